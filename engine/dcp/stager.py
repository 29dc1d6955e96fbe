"""A stager that keeps its memory: making fresh memory for every save costs more than the copy."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .writer import wait_for_background


class Stager(DefaultStager):
    """For ``dcp.async_save(..., async_stager=)`` with the checkpointer that runs in a thread; one for many saves.

    Copies on the caller's thread, into memory that is kept from save to save. It first waits for saves that are under
    way, as they read that memory. Where a checkpoint process runs, which reads it at times of its own, every save gets
    fresh memory. ``close`` it after the last save.
    """

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        """``pin_memory``: whether to use pinned memory; default: where there is a CUDA device."""
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        super().__init__(StagingOptions(pin, False, False, False))

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A copy of ``state_dict`` on the CPU. Raises SaveFailed if a save before does not end."""
        wait_for_background()
        if _async_process_executor._CHECKPOINT_PROCESS is not None:
            super().__init__(self._config)
        return super().stage(state_dict, **kwargs)
