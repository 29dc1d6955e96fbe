"""Copies of what nobody reads again soon, without the interpreter lock.

Compiled (``_copying.c``), they pass by the caches: a snapshot, or what a load fills, is larger than these, and
memory is what such a copy waits for. Without a compiler they are ordinary ones.
"""

from __future__ import annotations

from typing import Any

_copying: Any
try:
    from . import _copying
except ImportError:
    _copying = None

COMPILED: bool = _copying is not None
"""Whether :func:`copy_each` can be had."""


def copy(target: memoryview, source: memoryview) -> None:
    """All of ``source`` into ``target``: flat views of one size that do not overlap. ValueError for other sizes."""
    if _copying is not None:
        _copying.copy(target, source)
        return
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes into {len(target)}")
    import numpy  # here, since fsck and the agent live without it

    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def copy_each(rows: list[tuple[int, int, int]]) -> None:
    """``rows`` are (address of the target, address of the source, bytes): the caller knows that they are right, and
    keeps the memory. Only where ``COMPILED``."""
    _copying.copy_each(rows)
