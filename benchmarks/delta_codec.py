"""What each way of coding makes of an image, and how fast on one core: processor time of one thread.

Everything is decoded again and compared, bit for bit, before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from everstep.codec.chunk import decode_chunk, encode_chunk
from everstep.codec.constants import FLOAT_DIFFERENCE, INT_DIFFERENCE, NONE, XOR
from everstep.codec.planes import join, split
from everstep.codec.segments import Segment, segments_of
from everstep.format.layout import Layout

from .common import Mismatch

ZSTD_LEVEL = 3
WAYS = ("planes", "xor", "difference", "chosen")
"""Byte planes of an image alone, of its XOR with the base, of the difference of the ordered numbers; and what the codec
chooses, block by block."""
SPEEDS = ("planes", "chosen")
"""Of which the speed is measured: the codec takes the others in one go, and here they are put together."""


@dataclass(frozen=True)
class Image:
    """One image of a checkpoint: its bytes and the base's, and how large its object is as a delta."""

    part: str
    layout: Layout
    chunk_bytes: int
    new: memoryview
    base: memoryview
    stored: int

    @property
    def nbytes(self) -> int:
        return len(self.new)

    def changed_bytes(self) -> int:
        """The bytes of the numbers that are not the base's, changed in whatever bit."""
        total = 0
        for at, segment in self.segments():
            whole = segment.nbytes // segment.item * segment.item
            new, base = (
                np.frombuffer(view[at : at + whole], f"<u{segment.item}") for view in (self.new, self.base)
            )
            total += int(np.count_nonzero(new != base)) * segment.item
        return total

    def segments(self) -> list[tuple[int, Segment]]:
        """What lies where in the whole image."""
        found, at = [], 0
        for segment in segments_of(self.layout, self.part, 0, self.nbytes):
            found.append((at, segment))
            at += segment.nbytes
        return found

    def chunks(self) -> list[tuple[int, int]]:
        """Begin and end of each chunk."""
        return [
            (at, min(at + self.chunk_bytes, self.nbytes)) for at in range(0, self.nbytes, self.chunk_bytes)
        ]


@dataclass
class Coded:
    """Bytes in and out, and seconds of one core, over several images."""

    nbytes: int = 0
    stored: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def add(self, other: Coded) -> None:
        self.nbytes += other.nbytes
        self.stored += other.stored
        self.encode_s += other.encode_s
        self.decode_s += other.decode_s

    def summary(self, *, speeds: bool = True) -> dict[str, float]:
        found = {"ratio": self.stored / self.nbytes}
        if speeds:
            found["encode_gb_per_s"] = self.nbytes / self.encode_s / 1e9
            found["decode_gb_per_s"] = self.nbytes / self.decode_s / 1e9
        return found


@dataclass
class Clock:
    """Processor seconds: of this thread, or, for what has threads of its own, of the process."""

    now: Callable[[], float] = time.thread_time
    seconds: float = 0.0

    def time(self, work: Callable[..., Any], *args: Any) -> Any:
        begun = self.now()
        found = work(*args)
        self.seconds += self.now() - begun
        return found


def code(image: Image, way: str) -> Coded:
    """All changed chunks of ``image`` by one of ``WAYS``, as the store does it: equal chunks are references."""
    coded = Coded(nbytes=image.nbytes)
    encode, decode = Clock(), Clock()
    for start, end in image.chunks():
        new, base = image.new[start:end], image.base[start:end]
        if way != "planes" and new == base:
            continue
        segments = segments_of(image.layout, image.part, start, end)
        given, against = _prepared(way, new, base, segments)
        encoding, parts = encode.time(encode_chunk, given, against, segments)
        payload = memoryview(b"".join(parts))
        out = memoryview(bytearray(len(new)))
        decode.time(decode_chunk, encoding, payload, against, out)
        if out != given or _restored(way, out, base, segments) != new:
            raise Mismatch(f"{image.part}, {way}: the chunk at {start} came back with other bytes")
        coded.stored += len(payload)
    # Where every chunk is a reference nothing is coded, however long that takes.
    coded.encode_s, coded.decode_s = encode.seconds, decode.seconds
    return coded


