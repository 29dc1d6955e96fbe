"""State of torch optimizers, by the names of their parameters; restoring it: read into the live tensors where they
fit, and torch's casts undone.

Content by name is what ``optimizer.state_dict()`` gives, with a parameter's name wherever torch has its position:
``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}]}``. It fits an optimizer whose parameters
are in another order, in other groups, or a part of them (pipeline stages). Content by position, as torch gives it,
is what an optimizer has of which some parameter has no name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import StateError, StateMismatch
from . import keys, objects
from .chunks import ChunkOptimizers
from .plan_base import Ledger, StoredTensor
from .sharded import local_of
from .tensors import as_bytes_view

_NOT_OPTIONS = frozenset({"params", "param_names"})
"""What a group holds besides options of its parameters."""

_SHAPED_AS_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
        "ax",
    }
)
"""State of torch's own optimizers that has the shape of its parameter."""


# Content by name.
def order_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str] | None:
    """The names of the parameters, group by group; None if one has no name."""
    found = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    order = [name for name in found if name is not None]
    return order if len(order) == len(found) else None


def named_content(optimizer: torch.optim.Optimizer, content: Any, names: Mapping[int, str]) -> Any:
    """``content`` (of ``optimizer.state_dict()``) by name; as it is where a parameter has no name, or where it is
    not of torch's form."""
    if not _is_content(content):
        return content
    found: dict[Any, str] = {}
    for group, mine in zip(content["param_groups"], optimizer.param_groups, strict=False):
        if len(group["params"]) != len(mine["params"]):
            return content
        for at, parameter in zip(group["params"], mine["params"], strict=True):
            name = names.get(id(parameter))
            if name is None or type(at) is not int:
                return content
            found[at] = name
    if len(content["param_groups"]) != len(optimizer.param_groups) or not found.keys().isdisjoint(
        found.values()
    ):
        return content
    # State that belongs to no parameter keeps its key, which must not look like a name.
    others = [key for key in content["state"] if key not in found]
    if not set(others).isdisjoint(found.values()):
        return content
    return {
        **content,
        "state": {found.get(key, key): value for key, value in content["state"].items()},
        "param_groups": [
            {**group, "params": [found[at] for at in group["params"]]} for group in content["param_groups"]
        ],
    }


def united_content(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], where: str
) -> dict[str, Any]:
    """The content of the optimizers of a model's chunks, as that of one. Raises StateError where a parameter has
    no name, or two optimizers have it."""
    contents: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, optimizer in enumerate(optimizers):
        content = named_content(optimizer, objects.state_of(optimizer, where), names)
        if not is_named(content):
            raise StateError(
                f"{where}: optimizer {number} has parameters of no chunk of the model",
                hint='Give optimizers of other modules as a dict, optimizer={"a": ..., "b": ...}',
                path=where,
            )
        own = _names_in(content)
        if not seen.isdisjoint(own):
            raise StateError(
                f"{where}: two optimizers have the parameter {min(seen.intersection(own))!r}",
                hint='Give optimizers that are not one per chunk as a dict, optimizer={"a": ..., "b": ...}',
                path=where,
            )
        seen.update(own)
        contents.append(content)
    return merge_states(contents)


def is_named(content: Any) -> bool:
    """Whether ``content`` is state of an optimizer by name."""
    return _is_content(content) and all(
        type(name) is str for group in content["param_groups"] for name in group["params"]
    )


