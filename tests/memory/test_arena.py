from __future__ import annotations

import errno
import os
import pickle
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep.errors import (
    BadOption,
    Damaged,
    EverstepError,
    MemoryTooSmall,
    RunInUse,
    Superseded,
    UnknownFormat,
)
from everstep.memory import lock, room
from everstep.memory.arena import Arena, Populate
from everstep.memory.directory import arena_dir, clean, find_arenas, mapped_by
from everstep.memory.errors import ArenaBusy, ArenaGone, SlotGone
from everstep.memory.header import Kind
from everstep.memory.process import Process

from . import children
from .conftest import NO_SPACE, SETTINGS, SOON_S, Reserving
from .contents import keys, matches, pin_step, write

Make = Callable[..., Arena]
OWNER = """
arena = Arena.attach(path)
arena.take(Process.current(), run_id="run", incarnation={incarnation}, world=1)
write(arena, {incarnation}, 1, None)
slot = arena.begin({incarnation}, 2, complete=None)
ready()
"""


def owner_pid(arena: Arena) -> int | None:
    owner = arena.info.owner
    return owner.pid if owner is not None else None


def path_of(arena: Arena) -> Path:
    path = arena.info.path
    assert path is not None
    return path


def test_what_an_arena_says_of_itself(make: Make, directory: Path) -> None:
    arena = make(owned=False, rank=3, world=5, slot_bytes=5000, slots=4)
    info = arena.info
    assert (info.run_key, info.run_id, info.node, info.rank, info.world) == ("key", "", "node", 3, 5)
    assert (info.slots, info.slot_bytes, info.chunk_bytes, info.incarnation) == (4, 8192, 4096, 0)
    assert info.owner == Process.current()
    path = path_of(arena)
    assert path.name.startswith("rank-00003.")
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == info.nbytes
    assert found.st_blocks * 512 >= info.nbytes, "memory is reserved, not promised"
    assert os.listdir(directory) == [path.name]
    arena.take(Process.current(), run_id="run", incarnation=2, world=7)
    assert (arena.info.run_id, arena.info.incarnation, arena.info.world) == ("run", 2, 7)
    with Arena.attach(path) as other:
        assert other.info == arena.info
    assert find_arenas(directory) == [arena.info]


@pytest.mark.parametrize(
    "options",
    [{"slots": 0}, {"slots": 65}, {"slot_bytes": 0}, {"chunk_bytes": 100}, {"rank": -1}, {"run_key": ""}],
)
def test_settings_are_checked(make: Make, directory: Path, options: dict[str, object]) -> None:
    with pytest.raises(BadOption):
        make(**options)
    assert os.listdir(directory) == []


def test_too_little_memory_is_said_with_numbers(directory: Path) -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        Arena.create(directory, **{**SETTINGS, "slot_bytes": 1 << 50})
    error = caught.value
    assert error.needed > 3 << 50
    stats = os.statvfs(directory)
    assert 0 < error.free <= stats.f_blocks * stats.f_frsize
    assert "--shm-size" in str(error)
    assert pickle.loads(pickle.dumps(error)).needed == error.needed  # noqa: S301
    assert os.listdir(directory) == []


def test_memory_that_another_took_meanwhile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryTooSmall, match=str(directory)):
        Arena.create(directory, **SETTINGS)
    assert os.listdir(directory) == []


