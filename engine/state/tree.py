"""Parts into entries and a state image: the first step of every snapshot.

Flattening reads the live state and copies plain values (they are encoded before it returns); tensors and
large numpy arrays are only referred to, by the leaves, until the copier has copied them.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..format.entries import ROOT, path_of
from ..format.layout import Box, EntrySpec, Scope
from . import foreign, objects, recipes, sharded
from .encode import HANDLERS, Encoder, Handler, Path
from .meshes import spread
from .recipes import Recipe, Recipes
from .registry import ObjectState, type_name
from .sharded import Held, Shards
from .steady import Again, Made, Said
from .tensors import DTYPE_NAMES, DTYPES, resolve
from .wire import DEPTH_MAX, PARAMETER, REQUIRES_GRAD, Node, Tag

AskOf = Callable[[Any, str], Any]
"""(object with state, its place for messages) -> its state."""

ScopeOf = Callable[[str, tuple[Any, ...], torch.Tensor], Scope]
"""(part, typed path, tensor) -> whose the tensor is; of a DTensor, what it holds here. GLOBAL for one that is sharded
in any case says that ranks outside its mesh hold the same."""

_STRIDED = torch.strided
_RANK = Scope.RANK
_REF = Tag.REF.value
_COMPLEX = frozenset(name for name, dtype in DTYPES.items() if dtype.is_complex)

_BOXES_MAX = 1 << 16
_boxes: dict[tuple[int, ...], tuple[Box, ...]] = {}
"""The full box of each shape met: equal shapes are many, and making boxes costs more than looking them up.
Only ever added to or cleared; a lost race makes an equal box twice."""


class Leaf(msgspec.Struct, gc=False):  # thousands at each save: made without a call of Python
    """One tensor of the state. ``tensor`` is the live one (or a fresh one where it had lazy bits to resolve),
    on its own device, with its own strides; ``shape`` is global and ``boxes`` are this rank's regions of
    it (one, of all of it, for a plain tensor)."""

    part: str
    key: str
    tensor: torch.Tensor
    scope: Scope
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def spec(
        self, *, stored: bool = True, shared: tuple[int, ...] = (), copy_of: int | None = None
    ) -> EntrySpec:
        plain = self.part, self.key, self.dtype, self.shape, self.boxes, self.scope
        return EntrySpec(*plain, stored, shared, copy_of)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """Plain tensors with what this rank holds, one per box."""
        return (self.tensor,)

    @property
    def holders(self) -> tuple[int, ...] | None:
        """The ranks that hold exactly these boxes; None for a plain tensor: this rank's own, or, where it is GLOBAL,
        the whole job's."""
        return None


class ShardedLeaf(Leaf, gc=False):
    """A tensor of which ranks hold regions. ``tensor`` is the live DTensor, ShardedTensor or Shards."""

    held: Held

    @property
    def nbytes(self) -> int:
        return sum([piece.nbytes for piece in self.held.pieces])

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        return self.held.pieces

    @property
    def holders(self) -> tuple[int, ...] | None:
        return self.held.holders


@dataclass(slots=True)
class FlatState:
    """The leaves in the order that the state image refers to, and the state image. ``sharded`` are the indices of
    the :class:`ShardedLeaf` among them, ascending. ``known`` are (part, recipe) of leaves that were made by a recipe,
    ascending too."""

    leaves: list[Leaf]
    state: bytes
    sharded: list[int] = field(default_factory=list)
    known: list[tuple[str, Recipe]] = field(default_factory=list)
    addresses: list[int] | None = None
    """Where the leaves lie, if all were made by recipes: then they are tensors with memory of their own, of the dtypes
    and shapes that the leaves say, without bits to resolve."""
    by: tuple[Recipe, ...] = ()
    """The recipes of all leaves, where it was known what all modules and optimizers would say."""

    def signature(self) -> list[tuple[Any, ...]]:
        """What the layout depends on: two states of equal signatures have the same layout."""
        found: list[tuple[Any, ...]] = []
        at = 0
        for part, recipe in self.known:
            found += map(_described, self.leaves[at : recipe.base])
            found.append((part, recipe))  # one stands for all of its leaves
            at = recipe.base + len(recipe.texts)
        found += map(_described, self.leaves[at:])
        found += [(index, self.leaves[index].holders) for index in self.sharded]
        return found

    def sources(self) -> list[Any]:
        """What the copier reads, by leaf: one plain tensor, or a tuple of them if there is not exactly one box."""
        found: list[Any] = [leaf.tensor for leaf in self.leaves]
        for index in self.sharded:
            pieces = self.leaves[index].pieces
            found[index] = pieces[0] if len(pieces) == 1 else pieces
        return found


