"""What a snapshot says of itself: its meta region, which the manifest gathers from the ranks."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .format.records import IncarnationRecord
from .state.trainstate import TrainState
from .store.flush import write_meta


def describe(
    state: TrainState,
    record: IncarnationRecord,
    rank: int,
    metrics: dict[str, Any],
    compared: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """A snapshot's meta region: what the manifest gathers from the rank. ``compared``: what its vote says of equality
    (see :mod:`.auditing`)."""
    meta: dict[str, Any] = {
        "mesh": record.mesh,
        "coordinates": _coordinates(record.mesh, rank),
        "parts": {},
        "data": None,
        "rng": [],
        "metrics": metrics,
        "config_hash": record.config_hash,
        "libraries": _libraries(),
        "facts": {},
    }
    meta.update(state.describe())
    meta.update(compared)
    return write_meta(meta)


def _coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """The rank's place in a row-major mesh."""
    found: dict[str, int] = {}
    for name, size in reversed(mesh.items()):
        rank, found[name] = divmod(rank, size)
    return dict(reversed(found.items()))


@functools.lru_cache(maxsize=1)
def _libraries() -> dict[str, str]:
    import torch

    from . import __version__

    return {"everstep": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
