"""Local files on the simulated disk: a power loss after every single operation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends import filewriter
from everstep.backends.conformance import content, put
from everstep.backends.errors import Conflict
from everstep.backends.files import LocalBackend

from tests.disk.simdisk import SimDisk, Unsynced

OLD = content(9000, seed=5)
NEW = content(20_001, seed=6)

Change = Callable[[LocalBackend], Awaitable[object]]

CHANGES: dict[str, tuple[Change, bytes | None, bytes | None]] = {
    # what is done to "run/a/x", what was there before, what is there after
    "write a new one": (lambda backend: backend.write("run/a/x", NEW), None, NEW),
    "write over": (lambda backend: backend.write("run/a/x", NEW), OLD, NEW),
    "stream a new one": (lambda backend: put(backend, "run/a/x", NEW, 5000), None, NEW),
    "stream over": (lambda backend: put(backend, "run/a/x", NEW, 5000), OLD, NEW),
    "create": (lambda backend: backend.create("run/a/x", NEW), None, NEW),
    "delete": (lambda backend: backend.delete(["run/a/x"]), OLD, None),
}


@pytest.fixture(autouse=True)
def direct_even_if_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filewriter, "DIRECT_BYTES_MIN", 1)
    monkeypatch.setattr(filewriter, "STAGING_BYTES", 8192)


def found(root: Path) -> bytes | None:
    """The object as a fresh backend finds it, by reading and by listing."""

    async def main() -> bytes | None:
        backend = LocalBackend(root)
        names = {item.name: item.nbytes async for item in backend.list()}
        assert set(names) <= {"run/a/x", "run/other"}
        data = await backend.read("run/a/x") if "run/a/x" in names else None
        await backend.discard_leftovers(await backend.leftovers())
        assert await backend.leftovers() == []
        await backend.close()
        assert data is None or len(data) == names["run/a/x"]
        return data

    return asyncio.run(main())


def run(sim: SimDisk, change: Change) -> None:
    async def main() -> None:
        backend = LocalBackend(sim.root, door=sim.door)
        await change(backend)
        await backend.close()

    asyncio.run(main())


def prepare(root: Path, before: bytes | None) -> SimDisk:
    async def main() -> None:
        backend = LocalBackend(root)
        await backend.write("run/other", b"other")
        if before is not None:
            await backend.write("run/a/x", before)
        await backend.close()

    asyncio.run(main())
    return SimDisk(root)


@pytest.mark.parametrize("name", CHANGES)
def test_power_loss_after_every_operation(name: str, tmp_path: Path) -> None:
    change, before, after = CHANGES[name]
    sim = prepare(tmp_path / "disk", before)
    run(sim, change)
    count = len(sim.ops)
    assert count >= 2
    variants: list[tuple[int | None, Unsynced]] = [(None, "lost"), (None, "zeros"), (None, "kept")]
    variants += [(seed, "lost") for seed in range(8)]
    for k in range(count + 1):
        for seed, unsynced in variants:
            where = f"after {k} operations ({sim.ops[k - 1] if k else 'none'}), seed {seed}, {unsynced}"
            left = found(sim.crash(tmp_path / f"{k}-{seed}-{unsynced}", seed, op_index=k, unsynced=unsynced))
            assert left in (before, after), where
            if k == count:
                assert left == after, where
    assert found(Path(sim.root)) == after


def test_a_directory_that_others_made_is_made_durable_too(tmp_path: Path) -> None:
    sim = prepare(tmp_path / "disk", None)
    sim.door.mkdir("run/a")  # by another process, which has not synced it
    run(sim, lambda backend: backend.write("run/a/x", NEW))
    assert found(sim.crash(tmp_path / "crash")) == NEW


def test_a_directory_that_was_removed_and_made_again_is_made_durable_again(tmp_path: Path) -> None:
    sim = prepare(tmp_path / "disk", None)

    async def main() -> None:
        backend = LocalBackend(sim.root, door=sim.door)
        await backend.write("run/a/x", OLD)
        sim.door.unlink("run/a/x")
        sim.door.rmdir("run/a")
        sim.door.mkdir("run/a")  # all of it by another process, without a sync
        await backend.write("run/a/x", NEW)
        await backend.close()

    asyncio.run(main())
    assert found(sim.crash(tmp_path / "crash")) == NEW


def test_who_loses_a_race_finds_the_winner_durable(tmp_path: Path) -> None:
    """The winner has linked its object and not yet synced the directory; the loser builds on what it read."""
    sim = prepare(tmp_path / "disk", None)
    publish = tmp_path / "disk" / "run"

    async def main() -> None:
        winner = LocalBackend(sim.root, door=sim.door)
        await winner.create("run/first", b"")
        writer = winner._files.open_writer("run/a/x", len(NEW))
        writer.write(memoryview(NEW))
        writer._finish(writer._open_file())
        sim.door.link(writer._open_file().name, "run/a/x")
        loser = LocalBackend(sim.root, door=sim.door)
        with pytest.raises(Conflict):
            await loser.create("run/a/x", OLD)
        await loser.close()
        await winner.close()

    asyncio.run(main())
    assert publish.is_dir()
    crashed = sim.crash(tmp_path / "crash")
    assert (crashed / "run/a/x").read_bytes() == NEW


def test_many_deletions(tmp_path: Path) -> None:
    """Deleted is deleted, and what was not to be deleted is there, at every moment."""
    root = tmp_path / "disk"
    names = [f"c/{index}/{index % 2}/x" for index in range(6)]

    async def make() -> None:
        backend = LocalBackend(root)
        for name in [*names, "c/0/keep"]:
            await backend.write(name, name.encode())
        await backend.close()

    asyncio.run(make())
    sim = SimDisk(root)
    run(sim, lambda backend: backend.delete(names))
    for k in range(len(sim.ops) + 1):
        crashed = sim.crash(tmp_path / f"crash-{k}", op_index=k)
        left = {path.relative_to(crashed).as_posix() for path in crashed.rglob("*") if path.is_file()}
        assert "c/0/keep" in left and left <= {*names, "c/0/keep"}
        if k == len(sim.ops):
            assert left == {"c/0/keep"}
            assert sorted(path.name for path in (crashed / "c").iterdir()) == ["0"]
