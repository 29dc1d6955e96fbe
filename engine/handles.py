"""What a save gives back."""

from __future__ import annotations

from typing import Protocol

from .errors import EverstepError
from .plan.chains import Kind


class _Watched(Protocol):
    def kind(self, step: int) -> Kind: ...
    def outcome(self, step: int, tier: str | None) -> tuple[bool, EverstepError | None]: ...
    def wait_durable(self, step: int, timeout_s: float | None, tier: str | None) -> None: ...


class SaveHandle:
    """One flush on its way. Durable means: every rank's images, votes and the manifest are fsynced, files and
    directories; in an object store: completed and verified.

    ``tier`` is the name of a further tier (:class:`~.policy.Tier`); None is the run's root. Used from the thread that
    made it. All ranks get the same outcome.
    """

    def __init__(self, step: int, watched: _Watched) -> None:
        self.step = step
        self._watched = watched

    def done(self, tier: str | None = None) -> bool:
        """Whether the checkpoint is durable there. False while it is on its way, and for ever if it failed."""
        finished, error = self._watched.outcome(self.step, tier)
        return finished and error is None

    @property
    def kind(self) -> Kind:
        """What it was asked for as, until it is durable; then what it is: a "delta" needs another checkpoint, its base,
        a "full" none. A delta may be stored in full, or be made a full later."""
        return self._watched.kind(self.step)

    @property
    def error(self) -> EverstepError | None:
        """Why the flush failed or was given up; None while it is on its way and when it is durable."""
        return self._watched.outcome(self.step, None)[1]

    def wait(self, tier: str | None = None, timeout_s: float | None = None) -> None:
        """Return once the checkpoint is durable there. Raises SaveFailed (or SaveAbandoned) if it will not be, and
        after ``timeout_s`` (None: the policy's close_timeout_s); BadOption for a tier that it does not go to."""
        self._watched.wait_durable(self.step, timeout_s, tier)

    def __repr__(self) -> str:
        finished, error = self._watched.outcome(self.step, None)
        stage = "failed" if error else "durable" if finished else "on its way"
        return f"SaveHandle(step={self.step}, {self.kind}, {stage})"
