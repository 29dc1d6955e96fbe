"""torchsnapshot: ``Snapshot.take`` and ``async_take``. Nothing is synced.
Version 0.1.0 fails at bf16 tensors with an odd number of elements.
"""

from __future__ import annotations

from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import absent, finish


class TorchSnapshotSession(Session):
    """The state as one stateful object; tensors are restored in place."""

    def _app_state(self) -> dict[str, Any]:
        from torchsnapshot import StateDict

        return {"training": StateDict(**self.job.state.tree())}

    def save(self, step: int) -> Pending:
        from torchsnapshot import Snapshot

        Snapshot.take(str(self.path(step)), self._app_state())
        return Done()

    def load(self, step: int) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(self.path(step))).restore(self._app_state())


class TorchSnapshotAsyncSession(TorchSnapshotSession):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._pending: Pending | None = None

    def save(self, step: int) -> Pending:
        from torchsnapshot import Snapshot

        self._pending = Snapshot.async_take(str(self.path(step)), self._app_state())
        return self._pending

    def close(self) -> None:
        finish(self._pending)


class TorchSnapshot(System):
    name = "torchsnapshot"
    meaning = "torchsnapshot's Snapshot.take and restore"
    by_default = False
    works = frozenset({"save", "load"})
    package = "torchsnapshot"

    def missing(self) -> str | None:
        return absent("torchsnapshot")

    def open(self, job: Job) -> Session:
        return TorchSnapshotSession(job)


class TorchSnapshotAsync(TorchSnapshot):
    name = "torchsnapshot-async"
    meaning = "torchsnapshot's Snapshot.async_take and restore"
    by_default = True
    works = frozenset({"save", "async", "load"})

    def open(self, job: Job) -> Session:
        return TorchSnapshotAsyncSession(job)


__all__ = ["TorchSnapshot", "TorchSnapshotAsync"]
