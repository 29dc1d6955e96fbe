"""What flattening found at a place last time, used again where the structure there is still the same.

Most of a state are dicts of tensors with the same keys at every save: a model's, an optimizer's by parameter. To
find out that such a dict is as it was (the same keys in the same order, values of the same types, tensors of the same
dtypes, shapes and flags, tied as before, numbers and texts with the same bits) takes a few loops that run in C; to
walk it takes a call for each tensor. A recipe holds structure only: no tensor, and nothing is taken for unchanged
because it is the same object, or lies at the same address. What it holds is compared with the live values at every
flattening, and what has changed is walked again.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch

from ..format.layout import Box, Scope

ITEMS_MIN = 16
"""Dicts with fewer are walked: that is as quick."""
LEVELS_MAX = 3
"""Dicts within dicts that one recipe is of: more than the state of any optimizer has."""

MISSES_MAX = 4
"""Times in a row that a place has to be walked after all: numbers among its tensors may change at every step."""

T = TypeVar("T")

Place = tuple[str, str]
"""(part, key text)."""

_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({type(None), bool, int, float, str})
_KNOWN = _LEAVES | _ATOMS | {dict}
_MAPPINGS = (dict, OrderedDict)
_TEXT = frozenset({str})

_address_of = torch.Tensor.data_ptr
_is_negative = torch.Tensor.is_neg
_is_conjugate = torch.Tensor.is_conj
_dtype_of = operator.attrgetter("dtype")
_shape_of = operator.attrgetter("shape")
_requires_grad = operator.attrgetter("requires_grad")
_device_of = operator.attrgetter("device")
_stride_of = torch.Tensor.stride


@dataclass(slots=True)
class Found:
    """A dict of tensors, numbers and texts, and of such dicts, as a walk would meet them: ``keys`` and the types of
    the values (``kinds``) dict by dict, with their ``counts``."""

    keys: list[str] = field(default_factory=list)
    kinds: list[type] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    atoms: list[Any] = field(default_factory=list)
    inner: list[dict[Any, Any]] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def add(self, value: Mapping[Any, Any], level: int = 1) -> bool:
        """Take in ``value``; False if there is anything else in it."""
        values = list(value.values())
        kinds = list(map(type, values))
        distinct = set(kinds)
        if not distinct <= _KNOWN:
            return False
        self.keys += value
        self.kinds += kinds
        self.counts.append(len(values))
        if distinct <= _LEAVES:
            self.tensors += values
            return True
        for kind, one in zip(kinds, values, strict=True):
            if kind is dict:
                self.inner.append(one)
                if level == LEVELS_MAX or not self.add(one, level + 1):
                    return False
            elif kind in _LEAVES:
                self.tensors.append(one)
            else:
                self.atoms.append(one)
        return True

    def look(self) -> bool:
        """Find where the tensors lie. False if one has no memory of its own, or is to be resolved first."""
        try:
            self.addresses = list(map(_address_of, self.tensors))
        except RuntimeError:  # torch's answer for tensors without a storage
            return False
        return 0 not in self.addresses and not any(map(_is_negative, self.tensors))


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """Of what is at one place: how :class:`Found` was, and what the walk made of it. By leaf ``texts`` (keys of the
    entries), ``scopes``, ``paths``, names of dtypes, ``lengths`` and ``boxes``; ``firsts`` are the tensors that are
    leaves, where some are tied to others (None: all are). ``tied``: addresses, strides and devices, where two tensors
    begin at one address."""

    base: int
    """Leaves before the first of this one's, which the node counts from."""
    keys: list[str]
    kinds: list[type]
    counts: list[int]
    atoms: bytes
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    flags: list[int]
    firsts: list[int] | None
    tied: tuple[list[int], list[tuple[int, ...]], list[torch.device]] | None
    at: dict[int, int | list[int]]
    """By address the leaf, or leaves, that begin there; only where some are tied."""
    complex: bool
    texts: list[str]
    paths: list[tuple[Any, ...]]
    scopes: list[Scope]
    names: list[str]
    lengths: list[tuple[int, ...]]
    boxes: list[tuple[Box, ...]]
    node: msgspec.Raw

    def fits(self, found: Found, base: int) -> bool:
        """Whether a walk of ``found``, as the leaves from ``base`` on, would make of it what it made last time, but
        for scopes."""
        return (
            base == self.base
            and found.keys == self.keys
            and _are_text(itertools.compress(found.keys, map(operator.is_not, found.keys, self.keys)))
            and found.kinds == self.kinds
            and found.counts == self.counts
            and self.fits_tensors(found)
            and atoms_of(found.atoms) == self.atoms
        )

    def fits_tensors(self, found: Found, *, flags: bool = True) -> bool:
        """Whether the tensors, as many, are such and tied as they were; ``flags``: for autograd, too."""
        tensors = found.tensors
        return (
            all(map(operator.is_, map(_dtype_of, tensors), self.dtypes))
            and _same_shapes(tensors, self.shapes)
            and (not flags or flags_of(tensors) == self.flags)
            and not (self.complex and any(map(_is_conjugate, tensors)))
            and self._is_tied_alike(found)
        )

    def _is_tied_alike(self, found: Found) -> bool:
        if self.tied is None:
            return len(set(found.addresses)) == len(found.addresses)
        return self.tied == places_of(found)

    def leaves(self, some: list[T]) -> list[T]:
        """Those of ``some``, one of each tensor, that are of leaves, in their order."""
        return some if self.firsts is None else [some[first] for first in self.firsts]


