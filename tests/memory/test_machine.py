"""The slot protocol under all its parties at once: trainer, agent, replicator and recovery take turns in any
order, and any of them is killed at any point, also in the middle of an operation.

Processes are played: each party has an identity and an opening of its own, and a kill is an exception that
nothing handles, after which nothing of the party runs any more. (``test_stress.py`` kills real ones.)
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from everstep.errors import RunInUse
from everstep.memory import mapping, points
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.memory.slots import Pinned, SlotGone, SlotState, WriteSlot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .conftest import SETTINGS
from .contents import LAYOUT_HASH, contents, read

SIZES = (("image:model", 5000), ("state", 100))
SLOTS = 3
T = TypeVar("T")
Key = tuple[int, int]


class Killed(BaseException):
    """What a party sees of its own SIGKILL."""


class Party:
    """A process with its opening of the arena."""

    def __init__(self, process: Process, path: Path) -> None:
        self.process = process
        self.arena = Arena.attach(path)
        self.pinned: Pinned | None = None
        self.seen: dict[str, bytes] = {}

    def vanish(self) -> None:
        """As the kernel does it: memory and descriptors go, nothing is put in order."""
        self.arena._closed = True
        self.arena._lock.retire()
        self.arena._control.forget()
        mapping.close_file(self.arena._fd)


kills = st.sampled_from([None, None, None, "locked", "before", "after", "begin"])
readers = st.sampled_from(["agent", "replicator"])


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.living: set[Process] = set()
        self.running = self.new_process()
        living, machine = self.living, self
        self.patch.setattr(Process, "alive", lambda process: process in living)
        self.patch.setattr(Process, "current", classmethod(lambda cls: machine.running))
        self.directory = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
        self.incarnation, self.step = 1, 0
        self.w: Key | None = None
        self.slot: WriteSlot | None = None
        self.views: dict[str, memoryview] = {}
        self.written = 0
        self.readers: dict[str, Party] = {}

    ids = itertools.count(1_000_000)

    def new_process(self) -> Process:
        process = Process(next(self.ids), 1, "boot")
        self.living.add(process)
        return process

    @initialize()
    def start(self) -> None:
        size = sum(-(-nbytes // 4096) * 4096 for _, nbytes in SIZES)
        made = Arena.create(self.directory, **{**SETTINGS, "slots": SLOTS, "slot_bytes": size})
        assert made.info.path is not None
        self.path = made.info.path
        made.close()
        self.observer = Party(self.new_process(), self.path)
        self.trainer: Party | None = Party(self.new_process(), self.path)
        self.act(self.trainer, self.take)

    def teardown(self) -> None:
        points.hook = None
        for party in (*self.readers.values(), self.trainer, getattr(self, "observer", None)):
            if party is not None:
                party.vanish()
        self.patch.undo()
        shutil.rmtree(self.directory)

    # -- how a party acts, and dies

    def act(self, party: Party, call: Callable[[Party], T], kill: str | None = None) -> T | None:
        """What ``call`` returns; None also when the party was killed at a point whose name ends in
        ``kill``."""

        def hook(name: str, detail: str) -> None:
            if kill is not None and name.endswith(kill):
                raise Killed

        self.running = party.process
        points.hook = hook
        try:
            return call(party)
        except Killed:
            self.die(party)
            return None
        finally:
            points.hook = None

    def die(self, party: Party) -> None:
        self.living.discard(party.process)
        party.vanish()
        if party is self.trainer:
            self.trainer, self.slot, self.views = None, None, {}
        self.readers = {name: other for name, other in self.readers.items() if other is not party}

    def take(self, party: Party) -> None:
        party.arena.take(party.process, run_id="run", incarnation=self.incarnation, world=1)

    # -- trainer

    @precondition(lambda self: self.trainer is not None and self.slot is None)
    @rule(kill=kills)
    def begin(self, kill: str | None) -> None:
        assert self.trainer is not None
        self.step += 1
        protected = self.protected()
        trainer = self.trainer
        slot = self.act(
            trainer, lambda party: party.arena.begin(self.incarnation, self.step, complete=self.w), kill
        )
        if self.trainer is None:
            return
        assert (slot is None) == (len(protected) == SLOTS)
        self.slot, self.written = slot, 0
        if slot is not None:
            self.views = slot.place(SIZES)

    def protected(self) -> set[int]:
        """Slots that may not be reused now, by the rules and not by the code's way of finding them."""
        found = {
            info.index
            for info in self.observer.arena.snapshots()
            if info.key == self.w
            or (info.incarnation == self.incarnation and (self.w is None or info.key > self.w))
        }
        for reader in self.readers.values():
            pinned = reader.pinned
            if pinned is not None and reader.process in self.living:
                found.add(pinned.info.index)
        return found

    def after_w(self, key: Key) -> bool:
        return self.w is None or key > self.w

    @precondition(lambda self: self.slot is not None)
    @rule(count=st.integers(1, 5000))
    def copy(self, count: int) -> None:
        """Some more bytes; the rest follows before it is published."""
        end = min(self.written + count, 5100)
        whole = contents(self.incarnation, self.step, SIZES)
        self.views["image:model"][self.written : end] = whole["image:model"][self.written : end]
        state_start = max(self.written - 5000, 0)
        self.views["state"][state_start : max(end - 5000, 0)] = whole["state"][
            state_start : max(end - 5000, 0)
        ]
        self.written = end

    @precondition(lambda self: self.slot is not None)
    @rule(kill=kills)
    def publish(self, kill: str | None) -> None:
        slot = self.slot
        assert slot is not None and self.trainer is not None
        self.copy(5000)
        self.act(self.trainer, lambda party: slot.publish(LAYOUT_HASH), kill)
        self.slot, self.views = None, {}

    @precondition(lambda self: self.slot is not None)
    @rule(say=st.booleans())
    def give_up(self, say: bool) -> None:
        """The slot is abandoned, or just dropped."""
        if say:
            assert self.slot is not None
            self.slot.abandon()
        self.slot, self.views = None, {}

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def complete(self) -> None:
        """W moves to the newest snapshot."""
        newest = self.observer.arena.newest(self.incarnation)
        if newest is not None:
            self.w = (self.incarnation, newest)

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def kill_trainer(self) -> None:
        assert self.trainer is not None
        self.die(self.trainer)

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def second_trainer(self) -> None:
        other = Party(self.new_process(), self.path)
        with pytest.raises(RunInUse):
            self.act(other, self.take)
        self.die(other)

    # -- recovery

    @precondition(lambda self: self.trainer is None)
    @rule(kill=kills, back=st.integers(0, 2), fresh=st.booleans())
    def recover(self, kill: str | None, back: int, fresh: bool) -> None:
        """Take over, adopt a snapshot (one further back when newer ones are not complete elsewhere) and read
        it."""
        trainer = self.trainer = Party(self.new_process(), self.path)
        self.incarnation += 1
        self.act(trainer, self.take, kill)
        found = self.observer.arena.snapshots()
        if self.trainer is None:
            return
        adopted = found[max(len(found) - 1 - back, 0)] if found else None
        if adopted is None:
            return
        if self.w is not None and self.w in [info.key for info in found] and adopted.key < self.w:
            adopted = next(info for info in found if info.key == self.w)

        def adopt(party: Party) -> None:
            with party.arena.pin(adopted.index, adopted.generation) as pinned:
                pinned.seal(pinned.compute())
                data = read(pinned)
                pinned.check()
            assert data == contents(*adopted.key, SIZES)

        self.act(trainer, adopt, kill)
        if self.trainer is not None:
            self.w, self.step = adopted.key, adopted.step

    # -- agent and replicator

    @rule(name=readers, choice=st.integers(0, SLOTS - 1), kill=kills)
    def pin(self, name: str, choice: int, kill: str | None) -> None:
        reader = self.readers.setdefault(name, Party(self.new_process(), self.path))
        found = self.observer.arena.snapshots()
        if reader.pinned is not None or not found:
            return
        info = found[choice % len(found)]
        reader.pinned = self.act(reader, lambda party: party.arena.pin(info.index, info.generation), kill)
        reader.seen = {}

    @rule(name=readers, region=st.sampled_from([name for name, _ in SIZES]))
    def look(self, name: str, region: str) -> None:
        reader = self.readers.get(name)
        if reader is not None and reader.pinned is not None:
            reader.seen[region] = bytes(reader.pinned.view(region))

    @rule(name=readers, kill=kills)
    def seal(self, name: str, kill: str | None) -> None:
        reader = self.readers.get(name)
        if reader is not None and reader.pinned is not None:
            self.act(reader, self.seal_pinned, kill)

    def seal_pinned(self, party: Party) -> None:
        assert party.pinned is not None
        try:
            party.pinned.seal(party.pinned.compute())
        except SlotGone:
            assert party.process not in self.living

    @rule(name=readers)
    def accept(self, name: str) -> None:
        """What was read is used only if the check says so; then it must be right."""
        reader = self.readers.get(name)
        if reader is None or reader.pinned is None:
            return
        try:
            reader.pinned.check()
        except SlotGone:
            assert reader.process not in self.living, "a living process's pin was not respected"
        else:
            whole = contents(*reader.pinned.info.key, SIZES)
            assert all(data == whole[region] for region, data in reader.seen.items()), (
                "a torn read was accepted"
            )
        self.running = reader.process
        reader.pinned.release()
        reader.pinned = None

    @rule(name=readers)
    def misjudge(self, name: str) -> None:
        """Everybody believes that a reader is dead, but it reads on."""
        if name in self.readers:
            self.living.discard(self.readers[name].process)

    @rule(name=readers)
    def kill_reader(self, name: str) -> None:
        if name in self.readers:
            self.die(self.readers[name])

    # -- what holds at every moment

    @invariant()
    def every_snapshot_is_whole(self) -> None:
        if not hasattr(self, "observer"):
            return
        self.running = self.observer.process
        assert self.observer.arena.problems() == []
        found = self.observer.arena.snapshots()
        for info in found:
            with self.observer.arena.pin(info.index, info.generation) as pinned:
                assert {name: bytes(pinned.view(name)) for name in pinned.regions} == contents(
                    *info.key, SIZES
                )
                if info.state is SlotState.SEALED:
                    assert pinned.sealed() == pinned.compute()
        if self.w is not None:
            assert self.w in [info.key for info in found], "W was overwritten"


def run(**options: Any) -> None:
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            **options,
        ),
    )


def test_protocol() -> None:
    run(max_examples=60, stateful_step_count=40)


@pytest.mark.long
def test_protocol_at_length() -> None:
    run(max_examples=int(os.environ.get("EVERSTEP_EXAMPLES", "3000")), stateful_step_count=80)
