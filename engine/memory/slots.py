"""Handles on one slot: :class:`WriteSlot` for the owner, :class:`Pinned` for the agent and recovery."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import TracebackType

from everstep.errors import BadOption, Damaged
from everstep.format.constants import HASH_BYTES
from everstep.format.vote import ImageRecord

from . import points
from .control import IMAGE_PREFIX, STATE_REGION, Control, Identity, Purpose, Region, SlotState
from .errors import ArenaGone, SlotGone
from .header import KEY_BYTES_MAX, aligned
from .sealing import check_records, decode_records, encode_records, hash_regions

__all__ = ["Pinned", "Purpose", "SlotGone", "SlotState", "SnapshotInfo", "WriteSlot"]


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot in an arena."""

    index: int
    generation: int
    state: SlotState
    incarnation: int
    step: int
    layout_hash: str

    @property
    def key(self) -> tuple[int, int]:
        """(incarnation, step)."""
        return self.incarnation, self.step


class WriteSlot:
    """A slot in state WRITING: nobody else reads or reuses it until :meth:`publish` or :meth:`abandon`.

    Dropping the object without either gives the slot back at the next ``begin``. Used by one thread at a
    time. As a context manager it is abandoned on the way out unless it was published.
    """

    def __init__(
        self, control: Control, index: int, generation: int, key: tuple[int, int], layout_hash_before: str
    ) -> None:
        self.index = index
        self.generation = generation
        self.incarnation, self.step = key
        self.layout_hash_before = layout_hash_before
        """Layout that the slot's data still has headers of; "" if unknown."""
        self._control = control
        self._table: tuple[int, bytes] | None = None
        self._open = True

    @property
    def arena_token(self) -> int:
        """Tells this opening of an arena from any other of the process."""
        return self._control.token

    def place(self, regions: Sequence[tuple[str, int]]) -> dict[str, memoryview]:
        """Lay out ``(name, nbytes)`` regions, each 4 KiB-aligned, and return writable views of them.

        The same sizes in the same order get the same places in the same slot. MemoryTooSmall if they do not
        fit into the slot (the slot stays WRITING: abandon it).
        """
        self._check_open()
        if len({name for name, _ in regions}) != len(regions):
            raise BadOption("two regions of one name", found=[name for name, _ in regions])
        placed = self._control.place(regions)
        self._table = self._control.write_table(self.index, regions)
        return {
            region.name: self._control.data(self.index, region.offset, region.nbytes) for region in placed
        }

    def publish(self, layout_hash: str) -> None:
        """Make the snapshot VALID, by one store. SlotGone if the arena was taken over meanwhile."""
        self._check_open()
        if self._table is None:
            raise BadOption("publish before place", slot=self.index)
        if len(layout_hash.encode()) > KEY_BYTES_MAX:
            raise BadOption("layout hash is too long", found=layout_hash)
        control, (table_bytes, table_sum) = self._control, self._table
        identity = Identity(self.generation, self.incarnation, self.step, layout_hash, table_bytes, table_sum)
        points.reach("slot.publish.before", str(self.step))
        with control.lock:
            self._check_mine()
            control.write_identity(self.index, identity)
            points.reach("slot.publish.locked", str(self.step))
            control.store_word(self.index, self.generation, SlotState.VALID)
        self._open = False
        points.reach("slot.publish.after", str(self.step))

    def abandon(self) -> None:
        """Give the slot back, FREE. Does nothing after publish, or when the slot is no longer this one's."""
        if not self._open:
            return
        self._open = False
        try:
            with self._control.lock:
                if self._control.read_word(self.index) == (self.generation, SlotState.WRITING):
                    self._control.store_word(self.index, self.generation, SlotState.FREE)
        except ArenaGone:
            return

    @property
    def open(self) -> bool:
        """Neither published nor abandoned."""
        return self._open

    def __enter__(self) -> WriteSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _check_open(self) -> None:
        if not self._open:
            raise SlotGone(f"{self._control.label(self.index)} was published or abandoned", slot=self.index)

    def _check_mine(self) -> None:
        word = self._control.read_word(self.index)
        if word != (self.generation, SlotState.WRITING):
            raise SlotGone(
                f"{self._control.label(self.index)} was taken over",
                found=word,
                expected=(self.generation, SlotState.WRITING),
                slot=self.index,
            )


