"""Walking a live target and a checkpoint side by side.

:meth:`Fitter.part` compares one part (its checkpoint's values having :class:`StoredTensor` for tensors),
claims live tensors, notes differences, and gives an *applier*: called later with the real values, it puts
them in place and returns what the parent should hold (the live object itself wherever that can be).

The rule for plain values: a subtree without tensors on either side is replaced as a whole (a history may have
grown); containers with tensors, and the outermost container of a part, must have the same keys. None and
empty containers in the target take whatever is stored.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..format.entries import Scope
from . import keys, objects
from .chunks import ChunkOptimizers, Chunks, kind_of
from .optim import load_optimizer, plan_optimizer
from .plan_base import Ledger, Phase, Planned, StoredArray, StoredTensor, stored_in
from .registry import ObjectState, attributes_of, set_attributes
from .sharded import Shards, held_by

Applier = Callable[[Any], Any]

_SCALARS = (bool, int, float, complex, str, bytes)
_WITH_TYPE_CHECK = (
    torch.optim.Optimizer,
    ChunkOptimizers,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
"""Objects whose load_state_dict takes anything: another class's state must not get there."""


def _take(value: Any) -> Any:
    return value


class Fitter:
    """One restore. Collects loads of objects, which run in their phases once all appliers have run."""

    def __init__(self, ledger: Ledger, names: Mapping[int, str]) -> None:
        """``names``: of parameters, by id."""
        self.ledger = ledger
        self._names = names
        self._loads: list[tuple[Phase, Callable[[], Any]]] = []

    def part(self, live: Any, stored: Any, part: str) -> Applier:
        """Compare a whole part."""
        before = (self.ledger.matched, self.ledger.wanted)
        apply = self.fit(live, stored, part, strict=True)
        matched, wanted = self.ledger.matched - before[0], self.ledger.wanted - before[1]
        if wanted and not matched:
            # Never loosened: a target of which nothing matches keeps its fresh values and looks like success.
            self.ledger.mismatches.append(f"nothing: {part}: none of {wanted} tensors is in the checkpoint")
        return apply

    def load_objects(self) -> None:
        """Give all objects their state: modules, optimizers, schedulers, others, random numbers."""
        for _, load in sorted(self._loads, key=lambda item: item[0]):
            load()
        self._loads.clear()

    def fit(self, live: Any, stored: Any, where: str, *, strict: bool = False) -> Applier:
        """Compare ``live`` with ``stored``."""
        type_name = None
        if isinstance(stored, ObjectState):
            type_name, stored = stored.type_name, stored.value
        if isinstance(live, (torch.Tensor, Shards)):
            return self._tensor(live, stored, where)
        if objects.is_stateful(live):
            return self._object(live, stored, type_name, where)
        if isinstance(live, np.ndarray):
            return self._array(live, stored, where)
        if isinstance(live, torch.Generator):
            return self._generator(live, stored, where)
        if live is None or (isinstance(live, (dict, list)) and not live):
            for index in stored_in(stored):
                self.ledger.tensor(index)
            return lambda value: refill(live, value)
        if isinstance(live, dict):
            return self._dict(live, stored, where, strict)
        if isinstance(live, (list, tuple)):
            return self._sequence(live, stored, where, strict)
        if dataclasses.is_dataclass(live):
            return self._dataclass(live, stored, where)
        return self._plain(live, stored, where)

    def _mistyped(self, live: Any, stored: Any, where: str) -> Applier:
        self.ledger.differ("type", f"{where}: stored {_kind(stored)}, target {_kind(live)}")
        return _take

    def _plain(self, live: Any, stored: Any, where: str) -> Applier:
        scalars = (type(None), *_SCALARS)
        both = isinstance(live, scalars) and isinstance(stored, scalars)
        # Sets, dates, enums and the like must keep their type; scalars may become None or another scalar.
        if not both and stored is not None and type(live) is not type(stored):
            return self._mistyped(live, stored, where)
        return lambda value: refill(live, value)

    def _tensor(self, live: torch.Tensor | Shards, stored: Any, where: str) -> Applier:
        self.ledger.wanted += 1
        if not isinstance(stored, StoredTensor):
            return self._mistyped(live, stored, where)
        self.ledger.claim(live, stored.index, where)
        return lambda value: live

    def _array(self, live: np.ndarray[Any, Any], stored: Any, where: str) -> Applier:
        if not isinstance(stored, (np.ndarray, StoredArray)):
            return self._mistyped(live, stored, where)
        if tuple(stored.shape) != live.shape:
            self.ledger.differ("shape", f"{where}: stored {tuple(stored.shape)}, target {live.shape}")
        elif stored.dtype != live.dtype:
            self.ledger.differ("dtype", f"{where}: stored numpy {stored.dtype}, target {live.dtype}")

        def apply(value: Any) -> Any:
            if not live.flags.writeable:
                return value
            np.copyto(live, value, casting="unsafe")
            return live

        return apply

    def _generator(self, live: torch.Generator, stored: Any, where: str) -> Applier:
        if not isinstance(stored, torch.Generator):
            return self._mistyped(live, stored, where)

        def apply(value: Any) -> Any:
            live.set_state(value.get_state())
            return live

        return apply

    def _dict(self, live: dict[Any, Any], stored: Any, where: str, strict: bool) -> Applier:
        if not isinstance(stored, dict):
            return self._none(live, stored, where)
        if not strict and not holds_tensors(live) and not holds_tensors(stored):
            return self._whole(live, stored, where)
        appliers = self._entries(live, stored, where)

        def apply(value: Any) -> Any:
            made = {key: appliers[key](value[key]) for key in value if key in appliers}
            kept = {key: item for key, item in live.items() if key not in made}
            live.clear()
            live.update({**made, **kept})
            return live

        return apply

    def _entries(self, live: dict[Any, Any], stored: dict[Any, Any], where: str) -> dict[Any, Applier]:
        appliers: dict[Any, Applier] = {}
        for key in stored.keys() - live.keys():
            self.ledger.unexpected(place(where, key), stored[key], "in the checkpoint, not in the target")
        for key, value in live.items():
            here = place(where, key)
            if key in stored:
                self.ledger.met.add(here)
                appliers[key] = self.fit(value, stored[key], here)
            else:
                self.ledger.wanted += holds_tensors(value)
                self.ledger.differ("missing", f"{here}: in the target, not in the checkpoint")
        return appliers

    def _sequence(self, live: Any, stored: Any, where: str, strict: bool) -> Applier:
        base = list if isinstance(live, list) else tuple
        if not isinstance(stored, base):
            return self._none(live, stored, where)
        if not holds_tensors(live) and not holds_tensors(stored):
            return self._whole(live, stored, where)
        if len(live) != len(stored):
            self.ledger.differ("shape", f"{where}: stored {len(stored)} elements, target {len(live)}")
            return _take
        appliers = [
            self.fit(mine, other, f"{where}/[{at}]")
            for at, (mine, other) in enumerate(zip(live, stored, strict=True))
        ]

        def apply(value: Any) -> Any:
            made = [one(item) for one, item in zip(appliers, value, strict=True)]
            if isinstance(live, list):
                live[:] = made
                return live
            same = all(mine is other for mine, other in zip(live, made, strict=True))
            return live if same else tuple.__new__(type(live), made)

        return apply

    def _dataclass(self, live: Any, stored: Any, where: str) -> Applier:
        if type(stored) is not type(live):
            return self._none(live, stored, where)
        mine, other = attributes_of(live), attributes_of(stored)
        if not holds_tensors(mine) and not holds_tensors(other):
            return lambda value: refill(live, value)
        appliers = self._entries(mine, other, where)

        def apply(value: Any) -> Any:
            found = attributes_of(value)
            set_attributes(live, {name: one(found[name]) for name, one in appliers.items()})
            return live

        return apply

    def _none(self, live: Any, stored: Any, where: str) -> Applier:
        return _take if stored is None else self._mistyped(live, stored, where)

    def _whole(self, live: Any, stored: Any, where: str) -> Applier:
        return lambda value: refill(live, value)

    # Objects.
    def _object(self, live: Any, stored: Any, type_name: str | None, where: str) -> Applier:
        live = objects.unwrap(live)
        self._check_type(live, type_name, where)
        load, phase = live.load_state_dict, Phase.OTHERS
        if isinstance(live, Planned):
            live.plan(self.ledger, stored, where)
            phase = live.phase
        elif isinstance(live, torch.nn.Module):
            return self._module(live, stored, where)
        elif isinstance(live, Chunks):
            return self._chunks(live, stored, where)
        elif isinstance(live, (torch.optim.Optimizer, ChunkOptimizers)):
            plan_optimizer(self.ledger, live, stored, where, self._names)
            load, phase = functools.partial(load_optimizer, live, names=self._names), Phase.OPTIMIZERS
        elif isinstance(live, torch.optim.lr_scheduler.LRScheduler):
            phase = Phase.SCHEDULERS
        elif any(self.ledger.entry(index).scope is Scope.GLOBAL for index in stored_in(stored)):
            self._shards_of(objects.state_of(live, where), stored, where)
        return self._later(phase, load, live)

    def _shards_of(self, own: Any, stored: Any, where: str) -> None:
        """Sharded tensors that an object of the user's own gives as its state are filled, and given back to it, as it
        gave them: a tensor of the whole job would be no answer to a rank's regions."""
        if isinstance(own, dict) and isinstance(stored, dict):
            for key in own.keys() & stored.keys():
                self._shards_of(own[key], stored[key], place(where, key))
        elif isinstance(own, (list, tuple)) and isinstance(stored, (list, tuple)):
            for at, (mine, other) in enumerate(zip(own, stored, strict=False)):
                self._shards_of(mine, other, f"{where}/[{at}]")
        elif isinstance(stored, StoredTensor) and held_by(own) is not None:
            self.ledger.claim(own, stored.index, where)

    def later(self, phase: Phase, load: Callable[[Any], Any], value: Any) -> None:
        """Have ``load(value)`` called in its phase."""
        self._loads.append((phase, lambda: load(value)))

    def _later(self, phase: Phase, load: Callable[[Any], Any], live: Any) -> Applier:
        def apply(value: Any) -> Any:
            self.later(phase, load, value)
            return live

        return apply

    def _check_type(self, live: Any, type_name: str | None, where: str) -> None:
        if type_name is None or not isinstance(live, _WITH_TYPE_CHECK):
            return
        stored, mine = type_name.partition(":")[2], kind_of(live).__qualname__
        if stored != mine:
            self.ledger.differ("class", f"{where}: state of a {stored}, the target is a {mine}")

    def _chunks(self, live: Chunks, stored: Any, where: str) -> Applier:
        """Each chunk takes its own keys of the one state of all."""
        appliers: list[Applier] = []
        if isinstance(stored, list):
            # Saved module by module, in a list.
            appliers.append(self._sequence(list(live.modules), stored, where, strict=True))
        elif not isinstance(stored, dict):
            return self._mistyped(live, stored, where)
        else:
            known: set[str] = set()
            for module in live.modules:
                own = objects.state_of(module, where).keys()
                known.update(own)
                mine = {key: value for key, value in stored.items() if key in own}
                appliers.append(self._module(objects.unwrap(module), mine, where))
            for key in stored.keys() - known:
                self.ledger.unexpected(place(where, key), stored[key], "in the checkpoint, not in the target")

        def apply(value: Any) -> Any:
            for one in appliers:
                one(value)
            return live

        return apply

    def _module(self, live: torch.nn.Module, stored: Any, where: str) -> Applier:
        if not isinstance(stored, dict):
            return self._mistyped(live, stored, where)
        own = objects.state_of(live, where)
        for key in stored.keys() - own.keys():
            self.ledger.unexpected(place(where, key), stored[key], "in the checkpoint, not in the target")
        plain = objects.is_plain_module(live)
        missing = False
        for key, value in own.items():
            here = place(where, key)
            tensor = isinstance(value, (torch.Tensor, Shards))
            self.ledger.wanted += tensor
            if key not in stored:
                missing = True
                self.ledger.differ("missing", f"{here}: in the target, not in the checkpoint")
                continue
            self.ledger.met.add(here)
            if tensor != isinstance(stored[key], StoredTensor):
                self._mistyped(value, stored[key], here)
            elif tensor and plain:
                self.ledger.claim(value, stored[key].index, here)
            elif tensor and self.ledger.fits(value, stored[key].index, here):
                # A module that does something of its own while loading gets a filled dict instead of filled
                # tensors.
                self.ledger.like(stored[key].index, value)
        if plain:
            return lambda value: live

        def load(value: Any) -> None:
            content: Any = collections.OrderedDict((key, item) for key, item in value.items() if key in own)
            if hasattr(value, "_metadata"):
                content._metadata = value._metadata
            live.load_state_dict(objects.with_prefixes(live, content), strict=not missing)

        return self._later(Phase.MODULES, load, live)


