"""Modules and optimizers that would say what they said last time, but for what their tensors hold: proved without
asking them.

To ask a module of torch for its state takes a call for each module and a new tensor for each of its own; to name an
optimizer's state a few more for each parameter. Where their classes are content with torch's own ``state_dict`` and
no hook is set, what they would say follows from their dicts, so these are compared with what they were when the
object was asked last. Whatever differs is asked again. No reference to a tensor is kept, and none is taken for
unchanged because it is the same object: tensors are compared as :mod:`.recipes` does.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .recipes import MISSES_MAX, Found, Recipe, Recipes, atoms_of
from .wire import Tag

_MODULE = torch.nn.Module
_METHODS = {name: getattr(_MODULE, name) for name in ("state_dict", "_save_to_state_dict", "get_extra_state")}
_OPTIMIZER_STATE_DICT = torch.optim.Optimizer.state_dict
"""As torch has it: one that is put in its place for all classes is another."""
_OWN_OF_MODULES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_OWN_OF_OPTIMIZERS = (
    "state",
    "param_groups",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_NOTHING = type(None)
MODULES_MAX = 1 << 16
"""Of one part: a circle of them has no end."""
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter})

_dict_of = operator.attrgetter("__dict__")
_version_of = operator.attrgetter("_version")
_parameters_of = operator.itemgetter("_parameters")
_buffers_of = operator.itemgetter("_buffers")
_transient_of = operator.itemgetter("_non_persistent_buffers_set")
_hooks_of = operator.itemgetter("_state_dict_hooks", "_state_dict_pre_hooks")


@dataclass(frozen=True, slots=True)
class Said:
    """A value that is known as a node: with ``containers`` mutable ones, itself included."""

    node: msgspec.Raw
    containers: int = 1


@dataclass(frozen=True, slots=True)
class Again:
    """A dict that is as it was when ``recipe`` was made, of ``found``. ``node`` is all of it, after which come
    ``containers`` mutable ones that are no one else's; ``before``: ordinals (:class:`.encode.Encoder`) that were given
    before it. ``content`` asks for it in earnest."""

    recipe: Recipe
    found: Found
    node: msgspec.Raw
    before: int
    containers: int
    content: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Made:
    """What encoding a part made: its node, how many leaves and ordinals there were before it, how many it made."""

    node: msgspec.Raw
    base: int
    leaves: int
    before: int
    containers: int


class Gathered:
    """What of a module decides what it says. Raises AttributeError or KeyError for one that is built otherwise."""

    def __init__(self, root: torch.nn.Module) -> None:
        """Raises ValueError if there are more than :data:`MODULES_MAX` modules."""
        modules, names, counts = [root], [], []
        for one in modules:  # grows
            children = one.__dict__["_modules"]
            counts.append(len(children))
            if children:
                names += children
                modules += children.values()
                if len(modules) > MODULES_MAX:
                    raise ValueError("modules without end")
        dicts = list(map(_dict_of, modules))
        keys: list[str] = []
        sizes: list[int] = []
        values: list[Any] = []
        for held in map(_parameters_of, dicts):
            sizes.append(len(held))
            keys += held
            values += held.values()
        self.parameters = values.copy()
        for held in map(_buffers_of, dicts):
            sizes.append(len(held))
            keys += held
            values += held.values()
        self.values = values
        """Of all parameters, then all buffers, module by module."""
        self.kinds = list(map(type, modules))
        self.asks = self._is_plain(dicts)
        """Whether what it says follows from its dicts."""
        transient = list(map(_transient_of, dicts))
        types = list(map(type, values))
        self.structure = [
            self.kinds,
            names,
            counts,
            keys,
            sizes,
            types,
            transient,
            list(map(_version_of, modules)),
        ]
        """What is compared: lists."""

    def _is_plain(self, dicts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether nothing but torch's own ``state_dict`` has a say."""
        return (
            not any(map(any, map(_hooks_of, dicts)))
            and not any("state_dict" in one or "_save_to_state_dict" in one for one in dicts)
            and all(map(_is_plain_module, set(self.kinds)))
        )

    def places(self) -> dict[str, int]:
        """{name as in the state dict, in its order: position in :attr:`values`}."""
        _, names, counts, keys, sizes, types, transient, _ = self.structure
        firsts = [1, *itertools.accumulate(counts, initial=1)][1:]
        begins = [0, *itertools.accumulate(sizes)]
        found: dict[str, int] = {}

        def walk(module: int, prefix: str) -> None:
            for block, left_out in ((module, ()), (len(counts) + module, transient[module])):
                for at in range(begins[block], begins[block + 1]):
                    if types[at] is not _NOTHING and keys[at] not in left_out:
                        found[prefix + keys[at]] = at
            for child in range(firsts[module], firsts[module] + counts[module]):
                walk(child, f"{prefix}{names[child - 1]}.")

        walk(0, "")
        return found


