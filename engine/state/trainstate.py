"""All of a trainer's state under one roof."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import BadOption, StateError
from ..format.layout import Scope
from . import objects
from .chunks import ChunkOptimizers, Chunks, as_chunk_optimizers, as_chunks, kind_of
from .grads import Gradients
from .names import Asker
from .registry import ObjectState, type_name
from .rng import RandomState
from .sharded import local_of
from .steady import Steady
from .tree import FlatState, Leaf, flatten

BARE_PART = "bare_value"
"""The one part of a state that is no mapping of parts: a tensor, a list, a number, a large dict."""

PARTS_MAX = 64
"""A plain dict with more keys than this is one value, not so many parts (each part is a file of its own)."""

_POSITION_ITEMS_MAX = 16

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

_NOTHING_IN = _PLAIN_TENSORS | {type(None), bool, int, float, str, bytes}
"""Types without objects inside."""

_tensor_of = operator.attrgetter("tensor")

DATA_KINDS = ("finite", "stream")


class TrainState:
    """What a training run consists of, to be saved and restored together.

    ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``loader``, ``ema`` and every further keyword may be
    anything with ``state_dict()`` and ``load_state_dict()``, a tensor, or plain values, or a list or dict of
    these; each is a *part*. They are asked for their state anew at every save, and restored in place.
    ``rng``: the random number generators of Python, numpy and torch. ``grads=True`` stores the gradients of
    the model and ``micro_step`` (which the trainer keeps up to date), so that a save between two optimizer
    steps is exact. ``extra``: a dict of further values, updated in place by a load. ``data``: "finite" or
    "stream", what the loader reads: a checkpoint that says the other one is not loaded. ``replicated``: parts whose
    tensors the user promises to be equal on all ranks, besides what DDP says.

    The state of a torch optimizer is stored by the names of its parameters where the modules that these belong to
    are in the TrainState too, so that it fits an optimizer with other groups, another order, or of a part of the
    model; else by position.

    ``model`` as a list (or tuple) of modules: the chunks of *one* model that this rank holds (pipeline stages),
    with names of the whole model. They are stored, and restored in place, as one model, so that another number of
    chunks or ranks can load it; ``optimizer`` as a list is then one for each of them, or more. Give other modules
    as a dict, or as parts of their own.

    ``reshard_loader``: ``fn(states, rank, world) -> state``, called where a checkpoint of another number of ranks is
    loaded: ``states`` are the states of the part ``loader`` of all ranks that saved, in their order; what it gives
    for ``rank`` of the ``world`` that loads is put into this rank's loader. Every rank calls it with the same states.

    Used from the trainer's thread only. Nothing of the state is kept between calls.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        *,
        rng: bool = True,
        ema: Any = None,
        grads: bool = False,
        micro_step: int | None = None,
        extra: dict[str, Any] | None = None,
        data: str | None = None,
        replicated: Collection[str] = (),
        reshard_loader: Callable[[list[Any], int, int], Any] | None = None,
        **parts: Any,
    ) -> None:
        if data is not None and data not in DATA_KINDS:
            raise BadOption(
                "data= says what kind of data the loader reads",
                found=repr(data),
                expected=" or ".join(map(repr, DATA_KINDS)),
                hint="Give what has a state of its own as loader=, or under another name",
            )
        if reshard_loader is not None and not callable(reshard_loader):
            raise BadOption(
                "reshard_loader= is a function of (states, rank, world)",
                found=type(reshard_loader).__qualname__,
            )
        if grads and model is None:
            raise BadOption("grads=True needs a model")
        reserved = sorted({"rng", "grads", "extra", BARE_PART} & set(parts))
        if reserved:
            raise BadOption("a part of this name exists already", found=reserved)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.loader = loader
        self.ema = ema
        self.extra = {} if extra is None else extra
        self.micro_step = micro_step
        self.data = data
        self.reshard_loader = reshard_loader
        self.replicated = frozenset({replicated} if isinstance(replicated, str) else replicated)
        self.others: dict[str, Any] = parts
        self._grads = Gradients(self) if grads else None
        self._rng = RandomState() if rng else None
        self._root: Any = None
        self._global_addresses: frozenset[int] = frozenset()
        self._first_addresses: frozenset[int] = frozenset()
        self._global_state: dict[tuple[str, tuple[Any, ...]], frozenset[int | str]] = {}
        self._position: dict[str, Any] | None = None

    @classmethod
    def of(cls, value: Any) -> TrainState:
        """``value`` itself if it is a TrainState; else one that holds it.

        A plain dict with text keys (at most :data:`PARTS_MAX`) gives its items as parts; anything else is one
        part, :data:`BARE_PART`.
        """
        if isinstance(value, TrainState):
            return value
        state = cls(rng=False)
        if _is_mapping_of_parts(value):
            state.others, state._root = value, value
        else:
            state.others = {BARE_PART: value}
        return state

    def live_parts(self) -> dict[str, Any]:
        """{part: the live object}, without those that are None. A list of modules as model, and its list of
        optimizers, are one object each (see :mod:`.chunks`)."""
        named = {
            "model": self.model,
            "ema": self.ema,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "grads": self._grads,
            "loader": self.loader,
            "extra": self.extra or None,
            "rng": self._rng,
        }
        found = {part: value for part, value in named.items() if value is not None}
        found.update(self.others)
        if "model" in found:
            found["model"] = as_chunks(found["model"])
            if "optimizer" in found and isinstance(found["model"], Chunks):
                found["optimizer"] = as_chunk_optimizers(found["optimizer"])
        return found

    def parts(self) -> dict[str, Any]:
        """{part: its state}, asked now. Raises StateError where a save at this point could not be exact."""
        return self._ask(Asker(self))

    def _ask(self, ask: Asker) -> dict[str, Any]:
        self._check_micro_step()
        self._find_replicated(ask)
        found: dict[str, Any] = {}
        for part, value in self.live_parts().items():
            if objects.is_stateful(value) and not isinstance(value, torch.Tensor):
                found[part] = ObjectState(type_name(kind_of(value)), ask.of_part(part, value))
            else:
                found[part] = value
        self._position = _position(found.get("loader"))
        return found

    def flatten(self, recipes: Steady | None = None) -> FlatState:
        """Leaves and state image of all parts, asked now; faster with the ``recipes`` of former times."""
        ask = Asker(self, recipes)
        parts = self._ask(ask)
        shared = bool(
            self.replicated or self._global_addresses or self._global_state or self._first_addresses
        )
        looker = ask.looker
        noted = looker.to_note() if looker is not None else None
        flat = flatten(parts, scope=self.scope if shared else None, ask=ask, recipes=recipes, noted=noted)
        if looker is not None:
            looker.learn(noted or {}, lambda: ask.names)
            if any(part not in looker.known for part, _, _ in self._find(torch.optim.Optimizer)):
                flat.by = ()
        return flat

    def pieces(self) -> list[torch.Tensor]:
        """The plain tensors with what this rank holds, asked now."""
        return [piece for leaf in self.flatten().leaves for piece in leaf.pieces]

    def replace(self, part: str, value: Any) -> None:
        """Hold ``value`` as ``part`` from now on: restoring calls it where a part could not be changed in
        place."""
        if part == BARE_PART:
            raise StateError(f"a bare {type(value).__qualname__} cannot be restored in place", path=part)
        if part in self.others:
            self.others[part] = value
        elif part in ("rng", "grads"):
            raise StateError(f"{part} cannot be replaced", path=part)
        else:
            setattr(self, part, value)

    # Structure.
    def scope(self, part: str, path: Sequence[Any], tensor: torch.Tensor) -> Scope:
        """Whose a tensor is, as of the last :meth:`parts`: parameters under DDP, and their optimizer state,
        are one for the whole job; of buffers that DDP broadcasts, and of what an optimizer keeps whole for a sharded
        parameter (its count of steps), the first rank's count elsewhere; everything else is this rank's own."""
        if part in self.replicated:
            return Scope.GLOBAL
        if not self._global_addresses and not self._first_addresses:
            return Scope.RANK
        address = tensor.data_ptr()
        if address in self._first_addresses:
            return Scope.FIRST
        for depth in range(len(path) - 2):
            if path[depth] == "state":
                owners = self._global_state.get((part, tuple(path[:depth])))
                if owners is not None:
                    return Scope.GLOBAL if path[depth + 1] in owners else Scope.RANK
        return Scope.GLOBAL if address in self._global_addresses else Scope.RANK

    def modules(self) -> Iterable[tuple[str, tuple[Any, ...], torch.nn.Module]]:
        """(part, path in it, module) of the modules of this state; those inside of them are not told apart."""
        return self._find(torch.nn.Module)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers of this state, each once."""
        found = {id(item): item for _, _, item in self._find(torch.optim.Optimizer)}
        return list(found.values())

    def late_tensors(self, leaves: Sequence[Leaf]) -> set[int]:
        """Indices of the leaves that only an optimizer's step changes: its parameters and its state. They may
        be copied until just before that step; all others must be copied before the save returns."""
        parameters: list[torch.Tensor] = []
        values: list[Any] = []
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                parameters += group["params"]
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    values += state.values()
        if not _are_plain(values):
            values = [value for value in values if isinstance(value, torch.Tensor)]
        # Most of an optimizer's state are its very own tensors; addresses are looked at for what is left.
        held = set(
            itertools.compress(map(id, values), map(_PLAIN_TENSORS.__contains__, map(type, _local(values))))
        )
        own = map(held.__contains__, map(id, map(_tensor_of, leaves)))
        found = set(itertools.compress(range(len(leaves)), own))
        for owned in (parameters, values):
            if len(found) < len(leaves):
                found |= _lying_in(owned, leaves, found)
        return found

    def describe(self) -> dict[str, Any]:
        """Plain values for the manifest: "parts" ({part: {"class", "settings"}}), "rng" (kinds), "data"."""
        parts: dict[str, dict[str, Any]] = {}
        for part, value in self.live_parts().items():
            item = objects.unwrap(value)
            parts[part] = {"class": type_name(type(item)).replace(":", "."), "settings": _settings(item)}
        kinds = self._rng.kinds if self._rng is not None else []
        data = None if self.data is None else {"kind": self.data, "position": self._position}
        return {"parts": parts, "rng": kinds, "data": data}

    def _find(self, kind: type) -> Iterable[tuple[str, tuple[Any, ...], Any]]:
        for part, value in self.live_parts().items():
            for path, item in _items_in(value, ()):
                if isinstance(item, kind):
                    yield part, path, item

    def _find_replicated(self, ask: Asker) -> None:
        parameters: list[torch.nn.Parameter] = []
        buffers: list[torch.Tensor] = []
        # Without a process group there is no DDP; looking for it in thousands of modules takes milliseconds.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for _, _, module in self.modules():
                parameters += objects.replicated_parameters(module)
                buffers += objects.broadcast_buffers(module)
        self._global_addresses = frozenset(local_of(parameter).data_ptr() for parameter in parameters) - {0}
        whole = [value for one in self.optimizers() for value in _kept_whole(one)]
        self._first_addresses = frozenset(tensor.data_ptr() for tensor in (*buffers, *whole)) - {0}
        self._global_state = {}
        if not parameters:
            return
        ids = {id(parameter) for parameter in parameters}
        for part, path, optimizer in self._find(torch.optim.Optimizer):
            order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # Its state may be stored by position or by name.
            found: set[int | str] = set(self._global_state.get((part, path), ()))
            for index, parameter in enumerate(order):
                if id(parameter) in ids:
                    found.add(index)
                    if id(parameter) in ask.names:
                        found.add(ask.names[id(parameter)])
            self._global_state[(part, path)] = frozenset(found)

    def _check_micro_step(self) -> None:
        if self._grads is not None or not self.micro_step:
            return
        modules = [module for part, _, module in self.modules() if part == "model"]
        if any(parameter.grad is not None for module in modules for parameter in module.parameters()):
            raise StateError(
                "a save between two optimizer steps would lose the gradients accumulated so far",
                found=f"micro_step={self.micro_step} with gradients",
                hint="Use TrainState(grads=True), or save when micro_step is 0",
                path="grads",
            )


def _lying_in(owned: Sequence[torch.Tensor], leaves: Sequence[Leaf], known: Collection[int]) -> set[int]:
    """The leaves, but for those that are ``known``, that are one of ``owned``, all of it."""
    places = {tensor.data_ptr(): tensor for tensor in _local(owned)}
    places.pop(0, None)
    found: set[int] = set()
    left = [index for index in range(len(leaves)) if index not in known]
    for index, tensor in zip(left, _local([leaves[index].tensor for index in left]), strict=True):
        other = places.get(tensor.data_ptr()) if type(tensor) in _PLAIN_TENSORS else None
        # Another view that begins at the same address may reach further than what the optimizer owns.
        if other is tensor or (
            other is not None
            and other.shape == tensor.shape
            and other.stride() == tensor.stride()
            and other.dtype == tensor.dtype
        ):
            found.add(index)
    return found


def _are_plain(values: Iterable[Any]) -> bool:
    return _PLAIN_TENSORS.issuperset(map(type, values))


def _local(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What this rank holds of each: hundreds of plain ones are not asked one by one."""
    return tensors if _are_plain(tensors) else list(map(local_of, tensors))


