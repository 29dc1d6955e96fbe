"""The storage writer: what ``dcp.save`` and ``dcp.async_save`` store, durably and whole, or not at all."""

from __future__ import annotations

import logging
import os
import platform
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..agent.storage import patiently
from ..backends.api import Backend
from ..backends.errors import Permanent
from ..backends.open import SUPPORTED, local_path
from ..backends.parallel import both
from ..errors import BadOption, EverstepError, RankError, SaveAbandoned, SaveFailed, UsageError
from ..format import names
from ..format.hashing import rank_root
from ..format.layout import Layout, encode, layout_hash
from ..format.manifest import Manifest
from ..format.vote import STATE_IMAGE, ImageRecord, Vote
from ..store.blocking import run_blocking
from ..store.commit import try_commit
from ..store.flush import FlushJob, publish_vote, refuse_decided, store_layout, write_image
from . import directory
from .directory import Attempt
from .share import Report, Share
from .values import ABOUT, STATE

log = logging.getLogger("everstep")

OVERLAP_WAIT_S = 1800.0
"""How long a save in the background waits for the one before it: torch's own bound for a collective."""

_BACKGROUND = "AsyncCheckpointExecutor"
"""torch's threads for saves in the background are called so."""


@dataclass(slots=True)
class _Save:
    """One save of this rank, from ``set_up_storage_writer`` on. ``decides``: it commits."""

    directory: str
    decides: bool
    rank: int
    use_collectives: bool
    attempt: Attempt | None = None
    share: Share | None = None
    records: tuple[ImageRecord, ...] = ()

    @property
    def number(self) -> int:
        """The rank's number in the run that it writes to."""
        return self.rank if self.use_collectives else 0

    @property
    def path(self) -> str:
        """The run that it writes to."""
        return self.directory if self.use_collectives else directory.rank_directory(self.directory, self.rank)


