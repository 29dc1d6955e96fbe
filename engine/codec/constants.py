"""Numbers of the codec that are stored (never renumbered), and its bounds."""

from __future__ import annotations

REFERENCE, PLAIN, ZSTD, PLANES, XOR_PLANES, DIFFERENCE_PLANES = range(6)
"""Encodings of a chunk. A reference has no payload and never comes here."""

NONE, XOR, FLOAT_DIFFERENCE, INT_DIFFERENCE, SAME, FLOAT_CLASSES, INT_CLASSES = range(7)
"""Transforms of a block: its own bytes; XOR with the base; the difference of the ordered numbers, of floats or of whole
numbers; the base's very bytes; the differences again, as classes and bits instead of planes."""

ENCODING_OF = (
    PLANES,
    XOR_PLANES,
    DIFFERENCE_PLANES,
    DIFFERENCE_PLANES,
    XOR_PLANES,
    DIFFERENCE_PLANES,
    DIFFERENCE_PLANES,
)
"""By transform: the encoding that a chunk has at least."""

GROUPING = (XOR, FLOAT_DIFFERENCE, INT_DIFFERENCE)
"""Transforms whose items may be grouped by the base's exponents: written up to format version 4."""

IN_ORDER, GROUPED, SPARSE = range(3)
"""Which items a block has: all; all, grouped by the base's exponents; those alone that are not the base's."""

CLASSES = 256
CONTEXTS_MAX = 16
SCALE_BITS = 12
"""The classes' frequencies in a context sum up to 2 to the power of this."""
LANES_MIN, LANES_MAX = 8, 256

STREAM_PLAIN, STREAM_ZSTD, STREAM_EQUAL, STREAM_SPARSE = range(4)
"""How a plane, or the map and the values of a sparse one, is stored."""

ITEMS = (1, 2, 4, 8)
"""Sizes of an item in bytes; a block has as many planes."""

BLOCK_BYTES = 1 << 20
"""A segment is coded in blocks of this size: what is looked at and worked on at once."""

WINDOW_BYTES_MAX = 8 << 20
"""Largest window that a stored frame may ask for: what reading one may allocate besides its result."""
