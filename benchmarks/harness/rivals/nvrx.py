"""nvidia-resiliency-ext: its LocalCheckpointManager. Asynchronous saves synchronize with CUDA, so they need a GPU;
synchronous ones work with a state dict class of one's own, which its interface asks for. Nothing is synced.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import Done, Job, Pending, Session, System
from .parts import OwnGroup, absent, copy_tree

if TYPE_CHECKING:
    from torch import Tensor


class HostState:
    """A nested state whose tensors lie on the host: what the manager asks of a state dict, without moving anything."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """They are there: a synchronous save reads them where they are."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They stay there."""

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        _collect(self.tree, found)
        return found


def _collect(value: Any, found: list[Tensor]) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _collect(one, found)


class NvrxSession(Session):
    """The manager keeps the newest checkpoint only: it removes the former ones when a save is done."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._own = OwnGroup(job)
        self._manager = self._open()

    def _open(self) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )

        return LocalCheckpointManager(self.job.directory, session_id="bench")

    def save(self, step: int) -> Pending:
        self._manager.save(HostState(self.job.state.tree()), iteration=step, is_async=False)
        return Done()

    def load(self, step: int) -> None:
        newest = self._manager.find_latest()
        if newest != step:
            raise ValueError(f"the manager has step {newest}, not {step}")
        loaded, _ = self._manager.load()
        copy_tree(self.job.state.tree(), loaded.tree)
        self._manager.latest_iteration = -1

    def path(self, step: int) -> Path:
        return Path(self._manager.local_ckpt_dir)

    def forget(self, step: int) -> None:
        """The manager has."""

    def close(self) -> None:
        self._own.close()


class Nvrx(System):
    name = "nvrx"
    meaning = "nvidia-resiliency-ext's LocalCheckpointManager, synchronous"
    by_default = False
    works = frozenset({"save", "load"})
    package = "nvidia-resiliency-ext"

    def missing(self) -> str | None:
        return absent("nvidia-resiliency-ext")

    def open(self, job: Job) -> Session:
        return NvrxSession(job)


class NvrxAsync(Nvrx):
    name = "nvrx-async"
    meaning = "nvidia-resiliency-ext's LocalCheckpointManager, asynchronous"
    by_default = True
    works = frozenset({"save", "async", "load"})

    def missing(self) -> str | None:
        return super().missing() or "needs CUDA: an asynchronous save calls torch.cuda.synchronize()"


__all__ = ["HostState", "Nvrx", "NvrxAsync"]
