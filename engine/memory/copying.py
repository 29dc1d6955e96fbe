"""Copies of what nobody reads again soon, without the interpreter lock; of bytes that are proved first, too.

Compiled (``_copying.c``), they pass by the caches: a snapshot, or what a load fills, is larger than these, and
memory is what such a copy waits for. Without a compiler they are ordinary ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import digest

_copying: Any
try:
    from . import _copying
except ImportError:
    _copying = None

COMPILED: bool = _copying is not None
"""Whether :func:`copy_range` and :func:`prove_and_copy` can be had."""

Words: TypeAlias = "array[int]"
"""Of type "Q": whole numbers of eight bytes."""

BRIEF_BYTES = 240
"""Up to here the hash has other formulas, which are not in the compiled part."""


def copy(target: memoryview, source: memoryview) -> None:
    """All of ``source`` into ``target``: flat views of one size that do not overlap. ValueError for other sizes."""
    if _copying is not None:
        _copying.copy(target, source)
        return
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes into {len(target)}")
    import numpy  # here, since fsck and the agent live without it

    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def copy_range(into: Words, sources: Words, sizes: Words, begin: int, end: int) -> None:
    """Of ``sources``, as if they lay one behind the other, the bytes from ``begin`` up to ``end``, each to its place.
    Addresses, and sizes in bytes: the caller knows that they are right, and keeps the memory. Only where
    ``COMPILED``. ValueError if there are not as many of each."""
    _copying.copy_range(into, sources, sizes, begin, end)


def prove_and_copy(
    piece: memoryview,
    offset: int,
    chunk_bytes: int,
    expected: bytes,
    reads: list[Any],
    targets: Mapping[int, memoryview],
) -> bytes | None:
    """Do ``reads`` (see :class:`~everstep.plan.reads.Read`) from ``piece``, which begins at ``offset`` of the image,
    chunk by chunk, each right after it was hashed. Gives the hashes that were found, joined; of a chunk that has
    another than the ``expected`` one nothing is copied. None, and nothing was done, where reads have several runs or
    are not in the order of their places, chunks are as small as ``BRIEF_BYTES``, or a hash is missing. ValueError for
    reads outside of the piece, or of a target."""
    count = -(-len(piece) // chunk_bytes)
    if chunk_bytes <= BRIEF_BYTES or len(expected) != count * HASH_BYTES:
        return None
    tail = len(piece) - (count - 1) * chunk_bytes
    brief = digest(piece[-tail:]) if 0 < tail <= BRIEF_BYTES else b""
    found: bytes | None = _copying.prove_and_copy(piece, offset, chunk_bytes, expected, brief, reads, targets)
    return found
