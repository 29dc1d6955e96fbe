"""Without a training loop: read a run, or write one checkpoint, in one call."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .backends.open import open_backend
from .discovery import Proposals, find_run
from .errors import NoCheckpoint, NotARun, StepOrder
from .format.constants import CHUNK_BYTES
from .loading import Loader, as_values, into_state
from .memory.directory import arena_dir
from .places import locate
from .ranks import Ranks
from .state.trainstate import TrainState, as_train_state

RANK_TIMEOUT_S = 60.0


def load(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    parts: Collection[str] | None = None,
    rank: int = 0,
    into: TrainState | Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
) -> dict[str, Any]:
    """The state of one rank at ``step`` (default: the newest) as plain nested values on the CPU: {part: value}.

    Reads only; the run may be live. With ``into`` live objects are filled in place instead, and the result is
    empty. Raises NotARun, NoCheckpoint, Damaged, CannotTell, StateMismatch.
    """
    place = locate(root)
    backend = open_backend(place.url, shared=True)
    arenas = arena_dir(Path("/dev/shm"), place.run_key)
    loader = Loader(backend, Ranks.alone(), arenas, timeout_s=RANK_TIMEOUT_S)
    read = as_values(rank, parts) if into is None else into_state(as_train_state(into), rank, None, allow)
    found = loader.load(read, step=step)
    if found is None:
        _explain_nothing(root, place.url)
    assert found is not None
    return found[1].values or {}


def _explain_nothing(root: str | os.PathLike[str], url: str) -> None:
    backend = open_backend(url, shared=True)
    if find_run(backend) is None:
        raise NotARun(
            f"{os.fspath(root)} is no run",
            found="no run.json" if os.path.isdir(root) else "no such directory",
            expected="the directory of a run",
        )
    raise NoCheckpoint(f"the run at {os.fspath(root)} has no checkpoint yet", hint="`everstep fsck` says more.")
