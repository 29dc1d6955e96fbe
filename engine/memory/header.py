"""Where everything lies in an arena file, and the records of its header page.

::

    0        fixed part: magic, version, sizes, names; never changes; with its own checksum
    4096     reserved for parity descriptors
    8192     changing part: which owner record counts, removal mark, heartbeat, last step and what it
             took, what the agent says of protection and W, two owner records
    12288    control block of slot 0, 1, ... (see ``slots.py``)
    ...      data of slot 0, 1, ... each a multiple of 4 KiB, 4 KiB-aligned

All integers are little-endian. What other processes may read at any moment is a single aligned 8-byte word,
or lies behind a checksum. The owner record is written in the place that does not count, and then made to
count by one store of a word, so that a kill in between changes nothing.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash
from everstep.errors import BadOption, Damaged, UnknownFormat
from everstep.format.constants import ALIGN_BYTES, HASH_BYTES

from .process import Process

MAGIC = b"EVERAREN"
VERSION = 2
"""Version of the arena file. It need not outlive a machine's boot, so other versions are refused, not
read."""

HEADER_BYTES = 3 * ALIGN_BYTES
PARITY_OFFSET = ALIGN_BYTES
CHANGING_OFFSET = 2 * ALIGN_BYTES
WORD_OWNER = CHANGING_OFFSET // 8
WORD_REMOVED = WORD_OWNER + 1
WORD_BEAT_NS = WORD_OWNER + 2
WORD_STEP_NS = WORD_OWNER + 3
WORD_PROTECTED = WORD_OWNER + 4
WORD_COMPLETE = WORD_OWNER + 5
WORD_LAST = WORD_OWNER + 6
WORD_LAST_NS = WORD_OWNER + 7
WORD_TOOK = WORD_OWNER + 8
OWNER_OFFSETS = (CHANGING_OFFSET + 1024, CHANGING_OFFSET + 2048)

SLOTS_MAX = 64
REGIONS_MAX = 256
TABLE_BYTES = 64 << 10
"""Room for a slot's region table: names and sizes."""
NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 64
SLOT_PAGE_BYTES = ALIGN_BYTES
SEAL_ENTRY_BYTES = 8 + HASH_BYTES

_FIXED = struct.Struct("<8s II IIQQ QQQQ qq 64s 256s 8s")
_FIXED_SUM_OFFSET = _FIXED.size
_OWNER = struct.Struct("<QQqQq64s64s")


class Kind(enum.Enum):
    """Whose snapshots an arena holds: a rank's OWN ones, those that another node's agent sent of its rank (HELD), or
    parity over those of several nodes, whose ``rank`` means nothing."""

    OWN = "rank"
    HELD = "held"
    PARITY = "parity"


STEP_BITS = 40
INCARNATION_BITS = 24


def pack_key(key: tuple[int, int]) -> int:
    """(incarnation, step) as one word, so that one store changes both; never 0."""
    incarnation, step = key
    if not 0 < incarnation < 1 << INCARNATION_BITS or not 0 <= step < 1 << STEP_BITS:
        raise BadOption(
            "incarnation or step is out of range",
            found=key,
            expected=f"1 to 2^{INCARNATION_BITS}, 0 to 2^{STEP_BITS}",
        )
    return incarnation << STEP_BITS | step


def unpack_key(word: int) -> tuple[int, int] | None:
    """Inverse of :func:`pack_key`; None for 0."""
    return (word >> STEP_BITS, word & ((1 << STEP_BITS) - 1)) if word else None


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 4 KiB."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Fixed:
    """The part of the header that never changes, and what follows from it."""

    run_key: str
    node: str
    rank: int
    slots: int
    slot_bytes: int
    chunk_bytes: int
    created_pid: int
    created_start: int
    kind: Kind = Kind.OWN

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= SLOTS_MAX:
            raise BadOption("number of slots", found=self.slots, expected=f"1 to {SLOTS_MAX}")
        if self.slot_bytes <= 0 or self.slot_bytes % ALIGN_BYTES:
            raise BadOption("slot size", found=self.slot_bytes, expected=f"a multiple of {ALIGN_BYTES}")
        if self.chunk_bytes < ALIGN_BYTES:
            raise BadOption("chunk size", found=self.chunk_bytes, expected=f"at least {ALIGN_BYTES}")
        if self.rank < 0:
            raise BadOption("rank", found=self.rank, expected="0 or more")
        if not 0 < len(self.run_key.encode()) <= KEY_BYTES_MAX or len(self.node.encode()) > NAME_BYTES_MAX:
            raise BadOption("run key or node name is empty or too long", found=(self.run_key, self.node))

    @property
    def seal_bytes(self) -> int:
        """Room for the chunk hashes of a full slot: every region may end in one short chunk."""
        chunks = -(-self.slot_bytes // self.chunk_bytes) + REGIONS_MAX
        return aligned(chunks * HASH_BYTES + REGIONS_MAX * SEAL_ENTRY_BYTES)

    @property
    def control_bytes(self) -> int:
        return SLOT_PAGE_BYTES + TABLE_BYTES + self.seal_bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + self.slots * (self.control_bytes + self.slot_bytes)

    def control_offset(self, index: int) -> int:
        return HEADER_BYTES + index * self.control_bytes

    def data_offset(self, index: int) -> int:
        return HEADER_BYTES + self.slots * self.control_bytes + index * self.slot_bytes

    def encode(self) -> bytes:
        body = _FIXED.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.slots,
            self.rank,
            self.slot_bytes,
            self.chunk_bytes,
            self.control_bytes,
            self.data_offset(0),
            self.nbytes,
            TABLE_BYTES,
            self.created_pid,
            self.created_start,
            self.run_key.encode(),
            self.node.encode(),
            self.kind.value.encode(),
        )
        return body + xxhash.xxh3_128_digest(body)


