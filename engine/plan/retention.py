"""Which checkpoints stay and which go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import BadOption
from .lineage import Lineage

Key = tuple[int, int]
"""A checkpoint: (incarnation, step)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the last ``keep_last`` checkpoints, and every one whose step ``keep_every`` divides (None: no
    more)."""

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            bad = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if bad and not (name == "keep_every" and value is None):
                raise BadOption(
                    f"{name} cannot be used", found=repr(value), expected="a whole number above 0"
                )


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """``keep``: what stays, with why, and ``remove``: what goes; both oldest first."""

    keep: tuple[tuple[Key, str], ...]
    remove: tuple[Key, ...]


def plan_retention(
    checkpoints: Sequence[Key], retention: Retention, lineage: Lineage, protected: Collection[Key] = ()
) -> RetentionPlan:
    """Plan the removal of ``checkpoints`` (complete ones, in any order).

    Of those that the lineage counts: the newest ``keep_last`` stay, those that ``keep_every`` divides, and
    the ``protected`` ones; the others go. Of those that it does not count (given up when an earlier step was
    resumed, or before a fresh start) all stay until the lineage has ``keep_last`` checkpoints of its own, and
    then those go whose step is below all of these. So nothing is ever removed before as many good ones as
    were asked for exist, and the newest one never is.
    """
    counted = sorted({key for key in checkpoints if lineage.counts(*key)}, key=_age)
    beside = sorted(set(checkpoints) - set(counted), key=_age)
    last = counted[-retention.keep_last :]
    oldest_last = last[0][1] if len(last) == retention.keep_last else None
    keep: list[tuple[Key, str]] = []
    remove: list[Key] = []
    for key in sorted([*counted, *beside], key=_age):
        reason = _reason(key, last, retention, set(protected), oldest_last, lineage)
        if reason is None:
            remove.append(key)
        else:
            keep.append((key, reason))
    return RetentionPlan(tuple(keep), tuple(remove))


def _age(key: Key) -> tuple[int, int]:
    incarnation, step = key
    return step, incarnation


def _reason(
    key: Key,
    last: Sequence[Key],
    retention: Retention,
    protected: Collection[Key],
    oldest_last: int | None,
    lineage: Lineage,
) -> str | None:
    """Why ``key`` stays; None if it goes."""
    step = key[1]
    if last and key == last[-1]:
        return "newest"
    if key in last:
        return f"last {retention.keep_last}"
    if key in protected:
        return "protected"
    if not lineage.counts(*key):
        settled = oldest_last is not None and step < oldest_last
        return None if settled else "given up, but the run has not passed it"
    if retention.keep_every is not None and step % retention.keep_every == 0:
        return f"every {retention.keep_every}"
    return None