@pytest.fixture
def small_files() -> Iterator[int]:
    """This process's files may have so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, hard))
    yield 300 << 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("populate", ["now", "behind"])
@pytest.mark.parametrize("named", [True, False])
def test_a_limit_on_the_size_of_files_is_called_so(
    directory: Path, small_files: int, populate: Populate, named: bool
) -> None:
    options = {**SETTINGS, "slot_bytes": 1 << 20, "populate": populate}
    with pytest.raises(MemoryTooSmall, match="RLIMIT_FSIZE") as caught:
        _ = Arena.create(directory, **options) if named else Arena.create_memfd(**options)
    assert f"{small_files:,} bytes" in str(caught.value.found) and caught.value.free == small_files
    assert "shm" not in str(caught.value.hint) and "ulimit -f" in str(caught.value.hint)
    assert os.listdir(directory) == []


def test_memory_without_a_name_that_another_took_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryTooSmall) as caught:
        Arena.create_memfd(**SETTINGS)
    assert caught.value.free > 0


def test_a_memory_file_has_no_limit_but_the_machines(directory: Path) -> None:
    with pytest.raises(MemoryTooSmall, match=r"machine's memory|cgroup"):
        Arena.create_memfd(**{**SETTINGS, "slot_bytes": 1 << 50})


def test_limits_of_cgroups(tmp_path: Path) -> None:
    inner = tmp_path / "slice" / "job"
    inner.mkdir(parents=True)
    for group, limit, used in ((tmp_path / "slice", "1000000", "600000"), (inner, "max", "500000")):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(used + "\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    found = list(room._walk(tmp_path, "/slice/job", "memory.max", "memory.current"))
    assert [free for _, free in found] == [500_000]


def test_a_limit_refuses_before_memory_is_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_cgroup_limits", lambda: iter([("the memory limit of cgroup x", 70 << 20)]))
    with pytest.raises(MemoryTooSmall, match="cgroup x"):
        Arena.create(directory, **{**SETTINGS, "slot_bytes": 8 << 20})
    Arena.create(directory, **SETTINGS).close()


def test_a_living_owner_is_respected_and_a_dead_one_replaced(make: Make) -> None:
    arena = make(owned=False)
    path = path_of(arena)
    arena.close()
    child = children.start(path, OWNER.format(incarnation=1))
    children.wait_ready(child)
    with Arena.attach(path) as heir:
        with pytest.raises(RunInUse, match=str(child.pid)):
            heir.take(Process.current(), run_id="run", incarnation=2, world=1)
        assert owner_pid(heir) == child.pid
        children.kill(child)
        heir.take(Process.current(), run_id="run", incarnation=2, world=1)
        assert heir.info.owner == Process.current()
        assert keys(heir) == [(1, 1)]
        # What the dead one was writing is free again; the adopted snapshot stays until a newer W exists.
        write(heir, 2, 2, (1, 1))
        write(heir, 2, 3, (1, 1))
        assert heir.begin(2, 4, complete=(1, 1)) is None
        with pin_step(heir, 1, 1) as pinned:
            assert matches(pinned)
        write(heir, 2, 4, (2, 2))
        assert keys(heir) == [(2, 2), (2, 3), (2, 4)]


def test_an_older_incarnation_cannot_come_back(make: Make) -> None:
    arena = make()
    arena.take(Process.current(), run_id="run", incarnation=4, world=1)
    with pytest.raises(Superseded):
        arena.take(Process.current(), run_id="run", incarnation=3, world=1)
    arena.take(Process.current(), run_id="run", incarnation=4, world=1)


def test_another_runs_snapshots_do_not_stay(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    child = children.start(path_of(arena), "a = Arena.attach(path); p = pin_step(a, 1, 1); ready()")
    children.wait_ready(child)
    with pytest.raises(RunInUse, match="still read"):
        arena.take(Process.current(), run_id="other", incarnation=1, world=1)
    children.kill(child)
    arena.take(Process.current(), run_id="other", incarnation=1, world=1)
    assert keys(arena) == []
    write(arena, 1, 1, None)


def test_closing_gives_up_ownership(make: Make) -> None:
    arena = make()
    path = path_of(arena)
    write(arena, 1, 1, None)
    arena.begin(1, 2, complete=None)
    arena.close()
    arena.close()
    with Arena.attach(path) as other:
        assert other.info.owner is None
        other.take(Process.current(), run_id="run", incarnation=2, world=1)
        assert keys(other) == [(1, 1)]
        write(other, 2, 2, (1, 1))
        write(other, 2, 3, (1, 1))


def test_after_closing_nothing_dangles(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    slot = arena.begin(1, 2, complete=None)
    assert slot is not None
    views = slot.place([("state", 10)])
    pinned = pin_step(arena, 1, 1)
    before = pinned.view("state")
    arena.close()
    views["state"][:] = b"0123456789"
    assert bytes(before)
    for call in (
        lambda: pinned.view("state"),
        pinned.check,
        lambda: arena.snapshots(),
        lambda: arena.info,
        lambda: slot.publish("x"),
        lambda: arena.beat(1),
        lambda: arena.begin(1, 3, complete=None),
    ):
        with pytest.raises((ArenaGone, SlotGone)):
            call()
    pinned.release()
    slot.abandon()


def test_an_arena_without_a_name_outlives_its_maker() -> None:
    with Arena.create_memfd(**SETTINGS) as arena:
        arena.take(Process.current(), run_id="run", incarnation=1, world=1)
        write(arena, 1, 1, None)
        fd = os.dup(arena.fileno())
        assert arena.info.path is None
    try:
        with Arena.attach_fd(fd) as other:
            with pin_step(other, 1, 1) as pinned:
                assert matches(pinned)
            other.take(Process.current(), run_id="run", incarnation=2, world=1)
            write(other, 2, 2, (1, 1))
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_openings_of_one_descriptor_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that was sent shares its file locks with the sender, so it is opened anew."""
    monkeypatch.setattr(lock, "LOCK_WAIT_S_MAX", 0.05)
    with Arena.create_memfd(**SETTINGS) as arena, Arena.attach_fd(arena.fileno()) as other:
        with arena._lock, pytest.raises(ArenaBusy):
            other.take(Process.current(), run_id="run", incarnation=1, world=1)
        other.take(Process.current(), run_id="run", incarnation=1, world=1)


