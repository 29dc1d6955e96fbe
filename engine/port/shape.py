"""The shapes in which other formats keep a training state: nested dicts, dotted names, optimizers by index or by name.

Pure rearranging; tensors are passed through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import StateError, UnsupportedValue
from ..state.registry import Unknown

OPTIMIZER_KEYS = {"state", "param_groups"}
GROUP_PREFIX = "param_groups."
STATE_PREFIX = "state."
EXTRA_STATE = "_extra_state"
"""How the keys of what modules keep in ``get_extra_state`` end."""


def dotted(value: Any, part: str) -> dict[str, torch.Tensor]:
    """The tensors of ``value`` (nested mappings and sequences) by dotted name, ties once, under their first name.

    Raises StateError where two of them get one name, or where there is none.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, leaf in _leaves(value, ""):
        if not isinstance(leaf, torch.Tensor) or (leaf.numel() and id(leaf) in seen):
            continue
        if name in found:
            raise StateError(
                f"two tensors of part {part!r} have one name when written with dots",
                found=name,
                hint="Export them as torch or dcp, which keep nested keys",
                path=f"{part}/{name}",
            )
        found[name] = leaf.detach()
        seen.add(id(leaf))
    if not found:
        raise StateError(f"part {part!r} holds no tensors", hint="Choose another with --part", path=part)
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}" if name else str(index))
    else:
        yield name, value


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` is what an optimizer's ``state_dict()`` gives."""
    return (
        isinstance(value, Mapping)
        and set(value) == OPTIMIZER_KEYS
        and isinstance(value["param_groups"], list)
    )


def by_index(value: Any) -> Any:
    """An optimizer's content as ``Optimizer.load_state_dict`` takes it: parameters by their position, names kept
    beside them as ``param_names``. Anything else is given back as it is."""
    if not is_optimizer(value):
        return value
    names = [name for group in value["param_groups"] for name in group["params"]]
    if not names or not all(isinstance(name, str) for name in names):
        return value
    at = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [at[name] for name in group["params"]], "param_names": list(group["params"])}
        for group in value["param_groups"]
    ]
    return {"state": {at[name]: state for name, state in value["state"].items()}, "param_groups": groups}


def from_flat_optimizer(value: Any) -> Any:
    """The nested form of a flattened optimizer ("state.<parameter>.exp_avg", "param_groups.<parameter>.lr"):
    parameters of equal options form a group. Anything else is given back as it is."""
    if not isinstance(value, Mapping) or not value:
        return value
    if not all(isinstance(key, str) and key.startswith((STATE_PREFIX, GROUP_PREFIX)) for key in value):
        return value
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        into, prefix = (state, STATE_PREFIX) if key.startswith(STATE_PREFIX) else (options, GROUP_PREFIX)
        parameter, _, name = key.removeprefix(prefix).rpartition(".")
        into.setdefault(parameter, {})[name] = item
    groups: list[dict[str, Any]] = []
    for parameter, chosen in options.items():
        same = next(
            (group for group in groups if {k: v for k, v in group.items() if k != "params"} == chosen), None
        )
        if same is None:
            groups.append({**chosen, "params": [parameter]})
        else:
            same["params"].append(parameter)
    return {"state": state, "param_groups": groups}


def with_indices(value: Any) -> Any:
    """An optimizer whose parameters are numbered, but whose state's keys became texts on the way, with numbers
    again. Anything else is given back as it is."""
    if not is_optimizer(value):
        return value
    numbers = {str(n): n for group in value["param_groups"] for n in group["params"] if isinstance(n, int)}
    return {**value, "state": {numbers.get(key, key): state for key, state in value["state"].items()}}


def pick(value: Any, path: str, where: str) -> Any:
    """The value at a dotted ``path`` in nested mappings; at each level the longest key that fits.

    Raises StateError naming what is there instead.
    """
    if path in ("", "."):
        return value
    if isinstance(value, Mapping):
        keys = sorted((key for key in value if isinstance(key, str)), key=len, reverse=True)
        for key in keys:
            if path == key:
                return value[key]
            if path.startswith(f"{key}."):
                return pick(value[key], path[len(key) + 1 :], f"{where}.{key}")
    there = sorted(map(str, value))[:20] if isinstance(value, Mapping) else type(value).__name__
    raise StateError(f"{where} has nothing at {path!r}", found=there, expected=path, path=path)


def parts_of(value: Any, chosen: Mapping[str, str], *, default: str = "model") -> dict[str, Any]:
    """The parts of a run that ``value`` becomes: those ``chosen`` ({part: dotted path}), else its top-level items
    where these are containers; a bare state dict becomes part ``default``."""
    if chosen:
        found = {part: pick(value, path, "the file") for part, path in chosen.items()}
    elif isinstance(value, Mapping) and value and not _is_state_dict(value):
        found = {str(key): item for key, item in _unwrapped(value).items()}
    else:
        found = {default: value}
    return {part: with_indices(from_flat_optimizer(item)) for part, item in found.items()}


def _unwrapped(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """One object that holds everything ({"app": {"model": ..., "optim": ...}}) is looked into."""
    if len(value) == 1:
        (inner,) = value.values()
        if isinstance(inner, Mapping) and inner and not _is_state_dict(inner) and not is_optimizer(inner):
            return inner
    return value


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    """Names to tensors: one part, not so many. Tensors beside state dicts (a generator's state, a step) make none."""
    if is_optimizer(value):
        return True
    nested = any(
        isinstance(item, Mapping) and not str(key).endswith(EXTRA_STATE) and _holds_tensors(item)
        for key, item in value.items()
    )
    return not nested and any(isinstance(item, torch.Tensor) for item in value.values())


def _holds_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in _leaves(value, ""))


def refuse_unknown(value: Any, path: str) -> None:
    """Raise UnsupportedValue where ``value`` holds a stand-in: the class that it stands for is not known here."""
    for name, leaf in _leaves(value, path):
        if isinstance(leaf, Unknown):
            raise UnsupportedValue(
                f"{name} cannot be exported: its class is not known to this process",
                found=leaf.type_name,
                hint="Leave it out with --part, or import the module that defines it and export from Python",
                path=name,
            )
