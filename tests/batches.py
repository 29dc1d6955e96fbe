"""What the training jobs of the tests read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BATCH = 4


class Batches:
    """A rank's own stream of batches of ``width`` numbers; its position is where the generator stands."""

    def __init__(self, rank: int, width: int) -> None:
        self._width = width
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        return torch.randn(BATCH, self._width, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._generator.set_state(state["generator"])