def test_memory_comes_in_the_background(make: Make) -> None:
    arena = make(populate="background", slot_bytes=32 << 20)
    write(arena, 1, 1, None)
    arena.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "everstep-populate"]


def test_memory_that_is_reserved_behind_is_there_before_a_slot_is_begun(reserving: Reserving) -> None:
    arena = reserving.arena()
    path = path_of(arena)
    assert path.stat().st_size == arena.info.nbytes
    assert path.stat().st_blocks * 512 < 8 << 20, "make() came back before"
    assert find_arenas(path.parent) == [arena.info] and arena.newest(1) is None
    begun = threading.Thread(target=lambda: write(arena, 1, 1, None))
    begun.start()
    assert reserving.begun.wait(SOON_S) and begun.is_alive() and arena.newest(1) is None
    reserving.may.set()
    begun.join(SOON_S)
    assert arena.newest(1) == 1
    assert path.stat().st_blocks * 512 >= arena.info.nbytes


def test_memory_that_another_took_while_it_was_to_be_reserved_behind(reserving: Reserving) -> None:
    arena = reserving.arena()
    reserving.fail(NO_SPACE)
    for use in (arena.await_reserved, lambda: write(arena, 1, 1, None)):
        with pytest.raises(MemoryTooSmall, match=str(path_of(arena).parent)):
            use()
    arena.close()


def test_what_clearly_does_not_fit_is_not_begun_behind(directory: Path) -> None:
    with pytest.raises(MemoryTooSmall):
        Arena.create(directory, **{**SETTINGS, "slot_bytes": 1 << 50, "populate": "behind"})
    assert os.listdir(directory) == []