def decode_fixed(data: bytes, name: str, file_bytes: int) -> Fixed:
    """The fixed part of a file's first page; ``file_bytes`` is the file's size. Damaged, UnknownFormat."""
    if len(data) < _FIXED_SUM_OFFSET + HASH_BYTES or data[:8] != MAGIC:
        raise Damaged(f"{name} is no arena", name=name, found=data[:8], expected=MAGIC)
    version = int.from_bytes(data[8:12], "little")
    body = data[:_FIXED_SUM_OFFSET]
    stored = data[_FIXED_SUM_OFFSET : _FIXED_SUM_OFFSET + HASH_BYTES]
    # A changed version byte of a header of ours is damage, not another version.
    as_ours = body[:8] + VERSION.to_bytes(4, "little") + body[12:]
    if version != VERSION and xxhash.xxh3_128_digest(as_ours) != stored:
        raise UnknownFormat(
            f"arena {name}",
            found=f"version {version}",
            expected=f"version {VERSION}",
            hint="It holds snapshots of another release; remove it, or use that release",
            name=name,
        )
    if xxhash.xxh3_128_digest(body) != stored:
        raise Damaged(f"header of arena {name} does not match its checksum", name=name)
    (
        _,
        _,
        header,
        slots,
        rank,
        slot_bytes,
        chunk_bytes,
        control,
        data0,
        nbytes,
        table,
        pid,
        start,
        key,
        node,
        kind,
    ) = _FIXED.unpack(body)
    try:
        fixed = Fixed(
            key.rstrip(b"\0").decode(),
            node.rstrip(b"\0").decode(),
            rank,
            slots,
            slot_bytes,
            chunk_bytes,
            pid,
            start,
            Kind(kind.rstrip(b"\0").decode()),
        )
    except (BadOption, ValueError) as error:
        raise Damaged(f"header of arena {name}: {error}", name=name) from None
    expected = (HEADER_BYTES, fixed.control_bytes, fixed.data_offset(0), fixed.nbytes, TABLE_BYTES)
    if (header, control, data0, nbytes, table) != expected:
        raise Damaged(
            f"header of arena {name}", found=(header, control, data0, nbytes, table), expected=expected
        )
    if file_bytes != nbytes:
        raise Damaged(f"size of arena {name}", found=file_bytes, expected=nbytes, name=name)
    return fixed


@dataclass(frozen=True)
class Ownership:
    """Who may write snapshots. ``term`` goes up with every change; ``process`` None: nobody's now."""

    term: int
    incarnation: int
    world: int
    run_id: str
    process: Process | None

    def encode(self) -> bytes:
        process = self.process or Process(0, 0, "")
        run_id, boot = self.run_id.encode(), process.boot.encode()
        if max(len(run_id), len(boot)) > KEY_BYTES_MAX:
            raise BadOption(
                "run id is too long", found=self.run_id, expected=f"at most {KEY_BYTES_MAX} bytes"
            )
        body = _OWNER.pack(
            self.term, self.incarnation, process.pid, self.world, process.start_time, boot, run_id
        )
        return body + xxhash.xxh3_128_digest(body)


OWNER_BYTES = _OWNER.size + HASH_BYTES


def decode_owner(data: bytes) -> Ownership | None:
    """None when the checksum does not match: damaged, or being replaced at this very moment."""
    body = data[: _OWNER.size]
    if xxhash.xxh3_128_digest(body) != data[_OWNER.size : OWNER_BYTES]:
        return None
    term, incarnation, pid, world, start, boot, run_id = _OWNER.unpack(body)
    process = Process(pid, start, boot.rstrip(b"\0").decode()) if pid else None
    return Ownership(term, incarnation, world, run_id.rstrip(b"\0").decode(), process)
