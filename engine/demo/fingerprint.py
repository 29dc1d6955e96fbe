"""Hashes of a live state, leaf by leaf, made without everstep: the demonstration's independent witness."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def fingerprints(value: Any, path: str = "") -> dict[str, str]:
    """SHA-256 of the exact bytes of every leaf below ``value``, by path. Floats count by their bits."""
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for key in value:
            found.update(fingerprints(value[key], f"{path}/{key}"))
        return found or {path: "empty"}
    if isinstance(value, (list, tuple)):
        found = {}
        for index, item in enumerate(value):
            found.update(fingerprints(item, f"{path}/{index}"))
        return found or {path: "empty"}
    return {path: hashlib.sha256(_exact(value)).hexdigest()}


def _exact(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        kind = f"{plain.dtype} {tuple(plain.shape)} "
        return kind.encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return f"float {value.hex()}".encode()
    return f"{type(value).__name__} {value!r}".encode()
