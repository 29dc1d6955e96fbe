"""What an arena's header says, and reading it without mapping the arena."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import Damaged

from .header import OWNER_BYTES, OWNER_OFFSETS, WORD_OWNER, Fixed, Kind, Ownership, decode_fixed, decode_owner
from .mapping import close_file, open_file
from .process import Process

OWNER_READS_MAX = 100
"""Attempts to read an owner record that is just being replaced."""


@dataclass(frozen=True)
class ArenaInfo:
    """What an arena's header says. ``run_id`` is "" before the run exists; ``owner`` None: nobody's."""

    path: Path | None
    run_key: str
    run_id: str
    node: str
    rank: int
    world: int
    incarnation: int
    owner: Process | None
    slots: int
    slot_bytes: int
    chunk_bytes: int
    nbytes: int
    kind: Kind = Kind.OWN


def describe(path: Path | None, fixed: Fixed, owner: Ownership) -> ArenaInfo:
    """Both parts of a header as one value."""
    return ArenaInfo(
        path=path,
        run_key=fixed.run_key,
        run_id=owner.run_id,
        node=fixed.node,
        rank=fixed.rank,
        world=owner.world,
        incarnation=owner.incarnation,
        owner=owner.process,
        slots=fixed.slots,
        slot_bytes=fixed.slot_bytes,
        chunk_bytes=fixed.chunk_bytes,
        nbytes=fixed.nbytes,
        kind=fixed.kind,
    )


def read_info(path: Path) -> ArenaInfo:
    """An arena's header, without mapping it. FileNotFoundError, Damaged, UnknownFormat."""
    fd = open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        data = os.pread(fd, 4096, 0)
        fixed = decode_fixed(data, str(path), os.fstat(fd).st_size)
        for _ in range(OWNER_READS_MAX):
            word = struct.unpack("<Q", os.pread(fd, 8, WORD_OWNER * 8))[0]
            owner = decode_owner(os.pread(fd, OWNER_BYTES, OWNER_OFFSETS[word & 1]))
            if owner is not None:
                break
        else:
            raise Damaged(f"owner record of {path} does not match its checksum", name=str(path))
    finally:
        close_file(fd)
    return describe(path, fixed, owner)
