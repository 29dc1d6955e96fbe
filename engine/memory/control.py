"""A slot's control block: its state word, what it holds, who pins it, its region table and its sealed hashes.

::

    0      state word: generation (low 32 bits), state code (high 32 bits) 64     identity: generation,
    incarnation, step, layout hash, region table's size and checksum; own checksum 512    pin table: 32
    entries of 64 bytes: token (0: unused), pid, start time, boot, purpose 3072   sealed hashes' header:
    generation, size, checksum 4096   region table: names and sizes 69632  sealed hashes

What the state word's generation does not confirm does not count: everything else may be half written. State
codes are four letters, so that no single changed byte turns one into another.
"""

from __future__ import annotations

import enum
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from everstep.errors import CapacityError, Damaged, MemoryTooSmall
from everstep.format.constants import HASH_BYTES
from everstep.format.names import COPY_PREFIX as COPY_PREFIX
from everstep.format.vote import STATE_IMAGE, ImageRecord

from .errors import ArenaGone, TooManyPins
from .header import REGIONS_MAX, SLOT_PAGE_BYTES, TABLE_BYTES, Fixed, aligned
from .lock import FileLock
from .mapping import Mapping
from .process import Process


class SlotState(enum.IntEnum):
    """FREE holds nothing; WRITING is its owner's alone; VALID is whole; SEALED is whole, with its hashes."""

    FREE = 0
    WRITING = 1
    VALID = 2
    SEALED = 3


_CODES = {
    SlotState.FREE: 0,
    SlotState.WRITING: int.from_bytes(b"WRIT", "little"),
    SlotState.VALID: int.from_bytes(b"VALD", "little"),
    SlotState.SEALED: int.from_bytes(b"SEAL", "little"),
}
_STATES = {code: state for state, code in _CODES.items()}
_GENERATION_MASK = (1 << 32) - 1

PINS_MAX = 32
_PIN_BYTES = 64
_PIN = struct.Struct("<qqQQ")
_IDENTITY = struct.Struct("<QQQQ64s16s")
_SEAL = struct.Struct("<QQ16s")
_IDENTITY_OFFSET = 64
_PINS_OFFSET = 512
_SEAL_OFFSET = 3072
_SEALED_OFFSET = SLOT_PAGE_BYTES + TABLE_BYTES

IMAGE_PREFIX = "image:"
STATE_REGION = "state"


class Purpose(enum.IntEnum):
    """Why a slot is pinned; for people who look."""

    OTHER = 0
    FLUSH = 1
    REPLICATE = 2
    RECOVER = 3


_PURPOSES = frozenset(int(purpose) for purpose in Purpose)


@dataclass(frozen=True)
class Identity:
    """What a slot holds. ``table_sum`` is the checksum of its region table of ``table_bytes``."""

    generation: int
    incarnation: int
    step: int
    layout_hash: str
    table_bytes: int
    table_sum: bytes


@dataclass(frozen=True)
class Region:
    """One region of a snapshot: ``offset`` from the start of the slot's data."""

    name: str
    offset: int
    nbytes: int


_tokens = itertools.count(1)


def _boot_word(process: Process) -> int:
    return xxhash.xxh3_64_intdigest(process.boot.encode())


