"""Real text that is always there: the source of the Python standard library that runs this."""

from __future__ import annotations

import sysconfig
from pathlib import Path

CORPUS_BYTES_MAX = 2 << 20


def stdlib_text(nbytes_max: int = CORPUS_BYTES_MAX) -> bytes:
    """The standard library's top-level modules, in order of their names, at most ``nbytes_max`` bytes."""
    pieces: list[bytes] = []
    room = nbytes_max
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        piece = path.read_bytes()[:room]
        pieces.append(piece)
        room -= len(piece)
        if room <= 0:
            break
    return b"".join(pieces)
