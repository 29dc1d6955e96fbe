"""What a node keeps of one rank of another node: the arena that is written to, and former ones for as long as they hold
what must not be lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import AgentError, EverstepError
from everstep.format.vote import ImageRecord
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas, private_dir
from everstep.memory.header import Kind, aligned
from everstep.memory.info import ArenaInfo
from everstep.memory.process import Process
from everstep.memory.slots import Purpose, SlotState, SnapshotInfo, WriteSlot

log = logging.getLogger("everstep.peers")

SLOTS = 2
"""Of an arena with what others send: the newer snapshot is written while the older one stands."""
ARENAS_MAX = 3
"""Of one rank: the present one, the one that holds what must not be lost, and one that others made meanwhile."""

Key = tuple[int, int]
"""(incarnation, step)."""


@dataclass(frozen=True)
class Place:
    """Where the arenas lie in which a node keeps what others send, and whose they are."""

    directory: Path
    run_key: str
    node: str
    run_id: str

    def create(self, kind: Kind, rank: int, slot_bytes: int, chunk_bytes: int) -> Arena:
        """A new one, this process's, in the directory, which is made anew where it was removed. MemoryTooSmall;
        OwnershipError where another user has that name; OSError."""
        private_dir(self.directory)
        arena = Arena.create(
            self.directory,
            run_key=self.run_key,
            node=self.node,
            rank=rank,
            world=1,
            slots=SLOTS,
            slot_bytes=slot_bytes,
            chunk_bytes=chunk_bytes,
            populate="background",
            kind=kind,
        )
        self.take(arena, incarnation=0, world=1)
        return arena

    def take(self, arena: Arena, *, incarnation: int, world: int) -> None:
        """Own it for an incarnation of the run. RunInUse, Superseded."""
        arena.take(Process.current(), run_id=self.run_id, incarnation=incarnation, world=world)


class Shelf:
    """Used by one thread at a time: whoever holds the rank's place in the keeper."""

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._arenas: list[Arena] = []
        """The last one is written to."""
        self._looked = False

    @property
    def current(self) -> Arena | None:
        return self._arenas[-1] if self._arenas else None

    def fits(self, slot_bytes: int, chunk_bytes: int) -> bool:
        """Whether the present arena's slots have that room."""
        present = self.current
        return present is not None and not is_removed(present) and fits(present.info, slot_bytes, chunk_bytes)

    def reserve(self, slot_bytes: int, chunk_bytes: int, complete: Key | None) -> None:
        """Have slots of at least ``slot_bytes``: those that a former agent of this node left, or new ones. What holds
        the newest snapshot is kept beside them. MemoryTooSmall; RunInUse where a living process has them; OSError."""
        self._look()
        if self.fits(slot_bytes, chunk_bytes):
            return
        fitting = [arena for arena in self._arenas if fits(arena.info, slot_bytes, chunk_bytes)]
        for arena in [one for one in self._arenas if one not in fitting[-1:] and not one.snapshots()]:
            self._remove(arena)
        if fitting:
            self._arenas.remove(fitting[-1])
            self._arenas.append(fitting[-1])
        else:
            self._arenas.append(self._place.create(Kind.HELD, self._rank, slot_bytes, chunk_bytes))
        self.tidy(complete)

    def snapshots(self) -> Iterator[tuple[Arena, SnapshotInfo]]:
        """Those that are sealed."""
        self._look()
        for arena in self._arenas:
            for found in arena.snapshots():
                if found.state is SlotState.SEALED:
                    yield arena, found

    def find(self, key: Key) -> tuple[Arena, SnapshotInfo] | None:
        return next((found for found in self.snapshots() if found[1].key == key), None)

    def precious(self, complete: Key | None) -> Key | None:
        """The sealed snapshot that may not go: W, or the newest one up to it; the newest of all where W is not known,
        or nothing is that old."""
        keys = [found.key for _, found in self.snapshots()]
        known = [key for key in keys if complete is None or key <= complete]
        return max(known or keys, default=None)

    def begin(self, key: Key, world: int, complete: Key | None) -> WriteSlot | None:
        """A slot of the present arena to write ``key`` into; None while both are needed or read. Superseded,
        StepOrder."""
        arena = self._arenas[-1]
        if arena.info.incarnation != key[0] or arena.info.world != world:
            self._place.take(arena, incarnation=key[0], world=world)
        return arena.begin(*key, complete=self.precious(complete))

    def seal(self, slot: WriteSlot, records: Sequence[ImageRecord], complete: Key | None) -> None:
        """Seal what was published, and let go of what it replaces. Nothing of it stays if that fails."""
        arena = self._arenas[-1]
        try:
            with arena.pin(slot.index, slot.generation, purpose=Purpose.REPLICATE) as pinned:
                pinned.seal(tuple(records))
        except EverstepError:
            with contextlib.suppress(EverstepError):
                arena.discard(slot.index, slot.generation)
            raise
        if is_removed(arena):
            raise AgentError(
                f"what node {self._place.node} was to keep of rank {self._rank} lies in a file that was removed",
                found=f"{arena.info.path} is gone",
                expected="that nobody removes what a running agent keeps",
                node=self._place.node,
            )
        self.tidy(complete)

    def tidy(self, complete: Key | None) -> None:
        """Remove former arenas without the snapshot that may not go."""
        precious = self.precious(complete)
        for arena in self._arenas[:-1]:
            if not any(found.key == precious for found in arena.snapshots()):
                points.reach("keeper.outgrown", str(self._rank))
                self._remove(arena)

    def older_than(self, below: Key) -> bool:
        """Whether there are snapshots, and all are of before ``below``."""
        keys = [found.key for arena in self._arenas for found in arena.snapshots()]
        return bool(keys) and max(keys) < below

    def close(self, *, remove: bool) -> None:
        """Let go of the arenas; they stay for the next agent unless ``remove``."""
        while self._arenas:
            if remove:
                self._remove(self._arenas[-1])
            else:
                self._arenas.pop().close()

    def _look(self) -> None:
        """Once: take over what a former agent of this node left. Let go of what somebody removed: nobody would find it,
        so it must not count as kept."""
        for arena in [one for one in self._arenas if is_removed(one)]:
            log.warning("what was kept of rank %d is lost: %s was removed", self._rank, arena.info.path)
            self._remove(arena)
        if self._looked:
            return
        for info in find_arenas(self._place.directory, Kind.HELD):
            if info.rank == self._rank and info.path is not None:
                self._take_over(info.path)
        self._arenas.sort(
            key=lambda arena: (max((s.key for s in arena.snapshots()), default=(0, 0)), arena.info.slot_bytes)
        )
        self._looked = True
        for arena in self._arenas[:-ARENAS_MAX]:
            self._remove(arena)

    def _take_over(self, path: Path) -> None:
        try:
            arena = Arena.attach(path)
        except FileNotFoundError:
            return
        try:
            info = arena.info
            if info.run_id not in ("", self._place.run_id):
                arena.remove_if_unused()  # of a run that was deleted, and made anew at the same root
                arena.close()
                return
            self._place.take(arena, incarnation=info.incarnation, world=info.world)
            for found in arena.snapshots():
                if (
                    found.state is not SlotState.SEALED
                ):  # its former agent died before it said that it keeps it
                    arena.discard(found.index, found.generation)
        except BaseException:
            arena.close()
            raise
        arena.populate("background")
        self._arenas.append(arena)

    def _remove(self, arena: Arena) -> None:
        """Readers that have it mapped go on."""
        self._arenas.remove(arena)
        arena.unlink()
        arena.close()


def is_removed(arena: Arena) -> bool:
    """Whether somebody removed the arena's file: it is still mapped here, but nobody finds it."""
    path = arena.info.path
    return path is not None and not path.exists()


def fits(info: ArenaInfo, slot_bytes: int, chunk_bytes: int) -> bool:
    """Whether the arena's slots have that room."""
    return info.slots == SLOTS and info.chunk_bytes == chunk_bytes and info.slot_bytes >= aligned(slot_bytes)