def _is_plain_module(kind: type) -> bool:
    return (
        issubclass(kind, _MODULE)
        and all(getattr(kind, name) is method for name, method in _METHODS.items())
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name in _OWN_OF_MODULES)
    )


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing but torch's own ``state_dict`` has a say in what it gives."""
    kind = type(optimizer)
    return (
        kind.state_dict is _OPTIMIZER_STATE_DICT
        and kind.__getattribute__ is object.__getattribute__
        and "state_dict" not in optimizer.__dict__
        and not any(hasattr(kind, name) for name in _OWN_OF_OPTIMIZERS)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


class ModuleRecord:
    """A module as it was when it was asked last."""

    def __init__(self, gathered: Gathered, content: Mapping[str, Any], made: Made, recipe: Recipe) -> None:
        """``content`` is what it gave. ValueError where it does not follow from what was gathered."""
        places = gathered.places()
        positions = list(places.values())
        held = [gathered.values[at] for at in positions]
        if (
            not gathered.asks
            or list(places) != list(content)
            or made.leaves != len(recipe.texts)
            or made.base != recipe.base
            or recipe.flags
            or not all(map(_is_alias, content.values(), held))
        ):
            raise ValueError("a module that says more than its dicts")
        structure = gathered.structure
        # Sets are changed in place.
        self._structure = [*structure[:6], list(map(frozenset, structure[6])), structure[7]]
        self._pick = operator.itemgetter(*positions)
        self._recipe = recipe
        self._made = made

    def fits(self, gathered: Gathered) -> bool:
        """Whether it says as much as it said, of tensors of the same names."""
        return gathered.asks and gathered.structure == self._structure

    def again(self, gathered: Gathered, content: Callable[[], Any]) -> Again | None:
        """What it would say, if that is known."""
        if not self.fits(gathered):
            return None
        found = Found(tensors=list(self._pick(gathered.values)))
        if not found.look() or not self._recipe.fits_tensors(found, flags=False):
            return None
        made = self._made
        return Again(self._recipe, found, made.node, made.before, made.containers - 1, content)


def _is_alias(one: Any, other: torch.Tensor) -> bool:
    return (
        type(one) is torch.Tensor
        and type(other) in _LEAVES
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


class OptimizerRecord:
    """A torch optimizer as it was when it was asked last, and named."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        parameters: Sequence[Any],
        names: Mapping[int, str],
        recipe: Recipe,
        before: int,
    ) -> None:
        """``content`` is what it gave, by name; ``parameters`` those of all modules, called ``names`` by id; ``before``
        as in :class:`Again`, of its state. ValueError where the content does not follow from its dicts."""
        at = {id(parameter): number for number, parameter in reversed(list(enumerate(parameters)))}
        groups, state = optimizer.param_groups, optimizer.state
        try:
            self._members = [[at[id(one)] for one in group["params"]] for group in groups]
            self._owners = [at[id(one)] for one in state]
        except KeyError:
            raise ValueError("parameters without a name") from None
        called = [[names[id(one)] for one in group["params"]] for group in groups]
        self._outer = [names[id(one)] for one in state]
        if (
            not is_plain_optimizer(optimizer)
            or list(content) != ["state", "param_groups"]
            or list(content["state"]) != self._outer
            or not all(map(operator.is_, content["state"].values(), state.values()))
            or [group["params"] for group in content["param_groups"]] != called
            or [list(_packed(mine, None)) for mine in groups] != list(map(list, content["param_groups"]))
            or recipe.keys[: len(state)] != self._outer
        ):
            raise ValueError("an optimizer that says more than its dicts")
        encode = msgspec.msgpack.encode
        self._called = [Said(msgspec.Raw(encode([Tag.LIST.value, some]))) for some in called]
        self._keys = recipe.keys[len(state) :]
        self._recipe = recipe
        self._before = before

    def again(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Any]) -> dict[str, Any] | None:
        """What it would say, if that is known."""
        groups, state = optimizer.param_groups, optimizer.state
        if not is_plain_optimizer(optimizer) or not self._has_members(groups, parameters):
            return None
        if len(state) != len(self._owners) or not _are(state, parameters, self._owners):
            return None
        found = self._find(list(state.values()))
        if found is None:
            return None
        outer = self._outer

        def content() -> dict[str, Any]:
            return dict(zip(outer, state.values(), strict=True))

        kept = Again(self._recipe, found, self._recipe.node, self._before, 0, content)
        packed = [_packed(group, names) for group, names in zip(groups, self._called, strict=True)]
        return {"state": kept, "param_groups": packed}

    def _has_members(self, groups: list[dict[str, Any]], parameters: Sequence[Any]) -> bool:
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(members) and _are(group["params"], parameters, members)
            for group, members in zip(groups, self._members, strict=True)
        )

    def _find(self, inner: list[dict[Any, Any]]) -> Found | None:
        if any(type(one) is not dict for one in inner):
            return None
        recipe, count = self._recipe, len(inner)
        keys: list[Any] = []
        values: list[Any] = []
        for one in inner:
            keys += one
            values += one.values()
        kinds = list(map(type, values))
        if keys != self._keys or kinds != recipe.kinds[count:] or list(map(len, inner)) != recipe.counts[1:]:
            return None
        if any(map(operator.is_not, keys, self._keys)) and not all(type(key) is str for key in keys):
            return None  # keys of other types may have equal values
        found = Found(tensors=values, inner=inner)
        if not _LEAVES.issuperset(kinds):
            mask = list(map(_LEAVES.__contains__, kinds))
            found.tensors = list(itertools.compress(values, mask))
            found.atoms = list(itertools.compress(values, map(operator.not_, mask)))
        if atoms_of(found.atoms) != recipe.atoms or not found.look() or not recipe.fits_tensors(found):
            return None
        return found


def _packed(group: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """As ``Optimizer.state_dict`` packs a group."""
    return {**{key: value for key, value in group.items() if key != "params"}, "params": params}


def _are(some: Any, parameters: Sequence[Any], positions: list[int]) -> bool:
    """Whether ``some``, as many, are those of ``parameters``."""
    return all(map(operator.is_, some, map(parameters.__getitem__, positions)))


class Steady(Recipes):
    """Recipes, and what is known of the modules and optimizers of one state, by part. Used by one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, ModuleRecord] = {}
        self.optimizers: dict[str, OptimizerRecord] = {}
        self.parts: list[str] = []
        """Of modules, in their order."""
        self.pattern: list[int] | None = None
        """Of their parameters: where each is met first; None: all are different."""
        self.in_vain = 0
        """Flattenings in a row of which nothing was known."""
        self._late: tuple[tuple[Recipe, ...], frozenset[int]] = (), frozenset()

    def late(self, by: tuple[Recipe, ...], find: Callable[[], frozenset[int]]) -> frozenset[int]:
        """What ``find`` gives, which is the same for all flattenings whose leaves are known to be those of ``by``, in
        the same places of the same state; () is none."""
        if not by or self._late[0] != by:
            self._late = by, find()
        return self._late[1]


def pattern_of(parameters: Sequence[Any]) -> list[int] | None:
    """Which of ``parameters`` (without those that are None) are the same: where each is met first. None if all are
    different."""
    ids = [id(parameter) for parameter in parameters if parameter is not None]
    if len(set(ids)) == len(ids):
        return None
    first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))
    return list(map(first.__getitem__, ids))


