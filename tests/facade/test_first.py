"""What the first save of a process finds ready: an agent that has loaded everything, and slots that have their
memory. And who needs neither gets neither."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.agent import places, spawn
from everstep.errors import AgentError, MemoryTooSmall, UnsupportedValue
from everstep.memory import populating
from everstep.memory.arena import Arena
from everstep.memory.mapping import Mapping
from everstep.memory.process import Process
from everstep.snapshot import copier
from everstep.snapshot.views import build_destinations

from .kit import SOON_S, Script, opened, steps_on_disk, until

Starts = list[list[str]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The commands of all processes that are started for an agent."""
    made: Starts = []
    popen = spawn.subprocess.Popen

    def begin(command: list[str], **options: Any) -> Any:
        made.append(command)
        return popen(command, **options)

    monkeypatch.setattr(spawn.subprocess, "Popen", begin)
    return made


def standing_by(ckpt: everstep.Checkpointer) -> Process:
    """The process that waits to be the agent, once it has loaded everything."""
    standby = ckpt._standby
    assert standby is not None
    found = Process.of(until(lambda: standby.pid, "a process that stands by"))
    assert found is not None
    return found


def gone(process: Process) -> None:
    until(lambda: not process.alive(), "the end of a process that stood by")


def mapped_bytes(ckpt: everstep.Checkpointer) -> tuple[int, int]:
    """(bytes of the arena that this process has in its map, all of them)."""
    assert ckpt._tier is not None
    address, nbytes = ckpt._tier.arena.mapped
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            rss = next(line for line in lines if line.startswith("Rss:"))
            return int(rss.split()[1]) * 1024, nbytes
    raise AssertionError("the arena is not mapped")


def test_after_load_the_agent_is_there_and_the_first_slot_has_its_memory(root: Path, starts: Starts) -> None:
    state = {"w": torch.zeros(3 << 20)}
    with opened(root, agent="process") as ckpt:
        process = standing_by(ckpt)
        assert ckpt.load(state) is None
        found, expected = mapped_bytes(ckpt)
        assert expected > 3 * state["w"].nbytes and found >= state["w"].nbytes
        assert ckpt._tier is not None
        ckpt._tier.arena._populating.join()
        found, expected = mapped_bytes(ckpt)
        assert found >= expected, "the others soon have theirs"
        arena = ckpt._tier.arena.info.path
        ckpt.save(1, state).wait()
        assert len(starts) == 1, "nothing is started by the first save"
        assert ckpt._tier.arena.info.path == arena, "nor is memory reserved"
        assert ckpt.agent_pid == process.pid and process.alive()
        (log,) = (root.parent / "runtime").rglob(places.LOG)
        assert os.readlink(f"/proc/{process.pid}/fd/2") == str(log)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
    assert steps_on_disk(root) == [1]


def test_the_first_save_finds_its_layout_made_and_another_structure_is_seen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def build(layout: Any, *more: Any) -> Any:
        made.append(len(layout.entries))
        return build_destinations(layout, *more)

    monkeypatch.setattr(copier, "build_destinations", build)
    state = {f"w{i}": torch.full((3,), float(i)) for i in range(20)}
    with opened(root) as ckpt:
        ckpt.load({"part": state})
        assert made == [20]
        ckpt.save(1, {"part": state}).wait()
        assert made == [20], "all was there"
    assert everstep.load(root)["part"]["w7"].eq(7).all()
    for name, change in (("more", {"x": torch.ones(2)}), ("other", {"w3": torch.ones(2, dtype=torch.int8)})):
        other = root.with_name(name)
        with opened(other) as ckpt:
            ckpt.load({"part": state})
            ckpt.save(1, {"part": {**state, **change}}).wait()
        found = everstep.load(other)["part"]
        for key, value in {**state, **change}.items():
            assert found[key].dtype == value.dtype and found[key].equal(value)


def test_who_loads_and_never_saves_keeps_no_memory_mapped(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"w": torch.zeros(3 << 20)})
    gone: list[bool] = []
    assert ckpt._tier is not None
    ckpt._tier.arena.on_unmap(lambda: gone.append(True))
    ckpt.close()
    assert gone == [True]