def test_closing_ends_what_is_reserved_behind(reserving: Reserving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RESERVE_PIECE_BYTES", 1 << 20)
    arena = reserving.arena()
    path = path_of(arena)
    assert reserving.begun.wait(SOON_S)
    threading.Timer(0.05, reserving.may.set).start()
    arena.close()
    assert path.stat().st_blocks * 512 < 8 << 20
    assert not [thread for thread in threading.enumerate() if thread.name == "everstep-populate"]


def test_an_arena_that_was_left_before_it_had_its_memory_gets_it(reserving: Reserving) -> None:
    first = reserving.arena()
    reserving.fail(NO_SPACE)
    path = path_of(first)
    first.close()
    reserving.error = None
    with Arena.attach(path, populate="behind") as second:
        second.await_reserved()
        assert path.stat().st_blocks * 512 >= second.info.nbytes


def test_a_heartbeat(make: Make) -> None:
    arena = make()
    assert arena.heartbeat() is None
    arena.beat(1.5)
    with Arena.attach(path_of(arena)) as other:
        beat = other.heartbeat()
    assert beat is not None
    age, step = beat
    assert 0 <= age < 60
    assert step == 1.5


def test_what_survives_the_node_is_said_in_the_header(make: Make) -> None:
    arena = make()
    assert (arena.protected, arena.complete) == (None, None)
    with Arena.attach(path_of(arena)) as agents:  # not the owner: the agent
        agents.protected, agents.complete = (3, 1 << 39), (2, 0)
        assert (arena.protected, arena.complete) == ((3, 1 << 39), (2, 0))
        for wrong in ((0, 1), (1 << 24, 1), (1, 1 << 40), (1, -1)):
            with pytest.raises(BadOption):
                agents.protected = wrong
    assert arena.protected == (3, 1 << 39)
    path = path_of(arena)
    arena.close()
    with Arena.attach(path) as again:
        again.take(Process.current(), run_id="another", incarnation=1, world=1)
        assert (again.protected, again.complete) == (None, None)


def test_arenas_are_found_by_whose_snapshots_they_hold(make: Make, directory: Path) -> None:
    arenas = {kind: make(rank=2, kind=kind) for kind in Kind}
    assert {kind: [i.kind for i in find_arenas(directory, kind)] for kind in Kind} == {k: [k] for k in Kind}
    assert {info.path for info in find_arenas(directory)} == {path_of(arena) for arena in arenas.values()}
    assert [path_of(arenas[kind]).name.split(".")[0] for kind in Kind] == [
        "rank-00002",
        "held-00002",
        "parity-00002",
    ]
    for arena in arenas.values():
        arena.close()
    assert len(clean(directory, keep=lambda info: info.kind is Kind.HELD)) == 2


def test_a_stopped_process_does_not_stop_others_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_WAIT_S_MAX", 0.2)
    arena = make()
    write(arena, 1, 1, None)
    child = children.start(path_of(arena), "pin_step(Arena.attach(path), 1, 1)", "stall:pin.locked")
    while Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert child.poll() is None
    with pytest.raises(ArenaBusy, match=r"0\.2 s"):
        arena.begin(1, 2, complete=None)
    assert arena.newest(1) == 1, "what needs no lock goes on"
    children.kill(child)
    write(arena, 1, 2, None)


class TestDirectory:
    def test_it_is_private(self, tmp_path: Path) -> None:
        path = arena_dir(tmp_path, "key")
        assert path == tmp_path / f"everstep-{os.geteuid()}" / "key"
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.parent.chmod(0o755)
        assert arena_dir(tmp_path, "key") == path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize("key", ["", "..", "a/b", "a" * 65])
    def test_a_key_stays_inside(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(BadOption):
            arena_dir(tmp_path, key)

    def test_somebody_elses_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / f"everstep-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(EverstepError, match="not a directory of this user"):
            arena_dir(tmp_path, "key")

    def test_what_is_no_arena_is_left_alone(self, make: Make, directory: Path) -> None:
        arena = make()
        (directory / "rank-00001.abcd.arena").symlink_to(path_of(arena))
        (directory / "notes.txt").write_text("mine")
        (directory / "notes.arena").write_text("mine")
        assert find_arenas(directory) == [arena.info]
        clean(directory, keep=lambda info: True)
        assert (directory / "notes.txt").exists()
        assert (directory / "notes.arena").exists()

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert find_arenas(tmp_path / "none") == []
        assert clean(tmp_path / "none", keep=lambda info: False) == []

    def test_cleaning(self, make: Make, directory: Path) -> None:
        mine, dead, pinned, wanted = make(rank=0), make(rank=1), make(rank=2, owned=False), make(rank=3)
        write(dead, 1, 1, None)
        for arena in (dead, wanted):
            arena.close()
        pinned.take(Process.current(), run_id="run", incarnation=1, world=1)
        write(pinned, 1, 1, None)
        path = path_of(pinned)
        pinned.close()
        child = children.start(path, "a = Arena.attach(path); p = pin_step(a, 1, 1); ready()")
        children.wait_ready(child)
        removed = clean(directory, keep=lambda info: info.rank == 3)
        assert [name.name[:10] for name in removed] == ["rank-00001"]
        assert [info.rank for info in find_arenas(directory)] == [0, 2, 3]
        children.kill(child)
        assert clean(directory, keep=lambda info: info.rank == 3) == [path]
        assert mine.info.path is not None

    def test_one_that_was_cleaned_up_cannot_be_taken(self, make: Make, directory: Path) -> None:
        arena = make()
        other = Arena.attach(path_of(arena))
        write(arena, 1, 1, None)
        arena.close()
        assert clean(directory, keep=lambda info: False)
        with pytest.raises(ArenaGone, match="new arena"):
            other.take(Process.current(), run_id="run", incarnation=2, world=1)
        with pin_step(other, 1, 1) as pinned:
            assert matches(pinned)
        other.close()

    @pytest.mark.parametrize(
        ("place", "error"), [(8, UnknownFormat), (9, UnknownFormat), (20, Damaged), (0, Damaged)]
    )
    def test_damaged_ones_go_when_nobody_maps_them(
        self, make: Make, directory: Path, place: int, error: type[EverstepError]
    ) -> None:
        arena = make()
        path = path_of(arena)
        if error is UnknownFormat:
            from everstep.memory import header

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(header, "VERSION", header.VERSION + (1 << 8 * (place - 8)))
                data = arena._fixed.encode()
            arena._control.mapping.view[: len(data)] = data
        else:
            arena._control.mapping.view[place] ^= 1
        with pytest.raises(error):
            Arena.attach(path)
        assert find_arenas(directory) == []
        assert mapped_by(path) == [os.getpid()]
        assert clean(directory, keep=lambda info: False) == []
        arena.close()
        assert mapped_by(path) == []
        assert clean(directory, keep=lambda info: False) == [path]


def test_no_descriptor_or_mapping_stays(make: Make) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        arena = make()
        write(arena, 1, 1, None)
        with Arena.attach(path_of(arena)) as other, pin_step(other, 1, 1) as pinned:
            matches(pinned)
        path = path_of(arena)
        arena.close()
        assert mapped_by(path) == []
    assert len(os.listdir("/proc/self/fd")) == before
