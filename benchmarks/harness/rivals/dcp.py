"""torch.distributed.checkpoint: synchronous with one and two writer threads, and its ways of saving asynchronously.

Staging into pinned memory, and copies that do not block, need a GPU: they are off. The writer fsyncs its files, not
their directory.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..api import Done, Job, Pending, Session, System
from .parts import NO_WAIT_S, Futures, OwnGroup, finish

PROCESS_END_S = 10.0


class DcpSession(Session):
    """``dcp.save`` and ``dcp.load`` of the nested state."""

    def __init__(self, job: Job, threads: int) -> None:
        super().__init__(job)
        self._threads = threads
        self._alone = job.world == 1

    def writer(self, step: int) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(self.path(step), thread_count=self._threads)

    def save(self, step: int) -> Pending:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.job.state.tree(), storage_writer=self.writer(step), no_dist=self._alone)
        return Done()

    def load(self, step: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(self.path(step))
        load(self.job.state.tree(), storage_reader=reader, no_dist=self._alone)

    def notes(self) -> list[str]:
        return ["its writer fsyncs files, not their directory"]


class DcpAsyncSession(DcpSession):
    """``dcp.async_save`` with a thread or a process that writes. ``staging``: what StagingOptions says of shared memory
    and of staging beside the training; None for the stager that async_save makes anew for each save."""

    def __init__(self, job: Job, *, staging: tuple[bool, bool] | None, process: bool = False) -> None:
        super().__init__(job, threads=1)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = None
        if staging is not None:
            shared, beside = staging
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=shared,
                    use_async_staging=beside,
                    use_non_blocking_copy=False,
                )
            )
        self._process = process
        self._own = OwnGroup(job) if process else None
        self._group = _private_group() if job.world > 1 and not process else None
        self._staged: Any = None
        self._pending: Pending | None = None

    def save(self, step: int) -> Pending:
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        kinds = AsyncCheckpointerType
        answer = async_save(
            self.job.state.tree(),
            storage_writer=self.writer(step),
            async_stager=self._stager,
            async_checkpointer_type=kinds.PROCESS if self._process else kinds.THREAD,
            process_group=self._group,
            no_dist=self._alone and not self._process,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, answer = answer.staging_completion, answer.upload_completion
        self._pending = Futures(answer)
        return self._pending

    def settle(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result(NO_WAIT_S)

    def close(self) -> None:
        finish(self._pending)
        if self._stager is not None:
            self._stager.close()
        if self._process:
            _end_process()
        if self._own is not None:
            self._own.close()
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)


def _private_group() -> Any:
    """The writing thread's collectives must not meet the training's."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def _end_process() -> None:
    """End the process that writes: it lives as long as this one, otherwise."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    writing, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    if writing is None:
        return
    process = writing._save_process
    del writing  # asks it to end
    process.join(PROCESS_END_S)
    if process.is_alive():
        process.kill()
        process.join(PROCESS_END_S)


class Dcp(System):
    name = "dcp"
    meaning = "torch.distributed.checkpoint, one writer thread"
    works = frozenset({"save", "load", "ranks"})
    package = "torch"
    threads: ClassVar[int] = 1

    def open(self, job: Job) -> Session:
        return DcpSession(job, self.threads)


class DcpThreads(Dcp):
    name = "dcp-threads"
    meaning = "torch.distributed.checkpoint, two writer threads"
    threads = 2


class DcpAsync(Dcp):
    name = "dcp-async"
    meaning = "DCP async_save as it is: a new copy for each save, a thread writes"
    works = frozenset({"save", "async", "load", "ranks"})

    def open(self, job: Job) -> Session:
        return DcpAsyncSession(job, staging=None)


class DcpAsyncCached(DcpAsync):
    name = "dcp-async-cached"
    meaning = "DCP async_save, DefaultStager with memory that is kept, a thread writes"

    def open(self, job: Job) -> Session:
        return DcpAsyncSession(job, staging=(False, False))


class DcpAsyncShared(DcpAsync):
    name = "dcp-async-shared"
    meaning = "DCP async_save, DefaultStager with shared memory that is kept, a thread writes"
    by_default = False

    def open(self, job: Job) -> Session:
        return DcpAsyncSession(job, staging=(True, False))


class DcpAsyncStaging(DcpAsync):
    name = "dcp-async-staging"
    meaning = "DCP async_save, DefaultStager that copies beside the training into memory that is kept"
    defers = True

    def open(self, job: Job) -> Session:
        return DcpAsyncSession(job, staging=(False, True))


class DcpAsyncProcess(DcpAsync):
    name = "dcp-async-process"
    meaning = "DCP async_save, DefaultStager with shared memory that is kept, a process writes"

    def open(self, job: Job) -> Session:
        return DcpAsyncSession(job, staging=(True, False), process=True)


__all__ = [
    "Dcp",
    "DcpAsync",
    "DcpAsyncCached",
    "DcpAsyncProcess",
    "DcpAsyncShared",
    "DcpAsyncStaging",
    "DcpThreads",
]