def test_what_cannot_be_stored_is_told_by_the_save(root: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(3), "odd": object()}
    with opened(root, memory=everstep.Memory(bytes=1 << 20)) as ckpt:
        ckpt.load(state)
        with pytest.raises(UnsupportedValue, match="odd"):
            ckpt.save(1, state)
        del state["odd"]
        ckpt.save(1, state).wait()
    assert steps_on_disk(root) == [1]


def test_a_load_that_finds_nothing_waits_for_the_first_slots_memory_and_a_restore_does_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited, may = threading.Event(), threading.Event()
    given: list[int] = []
    populate, wait = Mapping.populate, Arena.await_first_slot

    def populate_when_awaited(self: Mapping, begin: int = 0, end: int | None = None) -> None:
        assert (may if given else awaited).wait(SOON_S)
        populate(self, begin, end)
        given.append(begin)

    def await_first_slot(self: Arena, within_s: float) -> None:
        awaited.set()
        wait(self, within_s)

    monkeypatch.setattr(populating, "PIECE_BYTES", 64 << 20)  # one for the first slot, and one for the others
    monkeypatch.setattr(Mapping, "populate", populate_when_awaited)
    monkeypatch.setattr(Arena, "await_first_slot", await_first_slot)
    with opened(root, memory=everstep.Memory(bytes=4 << 20)) as ckpt:
        assert ckpt.load({"n": 0}) is None and given == [0], "the other slots' comes behind training"
        ckpt.save(1, {"n": 1})
        may.set()
    awaited.clear()
    may.clear()
    given.clear()
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 1
        assert not awaited.is_set() and not given
        awaited.set()
        may.set()


