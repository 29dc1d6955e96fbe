"""Hashes of live tensors: the bytes that a slot would hold, without the slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import xxhash

PIECE_BYTES = 16 << 20
"""What is copied at a time of a tensor that is not one run of host memory."""


def digests(tensors: Iterable[Sequence[torch.Tensor]]) -> list[bytes]:
    """For each item the XXH3-128 hash (16 bytes) of its tensors' elements in row-major order, one tensor behind the
    other. Contiguous host memory is read in place, at about the speed of memory; anything else in copies of at most
    :data:`PIECE_BYTES` (or one element)."""
    return [_digest(item) for item in tensors]


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_128()
    # Neither a device context nor a tensor subclass may have a say in which bytes are read.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            if tensor.numel():
                for run in _runs(tensor.detach()):
                    state.update(run.numpy().data)
    value: bytes = state.digest()
    return value


def _runs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes in row-major order, as flat uint8 host tensors."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # Axes of length one may have any stride, which a view of other items does not take.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        if flat.is_cpu:
            yield flat
            return
        for piece in torch.split(flat, PIECE_BYTES):
            yield piece.cpu()
        return
    if tensor.dim() == 0 or tensor.nbytes <= PIECE_BYTES:
        whole = tensor.resolve_conj().resolve_neg().contiguous().cpu()
        yield whole.reshape(-1).view(torch.uint8)
        return
    row_bytes = prod(tensor.shape[1:]) * tensor.element_size()
    rows = PIECE_BYTES // row_bytes
    for part in torch.split(tensor, rows) if rows else tensor.unbind():
        yield from _runs(part)
