"""Constants of format version 1 (FORMAT.md). Stored values are never renumbered."""

from __future__ import annotations

FORMAT_VERSION = 1
SUPPORTED_FEATURES: frozenset[str] = frozenset()
"""Required features of a run that this release understands. Version 1 defines none yet."""

HASH_ID = "xxh3-128"
HASH_BYTES = 16

ALIGN_BYTES = 4096
"""Images, and the header of an image, are padded to this; it is what direct I/O needs."""

CHUNK_BYTES = 1 << 20
"""Default size of a chunk; the run's own value stands in run.json."""