def flatten(
    parts: Mapping[str, Any],
    *,
    scope: ScopeOf | None = None,
    ask: AskOf = objects.state_of,
    recipes: Recipes | None = None,
    noted: dict[str, Made | None] | None = None,
) -> FlatState:
    """Leaves and state image of ``parts``. Objects with ``state_dict()`` are asked now, by ``ask``. ``recipes``: those
    of former flattenings of the same state, which make this one faster, and nothing else. ``noted`` gets what was made
    of the parts that it has.

    Raises UnsupportedValue, with the path, for anything that cannot be stored.
    """
    if recipes is not None:
        recipes.begin()
    encoder = TreeEncoder(scope, ask, recipes, noted)
    # The walk makes many small containers and no cycles: the collector would scan the whole heap, several
    # times, in the middle of a training step, and find nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.no_grad():
            state = encoder.encode_parts(parts)
    finally:
        if collecting:
            gc.enable()
    leaves = encoder.leaves
    some = [(index, leaf) for index in encoder.sharded if isinstance(leaf := leaves[index], ShardedLeaf)]
    values = [(leaf.tensor, leaf.held, index in encoder.promised) for index, leaf in some]
    for (_, leaf), held in zip(some, spread(values), strict=True):
        leaf.held = held
    return FlatState(
        leaves,
        state,
        encoder.sharded,
        encoder.known,
        encoder.addresses if len(encoder.addresses) == len(leaves) else None,
        tuple(recipe for _, recipe in encoder.known) if encoder.agains == len(leaves) else (),
    )


