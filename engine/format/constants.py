"""Constants of the stored format (FORMAT.md). Stored values are never renumbered."""

from __future__ import annotations

FORMAT_VERSION = 5
"""What this release writes."""
READABLE_VERSIONS = (1, 2, 3, 4, 5)
"""What this release reads."""
SUPPORTED_FEATURES: frozenset[str] = frozenset()
"""Required features of a run that this release understands. None is defined yet."""

HASH_ID = "xxh3-128"
HASH_BYTES = 16
HASH_DIGITS = 2 * HASH_BYTES
"""Length of a hash written as text: lower-case hexadecimal."""

ALIGN_BYTES = 4096
"""Images, and the header of an image, are padded to this; it is what direct I/O needs."""

CHUNK_BYTES = 1 << 20
"""Default size of a chunk; the run's own value stands in run.json."""
CHUNK_BYTES_MIN = ALIGN_BYTES
CHUNK_BYTES_MAX = 1 << 30
"""A run's chunk size is a power of two between these."""

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Times in records: UTC, to the second."""

NUMBER_MAX = 10**18 - 1
"""Largest step, incarnation, attempt or rank: 18 digits, so that each fits a signed 64-bit word."""
SIZE_MAX = 1 << 62
"""Largest size of an axis, a tensor or an image, in its own unit."""

SEALED_BYTES_MAX = 64 << 20
LAYOUT_BYTES_MAX = 256 << 20
VOTE_INDEX_BYTES_MAX = 256 << 20
"""Largest encoded object of each kind, decompressed; what is larger is refused unread."""

HEADER_BYTES_MAX = 100_000_000
"""Largest safetensors header: the limit of the safetensors library itself."""

AXES_MAX = 64
"""Most axes of a tensor, as in torch."""

DEPTH_MAX = 32
"""Deepest nesting of plain values in a sealed record or in a vote's meta map."""
