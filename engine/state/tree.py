"""Parts into entries and a state image: the first step of every snapshot.

Flattening reads the live state and copies plain values (they are encoded before it returns); tensors and large
numpy arrays are only referred to, by the leaves, until the copier has copied them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..format.layout import Box, EntrySpec, Scope
from . import foreign, objects
from .encode import HANDLERS, Encoder, Handler, Path
from .registry import ObjectState, type_name
from .tensors import DTYPE_NAMES, resolve
from .wire import PARAMETER, REQUIRES_GRAD, Node, Tag

ScopeOf = Callable[[str, tuple[Any, ...], torch.Tensor], Scope]
"""(part, typed path, tensor) -> whose the tensor is."""

_BOXES_MAX = 1 << 16
_boxes: dict[tuple[int, ...], tuple[Box, ...]] = {}
"""The full box of each shape met: equal shapes are many, and making boxes costs more than looking them up.
Only ever added to or cleared; a lost race makes an equal box twice."""


@dataclass(slots=True)
class Leaf:
    """One tensor of the state. ``tensor`` is the live one (or a fresh one where it had lazy bits to resolve), on
    its own device, with its own strides; ``shape`` is global and ``boxes`` are this rank's regions of it."""

    part: str
    key: str
    tensor: torch.Tensor
    scope: Scope
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def spec(self, *, stored: bool = True) -> EntrySpec:
        return EntrySpec(self.part, self.key, self.dtype, self.shape, self.boxes, self.scope, stored)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(slots=True)
class FlatState:
    """The leaves in the order that the state image refers to, and the state image."""

    leaves: list[Leaf]
    state: bytes

    def signature(self) -> list[tuple[Any, ...]]:
        """What the layout depends on: two states of equal signatures have the same layout."""
        return [(leaf.part, leaf.key, leaf.dtype, leaf.shape, leaf.scope, leaf.boxes) for leaf in self.leaves]


def flatten(parts: Mapping[str, Any], *, scope: ScopeOf | None = None) -> FlatState:
    """Leaves and state image of ``parts``. Objects with ``state_dict()`` are asked now.

    Raises UnsupportedValue, with the path, for anything that cannot be stored.
    """
    encoder = TreeEncoder(scope)
    with torch.no_grad():
        state = encoder.encode_parts(parts)
    return FlatState(encoder.leaves, state)


def full_box(shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The one box that is all of ``shape``."""
    found = _boxes.get(shape)
    if found is None:
        if len(_boxes) >= _BOXES_MAX:
            _boxes.clear()
        found = _boxes[shape] = (Box((0,) * len(shape), shape),)
    return found


class TreeEncoder(Encoder):
    """An encoder that knows torch and numpy, and collects leaves."""

    leaf_types: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
    handlers: ClassVar[dict[type, Handler]] = {**HANDLERS, **foreign.HANDLERS}

    def __init__(self, scope: ScopeOf | None) -> None:
        super().__init__()
        self.leaves: list[Leaf] = []
        self._scope = scope
        self._at: dict[int, int | list[int]] = {}

    def leaf(self, value: torch.Tensor, text: str, path: Path, key: Any) -> Node:
        flags = REQUIRES_GRAD if value.requires_grad and value.is_leaf else 0
        if type(value) is torch.nn.Parameter:
            flags |= PARAMETER
        index = self._index(value, text, path, key)
        return [1, index, flags] if flags else [1, index]

    def _index(self, value: torch.Tensor, text: str, path: Path, key: Any) -> int:
        dtype = DTYPE_NAMES.get(value.dtype)
        if dtype is None or value.layout is not torch.strided or value.is_meta or value.is_nested:
            raise self._refuse_tensor(value, text)
        lazy = value.is_neg() or value.is_conj()
        # An empty tensor has no address, and one with lazy bits gets other memory: tied to themselves alone.
        address = -id(value) if lazy else value.data_ptr() or -id(value)
        found = self._at.get(address)
        if found is not None:
            tied = found if lazy else self._tied(value, found)
            if isinstance(tied, int):
                return tied
        index = len(self.leaves)
        self._at[address] = index if found is None else [*_as_list(found), index]
        scope = Scope.RANK if self._scope is None else self._scope(self.part, (*path, key), value)
        shape = tuple(value.shape)
        if lazy:
            self._alive.append(value)
            value = resolve(value)
        boxes = _boxes.get(shape) or full_box(shape)
        self.leaves.append(Leaf(self.part, text, value, scope, dtype, shape, boxes))
        return index

    def _tied(self, value: torch.Tensor, found: int | list[int]) -> int | None:
        """The leaf that is ``value`` once more: the same elements of the same memory."""
        for index in _as_list(found):
            other = self.leaves[index].tensor
            if value is other or (
                value.dtype == other.dtype
                and value.shape == other.shape
                and value.stride() == other.stride()
                and value.device == other.device
                and value.numel() > 0
            ):
                return index
        return None

    def _refuse_tensor(self, value: torch.Tensor, text: str) -> Exception:
        if value.is_meta:
            return self.refuse(value, text, "a meta tensor holds no bytes", "Materialise it before saving")
        if value.layout is not torch.strided or value.is_nested:
            what = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return self.refuse(value, text, f"a {what} tensor cannot be stored", "Store its dense parts")
        return self.refuse(value, text, f"a tensor of dtype {value.dtype} cannot be stored")

    def array_leaf(self, value: np.ndarray[Any, Any], dtype: str, text: str, path: Path) -> Node:
        """A numpy array as an entry, of torch's dtype where there is one, else as its bytes."""
        known = self._at.get(-id(value))
        if isinstance(known, int):
            return [Tag.ARRAY_REF.value, known, dtype, list(value.shape)]
        array = np.ascontiguousarray(value)
        if foreign.as_torch_dtype(dtype) is None:
            array = array.reshape(-1).view(np.uint8)
        if not array.flags.writeable:
            # torch warns of arrays that it could write to and must not.
            array = array.copy()
        self._alive.append(value)
        index = self._index(torch.from_numpy(array), text, path[:-1], path[-1] if path else None)
        self._at[-id(value)] = index
        return [Tag.ARRAY_REF.value, index, dtype, list(value.shape)]

    def other(self, value: Any, text: str, path: Path) -> Node | None:
        if isinstance(value, torch.Tensor):
            return self._tensor_subclass(value, text, path)
        node = foreign.other(self, value, text)
        if node is not None:
            return node
        if isinstance(value, ObjectState):
            return [Tag.STATE.value, value.type_name, self.node(value.value, text, path)]
        if objects.is_stateful(value):
            content = objects.state_of(value, self.where(text))
            # Kept until the end, so that ids and addresses of what it made are not given away.
            self._alive.append(content)
            return [Tag.STATE.value, type_name(type(objects.unwrap(value))), self.node(content, text, path)]
        return None

    def where(self, text: str) -> str:
        return f"{self.part}/{text}" if text else self.part

    def _tensor_subclass(self, value: torch.Tensor, text: str, path: Path) -> Node:
        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            raise self.refuse(value, text, "an uninitialised parameter holds no bytes", "Run a forward pass first")
        raise self.refuse(
            value,
            text,
            "a subclass of torch.Tensor cannot be stored",
            "Store its plain tensors",
        )


def _as_list(found: int | list[int]) -> list[int]:
    return [found] if isinstance(found, int) else found