def _described(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.part, leaf.key, leaf.dtype, leaf.shape, leaf.scope, leaf.boxes


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
    handlers: ClassVar[dict[type, Handler]] = {
        **HANDLERS,
        **foreign.HANDLERS,
        Again: lambda encoder, value, text, path: encoder.again(value, text, path),  # type: ignore[attr-defined]
        Said: lambda encoder, value, text, path: encoder.said(value, text, path),  # type: ignore[attr-defined]
    }

    def __init__(
        self,
        scope: ScopeOf | None,
        ask: AskOf = objects.state_of,
        recipes: Recipes | None = None,
        noted: dict[str, Made | None] | None = None,
    ) -> None:
        super().__init__()
        self._recipes = recipes
        self._noted = noted or {}
        self.addresses: list[int] = []
        """Of the leaves that were made by recipes."""
        self.agains = 0
        """Leaves of what was known without a walk."""
        self.known: list[tuple[str, Recipe]] = []
        self.leaves: list[Leaf] = []
        self._scope = scope
        self._ask = ask
        self._at: dict[int, int | list[int]] = {}
        self.sharded: list[int] = []
        self._sharded_at: dict[tuple[Any, ...], int] = {}
        self.promised: set[int] = set()
        """Sharded leaves of which the whole job holds the same, whatever their own mesh is."""

    def items(self, items: Mapping[Any, Any], view: Iterable[tuple[Any, Any]], text: str, path: Path) -> Node:
        if self._recipes is None or self._in_key or len(path) + recipes.LEVELS_MAX > DEPTH_MAX:
            return super().items(items, view, text, path)
        known, place, base = self._recipes, (self.part, text), len(self.leaves)
        found = recipes.scan(items) if known.may_fit(place) else None
        if found is None or not self._is_new(found):
            return super().items(items, view, text, path)
        recipe = known.find(place)
        if recipe is None or not recipe.fits(found, base) or not self._follow(recipe, found):
            self._recipes = None  # one recipe is of all that is inside
            node = super().items(items, view, text, path)
            self._recipes = known
            recipe = recipes.make(found, items, path, base, self.leaves[base:], self._at, node)
            if recipe is None:
                return node
        known.use(place, recipe)
        self.known.append((self.part, recipe))
        return recipe.node

    def _is_new(self, found: recipes.Found) -> bool:
        """Whether nothing of it was met before, so that what is made of it says nothing of what was."""
        ids = set(map(id, found.inner))
        return (
            len(ids) == len(found.inner)
            and self._ordinals.keys().isdisjoint(ids)
            and self._at.keys().isdisjoint(found.addresses)
        )

    def _follow(self, recipe: Recipe, found: recipes.Found) -> bool:
        """Take in what a walk would; False, and nothing is, if tensors are others' than they were."""
        tensors = recipe.leaves(found.tensors)
        scope = self._scope
        if scope is not None:
            scopes = [scope(self.part, *pair) for pair in zip(recipe.paths, tensors, strict=True)]
            if scopes != recipe.scopes:
                return False
        elif recipe.scopes.count(_RANK) < len(recipe.scopes):
            return False
        self._ordinals.update(zip(map(id, found.inner), itertools.count(len(self._ordinals)), strict=False))
        self._alive += found.inner
        self._at.update(recipe.at or zip(found.addresses, itertools.count(recipe.base)))
        self.addresses += recipe.leaves(found.addresses)
        rows = (recipe.texts, tensors, recipe.scopes, recipe.names, recipe.lengths, recipe.boxes)
        self.leaves += map(Leaf, itertools.repeat(self.part), *rows)
        return True

    def again(self, value: Again, text: str, path: Path) -> Node:
        """What is known to be as it was; walked after all where something before it is not."""
        recipe, found, number = value.recipe, value.found, len(self._ordinals)
        if len(self.leaves) == recipe.base and number == value.before and self._is_new(found):
            self._made_on_the_fly(1)
            if self._follow(recipe, found):
                self._made_on_the_fly(value.containers)
                if self._recipes is not None:
                    self._recipes.use((self.part, text), recipe)
                self.known.append((self.part, recipe))
                self.agains += len(recipe.texts)
                return value.node
            del self._ordinals[~number]
        return self.node(value.content(), text, path)

    def said(self, value: Said, text: str, path: Path) -> Node:
        self._made_on_the_fly(value.containers)
        return value.node

    def _made_on_the_fly(self, count: int) -> None:
        """Containers that nobody else can have, under numbers that are no ids."""
        number = len(self._ordinals)
        self._ordinals.update({~one: one for one in range(number, number + count)})

    def leaf(self, value: torch.Tensor, text: str, path: Path, key: Any) -> Node:
        dtype = DTYPE_NAMES.get(value.dtype)
        if dtype is None or value.layout is not _STRIDED or value.is_meta or value.is_nested:
            raise self._refuse_tensor(value, text)
        if value.is_neg() or (dtype in _COMPLEX and value.is_conj()):
            index = self._lazy(value, dtype, text, path, key)
        else:
            # An empty tensor has no address: it is tied to itself alone.
            address = value.data_ptr() or -id(value)
            found = self._at.get(address)
            if found is not None:
                index = self._again(value, address, found, dtype, text, path, key)
            elif self._scope is None:
                # As _add does: thousands of tensors at each save, and a call costs as much as what it does.
                shape = value.shape
                boxes = _boxes.get(shape) or full_box(tuple(shape))
                leaves = self.leaves
                index = self._at[address] = len(leaves)
                leaves.append(Leaf(self.part, text, value, _RANK, dtype, boxes[0].lengths, boxes))
            else:
                index = self._at[address] = self._add(value, value, dtype, text, path, key)
        if not value.requires_grad and type(value) is torch.Tensor:
            return [_REF, index]
        return _reference(value, index)

    def _add(
        self, value: torch.Tensor, stored: torch.Tensor, dtype: str, text: str, path: Path, key: Any
    ) -> int:
        scope = _RANK if self._scope is None else self._scope(self.part, (*path, key), value)
        shape = value.shape  # a tuple, of a class of its own: a box of the same shape has a plain one
        boxes = _boxes.get(shape) or full_box(tuple(shape))
        leaves = self.leaves
        leaves.append(Leaf(self.part, text, stored, scope, dtype, boxes[0].lengths, boxes))
        return len(leaves) - 1

    def _lazy(self, value: torch.Tensor, dtype: str, text: str, path: Path, key: Any) -> int:
        """A conjugate or negative view: stored from new memory, so its own address says nothing."""
        found = self._at.get(-id(value))
        if isinstance(found, int):
            return found
        self._alive.append(value)
        index = self._at[-id(value)] = self._add(value, resolve(value), dtype, text, path, key)
        return index

    def _again(
        self,
        value: torch.Tensor,
        address: int,
        found: int | list[int],
        dtype: str,
        text: str,
        path: Path,
        key: Any,
    ) -> int:
        """A tensor at an address that was met before: tied, or another view that begins there."""
        tied = self._tied(value, found)
        if tied is not None:
            return tied
        index = self._add(value, value, dtype, text, path, key)
        self._at[address] = [*_as_list(found), index]
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
        parent, key = path[:-1], path[-1] if path else None
        _, index = self.leaf(torch.from_numpy(array), text or ROOT, parent, key)
        self._at[-id(value)] = index
        return [Tag.ARRAY_REF.value, index, dtype, list(value.shape)]

    def other(self, value: Any, text: str, path: Path) -> Node | None:
        if isinstance(value, torch.Tensor):
            return self._tensor_subclass(value, text, path)
        if isinstance(value, Shards):
            return self._sharded(value, text, path)
        node = foreign.other(self, value, text)
        if node is not None:
            return node
        if isinstance(value, ObjectState):
            number, base = len(self._ordinals), len(self.leaves)
            node = self.node(value.value, text, path)
            if not text and self.part in self._noted:
                node = msgspec.Raw(msgspec.msgpack.encode(node))
                leaves, containers = len(self.leaves) - base, len(self._ordinals) - number
                self._noted[self.part] = Made(node, base, leaves, number, containers)
            return [Tag.STATE.value, value.type_name, node]
        if objects.is_stateful(value):
            content = self._ask(value, self.where(text))
            # Kept until the end, so that ids and addresses of what it made are not given away.
            self._alive.append(content)
            return [Tag.STATE.value, type_name(type(objects.unwrap(value))), self.node(content, text, path)]
        return None

    def where(self, text: str) -> str:
        return path_of(self.part, text)

    def _sharded(self, value: Any, text: str, path: Path) -> Node | None:
        """A value of which this rank holds regions, as a leaf of the whole job; None if ``value`` is none."""
        key = sharded.identity(value)
        index = self._sharded_at.get(key)
        if index is None:
            place = text or ROOT
            held = sharded.held_by(value, path_of(self.part, place))
            if held is None:
                return None
            if self._in_key:
                raise self.refuse(value, text, "a tensor cannot be a key or an element of a set")
            local = sharded.local_of(value)
            # Shards and ShardedTensors say themselves who holds the same.
            known = self._scope is not None and type(local) is torch.Tensor
            if known and self._scope(self.part, path, local) is Scope.GLOBAL:  # type: ignore[misc]
                self.promised.add(len(self.leaves))
            if any(piece.is_neg() or piece.is_conj() for piece in held.pieces):
                held = replace(held, pieces=tuple([resolve(piece) for piece in held.pieces]))
            index = self._sharded_at[key] = len(self.leaves)
            self.sharded.append(index)
            dtype = DTYPE_NAMES[held.dtype]
            self.leaves.append(
                ShardedLeaf(self.part, place, value, Scope.GLOBAL, dtype, held.shape, held.boxes, held)
            )
        return _reference(value, index) if isinstance(value, torch.Tensor) else [_REF, index]

    def _tensor_subclass(self, value: torch.Tensor, text: str, path: Path) -> Node:
        node = self._sharded(value, text, path)
        if node is not None:
            return node
        if isinstance(value, UninitializedTensorMixin):
            raise self.refuse(
                value, text, "an uninitialised parameter holds no bytes", "Run a forward pass first"
            )
        raise self.refuse(
            value,
            text,
            "a subclass of torch.Tensor cannot be stored",
            "Store its plain tensors",
        )


def _reference(value: torch.Tensor, index: int) -> Node:
    """The node of a tensor that may be a parameter, or record gradients."""
    flags = REQUIRES_GRAD if value.requires_grad and value.is_leaf else 0
    # A DTensor stays one when it is made a parameter: only the instance says so.
    if type(value) is torch.nn.Parameter or isinstance(value, torch.nn.Parameter):
        flags |= PARAMETER
    return [_REF, index, flags] if flags else [_REF, index]


def _as_list(found: int | list[int]) -> list[int]:
    return [found] if isinstance(found, int) else found
