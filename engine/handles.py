"""What a save gives back."""

from __future__ import annotations

from typing import Protocol

from .errors import EverstepError


class _Watched(Protocol):
    def outcome(self, step: int) -> tuple[bool, EverstepError | None]: ...
    def wait_durable(self, step: int, timeout_s: float | None) -> None: ...


class SaveHandle:
    """One flush on its way. Durable means: every rank's images, votes and the manifest are fsynced, files and
    directories.

    Used from the thread that made it. All ranks get the same outcome.
    """

    def __init__(self, step: int, watched: _Watched) -> None:
        self.step = step
        self._watched = watched

    def done(self) -> bool:
        """Whether the checkpoint is durable. False while it is on its way, and for ever if it failed."""
        finished, error = self._watched.outcome(self.step)
        return finished and error is None

    @property
    def error(self) -> EverstepError | None:
        """Why the flush failed or was given up; None while it is on its way and when it is durable."""
        return self._watched.outcome(self.step)[1]

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the checkpoint is durable. Raises SaveFailed (or SaveAbandoned) if it will not be, and
        after ``timeout_s`` (None: the policy's close_timeout_s)."""
        self._watched.wait_durable(self.step, timeout_s)

    def __repr__(self) -> str:
        finished, error = self._watched.outcome(self.step)
        return (
            f"SaveHandle(step={self.step}, {'failed' if error else 'durable' if finished else 'on its way'})"
        )