def holds_tensors(value: Any) -> bool:
    """Whether ``value``, a live or a stored one, holds tensors, large arrays or objects with state
    anywhere."""
    if isinstance(value, (torch.Tensor, Shards, StoredTensor, StoredArray, ObjectState)):
        return True
    if isinstance(value, (*_SCALARS, type(None), np.ndarray, np.generic)):
        return False
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    if isinstance(value, (list, tuple, collections.deque)):
        return any(map(holds_tensors, value))
    if isinstance(value, type):
        return False
    if objects.is_stateful(value):
        return True
    return dataclasses.is_dataclass(value) and any(map(holds_tensors, attributes_of(value).values()))


def place(where: str, key: Any) -> str:
    """The path of a child, as it is written in the checkpoint's keys."""
    return f"{where}/{keys.label(key)}"


def _kind(value: Any) -> str:
    if isinstance(value, (StoredTensor, torch.Tensor, Shards)):
        return "a tensor"
    if isinstance(value, StoredArray):
        return "a numpy array"
    return f"a {type(value).__qualname__}"


def _is_frozen(cls: Any) -> bool:
    return bool(cls.__dataclass_params__.frozen)


def refill(live: Any, value: Any) -> Any:
    """Give ``live`` the contents of ``value`` if it can hold them; else ``value``, for the parent to hold."""
    if type(live) is not type(value) or live is value:
        return value
    if isinstance(live, (dict, set)):
        live.clear()
        live.update(value)
        if attributes_of(value):
            set_attributes(live, attributes_of(value))
    elif isinstance(live, (list, bytearray)):
        live[:] = value
    elif isinstance(live, collections.deque) and live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    elif dataclasses.is_dataclass(live) and not _is_frozen(type(live)):
        set_attributes(live, attributes_of(value))
    else:
        return value
    return live
