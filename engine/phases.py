"""The steps of one attempt that all ranks make together: each succeeds on all of them, or fails for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import EverstepError, RankError
from .ranks import Ranks

T = TypeVar("T")


class PhaseFailed(Exception):
    """A phase failed on some ranks: ``errors`` by rank, the same on all."""

    def __init__(self, errors: dict[int, EverstepError]) -> None:
        super().__init__(str(errors))
        self.errors = errors


class Phases:
    """One attempt at ``what``. All ranks make the same calls; no wait is longer than ``timeout_s``. ``node`` is the
    same text for the ranks of one node, and empty where that is not known."""

    def __init__(self, ranks: Ranks, what: str, *, timeout_s: float, node: str = "") -> None:
        self.rank, self.world, self.timeout_s = ranks.rank, ranks.world, timeout_s
        self.node = node
        self._ranks = ranks
        self._what = what

    def each(self, act: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """``act`` on every rank (``timeout_s``: which may take that long). Raises PhaseFailed on all ranks if it fails
        on one; where it raises something that is none of ours, that rank raises it."""
        result, errors = self._ranks.outcomes(self._what, act, timeout_s=timeout_s or self.timeout_s)
        if errors:
            raise PhaseFailed(errors)
        return result  # type: ignore[return-value]

    def exchange(self, act: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """As :meth:`each` of an ``act`` that gives a result and what to tell the others of it (plain values): this
        rank's result, and what every rank told."""
        result, told, errors = self._ranks.exchange(self._what, act, timeout_s=self.timeout_s)
        if errors:
            raise PhaseFailed(errors)
        return result, told  # type: ignore[return-value]

    def share(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain values), by rank."""
        return self._ranks.agree(self._what, value, timeout_s=self.timeout_s)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """What ``act`` gives on rank 0 (plain values), on every rank. Raises PhaseFailed on all if it fails."""
        try:
            return self._ranks.from_first(self._what, act, timeout_s=self.timeout_s)
        except RankError:
            raise
        except EverstepError as error:
            raise PhaseFailed({0: error}) from error
