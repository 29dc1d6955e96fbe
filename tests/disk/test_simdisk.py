"""The simulated disk itself: what it must lose, what it must keep, and that a careless writer is caught."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from everstep.backends.door import Door, File
from everstep.backends.publish import Publisher

from tests.disk.simdisk import SimDisk


def tree(root: Path) -> dict[str, bytes | None]:
    """All names below a directory, with the contents of files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def sim(tmp_path: Path) -> SimDisk:
    root = tmp_path / "disk"
    root.mkdir()
    return SimDisk(root)


class Crashes:
    """Crashes a disk into one new directory after the other."""

    def __init__(self, sim: SimDisk, place: Path) -> None:
        self.sim = sim
        self.place = place
        self.count = 0

    def tree(self, *args: object, **options: object) -> dict[str, bytes | None]:
        self.count += 1
        return tree(self.sim.crash(self.place / f"crash-{self.count}", *args, **options))  # type: ignore[arg-type]


@pytest.fixture
def crashes(sim: SimDisk, tmp_path: Path) -> Crashes:
    return Crashes(sim, tmp_path)


def make_file(door: Door, name: str, data: bytes = b"data", sync: bool = True) -> None:
    file = door.open(name, os.O_RDWR | os.O_CREAT)
    door.write(file, memoryview(data), 0)
    if sync:
        door.fsync(file)
    door.close(file)


def sync_dir(door: Door, name: str) -> None:
    directory = door.open_dir(name)
    door.fsync_dir(directory)
    door.close(directory)


def test_a_file_without_directory_sync_is_lost(sim: SimDisk, crashes: Crashes) -> None:
    make_file(sim.door, "a")
    assert crashes.tree() == {}
    assert tree(Path(sim.root)) == {"a": b"data"}
    sync_dir(sim.door, "")
    assert crashes.tree() == {"a": b"data"}


def test_contents_without_sync_are_lost(sim: SimDisk, crashes: Crashes) -> None:
    make_file(sim.door, "a", sync=False)
    sync_dir(sim.door, "")
    assert crashes.tree() == {"a": b""}
    assert crashes.tree(unsynced="zeros") == {"a": b"\0\0\0\0"}
    assert crashes.tree(unsynced="kept") == {"a": b"data"}
    make_file(sim.door, "a", b"DATA and more", sync=True)
    make_file(sim.door, "a", b"other, and again more", sync=False)
    assert crashes.tree() == {"a": b"DATA and more"}
    assert crashes.tree(unsynced="zeros") == {"a": b"DATA and more" + bytes(8)}


def test_a_new_directory_needs_a_sync_of_its_parent(sim: SimDisk, crashes: Crashes) -> None:
    sim.door.mkdir("d")
    make_file(sim.door, "d/a")
    sync_dir(sim.door, "d")
    assert crashes.tree() == {}
    sync_dir(sim.door, "")
    assert crashes.tree() == {"d": None, "d/a": b"data"}


def test_rename_link_and_unlink_need_a_sync(sim: SimDisk, crashes: Crashes) -> None:
    make_file(sim.door, "a", b"old")
    make_file(sim.door, "b", b"new")
    sync_dir(sim.door, "")
    sim.door.rename("b", "a")
    assert crashes.tree() == {"a": b"old", "b": b"new"}
    sync_dir(sim.door, "")
    assert crashes.tree() == {"a": b"new"}
    sim.door.link("a", "c")
    assert crashes.tree() == {"a": b"new"}
    sync_dir(sim.door, "")
    sim.door.unlink("a")
    assert crashes.tree() == {"a": b"new", "c": b"new"}
    sync_dir(sim.door, "")
    assert crashes.tree() == {"c": b"new"}


def test_a_removed_directory_comes_back_with_what_it_held(sim: SimDisk, crashes: Crashes) -> None:
    sim.door.mkdir("d")
    make_file(sim.door, "d/a")
    sync_dir(sim.door, "d")
    sync_dir(sim.door, "")
    sim.door.unlink("d/a")
    sim.door.rmdir("d")
    assert crashes.tree() == {"d": None, "d/a": b"data"}
    sync_dir(sim.door, "")
    assert crashes.tree() == {}


