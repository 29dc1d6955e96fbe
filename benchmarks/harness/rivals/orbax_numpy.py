"""orbax: its AsyncCheckpointer with a PyTreeCheckpointHandler, and numpy arrays that share the tensors' memory.
Compression is off, which is faster here: the states' contents do not compress.
"""

from __future__ import annotations

from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import absent, fill


class OrbaxWait:
    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()


class OrbaxSession(Session):
    def __init__(self, job: Job, *, beside: bool) -> None:
        super().__init__(job)
        from orbax.checkpoint import AsyncCheckpointer, PyTreeCheckpointHandler

        self._beside = beside
        self._checkpointer = AsyncCheckpointer(PyTreeCheckpointHandler(use_compression=False))

    def save(self, step: int) -> Pending:
        from orbax.checkpoint.args import PyTreeSave

        self._checkpointer.save(self.path(step).absolute(), args=PyTreeSave(self._arrays()))
        pending = OrbaxWait(self._checkpointer)
        if self._beside:
            return pending
        pending.wait()
        return Done()

    def load(self, step: int) -> None:
        from orbax.checkpoint.args import PyTreeRestore
        from orbax.checkpoint.checkpoint_utils import construct_restore_args

        wanted = self._arrays()
        loaded = self._checkpointer.restore(
            self.path(step).absolute(),
            args=PyTreeRestore(item=wanted, restore_args=construct_restore_args(wanted)),
        )
        fill(self.job.state, ((name, as_tensor(array)) for name, array in loaded.items()))

    def _arrays(self) -> dict[str, Any]:
        return {name: as_array(tensor) for name, tensor in self.job.state.tensors().items()}

    def close(self) -> None:
        self._checkpointer.close()


def as_array(tensor: Any) -> Any:
    """A numpy array over the tensor's memory; bfloat16 is one of ml_dtypes."""
    import torch

    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def as_tensor(array: Any) -> Any:
    """A tensor over the array's memory."""
    import numpy as np
    import torch

    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Orbax(System):
    name = "orbax"
    meaning = "orbax's AsyncCheckpointer with numpy arrays, waited for"
    by_default = False
    works = frozenset({"save", "load"})
    package = "orbax-checkpoint"

    def missing(self) -> str | None:
        return absent("orbax-checkpoint")

    def open(self, job: Job) -> Session:
        return OrbaxSession(job, beside=False)


class OrbaxAsync(Orbax):
    name = "orbax-async"
    meaning = "orbax's AsyncCheckpointer with numpy arrays, asynchronous"
    by_default = True
    works = frozenset({"save", "async", "load"})

    def open(self, job: Job) -> Session:
        return OrbaxSession(job, beside=True)


__all__ = ["Orbax", "OrbaxAsync"]
