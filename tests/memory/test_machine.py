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
from dataclasses import dataclass, replace
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

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


@dataclass(frozen=True)
class Move:
    """Somebody does something: ``reader`` says which reader (where it is one), ``kill`` at the end of which
    point's name the party is killed, ``number`` is for the move to use."""

    name: str
    reader: str
    kill: str | None
    number: int


OFTEN = [
    name
    for name, times in {
        "train": 5,
        "run_ahead": 3,
        "begin": 3,
        "copy": 2,
        "publish": 3,
        "give_up": 1,
        "complete": 2,
        "second_trainer": 1,
        "kill_trainer": 1,
        "recover": 4,
        "pin": 4,
        "look": 3,
        "seal": 2,
        "accept": 3,
        "misjudge": 1,
        "read_on": 1,
        "kill_reader": 1,
    }.items()
    for _ in range(times)
]
kills = st.sampled_from([None] * 12 + ["locked", "locked", "before", "after", "begin"])
readers = st.sampled_from(["agent", "replicator"])
moves = st.builds(Move, st.sampled_from(OFTEN), readers, kills, st.integers(0, 5000))


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

    # -- moves, a few at a time (rules chosen one by one are mostly the wrong ones: little would ever happen)

    @rule(
        moves=st.lists(
            st.builds(Move, st.sampled_from(OFTEN), readers, kills, st.integers(0, 5000)), min_size=8
        )
    )
    def several(self, moves: list[Move]) -> None:
        for move in moves:
            getattr(self, move.name)(move)
            self.check_everything()

    # -- trainer

    def train(self, move: Move) -> None:
        """One step of the usual life."""
        self.begin(replace(move, kill=None))
        self.publish(move)
        self.complete(move)

    def run_ahead(self, move: Move) -> None:
        """Snapshots that other ranks do not have yet: W stays."""
        for _ in range(move.number % 3 + 1):
            self.begin(replace(move, kill=None))
            self.publish(move)

    def begin(self, move: Move) -> None:
        if self.trainer is None or self.slot is not None:
            return
        self.step += 1
        protected = self.protected()
        trainer = self.trainer
        slot = self.act(
            trainer, lambda party: party.arena.begin(self.incarnation, self.step, complete=self.w), move.kill
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
            if info.key == self.w or (info.incarnation == self.incarnation and self.after_w(info.key))
        }
        for reader in self.readers.values():
            pinned = reader.pinned
            if pinned is not None and reader.process in self.living:
                found.add(pinned.info.index)
        return found

    def after_w(self, key: Key) -> bool:
        return self.w is None or key > self.w

    def copy(self, move: Move) -> None:
        """Some more bytes; the rest follows before it is published."""
        if self.slot is None:
            return
        start, self.written = self.written, self.written + move.number
        for name, data in contents(self.incarnation, self.step, SIZES).items():
            self.views[name][start : self.written] = data[start : self.written]

    def publish(self, move: Move) -> None:
        slot = self.slot
        if slot is None or self.trainer is None:
            return
        self.copy(replace(move, number=5000))
        self.act(self.trainer, lambda party: slot.publish(LAYOUT_HASH), move.kill)
        self.slot, self.views = None, {}

    def give_up(self, move: Move) -> None:
        """The slot is abandoned, or just dropped."""
        if self.slot is not None and move.number % 2:
            self.slot.abandon()
        self.slot, self.views = None, {}

    def complete(self, move: Move) -> None:
        """W moves to the newest snapshot."""
        if self.trainer is None:
            return
        newest = self.observer.arena.newest(self.incarnation)
        if newest is not None:
            self.w = (self.incarnation, newest)

    def kill_trainer(self, move: Move) -> None:
        if self.trainer is not None:
            self.die(self.trainer)

    def second_trainer(self, move: Move) -> None:
        if self.trainer is None:
            return
        other = Party(self.new_process(), self.path)
        with pytest.raises(RunInUse):
            self.act(other, self.take)
        self.die(other)

    # -- recovery

    def recover(self, move: Move) -> None:
        """Take over, adopt a snapshot (one further back when newer ones are not complete elsewhere) and read
        it."""
        if self.trainer is not None:
            return
        trainer = self.trainer = Party(self.new_process(), self.path)
        self.incarnation += 1
        self.act(trainer, self.take, move.kill)
        found = self.observer.arena.snapshots()
        if self.trainer is None or not found:
            return
        adopted = found[max(len(found) - 1 - move.number % 3, 0)]
        if self.w is not None and adopted.key < self.w:
            adopted = next(info for info in found if info.key == self.w)

        def adopt(party: Party) -> None:
            with party.arena.pin(adopted.index, adopted.generation) as pinned:
                pinned.seal(pinned.compute())
                data = read(pinned)
                pinned.check()
            assert data == contents(*adopted.key, SIZES)

        self.act(trainer, adopt, move.kill)
        if self.trainer is not None:
            self.w, self.step = adopted.key, adopted.step

    # -- agent and replicator

    def pin(self, move: Move) -> None:
        if move.reader not in self.readers:
            self.readers[move.reader] = Party(self.new_process(), self.path)
        reader = self.readers[move.reader]
        found = self.observer.arena.snapshots()
        if reader.pinned is not None or not found:
            return
        info = found[move.number % len(found)]
        reader.pinned = self.act(
            reader, lambda party: party.arena.pin(info.index, info.generation), move.kill
        )
        reader.seen = {}

    def reader(self, move: Move) -> tuple[Party, Pinned] | None:
        """The move's reader and what it has pinned."""
        party = self.readers.get(move.reader)
        return (party, party.pinned) if party is not None and party.pinned is not None else None

    def look(self, move: Move) -> None:
        """Read one region."""
        if found := self.reader(move):
            party, pinned = found
            region = SIZES[move.number % len(SIZES)][0]
            party.seen[region] = bytes(pinned.view(region))

    def seal(self, move: Move) -> None:
        if found := self.reader(move):
            party, pinned = found

            def seal(party: Party) -> None:
                try:
                    pinned.seal(pinned.compute())
                except SlotGone:
                    assert party.process not in self.living

            self.act(party, seal, move.kill)

    def accept(self, move: Move) -> None:
        """What was read is used only if the check says so; then it must be right."""
        found = self.reader(move)
        if found is None:
            return
        party, pinned = found
        try:
            pinned.check()
        except SlotGone:
            assert party.process not in self.living, "a living process's pin was not respected"
        else:
            whole = contents(*pinned.info.key, SIZES)
            torn = [region for region, data in party.seen.items() if data != whole[region]]
            assert not torn, "a torn read was accepted"
        pinned.release()
        party.pinned = None

    def misjudge(self, move: Move) -> None:
        """Everybody believes that a reader is dead, but it reads on."""
        if move.reader in self.readers:
            self.living.discard(self.readers[move.reader].process)

    def read_on(self, move: Move) -> None:
        """A reader that is believed to be dead reads while its snapshot is written over."""
        life = replace(move, kill=None)
        self.pin(life)
        self.misjudge(life)
        for number in range(4):
            self.train(life)
            self.look(replace(life, number=number))
        self.accept(life)

    def kill_reader(self, move: Move) -> None:
        if move.reader in self.readers:
            self.die(self.readers[move.reader])

    # -- what holds at every moment

    def check_everything(self) -> None:
        self.running = self.observer.process
        assert self.observer.arena.problems() == []
        found = self.observer.arena.snapshots()
        for info in found:
            with self.observer.arena.pin(info.index, info.generation) as pinned:
                assert read(pinned) == contents(*info.key, SIZES)
                if info.state is SlotState.SEALED:
                    assert pinned.sealed() == pinned.compute()
        if self.w is not None:
            assert self.w in [info.key for info in found], "W was overwritten"


def run(**options: Any) -> None:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    limits = settings(deadline=None, suppress_health_check=slow, **options)
    run_state_machine_as_test(Protocol, settings=limits)


def test_protocol() -> None:
    run(max_examples=40, stateful_step_count=8)


@pytest.mark.long
def test_protocol_at_length() -> None:
    run(max_examples=int(os.environ.get("EVERSTEP_EXAMPLES", "1000")), stateful_step_count=40)
