"""DLRover's flash checkpoint: a copy into shared memory, out of which a process of its own writes with torch.save.

Nothing of the state is synced. Between checkpoints on disk its guide has a trainer save into memory alone, which is
what a snapshot after each step does here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import NO_WAIT_S, Late, absent, copy_tree, remove_files

POLL_S = 0.002
START_S = 60.0
END_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
JOB_NAME = "TORCHELASTIC_RUN_ID"
"""By this variable DLRover names its sockets and its shared memory."""


def job_name(directory: Path) -> str:
    """A name of its own for the session in ``directory``."""
    return f"everstep-bench-{hashlib.blake2b(os.fsencode(directory), digest_size=6).hexdigest()}"


def remove_leftovers(name: str) -> None:
    """Shared memory and sockets of the job ``name``."""
    remove_files(SHARED_MEMORY, [path.name for path in SHARED_MEMORY.glob(f"{name}_ckpt_shm_*")])
    with suppress(ImportError):
        from dlrover.python.common.multi_process import SOCKET_TMP_DIR

        shutil.rmtree(Path(SOCKET_TMP_DIR, name), ignore_errors=True)


def start_process() -> Any:
    """The process that writes, once it answers: what is sent to it earlier may be lost."""
    from dlrover.python.common.log import default_logger
    from dlrover.python.common.multi_process import SharedQueue
    from dlrover.trainer.torch.flash_checkpoint.engine import start_saver_process

    default_logger.setLevel(logging.WARNING)  # a dozen lines for each save
    process = start_saver_process()
    until = time.monotonic() + START_S
    queue = SharedQueue(name="factory")
    while not (queue.is_available() and queue.qsize() == 0):
        if not process.is_alive() or time.monotonic() >= until:
            process.kill()
            raise Late(f"DLRover's saver process did not answer within {START_S:g} s")
        time.sleep(POLL_S)
    return process


class Written:
    """A save to storage: done when the process has named its step in its tracker file."""

    def __init__(self, tracker: Path, step: int, process: Any) -> None:
        self._tracker, self._step, self._process = tracker, step, process

    def wait(self) -> None:
        until = time.monotonic() + NO_WAIT_S
        while self._written() != str(self._step):
            if not self._process.is_alive():
                raise RuntimeError(f"DLRover's saver process has ended (exit code {self._process.exitcode})")
            if time.monotonic() >= until:
                raise Late(f"step {self._step} was not written within {NO_WAIT_S:g} s")
            time.sleep(POLL_S)

    def _written(self) -> str:
        with suppress(FileNotFoundError):
            return self._tracker.read_text()
        return ""


class FlashSession(Session):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job_name = job_name(job.directory)
        os.environ[JOB_NAME] = self._job_name
        remove_leftovers(self._job_name)
        self._process = start_process()
        self._checkpointer = self._open()
        self._pending: Pending = Done()

    def _open(self) -> Any:
        """A checkpointer that finds its process running, as it does below DLRover's launcher."""
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine

        CheckpointEngine.saver_proc = self._process
        try:
            return DdpCheckpointer(str(self.job.directory))
        finally:
            CheckpointEngine.saver_proc = None

    def save(self, step: int) -> Pending:
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._into_memory(step, StorageType.DISK)
        tracker = self.job.directory / CheckpointConstant.TRACER_FILE_NAME
        self._pending = Written(tracker, step, self._process)
        return self._pending

    def snapshot(self, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._into_memory(step, StorageType.MEMORY)

    def _into_memory(self, step: int, kind: Any) -> None:
        self._checkpointer.save_checkpoint(step, self.job.state.tree(), storage_type=kind)
        if self._checkpointer._engine._cached_step != step:  # it does not say so itself
            raise RuntimeError(f"DLRover skipped step {step}: it was still writing the one before")

    def load(self, step: int) -> None:
        loaded = self._checkpointer._engine._load_from_storage(str(self.path(step) / "rank_0.pt"))
        copy_tree(self.job.state.tree(), loaded)

    def lose(self, tier: str) -> None:
        """A new engine beside the process that writes, as after a restart by DLRover's launcher."""
        self._pending.wait()
        self._checkpointer._engine.close()
        if tier == "disk":
            remove_files(SHARED_MEMORY, [f"{self._job_name}_ckpt_shm_0"])
        self._checkpointer = self._open()

    def recover(self, tier: str) -> None:
        engine = self._checkpointer._engine
        step, values = engine.get_state_dict_from_memory()
        if bool(values) != (tier == "memory"):
            raise RuntimeError(f"step {step} did not come from {tier}")
        loaded = next(iter(values.values())) if values else engine._load_from_storage()
        copy_tree(self.job.state.tree(), loaded)

    def close(self) -> None:
        with suppress(Exception):
            self._pending.wait()
        with suppress(BufferError):  # tensors that were recovered may still look into it
            self._checkpointer._engine.close()
        self._process.terminate()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)
        remove_leftovers(self._job_name)
        os.environ.pop(JOB_NAME, None)

    def notes(self) -> list[str]:
        return ["blocking is its save into memory; a thread of the process writes with torch.save, unsynced"]


class DLRover(System):
    name = "dlrover"
    meaning = "DLRover's flash checkpoint: into shared memory, a process writes to storage"
    works = frozenset({"save", "async", "load", "recover"})
    tiers = ("memory", "disk")
    package = "dlrover"

    def missing(self) -> str | None:
        return absent("dlrover", "grpcio")

    def open(self, job: Job) -> Session:
        return FlashSession(job)

    def clean(self, directory: Path) -> None:
        remove_leftovers(job_name(directory))


__all__ = ["DLRover"]
