"""The bytes of an image, gathered from tensors while they are written: no copy of the whole exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..backends.aligned import aligned_buffer
from ..errors import StateMismatch
from ..state.tensors import as_bytes_view
from ..store.flush import PIECE_BYTES

LARGE_COPY_BYTES = 64 << 10
"""From here on a copy is worth giving up the interpreter lock for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` of the image from ``offset`` on are the bytes of the tensor that ``resolve`` gives; ``name`` is what
    people call it."""

    offset: int
    nbytes: int
    resolve: Callable[[], torch.Tensor]
    name: str


class TensorStream:
    """Gives the pieces of one image in order (see :class:`everstep.store.flush.Pieces`), through two buffers. Of
    tensors whose memory cannot be read as it lies (strided, on another device) one at a time is copied."""

    def __init__(
        self, header: bytes, segments: Sequence[Segment], nbytes: int, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """``segments`` by offset, without gap behind the header; those without bytes are left out."""
        self.nbytes = nbytes
        self._header = header
        self._segments = segments
        self._piece_bytes = piece_bytes
        self._buffers: list[memoryview] = []
        self._turn = 1
        self._at = 0
        self._open: tuple[int, torch.Tensor] | None = None

    def piece(self, start: int, end: int) -> memoryview:
        view = self._buffer(end - start)
        done = 0
        if start < len(self._header):
            done = min(end, len(self._header)) - start
            view[:done] = self._header[start : start + done]
        while done < end - start:
            segment = self._segments[self._at]
            inside = start + done - segment.offset
            count = min(segment.nbytes - inside, end - start - done)
            self._copy(segment, inside, view[done : done + count])
            done += count
            if inside + count == segment.nbytes:
                self._at += 1
                self._open = None
        return view

    def _buffer(self, nbytes: int) -> memoryview:
        self._turn ^= 1
        if self._turn == len(self._buffers):
            self._buffers.append(aligned_buffer(min(max(self._piece_bytes, nbytes), self.nbytes)))
        return self._buffers[self._turn][:nbytes]

    def _copy(self, segment: Segment, start: int, target: memoryview) -> None:
        flat = self._bytes(segment)
        part = flat[start : start + len(target)]
        if part.device.type != "cpu":
            torch.from_numpy(np.frombuffer(target, np.uint8)).copy_(part)
        elif len(target) < LARGE_COPY_BYTES:
            array: Any = part.numpy()
            target[:] = memoryview(array)
        else:
            np.copyto(np.frombuffer(target, np.uint8), part.numpy())

    def _bytes(self, segment: Segment) -> torch.Tensor:
        """The tensor of ``segment`` as bytes, on its device; kept while the pieces need it."""
        if self._open is None or self._open[0] != self._at:
            with torch.no_grad():
                flat = as_bytes_view(segment.resolve().detach())
            if flat.numel() != segment.nbytes:
                raise StateMismatch(
                    f"{segment.name}: the tensor changed its size while it was saved",
                    found=f"{flat.numel()} bytes",
                    expected=f"{segment.nbytes} bytes",
                )
            self._open = (self._at, flat)
        return self._open[1]
