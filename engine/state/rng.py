"""The random number generators of a process, as one object with state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .plan_base import Ledger, Phase, Planned


class RandomState(Planned):
    """Python's ``random``, numpy's global generator, torch's CPU generator and those of all CUDA devices.

    States are bytes and plain values, so that nothing that moves or casts tensors touches them. CUDA's are
    left out while this process has not used CUDA, as asking would create a context.
    """

    phase = Phase.RANDOM

    @property
    def kinds(self) -> list[str]:
        """What is stored: "python", "numpy", "torch", "cuda:0", ..."""
        return ["python", "numpy", "torch", *(f"cuda:{index}" for index in range(cuda_count()))]

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state().numpy().tobytes(),
            "cuda": [torch.cuda.get_rng_state(index).numpy().tobytes() for index in range(cuda_count())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators. CUDA devices that the state lacks, or this process lacks, keep their own."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_tensor(state["torch"]))
        for index, data in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(data), index)

    def plan(self, ledger: Ledger, stored: Any, where: str) -> None:
        """Every device's generator must find its state, and every state its device."""
        if not is_random_state(stored):
            ledger.differ("type", f"{where}: stored is no state of the random number generators")
        elif len(stored["cuda"]) > torch.cuda.device_count() or len(stored["cuda"]) < cuda_count():
            found, here = len(stored["cuda"]), max(torch.cuda.device_count(), cuda_count())
            ledger.differ("rng", f"{where}/cuda: generators of {found} CUDA devices, this process has {here}")


def is_random_state(value: Any) -> bool:
    """Whether ``value`` looks like what :meth:`RandomState.state_dict` gives."""
    return isinstance(value, dict) and set(value) == {"python", "numpy", "torch", "cuda"}


def cuda_count() -> int:
    """CUDA devices whose generators count: none while this process has not used CUDA."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count() if in_use else 0


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
