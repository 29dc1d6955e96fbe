"""Which checkpoints stay and which go."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from ..errors import BadOption
from ..format.constants import TIME_FORMAT
from ..format.manifest import Manifest
from .lineage import Lineage
from .schedule import parse_duration

Key = tuple[int, int]
"""A checkpoint: (incarnation, step)."""

BEST = ("min", "max")
"""Which value of a metric is the best: the least, or the greatest."""

_COUNTS = ("keep_last", "keep_every", "keep_best", "keep_incarnations")


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays; all rules together, None: not this one.

    ``keep_last`` newest checkpoints; every one whose step ``keep_every`` divides; one in each ``keep_interval``
    ("6h"), by the times in their manifests; the ``keep_best`` best by the metric that ``best`` names: "min:loss",
    "max:accuracy"; the newest of each of the last ``keep_incarnations`` incarnations, given up or not.
    Raises BadOption, whose field ``option`` is the field's name.
    """

    keep_last: int
    keep_every: int | None = None
    keep_interval: str | None = None
    keep_best: int | None = None
    best: str | None = None
    keep_incarnations: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            bad = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if bad and not (value is None and name != "keep_last"):
                raise _bad(name, value, "a whole number, at least 1")
        try:
            parse_duration(self.keep_interval, "keep_interval")
        except BadOption:
            raise _bad("keep_interval", self.keep_interval, 'a duration: "90m", "6h", "2d"') from None
        if self.best is not None and (not isinstance(self.best, str) or _metric(self.best) is None):
            raise _bad("best", self.best, '"min:" or "max:" and the name of a metric: "min:loss"')
        if (self.best is None) != (self.keep_best is None):
            missing = "best" if self.best is None else "keep_best"
            raise _bad(missing, None, 'keep_best=3, best="min:loss": the two belong together')

    @property
    def interval_s(self) -> float | None:
        return parse_duration(self.keep_interval, "keep_interval")

    def to_wire(self) -> dict[str, Any]:
        """Plain values; ``Retention(**wire)`` is it again."""
        return asdict(self)


RETENTION_FIELDS = tuple(Retention.__dataclass_fields__)


def _bad(name: str, value: object, expected: str) -> BadOption:
    return BadOption(f"{name} cannot be used", found=repr(value), expected=expected, option=name)


