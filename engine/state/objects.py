"""Objects with ``state_dict()`` and ``load_state_dict()``: asking them, and what is known of torch's own."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from ..errors import StateError

_WRAPPED_IN = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}

_LEFT_OUT = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names of modules inside wrappers whose state dicts leave these names out by themselves."""

_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", _LEFT_OUT[0]),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", _LEFT_OUT[1]),
)
"""Modules around a module: where the class is found, its name, and the name that it gives the module inside."""


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object that can be asked for its state and given it back."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def inner_of(module: object) -> torch.nn.Module | None:
    """The module inside a DDP, DataParallel or compile wrapper; None if ``module`` is no wrapper."""
    if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)):
        return cast(torch.nn.Module, module.module)
    # A compiled module exists only where this is imported already; importing it costs a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    optimized = getattr(eval_frame, "OptimizedModule", None)
    if optimized is not None and isinstance(module, optimized):
        return cast(torch.nn.Module, module._orig_mod)
    return None


def unwrap(value: object) -> Any:
    """``value`` without the wrappers around it."""
    while (inner := inner_of(value)) is not None:
        value = inner
    return value


def state_of(value: Any, where: str) -> Any:
    """What ``value.state_dict()`` gives now, keys of modules without their wrappers' prefixes."""
    value = unwrap(value)
    content = value.state_dict()
    if isinstance(value, torch.nn.Module) and isinstance(content, dict):
        content = _renamed(content, _wrapper_prefixes(value, content), where)
    return content