class Pinned:
    """A snapshot that will not be overwritten while this process lives and holds the pin.

    Reading goes: pin, read, :meth:`check`, use. (The check is the proof; the pin makes it rarely fail.) Any
    thread may read; pins do not pass a fork. Release it, or use it as a context manager; a dropped one
    releases itself.
    """

    def __init__(
        self, control: Control, info: SnapshotInfo, regions: tuple[Region, ...], pin: tuple[int, int]
    ) -> None:
        self.info = info
        self.regions: dict[str, int] = {region.name: region.nbytes for region in regions}
        self._control = control
        self._regions = regions
        self._places = {region.name: region for region in regions}
        self._release = weakref.finalize(self, control.drop_pin, *pin)
        self._release.atexit = False

    @property
    def rank(self) -> int:
        """Whose snapshot it is."""
        return self._control.fixed.rank

    @property
    def chunk_bytes(self) -> int:
        return self._control.fixed.chunk_bytes

    def view(self, name: str) -> memoryview:
        """The region's bytes, read-only; it starts at a multiple of 4 KiB. KeyError."""
        region = self._places[name]
        return self._control.data(self.info.index, region.offset, region.nbytes).toreadonly()

    def view_padded(self, name: str) -> memoryview:
        """As :meth:`view`, up to the next multiple of 4 KiB. What lies behind the region's end means
        nothing."""
        region = self._places[name]
        return self._control.data(self.info.index, region.offset, aligned(region.nbytes)).toreadonly()

    def check(self) -> None:
        """SlotGone unless the slot still holds this very snapshot; then all that was read before is of it."""
        if not self._release.alive:
            raise SlotGone(f"{self._control.label(self.info.index)}: pin was released", slot=self.info.index)
        with self._control.lock:
            self._check()

    def _check(self) -> SlotState:
        generation, state = self._control.read_word(self.info.index)
        if generation == self.info.generation and state in (SlotState.VALID, SlotState.SEALED):
            assert state is not None
            return state
        raise SlotGone(
            f"{self._control.label(self.info.index)} no longer holds step {self.info.step}",
            found=f"generation {generation}, {'unknown state' if state is None else state.name}",
            expected=f"generation {self.info.generation}, VALID or SEALED",
            slot=self.info.index,
        )

    def sealed(self) -> tuple[ImageRecord, ...] | None:
        """Hash records of all images and the state (images in region order, then the state); None unless
        SEALED. Damaged if they do not match their checksum."""
        with self._control.lock:
            if self._check() is not SlotState.SEALED:
                return None
            return self._read_sealed()

    def seal(self, records: tuple[ImageRecord, ...]) -> None:
        """VALID -> SEALED with these records. Sealing again with equal ones does nothing; Damaged if unequal:
        the bytes changed since."""
        check_records(records, self._regions, self._control.fixed.chunk_bytes)
        data = encode_records(records)
        label = self._control.label(self.info.index)
        points.reach("seal.before", str(self.info.step))
        with self._control.lock:
            if self._check() is SlotState.SEALED:
                self._compare_sealed(records)
                return
            self._control.write_sealed(self.info.index, self.info.generation, data)
            points.reach("seal.locked", str(self.info.step))
            self._control.store_word(self.info.index, self.info.generation, SlotState.SEALED)
        points.reach("seal.after", label)

    def compute(
        self, names: Sequence[str] | None = None, pool: Executor | None = None
    ) -> tuple[ImageRecord, ...]:
        """Hash regions now: ``names`` are region names (default: all images, then the state), results in that
        order. With ``pool`` in pieces on its threads. Check afterwards."""
        if names is None:
            names = [name for name in self.regions if name.startswith(IMAGE_PREFIX)]
            names += [name for name in self.regions if name == STATE_REGION]
        return hash_regions(names, self.view, self._control.fixed.chunk_bytes, pool)

    def release(self) -> None:
        """Give the pin back. Safe to call again."""
        self._release()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _read_sealed(self) -> tuple[ImageRecord, ...]:
        index = self.info.index
        data = self._control.read_sealed(index, self.info.generation)
        return decode_records(data, self._regions, self._control.label(index))

    def _compare_sealed(self, records: tuple[ImageRecord, ...]) -> None:
        chunk_bytes = self._control.fixed.chunk_bytes
        for before, now in zip(self._read_sealed(), records, strict=True):
            if before == now:
                continue
            differing = [
                at
                for at in range(0, len(now.chunks), HASH_BYTES)
                if before.chunks[at : at + HASH_BYTES] != now.chunks[at : at + HASH_BYTES]
            ]
            first = differing[0] // HASH_BYTES * chunk_bytes if differing else 0
            raise Damaged(
                f"{self._control.label(self.info.index)}: image {now.name!r} of step {self.info.step} "
                f"changed since it was sealed, from byte {first} on",
                name=now.name,
                found=now.root.hex(),
                expected=before.root.hex(),
                slot=self.info.index,
                step=self.info.step,
            )
