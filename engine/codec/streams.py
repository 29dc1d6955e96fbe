"""How one plane is stored: plain, as a zstandard frame, as one byte, or as a map and the values that are not zero."""

from __future__ import annotations

import struct
import threading
from typing import Any

import zstandard

from ..errors import Damaged
from .constants import STREAM_EQUAL, STREAM_PLAIN, STREAM_SPARSE, STREAM_ZSTD, WINDOW_BYTES_MAX
from .planes import Bytes, fill, thin

Part = bytes | memoryview

STREAM = struct.Struct("<BI")
"""An entry of a table: how a stream is stored, and its stored length (EQUAL: its byte; SPARSE: how many values, and the
entries of map and values follow)."""

GAIN = 1 / 32
"""What a frame has to save of a plane; else the plane is stored as it is, which is the fastest to read."""

_NUMBERS = {
    "window_log": 16,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
}
"""Parameters for planes of numbers: almost all is in the entropy of single bytes, and a small table of matches finds
long runs as well as a large one does, in half the time."""


class _Coders(threading.local):
    """One set of zstandard contexts for each thread: they are dear to make, and not to be shared."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, write_content_size=True, **_NUMBERS
        )
        self.numbers = zstandard.ZstdCompressor(compression_params=parameters)
        self.text = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_CODERS = _Coders()


def compress(data: Any, *, text: bool = False) -> bytes:
    """One zstandard frame that holds ``data``, whose size stands in it."""
    frame: bytes = (_CODERS.text if text else _CODERS.numbers).compress(data)
    return frame


def pack(plane: Bytes, *, noise: bool, sparse: bool, text: bool) -> tuple[bytes, list[Part]]:
    """Table entry and stored parts of one plane (not empty). ``noise``: not to be tried. ``sparse``: mostly zeros."""
    if noise:
        return STREAM.pack(STREAM_PLAIN, plane.size), [memoryview(plane)]
    if plane[0] == plane[-1] and (plane == plane[0]).all():
        return STREAM.pack(STREAM_EQUAL, int(plane[0])), []
    if sparse:
        map_, values = thin(plane)
        table, parts = STREAM.pack(STREAM_SPARSE, values.size), []
        for stream in (map_, values):
            entry, stored = pack(stream, noise=False, sparse=False, text=False)
            table += entry
            parts += stored
        return table, parts
    frame = compress(plane, text=text)
    if len(frame) < plane.size * (1 - GAIN):
        return STREAM.pack(STREAM_ZSTD, len(frame)), [frame]
    return STREAM.pack(STREAM_PLAIN, plane.size), [memoryview(plane)]


def inflate(frame: memoryview, nbytes: int) -> bytes:
    """What the frame holds, which is exactly ``nbytes``; :class:`Damaged` otherwise. Bounded by that and the window."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        # A frame that tells neither its size nor a sane window is not ours, whatever it would give.
        if parameters.content_size != nbytes or parameters.window_size > max(WINDOW_BYTES_MAX, nbytes):
            raise Damaged("a frame of another size", found=parameters.content_size, expected=nbytes)
        data: bytes = _CODERS.decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as problem:
        raise Damaged("a frame that cannot be read", found=str(problem)) from None
    if len(data) != nbytes:
        raise Damaged("a frame of another size", found=len(data), expected=nbytes)
    return data


class Cursor:
    """Reads a payload front to back: the entries of its table, and the streams behind it."""

    def __init__(self, table: memoryview, streams: memoryview) -> None:
        self._table = table
        self._streams = streams

    @property
    def at_end(self) -> bool:
        """Whether the table has no more entries."""
        return not self._table

    def finish(self) -> None:
        """Nothing may be left."""
        if self._table or self._streams:
            raise Damaged(
                "bytes behind the last block", found=len(self._table) + len(self._streams), expected=0
            )

    def entry(self, form: struct.Struct) -> tuple[Any, ...]:
        """The next entry of the table."""
        if len(self._table) < form.size:
            raise Damaged("the table ends early", found=len(self._table), expected=form.size)
        entry, self._table = form.unpack(self._table[: form.size]), self._table[form.size :]
        return entry

    def take(self, nbytes: int) -> memoryview:
        """The next bytes of the streams."""
        if nbytes > len(self._streams):
            raise Damaged("the streams end early", found=len(self._streams), expected=nbytes)
        taken, self._streams = self._streams[:nbytes], self._streams[nbytes:]
        return taken

    def plane(self, count: int, *, within: bool = False) -> Bytes | int:
        """The next plane, of ``count`` bytes (at least one); its byte where all are equal. ``within``: a stream of a
        sparse plane, which cannot be sparse itself."""
        import numpy as np

        mode, length = self.entry(STREAM)
        if mode == STREAM_PLAIN and length == count:
            return np.frombuffer(self.take(count), np.uint8)
        if mode == STREAM_ZSTD:
            return np.frombuffer(inflate(self.take(length), count), np.uint8)
        if mode == STREAM_EQUAL and length < 256:
            return int(length)
        if mode == STREAM_SPARSE and not within and 0 < length < count:
            return self._sparse(count, length)
        raise Damaged("no such stream", found=f"{mode} of {length}", expected=f"{count} bytes")

    def plane_bytes(self, count: int) -> Bytes:
        """The next plane, which is not sparse, as an array in any case."""
        import numpy as np

        plane = self.plane(count, within=True)
        return np.full(count, plane, np.uint8) if isinstance(plane, int) else plane

    def _sparse(self, count: int, filled: int) -> Bytes:
        plane = fill(self.plane_bytes(-(-count // 8)), self.plane_bytes(filled), count)
        if plane is None:
            raise Damaged("map and values of a plane differ", expected=f"{filled} bits set")
        return plane
