"""The trainers that an agent serves, and their arenas."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import AgentError, EverstepError, RunInUse
from everstep.memory.arena import Arena
from everstep.memory.mapping import close_file
from everstep.memory.process import Process
from everstep.memory.slots import SnapshotInfo

from .journal import MemberEntry
from .watch import Watch

MEMBERS_MAX = 4096

FLUSHED = "flushed"
KEPT = "kept"
"""How a trainer said goodbye: with what it wanted made durable, or wishing that nothing more be."""


@dataclass
class Member:
    """One registered trainer. ``farewell`` is None until it says goodbye; ``dead`` once its process has
    ended."""

    run_id: str
    rank: int
    world: int
    incarnation: int
    adopted: tuple[int, int] | None
    process: Process
    arena: Arena
    arena_path: str
    farewell: str | None = None
    dead: bool = False
    safe: bool = False
    """Whether it left with its newest snapshot durable."""
    watch: Watch | None = None

    @classmethod
    def of(cls, kept: MemberEntry, arena: Arena) -> Member:
        """As the journal of a former agent knew it."""
        return cls(
            kept.run_id,
            kept.rank,
            kept.world,
            kept.incarnation,
            kept.adopted,
            Process(*kept.process),
            arena,
            kept.arena,
        )

    @property
    def here(self) -> bool:
        return self.farewell is None and not self.dead

    def entry(self) -> MemberEntry:
        process = (self.process.pid, self.process.start_time, self.process.boot)
        return MemberEntry(
            self.run_id, self.rank, self.world, self.incarnation, self.adopted, process, self.arena_path
        )


class Members:
    """By (incarnation, rank); those of older incarnations stay while their processes live. Used from the
    loop."""

    def __init__(self, died: Callable[[Member], None]) -> None:
        self._died = died
        self._members: dict[tuple[int, int], Member] = {}
        self._arenas: dict[int, Arena] = {}
        """The arena that each rank registered last; kept after its trainer's death, for W and for its next
        one."""

    def all(self) -> list[Member]:
        return list(self._members.values())

    def find(self, incarnation: int, rank: int) -> Member | None:
        return self._members.get((incarnation, rank))

    def arena(self, rank: int) -> Arena | None:
        return self._arenas.get(rank)

    def arenas(self) -> dict[int, Arena]:
        return dict(self._arenas)

    @property
    def newest(self) -> int:
        """The highest incarnation that registered; 0 before any."""
        return max((incarnation for incarnation, _ in self._members), default=0)

    def of_newest(self) -> list[Member]:
        newest = self.newest
        return [member for member in self._members.values() if member.incarnation == newest]

    @property
    def anyone_here(self) -> bool:
        return any(member.here for member in self._members.values())

    def check(self, incarnation: int, rank: int, process: Process) -> None:
        """Raises RunInUse while another living process is that rank of that incarnation."""
        known = self._members.get((incarnation, rank))
        if known is not None and known.here and known.process != process and known.process.alive():
            raise RunInUse(
                f"rank {rank} of incarnation {incarnation} is registered with the agent already",
                found=f"process {known.process.pid}",
                expected=f"process {process.pid}",
                pid=known.process.pid,
            )
        if known is None and len(self._members) >= MEMBERS_MAX:
            raise AgentError("too many trainers", found=len(self._members), expected=f"at most {MEMBERS_MAX}")

    def add(self, member: Member) -> None:
        """Register, again or anew; its process is watched from now on."""
        old = self._members.pop((member.incarnation, member.rank), None)
        if old is not None and old.watch is not None:
            old.watch.stop()
        self._members[member.incarnation, member.rank] = member
        self._keep_arena(member)
        member.watch = Watch(member.process, lambda: self._mark_dead(member))

    def _keep_arena(self, member: Member) -> None:
        """The rank's newest arena replaces an older one, unless an older incarnation comes back late."""
        newer = any(
            other.rank == member.rank and other.incarnation > member.incarnation for other in self.all()
        )
        if not newer:
            self._arenas[member.rank] = member.arena

    def retire(self) -> list[Member]:
        """Forget, and return, those who are gone and are not of the newest incarnation."""
        newest = self.newest
        gone = [member for member in self.all() if not member.here and member.incarnation < newest]
        for member in gone:
            self._members.pop((member.incarnation, member.rank))
            self._stop(member)
        return gone

    def let_go(self, *, nameless: bool = False) -> None:
        """Forget the arenas of ranks that the newest incarnation does not have, once their files were removed;
        with ``nameless`` those that never had a file, too. Their memory comes back with the last mapping."""
        present = {member.rank for member in self.of_newest()}
        for rank in [rank for rank in self._arenas if rank not in present]:
            with contextlib.suppress(EverstepError):
                path = self._arenas[rank].info.path
                if nameless if path is None else not path.exists():
                    del self._arenas[rank]

    def leave(self, member: Member, farewell: str, *, safe: bool) -> None:
        member.farewell, member.safe = farewell, safe
        self._stop(member)

    def close(self) -> None:
        for member in self.all():
            self._stop(member)

    def _mark_dead(self, member: Member) -> None:
        if not member.dead and self._members.get((member.incarnation, member.rank)) is member:
            member.dead = True
            self._died(member)

    @staticmethod
    def _stop(member: Member) -> None:
        if member.watch is not None:
            member.watch.stop()
            member.watch = None


def _close_in(owner: int, fd: int) -> None:
    """A forked child has closed it already, and may have another file under that number."""
    if os.getpid() == owner:
        close_file(fd)


def open_arena(path: str, fd: int | None, *, rank: int, run_key: str, known: Arena | None) -> Arena:
    """The trainer's arena, mapped, and checked to be that rank's of this run; ``known`` itself if it is that
    file. It lets go of its file when nothing refers to it any more. May wait for the arena's lock for some
    seconds. Raises AgentError, Damaged, UnknownFormat."""
    try:
        if known is not None and _is_open_as(known, path, fd):
            return known
        arena = Arena.attach_fd(fd) if fd is not None else Arena.attach(Path(path))
        # Members, jobs and others share it, so that nobody can close it for all of them.
        weakref.finalize(arena, _close_in, os.getpid(), arena.fileno())
        info = arena.info
    except OSError as error:
        if isinstance(error, EverstepError):
            raise
        raise AgentError(
            "the arena cannot be opened", found=f"{path or 'memfd'}: {error}", rank=rank
        ) from None
    if (info.rank, info.run_key) != (rank, run_key):
        raise AgentError(
            "the arena is another rank's or another run's",
            found=f"rank {info.rank} of {info.run_key}",
            expected=f"rank {rank} of {run_key}",
        )
    return arena


def _is_open_as(arena: Arena, path: str, fd: int | None) -> bool:
    theirs = os.fstat(fd) if fd is not None else os.stat(path)
    return os.path.samestat(os.fstat(arena.fileno()), theirs)


def find_snapshot(arena: Arena, incarnation: int, step: int) -> SnapshotInfo | None:
    """That step's snapshot, if the arena holds it."""
    found = [one for one in arena.snapshots() if (one.incarnation, one.step) == (incarnation, step)]
    return found[0] if found else None