def merge_states(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Content by name of several optimizers, or of several ranks' parts of one, as one.

    Where two have state of a parameter the first one's counts. Groups follow each other, without parameters that
    an earlier one has, and without the groups that are empty then. Raises StateMismatch for content by position.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    rest: dict[str, Any] = {}
    owned: set[str] = set()
    for content in contents:
        if not is_named(content):
            raise StateMismatch(
                "state of an optimizer by position cannot be united with another's",
                expected="state by the names of its parameters",
                hint="Save with the model and its optimizer in one TrainState",
            )
        before = frozenset(owned)
        for group in content["param_groups"]:
            kept = [at for at, name in enumerate(group["params"]) if name not in before]
            if not kept:
                continue
            made = {**group, "params": [group["params"][at] for at in kept]}
            if "param_names" in group:
                made["param_names"] = [group["param_names"][at] for at in kept]
            owned.update(made["params"])
            groups.append(made)
        state = {**content["state"], **state}
        rest = {**content, **rest}
    return {**rest, "state": state, "param_groups": groups}


def _is_content(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(content.get("state"), dict)
        and isinstance(content.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in content["param_groups"])
    )


def _names_in(content: Mapping[str, Any]) -> list[str]:
    return [name for group in content["param_groups"] for name in group["params"]]


# Comparing.
def plan_optimizer(
    ledger: Ledger,
    optimizer: torch.optim.Optimizer | ChunkOptimizers,
    stored: Any,
    where: str,
    names: Mapping[int, str],
) -> bool:
    """Compare ``stored`` (a state dict with :class:`StoredTensor` for tensors) and claim what can be filled
    in place. False if it is no optimizer state, or does not fit at all; then nothing can be loaded.

    ``names``: of parameters, by id. Parameters that the checkpoint lacks are noted as "missing", those that only the
    checkpoint has as "unexpected", each by ``<where>/state/<name>``.
    """
    if not _is_content(stored):
        ledger.differ("type", f"{where}: stored is no optimizer state")
        return False
    optimizers = _members(optimizer)
    if not is_named(stored):
        if len(optimizers) == 1:
            return _plan_by_order(ledger, optimizers[0], stored, where)
        ledger.differ("names", f"{where}: stored by position, which says nothing of the optimizers of chunks")
        return False
    orders = [order_of(one, names) for one in optimizers]
    for one, order in zip(optimizers, orders, strict=True):
        if order is None:
            _without_names(ledger, one, where, names)
            return False
    plan = _ByName(ledger, stored, where)
    for one, order in zip(optimizers, orders, strict=True):
        plan.optimizer(one, order or [])
    plan.finish()
    return True


def _plan_by_order(ledger: Ledger, optimizer: torch.optim.Optimizer, stored: Any, where: str) -> bool:
    parameters = _compare_groups(ledger, optimizer, stored["param_groups"], where)
    if parameters is None:
        return False
    for index, state in stored["state"].items():
        live = parameters.get(index)
        if live is not None and isinstance(state, dict):
            _plan_state(ledger, optimizer, live, state, f"{where}/state/{keys.label(index)}")
    return True


def _plan_state(
    ledger: Ledger, optimizer: torch.optim.Optimizer, live: torch.Tensor, state: dict[Any, Any], where: str
) -> None:
    """Claim what ``optimizer`` holds for its parameter ``live``; for the rest, what it will be read into is made
    as ``live`` is sharded."""
    held = optimizer.state.get(live, {})
    from_torch = type(optimizer).__module__.startswith("torch.optim.")
    for name, value in state.items():
        if not isinstance(value, StoredTensor):
            continue
        mine = held.get(name)
        if isinstance(mine, torch.Tensor):
            if not ledger.claim_if_free(mine, value.index):
                _compare_held(ledger, mine, value.index, f"{where}/{keys.label(name)}")
            continue
        if from_torch and name in _SHAPED_AS_PARAMETER:
            _compare_shape(ledger, live, value.index, f"{where}/{keys.label(name)}")
        if ledger.entry(value.index).shape == tuple(live.shape):
            ledger.like(value.index, live)


def _without_names(
    ledger: Ledger, optimizer: torch.optim.Optimizer, where: str, names: Mapping[int, str]
) -> None:
    found = [
        f"parameter {at} of group {number}, {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for at, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]
    ledger.differ(
        "names",
        f"{where}: stored by the names of parameters, and {len(found)} of the target's are in no module of the "
        f"TrainState (the first is {found[0]}): give it the modules too, whatever parts are loaded",
    )


class _ByName:
    """Comparing content by name with one optimizer, or with those of all chunks."""

    def __init__(self, ledger: Ledger, stored: dict[str, Any], where: str) -> None:
        self._ledger = ledger
        self._stored = stored
        self._where = where
        self._group_of = _group_of(stored)
        self._wanted: set[str] = set()
        self._places: dict[str, str] = {}

    def optimizer(self, optimizer: torch.optim.Optimizer, order: list[str]) -> None:
        """Compare with ``optimizer``, whose parameters are called ``order``."""
        self._wanted.update(order)
        if isinstance(optimizer, torch.optim.LBFGS) and order != _names_in(self._stored):
            self._ledger.differ(
                "order", f"{self._where}: the state of LBFGS needs the same parameters in the same order"
            )
        at = 0
        for number, group in enumerate(optimizer.param_groups):
            named = order[at : at + len(group["params"])]
            at += len(named)
            self._group(optimizer, number, named)
            for name, live in zip(named, group["params"], strict=True):
                state = self._stored["state"].get(name)
                if name not in self._group_of:
                    self._ledger.differ(
                        "missing", f"{self._place(name)}: in the target, not in the checkpoint"
                    )
                    continue
                place = self._place(name)
                self._ledger.met.add(place)
                if isinstance(state, dict):
                    _plan_state(self._ledger, optimizer, live, state, place)

    def finish(self) -> None:
        """Note what no optimizer takes."""
        if self._wanted and self._wanted.isdisjoint(self._group_of):
            # Never loosened: nothing would be loaded, which looks like success.
            self._ledger.mismatches.append(
                f"nothing: {self._where}: none of {len(self._wanted)} parameters is in the checkpoint"
            )
        for name in self._group_of:
            if name not in self._wanted:
                stored = self._stored["state"].get(name)
                self._ledger.unexpected(self._place(name), stored, "in the checkpoint, not in the target")
            else:
                self._ledger.met.add(self._place(name))

    def _place(self, name: str) -> str:
        found = self._places.get(name)
        if found is None:
            found = self._places[name] = f"{self._where}/state/{keys.label(name)}"
        return found

    def _group(self, optimizer: torch.optim.Optimizer, number: int, named: list[str]) -> None:
        """Options: those of all stored groups that ``named`` are in must be equal, and complete."""
        sources = _sources(named, self._group_of)
        if not sources:
            return
        place = f"{self._where}/param_groups/[{number}]"
        groups = self._stored["param_groups"]
        (first, name), *others = sources.items()
        mine = set(optimizer.defaults) & set(optimizer.param_groups[number])
        for source, member in sources.items():
            for option in sorted(mine - set(groups[source])):
                self._ledger.differ(
                    "missing",
                    f"{place}/{option}: an option of the target that is not stored (for {member})",
                )
        for source, member in others:
            for option in _unequal(groups[first], groups[source]):
                self._ledger.differ(
                    "options", f"{place}/{option}: {_said(groups, option, first, source, name, member)}"
                )


def _members(optimizer: torch.optim.Optimizer | ChunkOptimizers) -> list[torch.optim.Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, ChunkOptimizers) else [optimizer]


def _group_of(content: Mapping[str, Any]) -> dict[str, int]:
    """{name of a parameter: number of its group}."""
    return {name: number for number, group in enumerate(content["param_groups"]) for name in group["params"]}


def _sources(named: Iterable[str], group_of: Mapping[str, int]) -> dict[int, str]:
    """{number of a stored group that some of ``named`` are in: the first of them}."""
    found: dict[int, str] = {}
    for name in named:
        if name in group_of:
            found.setdefault(group_of[name], name)
    return found


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Options in which two groups differ, or that one lacks. Tensors of a checkpoint that is not read yet count as
    equal: :func:`load_optimizer` looks at them."""
    names = (set(a) | set(b)) - _NOT_OPTIONS
    return sorted(name for name in names if name not in a or name not in b or not _equal(a[name], b[name]))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes_view(a), as_bytes_view(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _said(
    groups: Sequence[Mapping[str, Any]], option: str, first: int, second: int, name: str, other: str
) -> str:
    """What two stored groups say of an option of one group of the target."""
    texts = [repr(groups[at][option])[:60] if option in groups[at] else "nothing" for at in (first, second)]
    return (
        f"one group of the target, stored are two: {texts[0]} for {name}, {texts[1]} for {other}; "
        "give the target's optimizer groups of their own for them"
    )


def _compare_groups(
    ledger: Ledger, optimizer: torch.optim.Optimizer, groups: Any, where: str
) -> dict[Any, torch.Tensor] | None:
    """Parameters by their stored index, if the groups agree."""
    live = optimizer.param_groups
    sizes = [len(group["params"]) for group in live]
    stored_sizes = [len(group["params"]) for group in groups]
    if sizes != stored_sizes:
        ledger.differ(
            "shape", f"{where}/param_groups: stored groups of {stored_sizes} parameters, target {sizes}"
        )
        return None
    parameters: dict[Any, torch.Tensor] = {}
    for number, (group, mine) in enumerate(zip(groups, live, strict=True)):
        parameters.update(zip(group["params"], mine["params"], strict=True))
        place = f"{where}/param_groups/[{number}]"
        # torch adds defaults of its own to an optimizer that was loaded into; its groups do not have them.
        for name in sorted((set(optimizer.defaults) & set(mine)) - set(group)):
            ledger.differ("missing", f"{place}/{name}: an option of the target that is not stored")
        names, my_names = group.get("param_names"), mine.get("param_names")
        if names is not None and my_names is not None and list(names) != list(my_names):
            ledger.differ("class", f"{place}/param_names: the parameters are in another order, or others")
    return parameters


def _compare_held(ledger: Ledger, mine: torch.Tensor, index: int, place: str) -> None:
    entry = ledger.entry(index)
    if tuple(mine.shape) != entry.shape:
        ledger.differ("shape", f"{place}: stored {entry.shape}, target {tuple(mine.shape)}")
    elif str(mine.dtype).removeprefix("torch.") != entry.dtype:
        # Loosened, the stored dtype is kept: a cast of moments loses them for good.
        ledger.differ(
            "dtype", f"{place}: stored {entry.dtype}, target {str(mine.dtype).removeprefix('torch.')}"
        )


def _compare_shape(ledger: Ledger, parameter: torch.Tensor, index: int, place: str) -> None:
    entry = ledger.entry(index)
    if tuple(parameter.shape) != entry.shape:
        ledger.differ("shape", f"{place}: stored {entry.shape}, its parameter is {tuple(parameter.shape)}")


# Loading.
def load_optimizer(
    optimizer: torch.optim.Optimizer | ChunkOptimizers, content: dict[str, Any], names: Mapping[int, str]
) -> None:
    """``optimizer.load_state_dict(content)``, exactly: torch casts state to the parameters' dtype and
    rebuilds nested values; whatever it changed so is put back as it was stored, on the device that torch
    chose.

    Content by name is brought into the order of the optimizer's own parameters; those that it lacks keep the state
    that they have. Raises StateMismatch, before anything of the optimizer is changed, if one group would get two
    values of an option that is a tensor.
    """
    optimizers = _members(optimizer)
    contents = [_in_order(one, content, names) if is_named(content) else content for one in optimizers]
    for one, own in zip(optimizers, contents, strict=True):
        _load_by_order(one, own)


def _in_order(
    optimizer: torch.optim.Optimizer, content: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Content by position for ``optimizer``, from content by name."""
    group_of = _group_of(content)
    state: dict[Any, Any] = {
        key: value for key, value in content["state"].items() if key not in group_of and type(key) is not int
    }
    groups: list[dict[str, Any]] = []
    at = 0
    for number, mine in enumerate(optimizer.param_groups):
        named = [names[id(parameter)] for parameter in mine["params"]]
        positions = list(range(at, at + len(named)))
        at += len(named)
        for position, name, parameter in zip(positions, named, mine["params"], strict=True):
            if name in group_of:
                found = content["state"].get(name)
            else:
                found = optimizer.state.get(parameter)
            if found is not None:
                state[position] = found
        groups.append({**_options(optimizer, number, content, named, group_of), "params": positions})
    return {**content, "state": state, "param_groups": groups}


def _options(
    optimizer: torch.optim.Optimizer,
    number: int,
    content: dict[str, Any],
    named: list[str],
    group_of: Mapping[str, int],
) -> dict[str, Any]:
    """What the live group ``number``, of parameters called ``named``, gets besides its parameters."""
    mine, groups = optimizer.param_groups[number], content["param_groups"]
    sources = _sources(named, group_of)
    if not sources:
        # No parameter, or none that is stored: the group at this place is its like only if it is empty as well.
        empty = not named and number < len(groups) and not groups[number]["params"]
        source = groups[number] if empty else mine
        return {name: value for name, value in source.items() if name != "params"}
    (first, name), *others = sources.items()
    for source, member in others:
        for option in _unequal(groups[first], groups[source]):
            raise StateMismatch(
                f"param_groups/[{number}]/{option}: {_said(groups, option, first, source, name, member)}"
            )
    kept = {option: value for option, value in mine.items() if option in optimizer.defaults}
    found = {option: value for option, value in groups[first].items() if option not in _NOT_OPTIONS}
    if "param_names" in mine:
        found["param_names"] = mine["param_names"]
    elif "param_names" in groups[first]:
        stored = {
            name: text
            for group in groups
            for name, text in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        found["param_names"] = [stored.get(name, name) for name in named]
    return {**kept, **found}


def _load_by_order(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> None:
    optimizer.load_state_dict(content)
    order = [index for group in content["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        stored, placed = content["state"].get(index), optimizer.state.get(parameter)
        if isinstance(stored, dict) and isinstance(placed, dict):
            for name in stored.keys() & placed.keys():
                placed[name] = _exact(stored[name], placed[name])


def _exact(stored: Any, placed: Any) -> Any:
    if isinstance(stored, torch.Tensor):
        if not isinstance(placed, torch.Tensor) or placed is stored:
            return placed
        if placed.dtype == stored.dtype:
            return placed
        cast = stored.to(device=placed.device, dtype=placed.dtype)
        mine, other = as_bytes_view(local_of(cast)), as_bytes_view(local_of(placed))
        if cast.shape != placed.shape or not torch.equal(mine, other):
            # No mere cast: the optimizer's own load_state_dict made something else of it on purpose.
            return placed
        return stored.to(device=placed.device)
    if isinstance(stored, dict) and isinstance(placed, dict) and stored.keys() == placed.keys():
        for name, value in stored.items():
            placed[name] = _exact(value, placed[name])
        return placed
    if type(stored) in (list, tuple) and type(placed) is type(stored) and len(placed) == len(stored):
        return type(stored)(_exact(mine, other) for mine, other in zip(stored, placed, strict=True))
    return placed if type(placed) is type(stored) else stored
