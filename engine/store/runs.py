"""The run's record and the incarnations' records on a backend.

Three answers stay apart: nothing there (:class:`NotARun`), there but bad (:class:`Damaged`,
:class:`UnknownFormat`), and no answer (:class:`CannotTell`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, Conflict, NotAnObject, NotFound, Permanent
from everstep.errors import BadOption, CannotTell, Damaged, NotARun, RunError, SaveFailed
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION, HASH_ID, TIME_FORMAT
from everstep.format.records import (
    IncarnationRecord,
    RunRecord,
    decode_incarnation,
    decode_run,
    encode_incarnation,
    encode_run,
)

from .asking import SMALL_BYTES_MAX, each, no_object, reading, writing

ADD_TRIES_MAX = 16
"""How often :func:`add_incarnation` takes the next number when others were faster."""

FOUND_NAMES_MAX = 5
"""Entries of a foreign directory that an error names."""


def now() -> str:
    """The time as records store it: UTC, to the second. For people, and for the patience of tombstones."""
    return datetime.now(timezone.utc).strftime(TIME_FORMAT)


async def open_run(backend: Backend) -> RunRecord:
    """The run that lies on ``backend``.

    Raises NotARun (nothing there, or something else: ``found`` says what), UnknownFormat, Damaged (also where
    run.json is gone but checkpoints are there) or CannotTell.
    """
    try:
        data = await backend.read(names.RUN, SMALL_BYTES_MAX)
    except NotFound:
        raise await _what_is_there(backend) from None
    except NotAnObject as error:
        told = await _what_is_there(backend)
        raise (no_object(error, names.RUN) if isinstance(told, Damaged) else told) from error
    except Permanent as error:
        raise await _refused(backend, error) from error
    except BackendError as error:
        raise _cannot_tell(backend, error) from error
    return decode_run(data, names.RUN)


async def require_one_run(places: Sequence[Backend]) -> None:
    """Raises BadOption where two of ``places`` are known to be different runs. What cannot be read is passed by."""
    first: tuple[str, str] | None = None
    for place in places:
        try:
            run_id = (await open_run(place)).run_id
        except RunError:
            continue
        if first is None:
            first = place.url, run_id
        elif first[1] != run_id:
            raise BadOption(
                f"{place.url}: another run is there",
                found=f"run {run_id}",
                expected=f"run {first[1]}, as at {first[0]}",
                hint="Name places of one run only",
            )


async def _what_is_there(backend: Backend) -> NotARun | Damaged | CannotTell:
    """The error for a root without run.json."""
    try:
        found = await backend.list_names("")
        if not found:
            return NotARun(
                f"{backend.url} is not a run",
                found="nothing: the place is empty or does not exist",
                expected=names.RUN,
                hint="Check the name; a run comes into being at its first save",
            )
        ours = await _traces(backend)
    except Permanent as error:
        return await _refused(backend, error)
    except BackendError as error:
        return _cannot_tell(backend, error)
    if ours:
        return Damaged(
            f"{backend.url}: {names.RUN} is missing, but {ours} is there",
            found="a run without its record",
            expected=names.RUN,
            hint=f"Restore {names.RUN} from a copy of the run",
            name=names.RUN,
        )
    some = ", ".join(sorted(found)[:FOUND_NAMES_MAX])
    return NotARun(
        f"{backend.url} is not a run",
        found=f"{len(found)} other entries: {some}" + (", ..." if len(found) > FOUND_NAMES_MAX else ""),
        expected=names.RUN,
        hint="Check the path",
    )


async def _traces(backend: Backend) -> str | None:
    """Something under the root that only a run has: an incarnation's record or a checkpoint's directory."""
    for child in await backend.list_names(names.INCARNATIONS):
        parsed = names.parse(f"{names.INCARNATIONS}/{child}")
        if parsed is not None:
            return f"{names.INCARNATIONS}/{child}"
    for child in await backend.list_names(names.CHECKPOINTS):
        if names.parse_step(child) is not None:
            for inner in await backend.list_names(f"{names.CHECKPOINTS}/{child}"):
                if names.parse_incarnation(inner) is not None:
                    return f"{names.CHECKPOINTS}/{child}/{inner}"
    return None


async def _refused(backend: Backend, error: BackendError) -> NotARun | CannotTell:
    """A permanent error at the root: a root that is a file is no run, anything else (denied) cannot be
    told."""
    if isinstance(error.__cause__, NotADirectoryError) or "not a directory" in error.cause.lower():
        return NotARun(
            f"{backend.url} is not a run",
            found="a file",
            expected="a directory",
            hint="Check the path",
        )
    return _cannot_tell(backend, error)


def _cannot_tell(backend: Backend, error: BackendError) -> CannotTell:
    return CannotTell(
        f"{backend.url}: cannot tell whether a run is there",
        found=f"{type(error).__name__}: {error.cause or error.name}",
        hint="Check the access rights and the storage",
        name=names.RUN,
    )


async def create_run(backend: Backend, *, chunk_bytes: int) -> RunRecord:
    """The run on ``backend``, created if there is none. A directory that holds other things may become a run.

    Raises what :func:`open_run` raises but for NotARun, which here means that the root cannot become a run;
    StorageFull.
    """
    record, is_new = await run_to_be(backend, chunk_bytes=chunk_bytes)
    return await write_run(backend, record) if is_new else record


async def run_to_be(backend: Backend, *, chunk_bytes: int) -> tuple[RunRecord, bool]:
    """The run on ``backend``, or the record of a new one, which is to be written yet (True). Raises as
    :func:`create_run`."""
    try:
        return await open_run(backend), False
    except NotARun as error:
        if error.expected != names.RUN:
            raise
    record = RunRecord(
        run_id=uuid.uuid4().hex,
        format=FORMAT_VERSION,
        required=(),
        hash_id=HASH_ID,
        chunk_bytes=chunk_bytes,
        created=now(),
    )
    return record, True


async def write_run(backend: Backend, record: RunRecord) -> RunRecord:
    """Make ``record`` the run's on ``backend``, unless one is there by now: then it is that one that is returned.
    Raises as :func:`create_run`."""
    try:
        with writing(backend, names.RUN):
            await backend.create(names.RUN, encode_run(record))
    except Conflict:
        return await open_run(backend)
    except SaveFailed as error:
        raise NotARun(
            f"{backend.url} cannot become a run",
            found=error.found,
            expected="a place that this process can write to",
            hint="Check the name and the access rights",
        ) from error
    return record


async def read_incarnations(
    backend: Backend, known: dict[int, IncarnationRecord] | None = None
) -> list[IncarnationRecord]:
    """All records, by number. Numbers start at 1 and have no gap: a missing record is Damaged. Those in ``known`` are
    not read again, and what is read is added there: records never change."""
    numbers = await incarnation_numbers(backend)
    expected = range(1, len(numbers) + 1)
    missing = sorted(set(expected) - set(numbers))
    if missing:
        name = names.incarnation(missing[0])
        raise Damaged(
            f"{name} is missing",
            found=f"records up to {numbers[-1]}",
            expected="every number from 1 on",
            hint="Restore it from a copy of the run; without it the run's lineage is not known",
            name=name,
        )

    records = {} if known is None else known

    async def one(number: int) -> IncarnationRecord:
        if number not in records:
            records[number] = await read_incarnation(backend, number)
        return records[number]

    return await each(numbers, one)


async def read_incarnation(backend: Backend, number: int) -> IncarnationRecord:
    """One record; Damaged if it is missing or bears another number."""
    name = names.incarnation(number)
    try:
        with reading(backend, name):
            data = await backend.read(name, SMALL_BYTES_MAX)
    except NotFound:
        raise Damaged(f"{name} is missing", found="nothing", expected="a record", name=name) from None
    record = decode_incarnation(data, name)
    if record.number != number:
        raise Damaged(f"{name} is another incarnation's", found=record.number, expected=number, name=name)
    return record


def require_records(records: Iterable[IncarnationRecord], incarnations: Iterable[int]) -> None:
    """Damaged if a checkpoint's incarnation has no record: a lost record must not hide its checkpoints."""
    known = {record.number for record in records}
    missing = sorted(set(incarnations) - known)
    if missing:
        name = names.incarnation(missing[0])
        raise Damaged(
            f"{name} is missing, but checkpoints of that incarnation are there",
            found=f"records {sorted(known)}",
            expected=f"a record of incarnation {missing[0]}",
            hint="Restore it from a copy of the run; without it the run's lineage is not known",
            name=name,
        )