def with_prefixes(module: torch.nn.Module, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inverse of the renaming of :func:`state_of`: keys as ``module`` itself (unwrapped) names them."""
    own = module.state_dict()
    prefixes = _wrapper_prefixes(module, own)
    if not prefixes:
        return content
    names = {_strip(key, prefixes): key for key in own}
    out = collections.OrderedDict((names.get(key, key), value) for key, value in content.items())
    metadata = getattr(content, "_metadata", None)
    if metadata is not None:
        own_metadata = getattr(own, "_metadata", {})
        found = {_strip(f"{key}.", prefixes)[:-1]: key for key in own_metadata}
        out._metadata = {found.get(key, key): item for key, item in metadata.items()}  # type: ignore[attr-defined]
    return out


def _wrapper_prefixes(module: torch.nn.Module, content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(prefix with the wrapper's part, prefix without) of every wrapper inside ``module``, innermost
    first."""
    joined = "\n".join(key for key in content if isinstance(key, str))
    if not any(f"{name}." in joined for name in _WRAPPED_IN.values()):
        return []
    found = [
        (f"{place}.{_WRAPPED_IN[kind]}.", f"{place}.")
        for name, child in module.named_modules(remove_duplicate=False)
        if name and inner_of(child) is not None
        for place in [".".join(step for step in name.split(".") if step not in _LEFT_OUT)]
        for kind in [cls.__name__ for cls in type(child).__mro__ if cls.__name__ in _WRAPPED_IN][:1]
    ]
    return sorted(found, key=lambda pair: -len(pair[0]))


def _strip(key: str, prefixes: list[tuple[str, str]]) -> str:
    for prefix, without in prefixes:
        if key.startswith(prefix):
            key = without + key[len(prefix) :]
    return key


def _renamed(content: dict[str, Any], prefixes: list[tuple[str, str]], where: str) -> dict[str, Any]:
    if not prefixes:
        return content
    out: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for key, value in content.items():
        name = _strip(key, prefixes)
        if name in out:
            raise StateError(
                f"{where}: two keys become one without their wrappers", found=key, path=f"{where}/{name}"
            )
        out[name] = value
    metadata = getattr(content, "_metadata", None)
    if metadata is not None:
        # Wrappers have metadata of their own, at the place that the module inside takes: the inner one wins.
        kept = collections.OrderedDict(
            (_strip(f"{key}.", prefixes)[:-1], item) for key, item in metadata.items()
        )
        out._metadata = kept  # type: ignore[attr-defined]
    return out


def ddp_modules(value: object) -> Iterator[torch.nn.parallel.DistributedDataParallel]:
    """Every DDP wrapper in ``value``, itself included."""
    if isinstance(value, torch.nn.Module):
        for child in value.modules():
            if isinstance(child, torch.nn.parallel.DistributedDataParallel):
                yield child


def replicated_parameters(value: object) -> list[torch.nn.Parameter]:
    """The parameters that DDP keeps equal on all ranks."""
    found: list[torch.nn.Parameter] = []
    for wrapper in ddp_modules(value):
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        if ignored:
            named = wrapper.module.named_parameters(remove_duplicate=False)
            found += [parameter for name, parameter in named if name not in ignored]
        else:
            found += wrapper.module.parameters()
    return found


def broadcast_buffers(value: object) -> list[torch.Tensor]:
    """The buffers that DDP overwrites with rank 0's before each forward pass."""
    found: list[torch.Tensor] = []
    for wrapper in ddp_modules(value):
        if wrapper.broadcast_buffers:
            ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
            named = wrapper.module.named_buffers(remove_duplicate=False)
            found += [buffer for name, buffer in named if name not in ignored]
    return found


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether loading a state dict into ``module`` is nothing but copying into its own tensors: no hooks, no
    methods of its own, no extra state."""
    base = torch.nn.Module
    return (
        _from_torch(module, "load_state_dict", "state_dict")
        and type(module).load_state_dict is base.load_state_dict
        and all(
            not child._state_dict_hooks
            and all(map(_only_shards, child._load_state_dict_pre_hooks.values()))
            and all(map(_only_shards, child._load_state_dict_post_hooks.values()))
            and all(map(_only_shards, child._state_dict_pre_hooks.values()))
            and _from_torch(child, "_load_from_state_dict", "_save_to_state_dict", "state_dict")
            and type(child).get_extra_state is base.get_extra_state
            and type(child).set_extra_state is base.set_extra_state
            for child in module.modules()
        )
    )


def _only_shards(hook: Any) -> bool:
    """Whether a hook is FSDP2's own: before, it brings parameters into their sharded form, in which asking the module
    for its state has put them already; after, it looks for parameters in new memory."""
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard.")


def _from_torch(module: torch.nn.Module, *methods: str) -> bool:
    return all(
        name not in module.__dict__
        and getattr(type(module), name).__module__.startswith(("torch.nn.", "torch._dynamo."))
        for name in methods
    )


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of ``module``, each once by its first name, named as :func:`state_of` names them: what
    wrappers add to the names is left out, wherever they are. Raises StateError if two have one name so."""
    names, parameters = all_parameters(module)
    found: dict[str, torch.nn.Parameter] = {}
    seen: set[int] = set()
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            if found.setdefault(name, parameter) is not parameter:
                raise StateError("two parameters have one name without their wrappers", found=name, path=name)
    return found


def all_parameters(module: torch.nn.Module, prefix: str = "") -> tuple[list[str], list[torch.nn.Parameter]]:
    """All names of parameters, behind ``prefix``, and the parameter of each, in the order of the state dict."""
    names: list[str] = []
    parameters: list[torch.nn.Parameter] = []
    hidden = _HiddenChildren()
    seen: set[int] = set()

    # Thousands of modules, at each save: calls and look-ups count here.
    def walk(module: torch.nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.append(prefix + name)
                parameters.append(parameter)
        skipped = hidden[type(module)]
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            inner = prefix if name == skipped else prefix + name + "."
            if child._modules:
                walk(child, inner)
                continue
            for own, parameter in child._parameters.items():
                if parameter is not None:
                    names.append(inner + own)
                    parameters.append(parameter)

    walk(unwrap(module), prefix)
    return names, parameters


class _HiddenChildren(dict[type, "str | None"]):
    """By class of a wrapper: the name of the child whose place it takes. None for other modules."""

    def __init__(self) -> None:
        super().__init__()
        # What is not imported wraps nothing; importing it costs a second.
        places = ((sys.modules.get(module), name, child) for module, name, child in _WRAPPERS)
        self._wrappers = [(getattr(module, name), child) for module, name, child in places if module]

    def __missing__(self, kind: type) -> str | None:
        found = next((child for wrapper, child in self._wrappers if issubclass(kind, wrapper)), None)
        self[kind] = found
        return found
