"""Values as bytes, and small runs that are rolled back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def plain_bytes(values: Mapping[str, Any]) -> dict[str, bytes]:
    """The logical bytes of all tensors and arrays, the slow and sure way."""
    found = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            found[name] = value.tobytes()
        elif isinstance(value, torch.Tensor):
            plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            found[name] = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return found
