"""everstep: a tiered checkpoint storage engine for PyTorch training.

The names below are loaded when they are first used, so that commands which need no torch start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import errors
    from .checkpointer import Checkpointer
    from .handles import SaveHandle
    from .loading import Recovery
    from .oneshot import load, save
    from .pinning import pin
    from .policy import Memory, Policy, Tier
    from .sizing import MemoryPlan, plan_memory
    from .state.registry import register
    from .state.sharded import Shards, flat_range
    from .state.trainstate import TrainState

_HOMES = {
    "Checkpointer": "checkpointer",
    "Memory": "policy",
    "MemoryPlan": "sizing",
    "Policy": "policy",
    "Recovery": "loading",
    "SaveHandle": "handles",
    "Shards": "state.sharded",
    "Tier": "policy",
    "TrainState": "state.trainstate",
    "errors": "",
    "flat_range": "state.sharded",
    "load": "oneshot",
    "pin": "pinning",
    "plan_memory": "sizing",
    "register": "state.registry",
    "save": "oneshot",
}

__all__ = [
    "Checkpointer",
    "Memory",
    "MemoryPlan",
    "Policy",
    "Recovery",
    "SaveHandle",
    "Shards",
    "Tier",
    "TrainState",
    "__version__",
    "errors",
    "flat_range",
    "load",
    "pin",
    "plan_memory",
    "register",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES[name]
    value = (
        getattr(import_module(f"{__name__}.{home}"), name) if home else import_module(f"{__name__}.{name}")
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
