"""The header of a full image: what makes it a safetensors file.

A header is a function of the layout, so it is not stored in one; writer and reader derive the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .constants import ALIGN_BYTES

_LENGTH_BYTES = 8
_RESERVED = "__metadata__"
_METADATA = {"everstep": "1", "format": "pt"}
"""``format`` is what loaders of pretrained models ask for."""


class Tensor(NamedTuple):
    """One tensor of an image: ``begin`` and ``end`` count from the first byte behind the header."""

    name: str
    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


def header(tensors: Iterable[Tensor]) -> bytes:
    """8 bytes of length, JSON, and spaces up to a multiple of 4 KiB. ``tensors`` in order of their data."""
    table: dict[str, object] = {_RESERVED: _METADATA}
    for name, dtype, shape, begin, end in tensors:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    padded = -(-(_LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


class TensorNames:
    """Names of the tensors of one image, unique: an entry in one box is named by its key alone, the boxes of
    one in several by key and offsets (``key@0,8``); ``@`` is appended to what is taken or reserved."""

    def __init__(self, keys: Iterable[str]) -> None:
        """``keys``: of all entries in one box, which take precedence."""
        self._taken = set(keys)
        self._taken.add(_RESERVED)

    def whole(self, key: str) -> str:
        """Name of an entry in one box."""
        return self._free(key) if key == _RESERVED else key

    def boxed(self, key: str, offsets: tuple[int, ...]) -> str:
        """Name of one of several boxes."""
        return self._free(f"{key}@{','.join(map(str, offsets))}")

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "@"
        self._taken.add(name)
        return name
