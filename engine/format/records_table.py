"""Records of a rank's images as one byte string, on the way from node to node and beside what one keeps of another.

Names, sizes, roots and chunk hashes, in order (images, then the state). Nothing is proved here: whoever reads it
compares the roots with what it was told, and the chunks with the roots.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..errors import Damaged
from .vote import ImageRecord

NAME = "table of records"


def encode_records(records: Iterable[ImageRecord]) -> bytes:
    """The records, plain images all."""
    return msgspec.msgpack.encode([(one.name, one.nbytes, one.root, one.chunks) for one in records])


def decode_records(data: bytes | memoryview, name: str = NAME) -> list[ImageRecord]:
    """Damaged, by ``name``, if it is no table of records."""
    try:
        rows = msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes, bytes]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged("no table of records", found=error, name=name) from None
    return [ImageRecord(*row) for row in rows]
