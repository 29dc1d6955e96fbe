"""The arena: one rank's slots in a shared-memory file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from everstep.errors import BadOption, Damaged, RunInUse, StepOrder, Superseded, UsageError

from . import mapping as maps
from . import points
from .choose import Candidate, choose
from .control import Control, Purpose, SlotState
from .errors import ArenaGone, SlotGone
from .header import (
    OWNER_BYTES,
    OWNER_OFFSETS,
    WORD_BEAT_NS,
    WORD_COMPLETE,
    WORD_LAST,
    WORD_LAST_NS,
    WORD_OWNER,
    WORD_PROTECTED,
    WORD_REMOVED,
    WORD_STEP_NS,
    WORD_TOOK,
    Fixed,
    Kind,
    Ownership,
    aligned,
    decode_fixed,
    decode_owner,
    pack_key,
    unpack_key,
)
from .info import OWNER_READS_MAX, ArenaInfo, describe
from .lock import FileLock
from .mapping import Mapping
from .populating import Populating
from .process import Process
from .room import reserve, resize
from .slots import Pinned, SnapshotInfo, WriteSlot

SUFFIX = ".arena"
UNFINISHED_SUFFIX = ".new"
Populate = Literal["now", "background", "behind", "no"]

_SEALS = 0x1 | 0x2 | 0x4
_F_ADD_SEALS = 1033


class Arena:
    """One opening of an arena file.

    Processes: one owner writes snapshots (``begin``); any number read (``snapshots``, ``newest``, ``pin``).
    Every method may be called from any thread. Changes of state are made under a short lock that its holder's
    death frees; a kill at any instruction leaves the arena usable. In a forked child the object is dead
    (ArenaGone).
    """

    def __init__(self, fd: int, path: Path | None, fixed: Fixed) -> None:
        self._fd = fd
        self._path = path
        self._fixed = fixed
        self._name = str(path) if path is not None else f"memory arena of rank {fixed.rank}"
        self._lock = FileLock(fd, self._name)
        pages = Mapping(fd, fixed.nbytes)
        self._control = Control(pages, fixed, self._lock, self._name)
        self._term = 0
        self._writing: dict[int, tuple[int, weakref.ref[WriteSlot]]] = {}
        self._populating = Populating(fd, path, fixed, pages, self._is_writing)
        self._closed = False
        _open.add(self)

    # -- making and finding

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        run_key: str,
        node: str,
        rank: int,
        world: int,
        slots: int = 3,
        slot_bytes: int,
        chunk_bytes: int,
        populate: Populate = "now",
        kind: Kind = Kind.OWN,
    ) -> Arena:
        """A new arena of this process, ``<kind>-<rank>.<random>.arena`` in ``directory``.

        Memory is reserved first: MemoryTooSmall, with nothing left behind, if it does not fit. ``slot_bytes``
        is rounded up to 4 KiB. ``populate`` gives pages their memory now, on a thread, or at first touch; "behind": on
        a thread, which reserves it, too (:meth:`await_reserved`), where it seems to fit.
        """
        fixed = _fixed(run_key, node, rank, slots, slot_bytes, chunk_bytes, kind)
        path = directory / f"{kind.value}-{rank:05d}.{secrets.token_hex(4)}{SUFFIX}"
        unfinished = path.with_name(
            f"{path.name}.{fixed.created_pid}.{fixed.created_start}{UNFINISHED_SUFFIX}"
        )
        fd = maps.open_file(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            points.reach("arena.reserve.before", path.name)
            _size(fd, fixed, directory, populate)
            arena = cls._start(fd, path, fixed, world)
            points.reach("arena.name.before", path.name)
            os.rename(unfinished, path)
        except BaseException:
            maps.close_file(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
        arena.populate(populate)
        return arena

    @classmethod
    def create_memfd(
        cls,
        *,
        run_key: str,
        node: str,
        rank: int,
        world: int,
        slots: int = 3,
        slot_bytes: int,
        chunk_bytes: int,
        populate: Populate = "now",
        kind: Kind = Kind.OWN,
    ) -> Arena:
        """A new arena without a name, for where shared memory's file system is too small: it lives as long as
        some process has it open (:meth:`fileno`, sent over a socket, :meth:`attach_fd`)."""
        fixed = _fixed(run_key, node, rank, slots, slot_bytes, chunk_bytes, kind)
        fd = maps.open_memory(f"everstep-{run_key}-{rank}")
        try:
            _size(fd, fixed, None, populate)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)  # nobody can shrink it under a reader
            arena = cls._start(fd, None, fixed, world)
        except BaseException:
            maps.close_file(fd)
            raise
        arena.populate(populate)
        return arena

    @classmethod
    def _start(cls, fd: int, path: Path | None, fixed: Fixed, world: int) -> Arena:
        arena = cls(fd, path, fixed)
        arena._control.mapping.view[: len(fixed.encode())] = fixed.encode()
        with arena._lock:
            arena._store_ownership(Ownership(1, 0, world, "", Process.current()))
        arena._term = 1
        return arena

    @classmethod
    def attach(cls, path: Path, *, populate: Populate = "no") -> Arena:
        """Map an existing arena. FileNotFoundError, Damaged, UnknownFormat."""
        fd = maps.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        return cls._attach(fd, path, str(path), populate)

    @classmethod
    def attach_fd(cls, fd: int, *, populate: Populate = "no") -> Arena:
        """Map the arena behind ``fd`` (of :meth:`fileno`, from another process). ``fd`` stays the
        caller's."""
        # Opened anew: a descriptor that was sent shares its locks with the sender.
        own = maps.open_file(f"/proc/self/fd/{fd}", os.O_RDWR)
        return cls._attach(own, None, "memory arena", populate)

    @classmethod
    def _attach(cls, fd: int, path: Path | None, name: str, populate: Populate) -> Arena:
        try:
            fixed = decode_fixed(os.pread(fd, 4096, 0), name, os.fstat(fd).st_size)
            arena = cls(fd, path, fixed)
        except BaseException:
            maps.close_file(fd)
            raise
        arena.populate(populate)
        return arena

    def populate(self, how: Populate = "now") -> None:
        """Give all pages their memory, and this process its map of them, before the first copy needs them; those of
        the first slot first."""
        if how == "now":
            self._control.mapping.populate()
        elif how != "no":
            self._populating.start(reserving=how == "behind")

    def await_reserved(self) -> None:
        """Until all memory is reserved (0.25 s per GiB, the kernel's work). MemoryTooSmall where others took it
        meanwhile: then no slot can be begun."""
        self._populating.await_reserved()

    def await_first_slot(self, within_s: float) -> None:
        """Until a :meth:`populate` in the background has given the first slot its memory (the kernel's work, about a
        second per GiB), or ``within_s`` seconds have passed."""
        self._populating.await_first_slot(within_s)

    # -- header

    @property
    def info(self) -> ArenaInfo:
        """The header as it is now. Damaged if its owner record is."""
        return describe(self._path, self._fixed, self._ownership())

    def fileno(self) -> int:
        return self._fd

    @property
    def mapped(self) -> tuple[int, int]:
        """(address, bytes) of this opening's mapping."""
        return self._control.mapping.address, self._control.mapping.nbytes

    def on_unmap(self, act: Callable[[], object]) -> None:
        """Call ``act`` just before the mapping goes; see :meth:`~.mapping.Mapping.on_unmap`."""
        self._control.mapping.on_unmap(act)

    def take(self, owner: Process, *, run_id: str, incarnation: int, world: int) -> None:
        """Become the owner. What a dead owner was writing becomes free; its snapshots stay. Of another run's
        snapshots none stays.

        RunInUse while another living process owns it (or reads another run's snapshots); Superseded if a
        newer incarnation owned it; ArenaGone if it was cleaned up meanwhile. Within one process the last
        taker owns it.
        """
        with self._lock:
            before = self._ownership()
            self._check_takeable(before, owner, run_id, incarnation)
            if before.run_id not in ("", run_id):
                self._free_all()
                self._control.words[WORD_PROTECTED] = self._control.words[WORD_COMPLETE] = 0
            else:
                self._free_unfinished()
            points.reach("take.locked", str(incarnation))
            term = before.term + 1
            self._store_ownership(Ownership(term, incarnation, world, run_id, owner))
            self._term = term
            self._writing.clear()

    def _check_takeable(self, before: Ownership, owner: Process, run_id: str, incarnation: int) -> None:
        if self._control.words[WORD_REMOVED]:
            raise ArenaGone(f"{self._name} was cleaned up meanwhile", hint="Make a new arena")
        if before.process not in (None, owner) and before.process.alive():
            raise RunInUse(
                f"{self._name} is owned by a living process",
                found=f"process {before.process.pid}, incarnation {before.incarnation}",
                pid=before.process.pid,
                hint="Wait until it has ended, or stop it",
            )
        if before.run_id not in ("", run_id):
            for index in range(self._fixed.slots):
                if pins := self._control.living_pins(index):
                    raise RunInUse(
                        f"{self._name}: snapshots of run {before.run_id} are still read", pid=pins[0][0].pid
                    )
        elif incarnation < before.incarnation:
            raise Superseded(
                f"{self._name} belongs to a newer incarnation", found=before.incarnation, expected=incarnation
            )

    def _free_unfinished(self) -> None:
        for index in range(self._fixed.slots):
            generation, state = self._control.read_word(index)
            if state is SlotState.WRITING:
                self._control.store_word(index, generation, SlotState.FREE)

    def _free_all(self) -> None:
        for index in range(self._fixed.slots):
            generation, _ = self._control.read_word(index)
            self._control.store_word(index, generation, SlotState.FREE)

    def beat(self, step_seconds: float) -> None:
        """The owner is at work; a step takes about ``step_seconds``."""
        self._control.words[WORD_STEP_NS] = max(0, min(int(step_seconds * 1e9), 1 << 62))
        self._control.words[WORD_BEAT_NS] = time.monotonic_ns()

    def heartbeat(self) -> tuple[float, float] | None:
        """(seconds since the last :meth:`beat`, seconds per step); None before the first of this boot."""
        at, step = self._control.words[WORD_BEAT_NS], self._control.words[WORD_STEP_NS]
        age = time.monotonic_ns() - at
        return (age / 1e9, step / 1e9) if at and age >= 0 else None

    def stepped(self, key: tuple[int, int], at_ns: int) -> None:
        """The owner finished step ``key``, (incarnation, step), at ``at_ns`` of the monotonic clock."""
        self._control.words[WORD_LAST_NS] = at_ns
        self._control.words[WORD_LAST] = pack_key(key)

    def took(self, seconds: float | None) -> None:
        """What the step took that :meth:`stepped` tells of next, without the calls of the engine (0.0: not known).
        None: the owner does nothing but wait for the agent."""
        self._control.words[WORD_TOOK] = 0 if seconds is None else 1 + min(int(seconds * 1e9), 1 << 62)

    def step_time(self) -> tuple[float, float] | None:
        """(when it ended, how long it took) in seconds of the monotonic clock, of the last step; None while the owner
        waits for the agent, and before its first step."""
        took = self._control.words[WORD_TOOK]
        return (self._control.words[WORD_LAST_NS] / 1e9, (took - 1) / 1e9) if took else None

    def last_step(self) -> tuple[tuple[int, int], float] | None:
        """((incarnation, step), seconds since then) of the last :meth:`stepped`; None before the first."""
        key = unpack_key(self._control.words[WORD_LAST])
        age = time.monotonic_ns() - self._control.words[WORD_LAST_NS]
        return (key, age / 1e9) if key is not None and age >= 0 else None

    @property
    def protected(self) -> tuple[int, int] | None:
        """(incarnation, step) of the newest snapshot here that survives the loss of this node, as the agent says."""
        return unpack_key(self._control.words[WORD_PROTECTED])

    @protected.setter
    def protected(self, key: tuple[int, int]) -> None:
        self._control.words[WORD_PROTECTED] = pack_key(key)

    @property
    def complete(self) -> tuple[int, int] | None:
        """W over all nodes as (incarnation, step), as the agent says; None before it did."""
        return unpack_key(self._control.words[WORD_COMPLETE])

    @complete.setter
    def complete(self, key: tuple[int, int]) -> None:
        self._control.words[WORD_COMPLETE] = pack_key(key)

    # -- snapshots

    def newest(self, incarnation: int) -> int | None:
        """Newest VALID or SEALED step of ``incarnation``; no lock, some microseconds."""
        steps = [found.step for found in self._scan() if found.incarnation == incarnation]
        return max(steps, default=None)

    def snapshots(self) -> list[SnapshotInfo]:
        """All VALID and SEALED ones, oldest first. Damaged ones are left out: see :meth:`problems`."""
        return sorted(self._scan(), key=lambda found: found.key)

    def problems(self) -> list[Damaged]:
        """What does not match its checksum in the slots' control blocks (data is proved by hashes
        instead)."""
        found = []
        with self._lock:
            for index in range(self._fixed.slots):
                try:
                    self._check_control(index)
                except Damaged as error:
                    found.append(error)
        return found

    def _check_control(self, index: int) -> None:
        generation, state = self._control.read_word(index)
        label = self._control.label(index)
        if state is None:
            raise Damaged(f"{label}: unknown state", name=label, slot=index)
        if state in (SlotState.VALID, SlotState.SEALED):
            identity = self._control.read_identity(index, generation)
            if identity is None:
                raise Damaged(f"{label}: what it holds does not match its checksum", name=label, slot=index)
            self._control.read_table(index, identity)
            if state is SlotState.SEALED:
                self._control.read_sealed(index, generation)

    def _scan(self) -> list[SnapshotInfo]:
        found = (self._snapshot(index) for index in range(self._fixed.slots))
        return [info for info in found if info is not None]

    def _snapshot(self, index: int) -> SnapshotInfo | None:
        control = self._control
        generation, state = control.read_word(index)
        if state not in (SlotState.VALID, SlotState.SEALED):
            return None
        identity = control.read_identity(index, generation)  # None also when it is replaced at this moment
        if identity is None or control.read_word(index)[0] != generation:
            return None
        assert state is not None
        return SnapshotInfo(
            index, generation, state, identity.incarnation, identity.step, identity.layout_hash
        )

    def pin(self, index: int, generation: int, *, purpose: Purpose = Purpose.OTHER) -> Pinned:
        """Keep a snapshot from being overwritten. SlotGone if the slot no longer holds it; Damaged if what
        the slot says of itself does not match its checksum."""
        if not 0 <= index < self._fixed.slots:
            raise BadOption("slot index", found=index, expected=f"0 to {self._fixed.slots - 1}")
        control = self._control
        with self._lock:
            now, state = control.read_word(index)
            if now != generation or state not in (SlotState.VALID, SlotState.SEALED):
                raise SlotGone(
                    f"{control.label(index)} no longer holds that snapshot",
                    found=f"generation {now}, {'unknown state' if state is None else state.name}",
                    expected=f"generation {generation}, VALID or SEALED",
                    slot=index,
                )
            info = self._snapshot(index)
            identity = control.read_identity(index, generation)
            if info is None or identity is None:
                label = control.label(index)
                raise Damaged(f"{label}: what it holds does not match its checksum", name=label, slot=index)
            regions = control.read_table(index, identity)
            pin = control.add_pin(index, Process.current(), purpose)
            points.reach("pin.locked", str(info.step))
        return Pinned(control, info, regions, pin)

    # -- writing

    def discard(self, index: int, generation: int) -> bool:
        """Free a snapshot of ours that is not worth keeping. False if the slot holds another one by now, or a living
        process has it pinned. Superseded when another took the arena."""
        with self._lock:
            self._check_mine()
            now, state = self._control.read_word(index)
            if now != generation or state not in (SlotState.VALID, SlotState.SEALED):
                return False
            if self._control.living_pins(index):
                return False
            self._control.store_word(index, generation, SlotState.FREE)
            return True

    def begin(self, incarnation: int, step: int, *, complete: tuple[int, int] | None) -> WriteSlot | None:
        """A slot to write the snapshot of ``step`` into, now WRITING; None when there is no room now.

        ``complete`` is W as (incarnation, step); after a resume, the adopted step. Which slots may be reused
        is :func:`~everstep.memory.choose.choose`'s decision; a living process's pin protects any. UsageError
        unless owned; Superseded when another took the arena; StepOrder unless the step is newer than all of
        the incarnation's.
        """
        self.await_reserved()
        with self._lock:
            self._check_mine()
            newest = self.newest(incarnation)
            if newest is not None and step <= newest:
                raise StepOrder("a snapshot must be of a newer step", found=step, expected=f"above {newest}")
            index = choose([self._candidate(i) for i in range(self._fixed.slots)], incarnation, complete)
            if index is None:
                return None
            generation, before = self._control.read_word(index)
            old = self._snapshot(index)
            layout_hash = old.layout_hash if old is not None and before is not SlotState.FREE else ""
            self._control.store_word(index, generation + 1, SlotState.WRITING)
            points.reach("slot.begin", str(step))
            slot = WriteSlot(self._control, index, generation + 1, (incarnation, step), layout_hash)
            self._writing[index] = (generation + 1, weakref.ref(slot))
            return slot

    def foresee(self, index: int, regions: Sequence[tuple[str, int]]) -> tuple[int, dict[str, memoryview]]:
        """Where :meth:`WriteSlot.place` would lay ``regions`` in slot ``index``, and the token of this opening. Only to
        make views of, which are written through once the slot is this one's. MemoryTooSmall."""
        control = self._control
        placed = control.place(regions)
        return control.token, {one.name: control.data(index, one.offset, one.nbytes) for one in placed}

    def _candidate(self, index: int) -> Candidate:
        generation, state = self._control.read_word(index)
        busy = False
        if state is SlotState.WRITING:
            writer = self._writing.get(index)
            held = writer[1]() if writer is not None and writer[0] == generation else None
            busy = held is not None and held.open
        elif state is not SlotState.FREE:
            busy = bool(self._control.living_pins(index))
        free = state in (SlotState.FREE, SlotState.WRITING)
        info = self._snapshot(index)
        return Candidate(index, free and not busy, info.key if info is not None else None, busy)

    def _is_writing(self) -> bool:
        """Whether a slot is being written, now, by this process."""
        for _, writer in list(self._writing.values()):
            slot = writer()
            if slot is not None and slot.open:
                return True
        return False

    def _check_mine(self) -> None:
        owner = self._ownership()
        if self._term == 0:
            raise UsageError(f"{self._name} is not owned by this object", hint="Call take() first")
        if owner.term != self._term or owner.process != Process.current():
            raise Superseded(f"{self._name} was taken by another opening", found=owner.process)

    # -- the end

    def close(self) -> None:
        """Give up ownership, if it is this object's, release its pins and let go of the memory. Views handed
        out before keep the pages mapped until they are gone. Safe to call again."""
        if self._closed:
            return
        self._populating.stop()
        try:
            self._disown()
        finally:
            self._populating.await_stopped()
            self._closed = True
            _open.discard(self)
            self._lock.retire()
            self._control.close()
            maps.close_file(self._fd)
            self._fd = -1
        self._populating.join()

    def _disown(self) -> None:
        if self._term == 0:
            return
        with self._lock:
            owner = self._ownership()
            if owner.term == self._term and owner.process == Process.current():
                self._free_unfinished()
                self._store_ownership(
                    Ownership(owner.term + 1, owner.incarnation, owner.world, owner.run_id, None)
                )

    def unlink(self) -> None:
        """Remove the file. Whoever has it mapped goes on; nobody can take it again. Memory comes back with
        the last mapping."""
        with self._lock:
            self._control.words[WORD_REMOVED] = 1
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def remove_if_unused(self) -> bool:
        """:meth:`unlink` unless a living process owns it or pins a slot of it; whether it did."""
        with self._lock:
            owner = self._ownership().process
            if owner is not None and owner.alive():
                return False
            if any(self._control.living_pins(index) for index in range(self._fixed.slots)):
                return False
            self._control.words[WORD_REMOVED] = 1
        self.unlink()
        return True

    # -- inner parts

    def _ownership(self) -> Ownership:
        for _ in range(OWNER_READS_MAX):
            offset = OWNER_OFFSETS[self._control.words[WORD_OWNER] & 1]
            found = decode_owner(bytes(self._control.mapping.view[offset : offset + OWNER_BYTES]))
            if found is not None:
                return found
        raise Damaged(f"owner record of {self._name} does not match its checksum", name=self._name)

    def _store_ownership(self, ownership: Ownership) -> None:
        """Under the lock."""
        place = 1 - (self._control.words[WORD_OWNER] & 1)
        data = ownership.encode()
        offset = OWNER_OFFSETS[place]
        self._control.mapping.view[offset : offset + len(data)] = data
        points.reach("owner.locked", str(ownership.incarnation))
        self._control.words[WORD_OWNER] = place

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *args: Any) -> None:
        self.close()


def _fixed(
    run_key: str, node: str, rank: int, slots: int, slot_bytes: int, chunk_bytes: int, kind: Kind
) -> Fixed:
    me = Process.current()
    return Fixed(run_key, node, rank, slots, aligned(slot_bytes), chunk_bytes, me.pid, me.start_time, kind)


def _size(fd: int, fixed: Fixed, directory: Path | None, populate: Populate) -> None:
    """Give a new file its size, and its memory; where that is to come "behind", that of what has no slot's data."""
    if populate == "behind":
        resize(fd, fixed.nbytes, directory)
    reserve(fd, fixed.data_offset(0) if populate == "behind" else fixed.nbytes, directory)


_open: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_in_child() -> None:
    for arena in list(_open):
        arena._closed = True
        arena._populating.forget()
        arena._lock.retire()
        arena._control.forget()
        arena._fd = -1


os.register_at_fork(after_in_child=_forget_in_child)