class Writer(StorageWriter):
    """Saves one DCP checkpoint to one directory, ``root`` or the ``checkpoint_id`` of the call.

    The directory is a run of its own: ``everstep ls``, ``show`` and ``fsck`` work on it, and ``everstep.load``. One
    writer serves any number of saves, in this process or (pickled) in another; it holds nothing open between them. A
    save to a directory that has a checkpoint replaces it once the new one is complete; ``overwrite=False`` refuses.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, overwrite: bool = True) -> None:
        super().__init__()
        self._id: str | os.PathLike[str] | None = None
        self.overwrite = overwrite
        self.save_id = uuid.uuid4().hex
        self._saves: dict[int, _Save] = {}
        """By thread: each save runs in one."""
        self._take(root)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saves": {}}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The directory of the save."""
        return self._id

    @property
    def path(self) -> str:
        """The directory as a local path. Raises UsageError where none was given."""
        if self._id is None:
            raise UsageError("no directory was given", hint="Writer(directory), or checkpoint_id=")
        return local_path(self._id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` names a directory of this machine."""
        try:
            local_path(checkpoint_id)
        except (Permanent, TypeError):
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another directory, if one is given. Touches no storage. In the background it waits for the saves that
        were begun before."""
        _wait_for_earlier()
        self._take(checkpoint_id)

    def _take(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            if not self.validate_checkpoint_id(checkpoint_id):
                raise BadOption(
                    "a checkpoint_id that cannot be used", found=repr(checkpoint_id), expected=SUPPORTED
                )
            self._id = checkpoint_id
        self.save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A save begins. In the background it first waits for those that were begun before it: their collectives
        would mix."""
        _wait_for_earlier()
        rank = kwargs.get("rank")
        if rank is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        together = bool(kwargs.get("use_collectives", True))
        for ident in set(self._saves) - {thread.ident for thread in threading.enumerate()}:
            self._saves.pop(ident, None)
        self._saves[threading.get_ident()] = _Save(
            self.path, is_coordinator or not together, int(rank), together
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses to replace a checkpoint where that is not allowed."""
        save = self._current()
        if not self.overwrite and save.decides:
            found = self._with_backend(lambda backend: directory.standing(backend))
            if found is not None or directory.is_stock(save.path):
                raise UsageError(
                    f"{save.path} has a checkpoint already",
                    found="a complete checkpoint",
                    expected="none, as overwrite=False says",
                    hint="Choose another directory, or allow it to be replaced",
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the attempt. Plans pass unchanged: torch may keep them for later saves."""
        save = self._current()
        if not save.use_collectives and os.path.exists(os.path.join(save.directory, names.RUN)):
            raise UsageError(
                f"{save.directory} has a checkpoint that all ranks wrote together",
                found=names.RUN,
                expected="a directory of ranks that save for themselves (use_collectives=False)",
                hint="Choose another directory",
            )
        save.attempt = self._with_backend(lambda backend: directory.begin(backend, save.path, len(plans)))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what the plan gives to this rank; returns when it is durable. Raises what went wrong: torch tells it
        to all ranks, with this one's number. Where another rank gave the save up it returns, having written nothing
        that counts: it is that rank's failure, and ``finish`` refuses."""
        save = self._current()
        try:
            share = Share(plan, planner, save.number)
            report = self._with_backend(lambda backend: self._write(backend, save, share))
        except SaveAbandoned as error:
            share.release()
            report = Report.of_abandoned(save.number, str(error))
        except Exception as error:
            told = _of_rank(error, save.rank)
            self._with_backend(lambda backend: self._give_up(backend, save, str(told)))
            raise told from error
        result = WriteResult(MetadataIndex(f"rank {save.number}"), report.nbytes, report)
        if not save.decides:
            del self._saves[threading.get_ident()]
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Decides: all shares are there and cover every tensor, or the save is given up. Then the marker."""
        save = self._current()
        try:
            self._with_backend(lambda backend: self._commit(backend, save, metadata, _reports(results)))
        except Exception as error:
            told = _of_rank(error, save.rank)
            self._with_backend(lambda backend: self._give_up(backend, save, str(told)))
            raise told from error
        finally:
            del self._saves[threading.get_ident()]
        directory.write_marker(save.directory, None if save.use_collectives else save.rank)
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()

    # -- inside

    def _current(self) -> _Save:
        save = self._saves.get(threading.get_ident())
        if save is None:
            raise UsageError("no save is under way", expected="the calls of dcp.save, in their order")
        return save

    def _open(self, path: str) -> Backend:
        return directory.open_directory(path)

    def _with_backend(self, work: Any) -> Any:
        """The result of ``work(backend)`` on the storage loop."""
        path = self._current().path

        async def run() -> Any:
            backend = self._open(path)
            try:
                return await work(backend)
            finally:
                await directory.close(backend)

        return run_blocking(run())

    async def _write(self, backend: Backend, save: _Save, share: Share) -> Report:
        attempt = save.attempt or await directory.join(backend)
        save.attempt = attempt
        job = _job(attempt, save)
        if job.rank >= job.world:
            raise SaveFailed(
                f"this rank is not part of the save: rank {job.rank} of {job.world}", rank=job.rank
            )
        await refuse_decided(backend, job)
        if save.decides:
            save.share = share  # it votes last, when it knows all tensors
            save.records = await _write_images(backend, attempt, job, share)
        else:
            image = share.image().build(share.about())
            small = _write_small(backend, attempt, job, share.layout, image)
            records, (hash_text, state) = await both(_write_images(backend, attempt, job, share), small)
            await _vote(backend, job, hash_text, (*records, state))
        report = share.report(attempt.incarnation, attempt.number)
        share.release()
        return report

    async def _give_up(self, backend: Backend, save: _Save, reason: str) -> None:
        with suppress(EverstepError):
            attempt = save.attempt or await directory.join(backend)
            await directory.give_up(backend, attempt, reason, save.number)

    async def _commit(
        self, backend: Backend, save: _Save, metadata: Metadata, reports: Sequence[Report]
    ) -> None:
        attempt, share = save.attempt, save.share
        for report in reports:
            if report.abandoned is not None:
                raise SaveAbandoned(f"{save.path}: the save was given up: {report.abandoned}")
        if attempt is None or share is None:
            raise UsageError("finish() without write_data()")
        _check_reports(attempt, reports)
        layout, image = share.whole(metadata, reports)
        job = _job(attempt, save)
        hash_text, state = await _write_small(backend, attempt, job, layout, image)
        await _vote(backend, job, hash_text, (*save.records, state))
        decided = await patiently(
            lambda: try_commit(backend, attempt.step, attempt.incarnation, attempt.number, attempt.world)
        )
        if not isinstance(decided, Manifest):
            reason = decided.reason if decided is not None else "not all ranks have voted"
            raise SaveAbandoned(f"{save.path}: the save was given up: {reason}", step=attempt.step)
        try:
            await directory.remove_former(backend, attempt)
        except EverstepError as error:
            log.warning(
                "everstep: %s: what the new checkpoint replaces was not removed: %s", save.path, error
            )


def _job(attempt: Attempt, save: _Save) -> FlushJob:
    return FlushJob(attempt.step, attempt.incarnation, attempt.number, save.number, attempt.world)


async def _write_images(
    backend: Backend, attempt: Attempt, job: FlushJob, share: Share
) -> tuple[ImageRecord, ...]:
    """The share's tensors, written as they are read."""
    if share.stream() is None:
        return ()
    image = share.layout.images[0].name
    name = names.image(job.step, job.incarnation, job.attempt, job.rank, image)
    with ThreadPoolExecutor(2, thread_name_prefix="everstep-dcp") as pool:

        async def once() -> ImageRecord:
            stream = share.stream()
            assert stream is not None
            return await write_image(backend, job, image, name, stream, attempt.run.chunk_bytes, pool)

        return (await patiently(once),)


class _Bytes:
    """Bytes as an image's source."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self.nbytes = len(data)

    def piece(self, start: int, end: int) -> memoryview:
        return self._view[start:end]


async def _write_small(
    backend: Backend, attempt: Attempt, job: FlushJob, layout: Layout, image: bytes
) -> tuple[str, ImageRecord]:
    """The layout and the state image: the one's hash, the other's record."""
    encoded = encode(layout)
    hash_text = layout_hash(encoded)
    name = names.state(job.step, job.incarnation, job.attempt, job.rank)
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-dcp") as pool:

        async def write() -> ImageRecord:
            return await write_image(
                backend, job, STATE_IMAGE, name, _Bytes(image), attempt.run.chunk_bytes, pool
            )

        _, state = await both(patiently(lambda: store_layout(backend, hash_text, encoded)), patiently(write))
    return hash_text, state


async def _vote(
    backend: Backend, job: FlushJob, layout_hash_text: str, records: tuple[ImageRecord, ...]
) -> None:
    """The vote, when all that it stands for is durable."""
    vote = Vote(
        step=job.step,
        incarnation=job.incarnation,
        attempt=job.attempt,
        rank=job.rank,
        world=job.world,
        kind="full",
        layout_hash=layout_hash_text,
        root=rank_root(records),
        images=records,
        meta=_meta(job),
    )
    await patiently(lambda: publish_vote(backend, job, vote))


def _meta(job: FlushJob) -> dict[str, Any]:
    from .. import __version__

    libraries = {
        "everstep": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {
        "mesh": {"rank": job.world},
        "coordinates": {"rank": job.rank},
        "parts": {part: {"class": "dict", "settings": {}} for part in (STATE, ABOUT)},
        "data": None,
        "rng": [],
        "metrics": {},
        "config_hash": None,
        "libraries": libraries,
        "facts": {},
    }


def _reports(results: list[list[WriteResult]]) -> list[Report]:
    found = [result.storage_data for some in results for result in some]
    return [report for report in found if isinstance(report, Report)]


def _check_reports(attempt: Attempt, reports: Sequence[Report]) -> None:
    """Every rank wrote to the attempt that was opened."""
    wrong = [r.rank for r in reports if (r.incarnation, r.attempt) != (attempt.incarnation, attempt.number)]
    missing = sorted(set(range(attempt.world)) - {report.rank for report in reports})
    if wrong or missing:
        raise RankError(
            "ranks did not take part in this save",
            found=f"another attempt by ranks {wrong}, nothing from ranks {missing}",
            expected=f"all {attempt.world} ranks in attempt {attempt.number}",
            hint="The directory must be one that all ranks share",
            ranks=wrong or missing,
        )


def _of_rank(error: Exception, rank: int) -> EverstepError:
    """The error with the rank in its text, as one that can travel between processes."""
    if not isinstance(error, EverstepError):
        return SaveFailed(f"rank {rank}: saving failed", found=f"{type(error).__name__}: {error}", rank=rank)
    if f"rank {rank}" in error.message:
        return error
    fields = {**error.fields, "rank": rank}
    return type(error)(
        f"rank {rank}: {error.message}", found=error.found, expected=error.expected, hint=error.hint, **fields
    )


def _wait_for_earlier() -> None:
    """In a thread of torch's for saves in the background: wait for the earlier ones of the process to end."""
    if threading.current_thread().name.startswith(_BACKGROUND):
        wait_for_background()


def wait_for_background() -> None:
    """Wait for the saves in threads that were begun before this one, or before this call. Raises SaveFailed."""
    me = threading.current_thread()
    for thread in threading.enumerate():  # in the order in which they were started
        if thread is me and me.name.startswith(_BACKGROUND):
            return
        if thread is not me and thread.name.startswith(_BACKGROUND):
            thread.join(OVERLAP_WAIT_S)
            if thread.is_alive():
                raise SaveFailed(
                    "the save before this one does not end",
                    found=f"it runs for more than {OVERLAP_WAIT_S:.0f} s",
                    hint="Wait for a save before you begin the next one",
                )
