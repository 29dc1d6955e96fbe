"""What several adapters need: is a package there, a process group of one, values into the state's tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ..api import Job, Pending, State

NO_WAIT_S = 600.0
"""Bound of every wait for a rival."""


class Late(RuntimeError):
    """A rival was not done in time."""


def absent(*distributions: str) -> str | None:
    """Which of ``distributions`` are not installed, as :meth:`~..api.System.missing` tells it; None if all are."""
    gone = []
    for name in distributions:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            gone.append(name)
    return f"not installed: pip install {' '.join(gone)}" if gone else None


def fill(state: State, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Copy tensors by name into the state's, each of which must come once. Raises KeyError."""
    import torch

    waiting = state.tensors()
    with torch.no_grad():
        for name, value in values.items() if isinstance(values, Mapping) else values:
            waiting.pop(name).copy_(value)
    if waiting:
        raise KeyError(f"{len(waiting)} tensors did not come back, {next(iter(waiting))!r} among them")


def copy_tree(into: Any, values: Any) -> int:
    """Copy the tensors of ``values`` into those of ``into``, a tree of dicts and lists of the same form; how many it
    were. Raises KeyError or IndexError where ``values`` lacks one."""
    import torch

    if isinstance(into, torch.Tensor):
        with torch.no_grad():
            into.copy_(values)
        return 1
    if isinstance(into, Mapping):
        return sum(copy_tree(value, values[key]) for key, value in into.items())
    if isinstance(into, list):
        return sum(copy_tree(value, values[index]) for index, value in enumerate(into))
    return 0


class OwnGroup:
    """The process group that some engines ask for even with one process: the job's, or one of a single rank."""

    def __init__(self, job: Job) -> None:
        import torch.distributed as dist

        self._made: str | None = None
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not dist.is_initialized():
            handle, self._made = tempfile.mkstemp(prefix="everstep-bench-group-")
            os.close(handle)
            os.unlink(self._made)
            dist.init_process_group(
                "gloo", init_method=f"file://{self._made}", rank=job.rank, world_size=job.world
            )

    def close(self) -> None:
        """End the group if it was made here."""
        if self._made is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
            with suppress(FileNotFoundError):
                os.unlink(self._made)
            self._made = None


class Futures:
    """A save whose progress is told by a future."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(NO_WAIT_S)


def finish(pending: Pending | None) -> None:
    """Wait for a save at close, whatever became of it: the caller has been told already, or does not ask."""
    if pending is not None:
        with suppress(Exception):
            pending.wait()


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Unlink ``names`` below ``directory``, as far as they are there."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(directory / name)


__all__ = [
    "NO_WAIT_S",
    "Futures",
    "Late",
    "OwnGroup",
    "absent",
    "copy_tree",
    "fill",
    "finish",
    "remove_files",
]