def _metric(best: str) -> tuple[str, str] | None:
    """Whether it is "min" or "max", and the metric's name; None if ``best`` does not say so."""
    how, colon, name = best.partition(":")
    return (how, name) if how in BEST and colon and name else None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan asks of a checkpoint. ``parent``: what a delta stands on; ``created_s``: seconds since the epoch by
    the clock of whoever committed it, None where that cannot be read; ``metrics``: those that are finite numbers."""

    parent: Key | None = None
    created_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def facts_of(manifest: Manifest) -> Facts:
    """The facts that a manifest says."""
    metrics = {name: value for name, value in manifest.metrics.items() if _is_finite(value)}
    return Facts(manifest.parent_key, seconds_of(manifest.created), metrics)


def seconds_of(created: str) -> float | None:
    """Seconds since the epoch of a time as records have it; None where it is none."""
    try:
        return datetime.strptime(created, TIME_FORMAT).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _is_finite(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """``keep``: what stays, with why, and ``remove``: what goes; both oldest first."""

    keep: tuple[tuple[Key, str], ...]
    remove: tuple[Key, ...]


NO_FACTS: Mapping[Key, Facts] = MappingProxyType({})
NO_PINS: Mapping[Key, str] = MappingProxyType({})
_NOTHING_KNOWN = Facts()


def plan_retention(
    checkpoints: Sequence[Key],
    retention: Retention,
    lineage: Lineage,
    protected: Collection[Key] = (),
    *,
    facts: Mapping[Key, Facts] = NO_FACTS,
    pinned: Mapping[Key, str] = NO_PINS,
) -> RetentionPlan:
    """Plan the removal of ``checkpoints`` (complete ones, in any order).

    Of those that the lineage counts and whose chains are whole: those stay that a rule of ``retention`` names, the
    others go. The rest (given up when an earlier step was resumed, or before a fresh start; deltas that lack a base)
    stays until ``keep_last`` of the former are there, and then those go whose step is below all of these. So nothing is
    ever removed before as many good ones as were asked for exist, and the newest one never is. ``pinned`` (with why)
    and ``protected`` ones stay whatever they are, and so does each base, down to a full one, of whatever stays.

    The plan depends on nothing but what is given, and planning again with what it keeps removes nothing more.
    """
    keys = sorted(set(checkpoints))
    whole = whole_chains(keys, facts)
    good = [key for key in keys if key in whole and lineage.counts(*key)]
    last = good[-retention.keep_last :]
    why: dict[Key, str] = {}

    def stay(some: Collection[Key], reason: str) -> None:
        for key in some:
            why.setdefault(key, reason)

    stay(good[-1:], "newest")
    stay(last, f"last {retention.keep_last}")
    for key in keys:
        if key in pinned:
            stay([key], f"pinned: {pinned[key]}" if pinned[key] else "pinned")
    stay([key for key in keys if key in set(protected)], "protected")
    for some, reason in _by_rules([key for key in keys if key in whole], good, retention, facts):
        stay(some, reason)
    full = len(last) == retention.keep_last
    oldest = min((step for _, step in last), default=0)
    for key in set(keys) - set(good):
        if not (full and key[1] < oldest):
            broken = "" if key in whole else ", and it lacks a base"
            stay([key], "given up, but the run has not passed it" + broken)
    _keep_bases(why, set(keys), facts)
    ordered = sorted(keys, key=_age)
    return RetentionPlan(
        tuple([(key, why[key]) for key in ordered if key in why]),
        tuple([key for key in ordered if key not in why]),
    )


def _age(key: Key) -> tuple[int, int]:
    incarnation, step = key
    return step, incarnation


def _by_rules(
    keys: Sequence[Key], good: Sequence[Key], retention: Retention, facts: Mapping[Key, Facts]
) -> list[tuple[Collection[Key], str]]:
    """What each of the further rules keeps, with the reason."""
    found: list[tuple[Collection[Key], str]] = []
    every, interval_s = retention.keep_every, retention.interval_s
    if every is not None:
        found.append(([key for key in good if key[1] % every == 0], f"every {every}"))
    if interval_s is not None:
        found.append((_spaced(good, interval_s, facts), f"one in {retention.keep_interval}"))
    if retention.keep_best is not None and retention.best is not None:
        some = _best(good, retention.keep_best, retention.best, facts)
        found.append((some, f"best {retention.keep_best} by {retention.best}"))
    if retention.keep_incarnations is not None:
        ends = dict(keys)  # the highest step of each incarnation: later keys replace earlier ones
        newest = list(ends.items())[-retention.keep_incarnations :]
        found.append((newest, "newest of its incarnation"))
    return found


def _spaced(good: Sequence[Key], interval_s: float, facts: Mapping[Key, Facts]) -> list[Key]:
    """The oldest one, and from each that stays the next one that is ``interval_s`` apart from it, in either direction:
    a clock that jumps, and jumps back, keeps one more, instead of keeping none until it is caught up with. What has no
    time that can be read stays."""
    found: list[Key] = []
    before: float | None = None
    for key in good:
        created_s = facts.get(key, _NOTHING_KNOWN).created_s
        if created_s is None or before is None or abs(created_s - before) >= interval_s:
            found.append(key)
            before = before if created_s is None else created_s
    return found


def _best(good: Sequence[Key], count: int, best: str, facts: Mapping[Key, Facts]) -> list[Key]:
    """The ``count`` best; of equal ones the newer. What lacks the metric, or is not finite, is none of them."""
    found = _metric(best)
    assert found is not None, best
    how, name = found
    measured = {
        key: value
        for key in good
        if (value := facts.get(key, _NOTHING_KNOWN).metrics.get(name)) is not None and _is_finite(value)
    }
    newest_first = sorted(measured, reverse=True)
    return sorted(newest_first, key=lambda key: measured[key], reverse=how == "max")[:count]


def whole_chains(keys: Sequence[Key], facts: Mapping[Key, Facts]) -> set[Key]:
    """Those of which every base is there, down to a full one."""
    known: dict[Key, bool] = {}
    there = set(keys)
    for key in keys:
        trail: list[Key] = []
        at: Key | None = key
        while at is not None and at not in known and at in there:
            trail.append(at)
            known[at] = False  # a chain that comes back to itself ends nowhere
            at = facts.get(at, _NOTHING_KNOWN).parent
        whole = at is None or known.get(at, False)
        known.update(dict.fromkeys(trail, whole))
    return {key for key, whole in known.items() if whole}


def _keep_bases(why: dict[Key, str], there: Collection[Key], facts: Mapping[Key, Facts]) -> None:
    """Add the bases of what stays, and theirs."""
    for key in sorted(why, reverse=True):
        at = key
        while (parent := facts.get(at, _NOTHING_KNOWN).parent) is not None and parent in there:
            if parent in why:
                break
            why[parent] = f"base of step {at[1]}"
            at = parent