class Looker:
    """Looks at the modules and optimizers of one state once, before it is flattened."""

    def __init__(
        self, steady: Steady, modules: Iterable[tuple[str, tuple[Any, ...], torch.nn.Module]]
    ) -> None:
        """``modules`` by part and path, without wrappers."""
        self._steady = steady
        self._gathered: dict[str, Gathered] = {}
        self._parameters: list[Any] = []
        """Of all modules."""
        self._asked: dict[str, Any] = {}
        """By part, what was said when it was asked for in earnest."""
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self.known: set[str] = set()
        """Parts of which it is known what they would say."""
        self._can = steady.in_vain < MISSES_MAX
        self._named: bool | None = None
        if self._can:
            try:
                self._gather(modules)
            except (AttributeError, KeyError, TypeError, ValueError):
                self._can = False

    def _gather(self, modules: Iterable[tuple[str, tuple[Any, ...], torch.nn.Module]]) -> None:
        for part, path, module in modules:
            if path or part in self._gathered:
                raise ValueError("a part of several modules")
            self._gathered[part] = Gathered(module)
            self._parameters += self._gathered[part].parameters

    def module(self, part: str, ask: Callable[[], Any]) -> Any:
        """What the module of ``part`` says; ``ask`` asks it."""
        record, gathered = self._steady.modules.get(part), self._gathered.get(part)
        if self._can and record is not None and gathered is not None:

            def anew() -> Any:
                self._steady.modules.pop(part, None)
                return ask()

            found = record.again(gathered, anew)
            if found is not None:
                self.known.add(part)
                return found
        self._asked[part] = said = ask()
        return said

    def optimizer(self, part: str, optimizer: torch.optim.Optimizer, ask: Callable[[], Any]) -> Any:
        """What the optimizer of ``part`` says, by name; ``ask`` asks it."""
        self._optimizers[part] = optimizer
        record = self._steady.optimizers.get(part)
        if self._can and record is not None and self._are_named_alike():
            found = record.again(optimizer, self._parameters)
            if found is not None:
                self.known.add(part)
                return found
        self._asked[part] = said = ask()
        return said

    def _are_named_alike(self) -> bool:
        """Whether all parameters have the names that they had."""
        if self._named is None:
            steady, records = self._steady, self._steady.modules
            self._named = (
                list(self._gathered) == steady.parts
                and all(part in records and records[part].fits(one) for part, one in self._gathered.items())
                and pattern_of(self._parameters) == steady.pattern
            )
        return self._named

    def to_note(self) -> dict[str, Made | None]:
        """Parts whose encoding is to be noted, for :meth:`learn`."""
        return dict.fromkeys(self._asked) if self._can else {}

    def learn(self, made: Mapping[str, Made | None], names: Callable[[], Mapping[int, str]]) -> None:
        """Take in what was asked for in earnest, and what flattening ``made`` of it. ``names`` gives those of
        parameters, by id."""
        steady = self._steady
        steady.in_vain = 0 if self.known else steady.in_vain + 1
        if not self._can or not self._asked:
            return
        steady.parts, steady.pattern = list(self._gathered), pattern_of(self._parameters)
        for part, said in self._asked.items():
            one = made.get(part)
            optimizer = self._optimizers.get(part)
            records: dict[str, Any] = steady.modules if optimizer is None else steady.optimizers
            recipe = steady.used((part, "" if optimizer is None else "state"))
            records.pop(part, None)
            if one is None or recipe is None:
                continue
            with contextlib.suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                if optimizer is None:
                    records[part] = ModuleRecord(self._gathered[part], said, one, recipe)
                else:
                    records[part] = OptimizerRecord(
                        optimizer, said, self._parameters, names(), recipe, one.before + 1
                    )
