"""Memory that each thread uses again, chunk after chunk, and leaves to others: fresh memory costs more than what is
done with it."""

from __future__ import annotations

import threading
from typing import Any

SCRATCH_BYTES = 12 << 20
"""What a thread keeps. A chunk of the default size takes about half of it at most; what does not fit is fresh."""
ALIGN_BYTES = 64


SPARE_MAX = 8
"""Of threads that have ended: what they leave is kept for so many others."""

_SPARE: list[Any] = []


class _Memory:
    """One thread's."""

    def __init__(self) -> None:
        import numpy as np

        try:
            self.bytes: Any = _SPARE.pop()
        except IndexError:
            self.bytes = np.empty(SCRATCH_BYTES, np.uint8)

    def __del__(self, spare: list[Any] = _SPARE, most: int = SPARE_MAX) -> None:
        # Given, for at the interpreter's end the module has no names any more.
        if len(spare) < most:
            spare.append(self.bytes)


class _Scratch(threading.local):
    """One for each thread."""

    def __init__(self) -> None:
        self.memory: _Memory | None = None
        self.used = 0


_SCRATCH = _Scratch()


def reuse() -> None:
    """All that this thread took may be overwritten from now on."""
    _SCRATCH.used = 0


def take(nbytes: int) -> Any:
    """An array of so many bytes, with anything in it, until this thread's next :func:`reuse`."""
    import numpy as np

    begin = _SCRATCH.used
    if begin + nbytes > SCRATCH_BYTES:
        return np.empty(nbytes, np.uint8)
    if _SCRATCH.memory is None:
        _SCRATCH.memory = _Memory()
    _SCRATCH.used = begin + -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return _SCRATCH.memory.bytes[begin : begin + nbytes]


def kept() -> int:
    """How much this thread has taken."""
    return _SCRATCH.used


def back(kept: int) -> None:
    """What was taken since :func:`kept` said so, or lies behind, may be overwritten."""
    _SCRATCH.used = min(-(-kept // ALIGN_BYTES) * ALIGN_BYTES, SCRATCH_BYTES)
