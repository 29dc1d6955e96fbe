"""torch_checkpointing: its CheckpointManager, synchronous, and asynchronous as its guide tells it for CPUs: no pinned
memory, no copies that do not block; a process writes from shared memory, which is kept. Nothing is synced.
"""

from __future__ import annotations

from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import Futures, absent

WRITERS = 2
"""Threads that write the state's parts, each a file of its own."""


class TorchCheckpointingSession(Session):
    def __init__(self, job: Job, *, beside: bool) -> None:
        super().__init__(job)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        files = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(save=_config(beside), storage_config=files)
        )
        if beside:
            self._manager.prewarm_staging(job.state.tree())
            self._manager._saver._checkpoint_process.wait_for_init()

    def save(self, step: int) -> Pending:
        future = self._manager.save(str(self.path(step)), self.job.state.tree())
        return Done() if future is None else Futures(future)

    def settle(self) -> None:
        with self._manager.lock():  # what its guide has an optimizer step run in
            pass

    def load(self, step: int) -> None:
        self._manager.load(str(self.path(step)), into=self.job.state.tree(), strict=True)

    def notes(self) -> list[str]:
        return ["use_direct_io=False: its O_DIRECT writes are not aligned, and fail here (EINVAL)"]

    def close(self) -> None:
        self._manager.close()


def _config(beside: bool) -> Any:
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig

    writer = CheckpointWriterConfig(file_write_max_threads=WRITERS)
    if not beside:
        return SyncCheckpointSaverConfig(writer_config=writer)
    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
    return AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)


class TorchCheckpointing(System):
    name = "torchcheckpointing"
    meaning = "torch_checkpointing's CheckpointManager, synchronous"
    by_default = False
    works = frozenset({"save", "load"})
    package = "torch_checkpointing"

    def missing(self) -> str | None:
        return absent("torch_checkpointing")

    def open(self, job: Job) -> Session:
        return TorchCheckpointingSession(job, beside=False)


class TorchCheckpointingAsync(TorchCheckpointing):
    name = "torchcheckpointing-async"
    meaning = "torch_checkpointing's CheckpointManager: staging beside the training, a process writes"
    by_default = True
    works = frozenset({"save", "async", "load"})
    defers = True

    def open(self, job: Job) -> Session:
        return TorchCheckpointingSession(job, beside=True)


__all__ = ["TorchCheckpointing", "TorchCheckpointingAsync"]