def _prepared(
    way: str, new: memoryview, base: memoryview, segments: Sequence[Segment]
) -> tuple[memoryview, memoryview | None]:
    """What the codec is given so that it does nothing but that way: the image's own planes are those of the words that
    the transform makes."""
    if way == "chosen":
        return new, base
    if way == "planes":
        return new, None
    return _transformed(way, new, base, segments, forward=True), None


def _restored(way: str, words: memoryview, base: memoryview, segments: Sequence[Segment]) -> memoryview:
    if way in ("chosen", "planes"):
        return words
    return _transformed(way, words, base, segments, forward=False)


def _transformed(
    way: str, words: memoryview, base: memoryview, segments: Sequence[Segment], *, forward: bool
) -> memoryview:
    """The words of each segment's difference or XOR with the base, or the other way round."""
    room = bytearray(words)
    found = np.frombuffer(room, np.uint8)
    other = np.frombuffer(base, np.uint8)
    at = 0
    for segment in segments:
        here = slice(at, at + segment.nbytes // segment.item * segment.item)
        mine, its = found[here], other[here]
        transform = XOR
        if way == "difference" and segment.kind != "bytes":
            transform = FLOAT_DIFFERENCE if segment.kind == "float" else INT_DIFFERENCE
        if mine.size:
            first, then = (transform, NONE) if forward else (NONE, transform)
            planes = list(split(mine.copy(), its if forward else None, first, segment.item))
            join(planes, None if forward else its, then, segment.item, False, mine)
        at += segment.nbytes
    return memoryview(room)


def zstd(image: Image) -> Coded:
    """Plain zstd of the whole image, without a base."""
    encode, decode = Clock(), Clock()
    frame = encode.time(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress, image.new)
    back = decode.time(zstandard.ZstdDecompressor().decompress, frame)
    if back != image.new:
        raise Mismatch(f"{image.part}, zstd: other bytes came back")
    return Coded(image.nbytes, len(frame), encode.seconds, decode.seconds)


def zipnn_dtype(image: Image) -> str | None:
    """What zipnn calls the image's numbers; None where it has no name for them, or they differ."""
    sizes = {segment.item for _, segment in image.segments() if segment.kind == "float"}
    return {frozenset({4}): "float32", frozenset({2}): "bfloat16"}.get(frozenset(sizes))


def zipnn(image: Image) -> Coded:
    """zipnn of the whole image, without a base, on one thread."""
    from zipnn import ZipNN

    given = bytearray(image.new)  # it writes into what it is given
    coder = ZipNN(input_format="byte", bytearray_dtype=zipnn_dtype(image), threads=1)
    encode, decode = Clock(time.process_time), Clock(time.process_time)
    frame = encode.time(coder.compress, given)
    back = decode.time(coder.decompress, frame)
    if bytes(back) != bytes(image.new):
        raise Mismatch(f"{image.part}, zipnn: other bytes came back")
    return Coded(image.nbytes, len(frame), encode.seconds, decode.seconds)


def zipnn_missing() -> str | None:
    """Why zipnn cannot be measured."""
    try:
        import zipnn  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


@dataclass
class Tally:
    """What was measured of several images, by way."""

    by_way: dict[str, Coded] = field(default_factory=dict)

    def add(self, way: str, coded: Coded) -> None:
        self.by_way.setdefault(way, Coded()).add(coded)

    def take(self, image: Image) -> None:
        """All that is measured against a base."""
        for way in WAYS:
            self.add(way, code(image, way))

    def take_alone(self, image: Image, *, with_zipnn: bool) -> None:
        """All that is measured of the image alone."""
        self.add(f"zstd -{ZSTD_LEVEL}", zstd(image))
        if with_zipnn and zipnn_dtype(image) is not None:
            self.add("zipnn", zipnn(image))

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            way: coded.summary(speeds=way not in WAYS or (way in SPEEDS and coded.encode_s > 0))
            for way, coded in self.by_way.items()
        }


__all__ = ["WAYS", "Coded", "Image", "Tally", "zipnn_missing"]