class Control:
    """All control blocks of one mapped arena. Whoever calls holds the lock where a method says so."""

    def __init__(self, mapping: Mapping, fixed: Fixed, lock: FileLock, name: str) -> None:
        self.mapping = mapping
        self.fixed = fixed
        self.lock = lock
        self.name = name
        self.token = next(_tokens)
        self._words = mapping.view[: fixed.data_offset(0)].cast("Q")
        self._mine: set[tuple[int, int]] = set()
        self._closed = False

    def close(self) -> None:
        """Drop this opening's pins, and the memory. Nothing is reached through this object afterwards."""
        for pin in list(self._mine):
            self.drop_pin(*pin)
        self.forget()

    def forget(self) -> None:
        """As :meth:`close`, in a forked child: what was mapped there is not, and the pins are the
        parent's."""
        self._closed = True
        self._mine.clear()
        self._words = memoryview(b"").cast("Q")
        self.mapping.close()

    @property
    def words(self) -> memoryview:
        """Header and control blocks as aligned 8-byte words. ArenaGone."""
        if self._closed:
            raise ArenaGone(f"{self.name}: closed, or used after a fork")
        return self._words

    def label(self, index: int) -> str:
        return f"{self.name} slot {index}"

    # -- state word: one aligned 8-byte load or store

    def read_word(self, index: int) -> tuple[int, SlotState | None]:
        """(generation, state); the state is None when its code is none of ours."""
        word = self.words[self.fixed.control_offset(index) // 8]
        return word & _GENERATION_MASK, _STATES.get(word >> 32)

    def store_word(self, index: int, generation: int, state: SlotState) -> None:
        """Under the lock, whose release orders it after all that was written before."""
        word = (_CODES[state] << 32) | (generation & _GENERATION_MASK)
        self.words[self.fixed.control_offset(index) // 8] = word

    # -- identity and region table

    def write_identity(self, index: int, identity: Identity) -> None:
        body = _IDENTITY.pack(
            identity.generation,
            identity.incarnation,
            identity.step,
            identity.table_bytes,
            identity.layout_hash.encode(),
            identity.table_sum,
        )
        self._put(index, _IDENTITY_OFFSET, body + xxhash.xxh3_128_digest(body))

    def read_identity(self, index: int, generation: int) -> Identity | None:
        """None when it does not match its checksum or is of another generation."""
        data = self._get(index, _IDENTITY_OFFSET, _IDENTITY.size + HASH_BYTES)
        body = data[: _IDENTITY.size]
        if xxhash.xxh3_128_digest(body) != data[_IDENTITY.size :]:
            return None
        of, incarnation, step, nbytes, layout_hash, table_sum = _IDENTITY.unpack(body)
        if of != generation or nbytes > TABLE_BYTES:
            return None
        return Identity(of, incarnation, step, layout_hash.rstrip(b"\0").decode(), nbytes, table_sum)

    def write_table(self, index: int, regions: Sequence[tuple[str, int]]) -> tuple[int, bytes]:
        """Store the region table; its size and checksum. Raises when there are too many, or too long
        names."""
        parts = [struct.pack("<I", len(regions))]
        for name, nbytes in regions:
            text = name.encode()
            parts.append(struct.pack("<IQ", len(text), nbytes) + text)
        data = b"".join(parts)
        if len(regions) > REGIONS_MAX or len(data) > TABLE_BYTES:
            raise CapacityError(
                "too many parts in one snapshot, or their names are too long",
                found=f"{len(regions)} regions, a table of {len(data)} bytes",
                expected=f"at most {REGIONS_MAX} regions, {TABLE_BYTES} bytes",
            )
        self._put(index, SLOT_PAGE_BYTES, data)
        return len(data), xxhash.xxh3_128_digest(data)

    def read_table(self, index: int, identity: Identity) -> tuple[Region, ...]:
        """Verified; Damaged."""
        data = self._get(index, SLOT_PAGE_BYTES, identity.table_bytes)
        if xxhash.xxh3_128_digest(data) != identity.table_sum:
            raise Damaged("region table does not match its checksum", name=self.label(index), slot=index)
        regions = []
        at, offset = 4, 0
        for _ in range(struct.unpack_from("<I", data)[0]):
            length, nbytes = struct.unpack_from("<IQ", data, at)
            name = data[at + 12 : at + 12 + length].decode()
            regions.append(Region(name, offset, nbytes))
            at += 12 + length
            offset += aligned(nbytes)
        return tuple(regions)

    def place(self, sizes: Sequence[tuple[str, int]]) -> tuple[Region, ...]:
        """Where regions of these sizes lie: one behind the other, each 4 KiB-aligned. MemoryTooSmall."""
        regions, offset = [], 0
        for name, nbytes in sizes:
            regions.append(Region(name, offset, nbytes))
            offset += aligned(nbytes)
        if offset > self.fixed.slot_bytes:
            raise MemoryTooSmall(
                f"a snapshot does not fit into a slot of {self.name}",
                found=f"{self.fixed.slot_bytes:,} bytes per slot",
                expected=f"{offset:,} bytes",
                hint="Set Memory(bytes=...) to at least the expected size",
                needed=offset,
                free=self.fixed.slot_bytes,
            )
        return tuple(regions)

    def data(self, index: int, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of a slot's data. ArenaGone."""
        if self._closed:
            raise ArenaGone(f"{self.name}: closed, or used after a fork")
        start = self.fixed.data_offset(index) + offset
        return self.mapping.view[start : start + nbytes]

    # -- pins

    def living_pins(self, index: int) -> list[tuple[Process, Purpose]]:
        """Pins of living processes; under the lock. Those of dead ones are void and removed."""
        found: list[tuple[Process, Purpose]] = []
        places = self._pin_words(index)
        tokens = self.words[places.start : places.stop : places.step].tolist()
        if not any(tokens):  # looked at for each slot, at each snapshot
            return found
        boot = Process.current().boot
        for word, token in zip(places, tokens, strict=True):
            if token == 0:
                continue
            pid, start, boot_word, purpose = _PIN.unpack_from(self.mapping.view, word * 8 + 8)
            process = Process(pid, start, boot)
            if boot_word == _boot_word(process) and process.alive():
                found.append((process, Purpose(purpose) if purpose in _PURPOSES else Purpose.OTHER))
            else:
                self.words[word] = 0
        return found

    def _pin_words(self, index: int) -> range:
        first = (self.fixed.control_offset(index) + _PINS_OFFSET) // 8
        return range(first, first + PINS_MAX * _PIN_BYTES // 8, _PIN_BYTES // 8)

    def add_pin(self, index: int, process: Process, purpose: Purpose) -> tuple[int, int]:
        """(word, token) of a new pin; under the lock. The token makes it count, so it is stored last."""
        unused = [word for word in self._pin_words(index) if self.words[word] == 0]
        if not unused:
            self.living_pins(index)
            unused = [word for word in self._pin_words(index) if self.words[word] == 0]
        if not unused:
            raise TooManyPins(
                f"{self.label(index)} is pinned {PINS_MAX} times by living processes", slot=index
            )
        word = unused[0]
        token = int.from_bytes(os.urandom(8), "little") | 1
        entry = (process.pid, process.start_time, _boot_word(process), int(purpose))
        _PIN.pack_into(self.mapping.view, word * 8 + 8, *entry)
        self.words[word] = token
        self._mine.add((word, token))
        return word, token

    def drop_pin(self, word: int, token: int) -> None:
        """Needs no lock: one store, and only of one's own pin."""
        if (word, token) not in self._mine:
            return  # closed meanwhile, or a forked child's copy
        self._mine.discard((word, token))
        if self.words[word] == token:
            self.words[word] = 0

    # -- sealed hashes

    def write_sealed(self, index: int, generation: int, data: bytes) -> None:
        """Under the lock, while the slot is VALID."""
        if len(data) > self.fixed.seal_bytes:
            raise CapacityError("too many chunk hashes", found=len(data), expected=self.fixed.seal_bytes)
        self._put(index, _SEALED_OFFSET, data)
        self._put(index, _SEAL_OFFSET, _SEAL.pack(generation, len(data), xxhash.xxh3_128_digest(data)))

    def read_sealed(self, index: int, generation: int) -> bytes:
        """Verified; Damaged."""
        of, nbytes, stored = _SEAL.unpack(self._get(index, _SEAL_OFFSET, _SEAL.size))
        data = self._get(index, _SEALED_OFFSET, nbytes) if nbytes <= self.fixed.seal_bytes else b""
        if of != generation or xxhash.xxh3_128_digest(data) != stored:
            raise Damaged("sealed hashes do not match their checksum", name=self.label(index), slot=index)
        return data

    def _put(self, index: int, offset: int, data: bytes) -> None:
        start = self.fixed.control_offset(index) + offset
        self.mapping.view[start : start + len(data)] = data

    def _get(self, index: int, offset: int, nbytes: int) -> bytes:
        start = self.fixed.control_offset(index) + offset
        return bytes(self.mapping.view[start : start + nbytes])


def region_of(records: Sequence[ImageRecord], position: int) -> str:
    """Name of the region that record ``position`` speaks of. The state image comes last, by its own name; any
    other record is an image's, even one of a part that is called "state"."""
    name = records[position].name
    if name == STATE_IMAGE and position == len(records) - 1:
        return STATE_REGION
    return IMAGE_PREFIX + name