class Recipes:
    """Those of the last flattening, by (part, key text of the place). Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[Place, tuple[Recipe, int]] = {}
        self._used: dict[Place, tuple[Recipe, int]] = {}

    def begin(self) -> None:
        """A flattening begins. What the one before did not use is forgotten."""
        self._known, self._used = self._used, {}

    def may_fit(self, place: Place) -> bool:
        """False for a place where something else was found each time; it is not looked at again."""
        known = self._known.get(place)
        if known is None or known[1] < MISSES_MAX:
            return True
        self._used[place] = known
        return False

    def find(self, place: Place) -> Recipe | None:
        known = self._known.get(place)
        return known[0] if known is not None else None

    def used(self, place: Place) -> Recipe | None:
        """That of ``place`` in the flattening that was begun last."""
        used = self._used.get(place)
        return used[0] if used is not None else None

    def use(self, place: Place, recipe: Recipe) -> None:
        """``recipe`` is that of ``place``, an old one or a new one."""
        former, missed = self._known.get(place, (recipe, 0))
        self._used[place] = recipe, 0 if former is recipe else missed + 1


def scan(items: Mapping[Any, Any]) -> Found | None:
    """``items`` as a recipe would have them; None where they are of other kinds, or few."""
    if len(items) < ITEMS_MIN or type(items) not in _MAPPINGS:
        return None
    found = Found()
    return found if found.add(items) and found.look() else None


def atoms_of(atoms: list[Any]) -> bytes | None:
    """Types and bits of numbers and texts; None if one of them is stored in another way."""
    if not atoms:
        return b""
    try:
        return msgspec.msgpack.encode(atoms)
    except (OverflowError, UnicodeEncodeError):
        return None


def flags_of(tensors: list[torch.Tensor]) -> list[int]:
    """What a reference to each tells besides the leaf: nothing at all where none records gradients."""
    if not any(map(_requires_grad, tensors)):
        return []
    parameter = torch.nn.Parameter
    return [
        (one.requires_grad and one.is_leaf) + 2 * (one.requires_grad and isinstance(one, parameter))
        for one in tensors
    ]


def places_of(found: Found) -> tuple[list[int], list[tuple[int, ...]], list[torch.device]]:
    """What tells whether tensors that begin at one address are the same, besides shape and dtype."""
    return found.addresses, list(map(_stride_of, found.tensors)), list(map(_device_of, found.tensors))


def paths_of(items: Mapping[Any, Any], path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The typed path of each tensor in ``items``."""
    for key, value in items.items():
        if type(value) is dict:
            yield from paths_of(value, (*path, key))
        elif type(value) in _LEAVES:
            yield (*path, key)


def make(
    found: Found,
    items: Mapping[Any, Any],
    path: tuple[Any, ...],
    base: int,
    leaves: list[Any],
    at: Mapping[int, int | list[int]],
    node: Any,
) -> Recipe | None:
    """The recipe of ``items``, which a walk made ``leaves`` (from ``base`` on, and no others) and ``node`` of. None if
    there can be none."""
    atoms, tensors = atoms_of(found.atoms), found.tensors
    has_complex = any(tensor.is_complex() for tensor in tensors)
    if atoms is None or type(node) is not dict or not _are_text(found.keys):
        return None
    if has_complex and any(map(_is_conjugate, tensors)):
        return None
    firsts = _firsts(tensors, leaves)
    tied = places_of(found) if len(set(found.addresses)) < len(tensors) else None
    paths = list(paths_of(items, path))
    return Recipe(
        base=base,
        keys=found.keys,
        kinds=found.kinds,
        counts=found.counts,
        atoms=atoms,
        dtypes=list(map(_dtype_of, tensors)),
        shapes=list(map(_shape_of, tensors)),
        flags=flags_of(tensors),
        firsts=firsts if len(firsts) < len(tensors) else None,
        tied=tied,
        at={address: at[address] for address in found.addresses} if tied is not None else {},
        complex=has_complex,
        texts=[leaf.key for leaf in leaves],
        paths=[paths[first] for first in firsts],
        scopes=[leaf.scope for leaf in leaves],
        names=[leaf.dtype for leaf in leaves],
        lengths=[leaf.shape for leaf in leaves],
        boxes=[leaf.boxes for leaf in leaves],
        node=msgspec.Raw(msgspec.msgpack.encode(node)),
    )


def _are_text(keys: Iterable[Any]) -> bool:
    """Keys of other types may have equal values."""
    return _TEXT.issuperset(map(type, keys))


def _same_shapes(tensors: list[torch.Tensor], shapes: list[torch.Size]) -> bool:
    try:
        return all(map(operator.eq, map(_shape_of, tensors), shapes))
    except RuntimeError:  # torch's answer for nested tensors
        return False


def _firsts(tensors: list[torch.Tensor], leaves: list[Any]) -> list[int]:
    """Positions of the tensors that became leaves, which are in the same order."""
    found: list[int] = []
    at = 0
    for leaf in leaves:
        while tensors[at] is not leaf.tensor:
            at += 1
        found.append(at)
        at += 1
    return found