async def add_incarnation(backend: Backend, build: Callable[[int], IncarnationRecord]) -> IncarnationRecord:
    """Create the record that ``build`` makes for the next free number. Announce first, then look: the caller
    re-reads what it adopted after this returns.

    Raises SaveFailed when others keep taking the number, StorageFull, CannotTell.
    """
    for _ in range(ADD_TRIES_MAX):
        numbers = await incarnation_numbers(backend)
        record = build(max(numbers, default=0) + 1)
        if await write_incarnation(backend, record):
            return record
    raise SaveFailed(
        f"{backend.url}: no incarnation's number could be taken",
        found=f"{ADD_TRIES_MAX} times another writer was faster",
        hint="Two jobs are opening this run again and again; stop one",
        tier=backend.url,
    )


async def write_incarnation(backend: Backend, record: IncarnationRecord) -> bool:
    """Create ``record``; False if its number is another's by now. Raises StorageFull, SaveFailed, CannotTell."""
    name = names.incarnation(record.number)
    try:
        with writing(backend, name):
            await backend.create(name, encode_incarnation(record))
    except Conflict:
        return False
    return True


async def incarnation_numbers(backend: Backend) -> list[int]:
    """The numbers of the records that are there, ascending."""
    with reading(backend, names.INCARNATIONS):
        children = await backend.list_names(names.INCARNATIONS)
    found = []
    for child in children:
        parsed = names.parse(f"{names.INCARNATIONS}/{child}")
        if parsed is not None and parsed.incarnation is not None:
            found.append(parsed.incarnation)
    return sorted(found)
