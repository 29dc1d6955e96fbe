"""Equal in type, structure and bits; written apart from the engine's own comparisons."""

from __future__ import annotations

import collections
import dataclasses
import enum
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from everstep.state.tensors import empty


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where ``found`` is not ``expected``."""
    if type(found) is not type(expected):
        yield f"{path}: {type(found).__name__}, not {type(expected).__name__}"
    elif isinstance(expected, torch.Tensor):
        yield from _tensors(found, expected, path)
    elif isinstance(expected, (np.ndarray, np.generic)):
        same = found.dtype == expected.dtype and found.shape == expected.shape
        if not same or found.tobytes() != expected.tobytes():
            yield f"{path}: {found!r}, not {expected!r}"
    elif isinstance(expected, torch.Generator):
        if not torch.equal(found.get_state(), expected.get_state()):
            yield f"{path}: another state"
    elif dataclasses.is_dataclass(expected):
        yield from differences(vars(found), vars(expected), path)
    elif isinstance(expected, dict):
        yield from _dicts(found, expected, path)
    elif isinstance(expected, (list, tuple, collections.deque)) and not isinstance(expected, torch.Size):
        if len(found) != len(expected):
            yield f"{path}: {len(found)} elements, not {len(expected)}"
        if isinstance(expected, collections.deque) and found.maxlen != expected.maxlen:
            yield f"{path}: maxlen {found.maxlen}"
        for at, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from differences(one, other, f"{path}[{at}]")
    elif isinstance(expected, float):
        if struct.pack(">d", found) != struct.pack(">d", expected):
            yield f"{path}: {found!r}, not {expected!r}"
    elif isinstance(expected, complex):
        yield from differences(found.real, expected.real, f"{path}.real")
        yield from differences(found.imag, expected.imag, f"{path}.imag")
    elif isinstance(expected, (set, frozenset)):
        if sorted(map(repr, found)) != sorted(map(repr, expected)):
            yield f"{path}: {found!r}, not {expected!r}"
    elif found != expected or (isinstance(expected, enum.Enum) and found is not expected):
        yield f"{path}: {found!r}, not {expected!r}"
    elif getattr(found, "fold", None) != getattr(expected, "fold", None):
        yield f"{path}: another fold"


def _dicts(found: Any, expected: Any, path: str) -> Iterator[str]:
    if (
        isinstance(expected, collections.defaultdict)
        and found.default_factory is not expected.default_factory
    ):
        yield f"{path}: factory {found.default_factory}"
    if [(type(key), key) for key in found] != [(type(key), key) for key in expected]:
        yield f"{path}: keys {list(found)}, not {list(expected)}"
        return
    for key in expected:
        yield from differences(found[key], expected[key], f"{path}/{key}")


def _tensors(found: torch.Tensor, expected: torch.Tensor, path: str) -> Iterator[str]:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        yield f"{path}: {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    elif found.requires_grad != expected.requires_grad:
        yield f"{path}: requires_grad {found.requires_grad}"
    elif raw(found) != raw(expected):
        yield f"{path}: other bits"


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, row-major, of any dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        made = empty(tuple(plain.shape), plain.dtype)
        made.copy_(plain)
        plain = made
    if plain.numel() == 0:
        return b""
    flat = plain.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
