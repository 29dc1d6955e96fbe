"""The trainer's side of the memory tier: the rank's arena, which slot comes next, and W.

W is the newest step whose snapshot is complete on all ranks of this node; it is read from the other ranks' arena
headers, without a message. Where snapshots are protected against the loss of nodes, W is the newest step that is
protected on all nodes, and the agent writes it into the arena's header. The slot that holds W, and after a resume the
adopted snapshot, is never reused before a newer W exists.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CapacityError, MemoryTooSmall
from .memory.arena import Arena
from .memory.directory import arena_dir, clean, find_arenas
from .memory.errors import ArenaGone
from .memory.header import Kind
from .memory.info import ArenaInfo
from .memory.process import Process
from .memory.slots import Pinned, WriteSlot
from .places import Place
from .plan.room import GROWTH

POLL_MIN_S = 0.0005
POLL_MAX_S = 0.05
CLEAN_PAUSE_S = 1.0
CLEAN_PAUSE_S_MAX = 60.0
"""Former ranks' arenas are looked for at most this often, and ever more seldom: it reads a directory and every header
in it, while the trainer waits."""
POPULATED_S = 20.0
"""Bound of the wait for the first slot's memory at the start of a new run."""

SLOTS_BEHIND = 3
"""Slots of a guarded arena that hold no snapshot without protection: W's, one being flushed, and one to write into."""

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """How arenas are made. ``private``: not for recovery, only to copy into before a flush. ``required``: shared
    memory was asked for by name, so too little of it is an error."""

    base: Path
    slots: int
    required: bool = False
    private: bool = False


