"""Tensors of which a rank holds only regions: what it holds, where that lies in the global tensor, and who holds
the same.

A region is taken from the data that is really held; where placements and data disagree the save refuses, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..format.entries import Box


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a global tensor of ``shape``.

    ``boxes`` are its regions (none where it holds nothing), ``pieces`` plain tensors, one per box and of its
    lengths, which share memory with the live tensor. ``holders``: the ranks of the job that hold exactly these
    boxes, ascending, this one included; None where only this rank is known to.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    pieces: tuple[torch.Tensor, ...]
    holders: tuple[int, ...] | None = None


class Shards:
    """Regions of one global tensor that a trainer shards by hand, to be saved as (and restored into) one tensor.

    ``shape`` is the global shape, ``boxes`` the (offsets, lengths) of what this rank holds, ``tensors`` the data, one
    tensor per box and of its lengths. ``holders``: the ranks that hold exactly these boxes too.
    """

    def __init__(
        self,
        shape: Sequence[int],
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
        tensors: Sequence[torch.Tensor],
        *,
        holders: Sequence[int] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.boxes = tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)
        self.tensors = tuple(tensors)
        self.holders = tuple(sorted(holders)) if holders is not None else None
