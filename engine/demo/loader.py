"""Shuffled windows of a text, with a position that can be saved: an endless loader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ShuffledWindows:
    """Batches ``[batch, length + 1]`` of int64 bytes, every window of this rank once per epoch, shuffled.

    Each rank has its own windows and its own generator. The position counts batches that were handed out;
    nothing is prefetched, so the saved position is the consumed one.
    """

    def __init__(self, text: bytes, *, length: int, batch: int, rank: int, world: int, seed: int) -> None:
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length)
        self._windows = windows[rank::world]
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        self._epoch = 0
        self._position = 0
        self._shuffle()

    def __iter__(self) -> ShuffledWindows:
        return self

    def __next__(self) -> Tensor:
        chosen = self._order[self._position * self._batch : (self._position + 1) * self._batch]
        if len(chosen) < self._batch:
            self._epoch += 1
            self._position = 0
            self._shuffle()
            chosen = self._order[: self._batch]
        self._position += 1
        return self._windows[chosen].long()

    def state_dict(self) -> dict[str, Any]:
        """The generator as it was before this epoch's shuffle: the order follows from it."""
        return {"epoch": self._epoch, "position": self._position, "generator": self._before_shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._generator.set_state(state["generator"])
        self._shuffle()

    def _shuffle(self) -> None:
        self._before_shuffle = self._generator.get_state()
        self._order = torch.randperm(len(self._windows), generator=self._generator)