class MemoryTier:
    """One rank's arena and its neighbours'. Used from the trainer's thread only."""

    def __init__(self, place: Place, room: Room, rank: int) -> None:
        self._place = place
        self._room = room
        self._rank = rank
        self._world = 1
        self.local_ranks = 1
        """How many ranks run on this node: those whose arenas W depends on."""
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._cleans = rank == 0
        self._alone = True
        self._first_complete: Key | None = None
        self._clean_next_s, self._clean_pause_s = 0.0, CLEAN_PAUSE_S
        self._neighbours: dict[int, Arena] = {}
        self.guarded = False
        """Whether snapshots are protected against the loss of nodes. Off again where no agent is left to do it."""
        self.lead = 0
        """How many snapshots more than usual the trainer may be ahead of protection. With late copies one: a snapshot
        is whole only when the next one is about to begin."""
        self._kept: Pinned | None = None
        self._incarnation = 0
        self._adopted: Key | None = None
        self._run_id = ""
        self.is_shared = not room.private
        self.prepared: object | None = None
        """What the first snapshot was prepared with (:class:`.snapshots.Prepared`): let go of with the arena."""

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "the arena is reserved before it is used"
        return self._arena

    @property
    def present(self) -> Arena | None:
        """The arena, if there is one; from any thread."""
        return self._arena

    @property
    def reserved(self) -> bool:
        return self._arena is not None

    @property
    def directory(self) -> Path:
        return arena_dir(self._room.base, self._place.run_key)

    def reserve(
        self,
        slot_bytes: int,
        *,
        chunk_bytes: int,
        adopted: Key | None,
        run_id: str,
        held: Sequence[Arena],
        behind: bool = False,
    ) -> None:
        """Have an arena with slots of at least ``slot_bytes``: the one a former process of this rank left, if it
        fits, else a new one; what holds the adopted snapshot is kept beside it. ``held`` are arenas without a
        path, that the agent kept. Raises MemoryTooSmall before training starts. ``behind``: a new one's memory is
        only looked for, and reserved beside what the trainer does next; :meth:`await_reserved` waits, and raises."""
        if self._room.private:
            for arena in held:
                arena.close()
        self._adopted = adopted
        left = [] if self._room.private else self._left_behind(adopted, run_id, chunk_bytes, held)
        # Killed before its first snapshot, again and again, a job has left both what holds the adopted snapshot
        # and the room that it made beside it: that one is taken again.
        fitting = [arena for arena in left if arena.info.slot_bytes >= slot_bytes]
        room = fitting[0] if fitting else None
        if left and left[0] is not room:
            self._outgrown.append(left[0])
        for arena in left[1:]:
            if arena is not room:
                arena.close()
        if room is not None:
            room.populate("behind")  # whoever left it may have been killed before it had all its memory
            self.is_shared = room.info.path is not None
        self._arena = room or self._create(slot_bytes, chunk_bytes, behind=behind and not self._room.private)

    def await_reserved(self, held: Sequence[Arena]) -> None:
        """Until what was reserved has its memory. ``held`` were found since, and are let go of. Raises MemoryTooSmall
        where others took it meanwhile, and nothing else will do."""
        for arena in held:
            arena.close()
        try:
            self.arena.await_reserved()
        except MemoryTooSmall:  # said, or done without, as if it had been too little before
            info, self.prepared = self.arena.info, None
            self.arena.unlink()
            self.arena.close()
            self._arena = None
            self._arena = self._create(info.slot_bytes, info.chunk_bytes)

    def await_first_slot(self) -> None:
        """Until the slot of the first snapshot has its memory, in this process's map; the others get theirs behind
        training."""
        self.arena.await_first_slot(POPULATED_S)

    def open(self, *, run_id: str, incarnation: int, adopted: Key | None, world: int) -> None:
        """Own the arena for this incarnation. Raises RunInUse if a living process owns it."""
        self._incarnation, self._adopted, self._run_id = incarnation, adopted, run_id
        self._world = world
        for arena in self._outgrown:
            self._take(arena)
        try:
            self._take(self.arena)
        except ArenaGone:  # another process of this rank had reserved it too, and left without a step
            info = self.arena.info
            self.arena.close()
            self._arena = self._create(info.slot_bytes, info.chunk_bytes)
            self._take(self._arena)

    def _take(self, arena: Arena) -> None:
        arena.take(Process.current(), run_id=self._run_id, incarnation=self._incarnation, world=self._world)

    def settle_in(self, local: Sequence[int], world: int) -> None:
        """``local`` are the ranks on this node, of ``world``. The first of them cleans up."""
        self.local_ranks = len(local)
        self._cleans = self._rank == min(local)
        self._alone = len(local) == world

    def complete(self) -> Key | None:
        """W as (incarnation, step): what all ranks of this node hold, or, guarded, what is protected on all nodes;
        before that, the adopted snapshot."""
        if self.guarded:
            said = self.arena.complete
            return said if said is not None and said[0] == self._incarnation else self._adopted
        if len(self._neighbours) + 1 < self.local_ranks:
            self._meet()
        steps = [self.arena.newest(self._incarnation)]
        steps += [arena.newest(self._incarnation) for arena in self._neighbours.values()]
        known = [step for step in steps if step is not None]
        if len(known) < self.local_ranks and self.is_shared:
            return self._adopted
        return (self._incarnation, min(known)) if known else self._adopted

    def begin(
        self, step: int, need_bytes: int, *, timeout_s: float, waiting: Callable[[], None]
    ) -> WriteSlot:
        """A slot for ``step`` with room for ``need_bytes``; waits at most ``timeout_s`` for one.

        ``waiting`` is called between looks (it may hear from the agent).
        """
        if need_bytes > self.arena.info.slot_bytes:
            self._grow(need_bytes)
        until = time.monotonic() + timeout_s
        pause = POLL_MIN_S
        while True:
            slot = None
            if not self._ahead():
                slot = self.arena.begin(self._incarnation, step, complete=self.complete())
                if slot is None and self._kept is not None:
                    self.keep(None)
                    continue
            if slot is not None:
                return slot
            if time.monotonic() > until:
                raise CapacityError(
                    f"no slot became free for step {step}",
                    found=f"all {self._room.slots} slots in use for {timeout_s:g} s",
                    expected="a flush to end, or the other ranks to reach this step",
                    hint="Look at the agent's log and the other ranks; more slots or a lower flush rate also help.",
                    step=step,
                )
            waiting()
            self._meet()
            time.sleep(pause)
            pause = min(pause * 2, POLL_MAX_S)

    def keep(self, pin: Pinned | None) -> None:
        """Hold on to this slot, instead of the one before, as long as there is no need of it. Only where there are more
        than the least: else it would be in the way of what is there for resuming."""
        former, self._kept = self._kept, None
        if former is not None:
            former.release()
        if pin is not None and self._room.slots > SLOTS_BEHIND:
            self._kept = pin
        elif pin is not None:
            pin.release()

    def _ahead(self) -> bool:
        """Whether the trainer has to wait for protection: with three slots, till all earlier snapshots have it (all but
        one with late copies), so that the loss of a node costs one step (two); each further slot lets it be one more
        behind."""
        if not self.guarded:
            return False
        complete = self.complete()
        after = [
            found
            for found in self.arena.snapshots()
            if found.incarnation == self._incarnation and (complete is None or found.key > complete)
        ]
        return len(after) > self._room.slots - SLOTS_BEHIND + self.lead

    def drop_outgrown(self) -> None:
        """Remove arenas that were replaced, and those of former ranks, once this incarnation has a W that lies in
        the present arena (just after a replacement, W may still lie in the one before). Where other nodes have ranks
        too, W is this node's only, unless snapshots are guarded: the others, at most one snapshot behind, have it when
        the next one is complete, and till then a load may need what the former incarnation left."""
        newest = self.complete()
        if newest is None or newest[0] != self._incarnation:
            return
        self._first_complete = self._first_complete or newest
        if not self._alone and not self.guarded and newest == self._first_complete:
            return
        if self._outgrown and any(found.key == newest for found in self.arena.snapshots()):
            for arena in self._outgrown:
                arena.unlink()
                arena.close()
            self._outgrown.clear()
        if time.monotonic() >= self._clean_next_s:
            self._clean_next_s = time.monotonic() + self._clean_pause_s
            self._clean_pause_s = min(2 * self._clean_pause_s, CLEAN_PAUSE_S_MAX)
            self._clean()

    def _clean(self) -> None:
        """Former ranks' arenas; the first rank of the node removes them."""
        if self._cleans and self.is_shared:
            clean(
                self.directory,
                keep=lambda info: info.run_id == self._run_id and info.incarnation >= self._incarnation,
            )

    def close(self, *, remove: bool) -> None:
        """Let go of the arenas; ``remove`` deletes them (what they held is durable elsewhere). One that was reserved,
        but holds nothing, goes anyhow: a job that only loads needs no room."""
        self.keep(None)
        self.prepared = None
        for arena in self._neighbours.values():
            arena.close()
        self._neighbours.clear()
        for arena in [*self._outgrown, *([self._arena] if self._arena else [])]:
            unneeded = arena is self._arena and not arena.snapshots()
            if remove or (unneeded and arena.info.owner == Process.current()):
                arena.unlink()
            elif unneeded:
                arena.remove_if_unused()
            arena.close()
        if remove and self._arena is not None:
            self._clean()  # the agent may have been reading some of them when it was looked last
        self._outgrown.clear()
        self._arena = None

    def _left_behind(
        self, adopted: Key | None, run_id: str, chunk_bytes: int, held: Sequence[Arena]
    ) -> list[Arena]:
        """The arenas of dead processes of this rank: first the one with the adopted snapshot, then from the
        largest."""
        found = [
            Arena.attach(info.path)
            for info in find_arenas(self.directory, Kind.OWN)
            if info.path and self._ours(info, run_id)
        ]
        found += [arena for arena in held if self._ours(arena.info, run_id)]
        fitting = [a for a in found if a.info.chunk_bytes == chunk_bytes and a.info.slots == self._room.slots]

        def worth(arena: Arena) -> tuple[bool, int]:
            holds = any((s.incarnation, s.step) == adopted for s in arena.snapshots())
            return holds, arena.info.slot_bytes

        for arena in [*found, *held]:  # closing twice does nothing
            if not any(arena is one for one in fitting):
                arena.close()
        return sorted(fitting, key=worth, reverse=True)

    def _ours(self, info: ArenaInfo, run_id: str) -> bool:
        """Left by a process of this rank that is gone."""
        alive = info.owner is not None and info.owner.alive()
        ours = info.kind is Kind.OWN and info.rank == self._rank
        return ours and info.run_id in ("", run_id) and not alive

    def _create(self, slot_bytes: int, chunk_bytes: int, *, behind: bool = False) -> Arena:
        make: dict[str, Any] = {
            "run_key": self._place.run_key,
            "node": self._place.node,
            "rank": self._rank,
            "world": self._world,
            "slots": self._room.slots,
            "slot_bytes": slot_bytes,
            "chunk_bytes": chunk_bytes,
            # Beside what the trainer does until its first snapshot: a restart should not wait for it.
            "populate": "behind" if behind else "background",
        }
        if not self._room.private:
            try:
                return Arena.create(self.directory, **make)
            except MemoryTooSmall as error:
                if self._room.required:
                    raise
                warnings.warn(
                    f"everstep: {error}. Snapshots go to memory that is shared with the agent only: they survive the "
                    "training process, but not the agent or a restart of the container.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self.is_shared = False
        return Arena.create_memfd(**make)

    def _grow(self, need_bytes: int) -> None:
        old = self.arena
        self.keep(None)
        self._arena = self._create(int(need_bytes * GROWTH), old.info.chunk_bytes)
        self._take(self._arena)
        if old.complete is not None:
            self._arena.complete = old.complete
        self._outgrown.append(old)

    def _meet(self) -> None:
        """Find the other ranks' newest arenas (again: one may have been replaced by a larger one)."""
        newest: dict[int, tuple[int, int, Path]] = {}
        for info in find_arenas(self.directory, Kind.OWN):
            if info.rank == self._rank or info.path is None or info.incarnation != self._incarnation:
                continue
            if info.run_id == self._run_id:
                key = (info.slot_bytes, info.incarnation, info.path)
                newest[info.rank] = max(newest.get(info.rank, key), key)
        for rank, (_, _, path) in newest.items():
            known = self._neighbours.get(rank)
            if known is not None and known.info.path == path:
                continue
            if known is not None:
                known.close()
            self._neighbours[rank] = Arena.attach(path)
