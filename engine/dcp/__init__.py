"""A storage backend for ``torch.distributed.checkpoint`` (DCP): checkpoints of any trainer that speaks it, in runs of
everstep.

The names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .installing import install, uninstall
    from .planners import LoadPlanner, SavePlanner
    from .reader import Reader
    from .stager import Stager
    from .writer import Writer

_HOMES = {
    "LoadPlanner": "planners",
    "Reader": "reader",
    "SavePlanner": "planners",
    "Stager": "stager",
    "Writer": "writer",
    "install": "installing",
    "uninstall": "installing",
}

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Stager", "Writer", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