def _kept_whole(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """The plain tensors that an optimizer has for its sharded parameters."""
    if _are_plain(optimizer.state):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict) and local_of(parameter) is not parameter:
            for value in state.values():
                if isinstance(value, torch.Tensor) and local_of(value) is value:
                    yield value


def _is_mapping_of_parts(value: Any) -> bool:
    return (
        type(value) is dict
        and 0 < len(value) <= PARTS_MAX
        and BARE_PART not in value
        and all(type(key) is str and key and key.isprintable() for key in value)
    )


def _items_in(value: Any, path: tuple[Any, ...]) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Objects with state in ``value``, a few containers deep."""
    if isinstance(value, dict) and len(path) < 3:
        if not _NOTHING_IN.issuperset(map(type, value.values())):
            for key, item in value.items():
                yield from _items_in(item, (*path, key))
    elif isinstance(value, (list, tuple)) and len(path) < 3:
        for index, item in enumerate(value):
            yield from _items_in(item, (*path, index))
    elif isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        yield path, value
    elif isinstance(value, (Chunks, ChunkOptimizers)):
        for item in value.modules if isinstance(value, Chunks) else value.optimizers:
            yield path, item


def _position(state: Any) -> dict[str, Any] | None:
    """The plain numbers and texts at the top of a loader's state: where in the data it stands."""
    content = state.value if isinstance(state, ObjectState) else state
    if not isinstance(content, Mapping):
        return None
    scalars = [(str(key), item) for key, item in content.items() if type(item) in (int, float, str, bool)]
    return dict(scalars[:_POSITION_ITEMS_MAX])


def _settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return {name: _plain(item) for name, item in value.defaults.items()}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return str(value)[:200]
