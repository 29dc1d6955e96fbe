"""Opening a run: nothing there, something else there, damaged, newer, or no answer."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from everstep.backends.errors import BackendError, Permanent, Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import CannotTell, Damaged, EverstepError, NotARun, UnknownFormat
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION
from everstep.format.sealed import seal
from everstep.store.catalog import list_steps
from everstep.store.runs import (
    add_incarnation,
    create_run,
    open_run,
    read_incarnations,
    require_records,
)

from tests.store import store_kit as kit


def on(root: Path, work: Callable[[LocalBackend], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        backend = LocalBackend(root)
        try:
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(go())


def error_of(root: Path, work: Callable[[LocalBackend], Coroutine[Any, Any, Any]]) -> EverstepError:
    with pytest.raises(EverstepError) as caught:
        on(root, work)
    error = caught.value
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error) and str(copy) == str(error)
    return error


def test_a_missing_and_an_empty_root_are_no_run(tmp_path: Path) -> None:
    for root in (tmp_path / "missing" / "deep", tmp_path):
        error = error_of(root, open_run)
        assert type(error) is NotARun and "nothing" in str(error.found)
        assert isinstance(error, FileNotFoundError)


def test_a_file_is_no_run_and_cannot_become_one(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_bytes(b"x")
    for work in (open_run, lambda backend: create_run(backend, chunk_bytes=4096)):
        error = error_of(root, work)
        assert type(error) is NotARun and "file" in str(error.found)
    assert root.read_bytes() == b"x"


def test_another_directory_is_named_by_what_it_holds_and_may_become_a_run(tmp_path: Path) -> None:
    for name in ("train.py", "notes.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("mine")
    error = error_of(tmp_path, open_run)
    assert type(error) is NotARun and "train.py" in str(error.found) and "3 other" in str(error.found)
    made = on(tmp_path, lambda backend: create_run(backend, chunk_bytes=4096))
    assert on(tmp_path, open_run) == made
    assert (tmp_path / "checkpoints" / "best.pt").read_text() == "mine"


def test_a_run_without_its_record_is_damaged_and_not_overwritten(tmp_path: Path) -> None:
    on(tmp_path, kit.start_run)
    (tmp_path / names.RUN).unlink()
    for work in (open_run, lambda backend: create_run(backend, chunk_bytes=4096)):
        error = error_of(tmp_path, work)
        assert type(error) is Damaged and error.name == names.RUN


def test_a_newer_run_is_refused(tmp_path: Path) -> None:
    body = {"run_id": "x", "required": [], "hash_id": "xxh3-128", "chunk_bytes": 4096, "created": ""}
    for data in (seal("run", body, format=FORMAT_VERSION + 1), seal("run", {**body, "required": ["parity"]})):
        (tmp_path / names.RUN).write_bytes(data)
        error = error_of(tmp_path, open_run)
        assert type(error) is UnknownFormat and error.hint


class Refusing(LocalBackend):
    """Reads of one name fail."""

    def __init__(self, root: Path, error: BackendError) -> None:
        super().__init__(root)
        self.error = error

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    "error", [Retryable("run.json", "timed out"), Permanent("run.json", "EACCES: denied")]
)
def test_storage_that_does_not_answer_cannot_be_told(tmp_path: Path, error: BackendError) -> None:
    on(tmp_path, kit.start_run)

    async def go() -> None:
        backend = Refusing(tmp_path, error)
        for work in (open_run(backend), create_run(backend, chunk_bytes=4096), read_incarnations(backend)):
            with pytest.raises(CannotTell):
                await work
        await backend.close()

    asyncio.run(go())


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_an_unwritable_directory_cannot_become_a_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    error = error_of(tmp_path / "run", lambda backend: create_run(backend, chunk_bytes=4096))
    assert type(error) is NotARun and "cannot become" in str(error)


def test_many_creators_agree_on_one_run(tmp_path: Path) -> None:
    async def go() -> None:
        backends = [LocalBackend(tmp_path) for _ in range(4)]
        made = await asyncio.gather(*(create_run(backend, chunk_bytes=4096) for backend in backends))
        assert len({record.run_id for record in made}) == 1
        for backend in backends:
            await backend.close()

    asyncio.run(go())


def test_incarnations_take_numbers_without_gaps_however_many_race(tmp_path: Path) -> None:
    async def go() -> None:
        backends = [LocalBackend(tmp_path) for _ in range(5)]

        def build(owner: int) -> Callable[[int], Any]:
            return lambda number: kit.incarnation_record(number, id=f"owner {owner}", parent=None)

        await asyncio.gather(*(add_incarnation(b, build(i)) for i, b in enumerate(backends)))
        records = await read_incarnations(backends[0])
        assert [record.number for record in records] == [1, 2, 3, 4, 5]
        assert {record.id for record in records} == {f"owner {i}" for i in range(5)}
        for backend in backends:
            await backend.close()

    asyncio.run(go())


def test_a_missing_record_is_damage(tmp_path: Path) -> None:
    async def make(backend: LocalBackend) -> None:
        await kit.start_run(backend)
        await kit.save(backend, 5)
        await kit.adopt(backend, 1, 5)
        await kit.save(backend, 6, incarnation=2)

    on(tmp_path, make)
    second = (tmp_path / names.incarnation(2)).read_bytes()
    (tmp_path / names.incarnation(2)).unlink()

    async def choose(backend: LocalBackend) -> None:
        found = await list_steps(backend)
        require_records(await read_incarnations(backend), [one.incarnation for one in found])

    error = error_of(tmp_path, choose)
    assert type(error) is Damaged and error.name == names.incarnation(2)
    (tmp_path / names.incarnation(2)).write_bytes(second)
    (tmp_path / names.incarnation(1)).unlink()
    error = error_of(tmp_path, read_incarnations)
    assert type(error) is Damaged and error.name == names.incarnation(1)