def test_every_moment_can_be_had_in_any_order(sim: SimDisk, crashes: Crashes) -> None:
    make_file(sim.door, "a")
    sync_dir(sim.door, "")
    sim.door.unlink("a")
    sync_dir(sim.door, "")
    assert [str(op) for op in sim.ops] == [
        *("create a", "write 4 bytes at 0 of a", "fsync a", "fsync directory ."),
        *("unlink a", "fsync directory ."),
    ]
    forward = [crashes.tree(op_index=k) for k in range(len(sim.ops) + 1)]
    backward = [crashes.tree(op_index=k) for k in reversed(range(len(sim.ops) + 1))]
    assert forward == backward[::-1] == [{}, {}, {}, {}, {"a": b"data"}, {"a": b"data"}, {}]
    processes = [crashes.tree(op_index=k, unsynced="kept") for k in range(len(sim.ops) + 1)]
    assert processes == [{}, {"a": b""}, *[{"a": b"data"}] * 3, {}, {}]


def test_what_was_there_before_is_durable(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    (root / "d").mkdir(parents=True)
    (root / "d" / "a").write_bytes(b"data")
    sim = SimDisk(root)
    assert Crashes(sim, tmp_path).tree() == {"d": None, "d/a": b"data"}
    make_file(sim.door, "b")
    sim.restart()
    assert not sim.ops
    assert tree(sim.crash(tmp_path / "later")) == {"b": b"data", "d": None, "d/a": b"data"}


def test_seeds_keep_some_and_the_same_each_time(sim: SimDisk, crashes: Crashes) -> None:
    big = bytes(range(1, 251)) * 100
    make_file(sim.door, "a", big, sync=False)
    sim.door.rename("a", "b")
    outcomes = [crashes.tree(seed) for seed in range(60)]
    assert outcomes == [crashes.tree(seed) for seed in range(60)]
    assert {} in outcomes
    assert any("a" in outcome for outcome in outcomes)
    assert any("b" in outcome for outcome in outcomes)
    assert not any("a" in outcome and "b" in outcome for outcome in outcomes)
    contents = {next(iter(outcome.values())) for outcome in outcomes if outcome}
    assert b"" in contents
    torn = [content for content in contents if content and 0 < content.count(0) < len(content)]
    assert torn, "no file was kept in part"
    assert any(len(content) < len(big) for content in contents if content)


def test_two_names_of_one_file_stay_one_file(sim: SimDisk, tmp_path: Path) -> None:
    make_file(sim.door, "a")
    sim.door.link("a", "b")
    sync_dir(sim.door, "")
    sim.crash(tmp_path / "crash")
    assert (tmp_path / "crash" / "a").stat().st_ino == (tmp_path / "crash" / "b").stat().st_ino


def careless_write(door: Door, name: str, data: bytes, skip: str) -> None:
    """Publishes as it should be done, but for one step."""
    publisher = Publisher(door)
    file: File = publisher.temporary(name)
    door.write(file, memoryview(data), 0)
    if skip != "fsync":
        door.fsync(file)
    door.close(file)
    if skip != "settle":
        publisher.settle(name.rpartition("/")[0])
    door.rename(file.name, name)
    if skip != "fsyncdir":
        publisher.sync_directory(name.rpartition("/")[0])
    publisher.close()


@pytest.mark.parametrize(
    ("skip", "left"),
    [("fsync", b""), ("settle", None), ("fsyncdir", None), ("", b"data")],
    ids=["no fsync of the file", "no fsync above", "no fsync of the directory", "all of it"],
)
def test_canary(sim: SimDisk, crashes: Crashes, skip: str, left: bytes | None) -> None:
    careless_write(sim.door, "d/e/a", b"data", skip)
    assert (Path(sim.root) / "d/e/a").read_bytes() == b"data"
    assert crashes.tree().get("d/e/a") == left
