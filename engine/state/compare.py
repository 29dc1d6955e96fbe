"""Comparing states bit for bit, for tests, benchmarks and ``diff``: what differs, by path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import random
import struct
from typing import Any

import numpy as np
import torch

from . import keys, objects
from .registry import ObjectState, Unknown, attributes_of
from .tensors import as_bytes_view
from .trainstate import TrainState

DIFFERENCES_MAX = 1000
"""Further differences are not looked for."""


def equal_states(a: Any, b: Any) -> list[str]:
    """Differences between two states (values, or objects with state, or TrainStates), as ``path: text``; none
    if they agree in types, structure, order of keys, dtypes, shapes and every bit. Devices and strides do not
    count.
    """
    found: list[str] = []
    _compare(a, b, "", found)
    return found


def _compare(a: Any, b: Any, where: str, found: list[str]) -> None:
    if len(found) >= DIFFERENCES_MAX or a is b:
        return
    a, b = _asked(a), _asked(b)
    if type(a) is not type(b):
        found.append(f"{where}: a {type(a).__qualname__} and a {type(b).__qualname__}")
    elif isinstance(a, torch.Tensor):
        _tensors(a, b, where, found)
    elif isinstance(a, dict):
        _dicts(a, b, where, found)
    elif isinstance(a, (list, tuple, collections.deque)):
        _sequences(a, b, where, found)
    elif isinstance(a, (np.ndarray, np.generic)):
        _arrays(a, b, where, found)
    elif isinstance(a, float):
        _texts(struct.pack("<d", a) == struct.pack("<d", b), a, b, where, found)
    elif isinstance(a, complex):
        _texts(struct.pack("<2d", a.real, a.imag) == struct.pack("<2d", b.real, b.imag), a, b, where, found)
    elif isinstance(a, torch.Generator):
        _compare(a.get_state(), b.get_state(), where, found)
    elif dataclasses.is_dataclass(a) and not isinstance(a, type):
        _dicts(attributes_of(a), attributes_of(b), where, found)
    elif isinstance(a, (set, frozenset)):
        _texts(_bag(a) == _bag(b), a, b, where, found)
    else:
        _scalars(a, b, where, found)


def _asked(value: Any) -> Any:
    if isinstance(value, TrainState):
        return {part: _asked(item) for part, item in value.parts().items()}
    if isinstance(value, ObjectState):
        return value.value
    if not isinstance(value, torch.Tensor) and objects.is_stateful(value):
        return objects.state_of(value, "")
    return value


def _texts(same: bool, a: Any, b: Any, where: str, found: list[str]) -> None:
    if not same:
        found.append(f"{where}: {str(a)[:60]!r} and {str(b)[:60]!r}")


def _scalars(a: Any, b: Any, where: str, found: list[str]) -> None:
    same = bool(a == b)
    if same and isinstance(a, (datetime.datetime, datetime.time)):
        same = a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    if isinstance(a, random.Random):
        same = a.getstate() == b.getstate()
    _texts(same, a, b, where, found)
    if not isinstance(a, (type, Unknown)) and type(a).__module__ != "builtins" and hasattr(a, "__dict__"):
        mine, other = attributes_of(a), attributes_of(b)
        if isinstance(a, (str, int, float, bytes)) and (mine or other):
            _dicts(mine, other, where, found)


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str, found: list[str]) -> None:
    if a.dtype != b.dtype:
        found.append(f"{where}: dtypes {a.dtype} and {b.dtype}")
    elif a.shape != b.shape:
        found.append(f"{where}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    elif a.layout is not torch.strided or b.layout is not torch.strided or a.is_meta or b.is_meta:
        found.append(f"{where}: tensors without plain bytes")
    elif a.requires_grad != b.requires_grad and a.is_leaf and b.is_leaf:
        found.append(f"{where}: requires_grad {a.requires_grad} and {b.requires_grad}")
    else:
        mine, other = as_bytes_view(a).cpu(), as_bytes_view(b).cpu()
        if not torch.equal(mine, other):
            wrong = mine != other
            count = int(wrong.reshape(-1, a.element_size()).any(dim=1).sum())
            found.append(f"{where}: {count} of {a.numel()} elements differ")


def _arrays(a: Any, b: Any, where: str, found: list[str]) -> None:
    if a.dtype != b.dtype or a.shape != b.shape:
        found.append(f"{where}: numpy {a.dtype}{a.shape} and {b.dtype}{b.shape}")
    else:
        _texts(a.tobytes() == b.tobytes(), a, b, where, found)


def _dicts(a: dict[Any, Any], b: dict[Any, Any], where: str, found: list[str]) -> None:
    mine, other = [_identity(key) for key in a], [_identity(key) for key in b]
    found += [
        f"{_place(where, key)}: only in the first"
        for key, name in zip(a, mine, strict=True)
        if name not in set(other)
    ]
    found += [
        f"{_place(where, key)}: only in the second"
        for key, name in zip(b, other, strict=True)
        if name not in set(mine)
    ]
    if mine != other and sorted(map(repr, mine)) == sorted(map(repr, other)):
        found.append(f"{where}: keys in another order")
    by_name = {_identity(key): value for key, value in b.items()}
    for key, name in zip(a, mine, strict=True):
        if name in by_name:
            _compare(a[key], by_name[name], _place(where, key), found)
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        found.append(f"{where}: default factories differ")
    if type(a) is not dict:
        attributes = attributes_of(a), attributes_of(b)
        if attributes[0] or attributes[1]:
            _dicts(*attributes, f"{where}/~a", found)


def _sequences(a: Any, b: Any, where: str, found: list[str]) -> None:
    if len(a) != len(b):
        found.append(f"{where}: {len(a)} and {len(b)} elements")
    if getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
        found.append(f"{where}: maxlen {a.maxlen} and {b.maxlen}")
    for index, (mine, other) in enumerate(zip(a, b, strict=False)):
        _compare(mine, other, f"{where}/[{index}]" if where else f"[{index}]", found)


def _identity(key: Any) -> Any:
    """What tells keys apart that Python takes for equal (1, 1.0, True), or for unequal (NaN)."""
    if isinstance(key, tuple):
        return (type(key), tuple(map(_identity, key)))
    if isinstance(key, frozenset):
        return (type(key), _bag(key))
    if isinstance(key, float):
        return (type(key), struct.pack("<d", key))
    if isinstance(key, complex):
        return (type(key), struct.pack("<2d", key.real, key.imag))
    return (type(key), key)


def _bag(values: Any) -> frozenset[Any]:
    return frozenset(collections.Counter(map(_identity, values)).items())


def _place(where: str, key: Any) -> str:
    return keys.join(where, keys.label(key))