def test_a_restore_does_not_wait_for_room_and_the_first_step_does(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    reserve = os.posix_fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if threading.current_thread().name == "everstep-populate":
            assert may.wait(SOON_S)
        reserve(fd, offset, nbytes)

    with opened(root) as ckpt:
        ckpt.save(1, {"n": 1}).wait()
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 1
        threading.Timer(0.05, may.set).start()
        ckpt.save(2, {"n": 2}).wait()
        assert may.is_set()
    assert steps_on_disk(root) == [1, 2]


@pytest.mark.parametrize("required", [False, True])
def test_room_that_others_took_after_a_restore_is_told_before_the_first_snapshot(
    root: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    with opened(root) as ckpt:
        ckpt.save(1, {"n": 1}).wait()
    reserve, room = os.posix_fallocate, {"left": True}

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if threading.current_thread().name == "everstep-populate":
            room["left"] = False
        # Memory without a name has no such limit.
        if not room["left"] and "memfd:" not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    memory = {"memory": everstep.Memory(path=root.parent)} if required else {}
    with opened(root, **memory) as ckpt:
        assert ckpt.load({"n": 0}) == 1
        if required:
            with pytest.raises(MemoryTooSmall):
                ckpt.save(2, {"n": 2})
            return
        with pytest.warns(RuntimeWarning, match="shared with the agent only"):
            ckpt.save(2, {"n": 2}).wait()
    assert steps_on_disk(root) == [1, 2]


def test_without_a_load_the_first_step_has_the_process_that_stands_by(root: Path, starts: Starts) -> None:
    with opened(root, agent="process") as ckpt:
        process = standing_by(ckpt)
        ckpt.save(1, {"n": 1})
        assert ckpt.agent_pid == process.pid and len(starts) == 1


def test_where_an_agent_is_there_already_no_process_is_started(root: Path, starts: Starts) -> None:
    policy = {"linger_s": 30.0}
    with opened(root, agent="process", policy=policy) as ckpt:
        ckpt.save(1, {"n": 1}).wait()
        first = ckpt.agent_pid
    del starts[:]
    with opened(root, agent="process", policy=policy) as ckpt:
        assert ckpt.load({"n": 0}) == 1 and starts == []
        ckpt.save(2, {"n": 2})
        assert ckpt.agent_pid == first and starts == []


def test_who_only_loads_starts_and_reserves_nothing(root: Path, starts: Starts) -> None:
    with opened(root) as ckpt:
        ckpt.save(1, {"n": 1})
    assert everstep.load(root)["n"] == 1
    for options in ({"memory": None, "agent": "process"}, {"agent": "inline"}):
        with opened(root, **options) as ckpt:
            assert ckpt.load({"n": 0}) == 1
            assert ckpt._standby is None
            assert options.get("agent") == "inline" or (ckpt._tier is not None and not ckpt._tier.reserved)
    assert starts == []


def test_a_process_that_stood_by_for_nothing_ends(root: Path) -> None:
    with opened(root, agent="process") as ckpt:
        closed = standing_by(ckpt)
        ckpt.load({"n": 0})
    gone(closed)
    ckpt = opened(root, agent="process")
    dropped = standing_by(ckpt)
    everstep.opened._newest.clear()
    del ckpt
    gone(dropped)
    opened(root, agent="process").close()  # before it has begun
    assert not (root.parent / "runtime").exists() and not root.exists()


def test_it_ends_with_its_trainer_even_if_that_leaves_children(
    root: Path, script: Callable[..., Script]
) -> None:
    run = script(
        """
        ckpt = opened(root, agent="process")
        pid = until(lambda: ckpt._standby.pid, "a process that stands by")
        if os.fork() == 0:
            os.close(1), os.close(2)
            ckpt.close()
            assert ckpt._standby.pid is None
            while os.getppid() != 1:
                time.sleep(0.05)
            open(sys.argv[2], "w").close()
            sys.stdin.read()  # as a worker of a loader that is left behind
            os._exit(0)
        say(pid)
        time.sleep(600)
        """,
        root,
        root.parent / "left",
    )
    process = Process.of(int(run.line()))
    assert process is not None and process.alive()
    run.signal(signal.SIGKILL)
    gone(process)
    until((root.parent / "left").exists, "a child that is left behind")
    run.go_on()


def test_one_process_of_a_node_has_it_and_it_loads_what_the_root_needs(
    root: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with opened(root, agent="process") as ckpt:
        assert ckpt._standby is None and starts == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    with everstep.Checkpointer("s3://bucket/run", storage_options={"anon": True}) as ckpt:
        standing_by(ckpt)
        assert starts[0][-2:] == ["--standby", "--load=s3"]


def test_one_that_was_lost_is_no_loss(root: Path, starts: Starts) -> None:
    with opened(root, agent="process") as ckpt:
        process = standing_by(ckpt)
        ckpt.load({"n": 0})
        os.kill(process.pid, signal.SIGKILL)
        gone(process)
        ckpt.save(1, {"n": 1}).wait()
        assert ckpt.agent_pid not in (None, process.pid) and len(starts) == 2


def test_it_is_the_agent_before_the_incarnation_has_its_record_and_may_die_then(
    root: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    become, recorded = spawn.Standby.become_early, list[bool]()

    def become_and_die(self: spawn.Standby, settings: Any) -> None:
        recorded.append((root / "incarnations").exists())
        become(self, settings)
        os.kill(process.pid, signal.SIGKILL)
        gone(process)

    monkeypatch.setattr(spawn.Standby, "become_early", become_and_die)
    with opened(root, agent="process") as ckpt:
        process = standing_by(ckpt)
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        assert recorded == [False]
        assert ckpt.agent_pid not in (None, process.pid) and len(starts) == 2
    assert steps_on_disk(root) == [1]


def test_what_was_set_in_the_environment_since_counts(
    root: Path, starts: Starts, script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", "kill:no.such.point")
    with opened(root, agent="process") as ckpt:
        process = standing_by(ckpt)
        monkeypatch.delenv(
            "EVERSTEP_AGENT_POINTS"
        )  # what is read when modules are loaded: another one is started
        ckpt.save(1, {"n": 1})
        assert ckpt.agent_pid not in (None, process.pid) and len(starts) == 2
        gone(process)


def test_that_no_agent_can_be_started_is_told_by_the_first_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(root / "none"))
    ckpt = opened(root, agent="process")
    assert ckpt._standby is None and ckpt.load({"n": 0}) is None
    with pytest.raises(everstep.errors.EverstepError) as told:
        ckpt.save(1, {"n": 1})
    assert isinstance(told.value, AgentError) or "agent" in str(told.value)
    ckpt.close(flush=False)
