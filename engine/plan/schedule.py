"""What is snapshotted and flushed, and when: decided by one rank, ahead of time, for all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..errors import BadOption
from .chains import DELTA, FULL, Chains, Key, Kind

OnSlow = Literal["wait", "skip", "supersede"]
ON_SLOW: tuple[OnSlow, ...] = ("wait", "skip", "supersede")

AUTO = "auto"
"""The interval between fulls that follows from what one costs."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)")
_HINT = 'Give a number of steps (100), a duration ("90s", "30m", "2h"), or None for never.'


@dataclass(frozen=True, slots=True)
class Every:
    """An interval: ``steps`` or ``seconds``, the other one is None."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.seconds is None), "either steps or seconds"


def parse_every(value: int | str | Every | None, option: str) -> Every | None:
    """The interval that ``value`` says, None for never. Raises :class:`BadOption`, naming ``option``."""
    if value is None or isinstance(value, Every):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Every(steps=value)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match and float(match[1]) > 0:
            return Every(seconds=float(match[1]) * _SECONDS[match[2]])
    raise BadOption(f"{option} cannot be used", found=repr(value), hint=_HINT, option=option)


def parse_duration(value: str | None, option: str) -> float | None:
    """The seconds that ``value`` says, None for None. Raises :class:`BadOption`, naming ``option``."""
    every = parse_every(value, option)
    if every is None or every.seconds is not None:
        return every.seconds if every is not None else None
    raise BadOption(f"{option} must be a duration", found=repr(value), expected='"90s", "30m", "6h"')


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at ``step``. ``flush`` implies ``snapshot``. ``wait``: first wait (bounded) until
    there is room for the flush; ``supersede``: first give up the oldest unfinished flush. ``tiers``: names of the
    further tiers that the checkpoint is to reach. ``trouble`` is what all ranks are told then, "" for nothing;
    ``fatal``: as an error, else as a warning. A flush of ``kind`` "delta" stands on ``base``; ``merge``: once it is
    durable it is made a full."""

    step: int
    snapshot: bool
    flush: bool
    wait: bool = False
    supersede: bool = False
    tiers: tuple[str, ...] = ()
    trouble: str = ""
    fatal: bool = False
    kind: Kind = FULL
    base: Key | None = None
    merge: bool = False


def merge(decisions: Iterable[Decision]) -> Decision | None:
    """One decision for the last step of ``decisions`` (in order) that does what any of them asks: for steps
    that were decided but passed over. None for none."""
    merged: Decision | None = None
    for d in decisions:
        if merged is not None:
            newest = d if d.flush else merged
            delta = all(one.kind == DELTA for one in (merged, d) if one.flush) and newest.flush
            d = Decision(
                d.step,
                merged.snapshot or d.snapshot,
                merged.flush or d.flush,
                merged.wait or d.wait,
                merged.supersede or d.supersede,
                tuple(dict.fromkeys([*merged.tiers, *d.tiers])),
                d.trouble or merged.trouble,
                merged.fatal or d.fatal,
                DELTA if delta else FULL,
                newest.base if delta else None,
                delta and (merged.merge or d.merge),
            )
        merged = d
    return merged


class _Timer:
    """Says when an interval has gone by. Step intervals are multiples of the step number, so that a resumed
    run keeps the same rhythm; a multiple that was passed over is due at the next step."""

    def __init__(self, every: Every | None, since: int | None = None) -> None:
        """``since``: the step at which it was due last; a time begins anew with the first look."""
        self.every = every
        self._since = since
        self._last: tuple[int, float] | None = None

    def restart(self, step: int, now: float) -> None:
        """What it times was done at ``step``, for another reason."""
        self._last = step, now

    def due(self, step: int, now: float) -> bool:
        """Whether ``step`` is due, for steps that go up; the first one is. Being due restarts the
        interval."""
        if self.every is None:
            return False
        last_step, last_time = self._last or (self._since, now)
        if last_step is None:
            is_due = True
        elif self.every.steps is not None:
            is_due = step // self.every.steps > last_step // self.every.steps
        else:
            assert self.every.seconds is not None
            is_due = now - last_time >= self.every.seconds
        self._last = (step, now if is_due else last_time)
        return is_due


class _Share:
    """Says which flushes go to a further tier: every n-th that was decided, the first included, or the first after some
    time."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self._count = 0
        self._timer = _Timer(every) if every.steps is None else None

    def due(self, step: int, now: float) -> bool:
        if self._timer is not None:
            return self._timer.due(step, now)
        self._count += 1
        assert self._every.steps is not None
        return (self._count - 1) % self._every.steps == 0


class Unsaved:
    """When it is told that what would be lost is too much: once it comes to ``bound``, and again each time that it has
    doubled since, until there is something newer to go back to."""

    def __init__(self, bound: Every) -> None:
        self._bound = bound
        self._next = 1.0
        self._last = 0.0

    def due(self, steps: int, seconds: float) -> bool:
        """Whether it is told now that ``steps``, or ``seconds`` of training, would be lost."""
        bound = self._bound
        found = steps / bound.steps if bound.steps is not None else seconds / (bound.seconds or 1.0)
        if found < self._last:
            self._next = 1.0
        self._last = found
        if found < self._next:
            return False
        self._next = 2 * found
        return True


class Schedule:
    """The decision machine of the one rank that decides. Not thread-safe; holds no clock.

    The first step that it decides is snapshotted and flushed (unless the interval is None). A flush that is
    due while ``unfinished_max`` are unfinished follows ``on_slow``: all ranks ``wait`` for room, or ``skip``
    it, or it ``supersede``s the oldest one. The last is never done twice without a finished flush between, or
    no flush might ever finish: such a flush is skipped. A delta supersedes no full: it is skipped, too.

    With ``delta_every`` some flushes are deltas, on what ``chains`` gives as their base; a full where none is to be
    had, or where both are due. A full that was skipped takes the place of the next delta. The first flush is a full,
    and the next ones are deltas on it, durable or not.
    """

    def __init__(
        self,
        snapshot_every: int | str | Every | None,
        full_every: int | str | Every | None,
        lookahead: int,
        on_slow: OnSlow = "wait",
        tiers: Mapping[str, int | str | Every] = MappingProxyType({}),
        *,
        delta_every: int | str | Every | None = None,
        chains: Chains | None = None,
    ) -> None:
        """``lookahead``: how many steps ahead of the current one are decided. ``tiers``: by name of a further tier
        which flushes go there: every n-th, or one in each interval of time. Raises :class:`BadOption`."""
        if on_slow not in ON_SLOW:
            raise BadOption("on_slow cannot be used", found=repr(on_slow), expected=" or ".join(ON_SLOW))
        if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 0:
            raise BadOption(
                "lookahead cannot be used", found=repr(lookahead), expected="a whole number from 0"
            )
        self.lookahead = lookahead
        self.on_slow = on_slow
        self.decided: int | None = None
        """The last step decided; None before the first."""
        self._snapshot = _Timer(parse_every(snapshot_every, "snapshot_every"))
        self._chains = chains if delta_every is not None else None
        going_on = self._chains is not None and self._chains.base() is not None
        newest = self._chains.newest_full if self._chains is not None and going_on else None
        self._full = _Timer(parse_every(full_every, "full_every"), newest[1] if newest is not None else None)
        self._delta = _Timer(parse_every(delta_every, "delta_every"))
        self._full_owed = False
        self._superseded = False
        self._tiers: dict[str, _Share] = {}
        for name, value in tiers.items():
            every = parse_every(value, f"every of tier {name}")
            if every is not None:
                self._tiers[name] = _Share(every)

    def flush_every(self, seconds: float) -> None:
        """From now on this is the interval between fulls."""
        self._full.every = Every(seconds=seconds)

    def extend(
        self, through: int, now: float, unfinished: int, unfinished_max: int, deltas: int = 0
    ) -> list[Decision]:
        """Decide all steps up to ``through`` (the current step and ``lookahead``) that are not decided yet.

        ``now``: seconds of a clock that never goes back. ``unfinished``: flushes decided so far that are
        neither durable nor given up, and ``deltas`` how many of them are deltas. Steps below
        ``through - lookahead`` cannot come any more and get no decision; what was due at them is due at the first one
        after. At most ``lookahead + 1`` decisions.
        """
        if unfinished < unfinished_max:
            self._superseded = False
        first = through - self.lookahead
        if self.decided is not None:
            first = max(first, self.decided + 1)
        decisions = []
        for step in range(first, through + 1):
            decision = self._decide(step, now, unfinished, unfinished_max, deltas)
            unfinished += decision.flush and not decision.supersede
            deltas += decision.kind == DELTA
            deltas -= decision.supersede and deltas > 0
            decisions.append(decision)
        self.decided = through if self.decided is None else max(self.decided, through)
        return decisions

    def _decide(self, step: int, now: float, unfinished: int, unfinished_max: int, deltas: int) -> Decision:
        snapshot = self._snapshot.due(step, now)
        full, delta = self._full.due(step, now), self._delta.due(step, now)
        if not (full or delta):
            return Decision(step, snapshot, False)
        owed = self._chains is not None and (full or self._full_owed)
        full = owed or self._chains is None or self._chains.base() is None
        room = unfinished < unfinished_max
        wait = not room and self.on_slow == "wait"
        supersede = not room and self.on_slow == "supersede" and not self._superseded and (full or deltas > 0)
        if not (room or wait or supersede):
            self._full_owed = owed
            return Decision(step, snapshot, False)
        self._superseded = self._superseded or supersede
        tiers = tuple([name for name, share in self._tiers.items() if share.due(step, now)])
        found = self._chains.delta(step) if self._chains is not None and not full else None
        if found is not None:
            kind, base, to_merge = DELTA, found.base, found.merge
            return Decision(step, True, True, wait, supersede, tiers, kind=kind, base=base, merge=to_merge)
        if self._chains is not None:
            self._chains.full(step)
        self._full_owed = False
        self._full.restart(step, now)
        self._delta.restart(step, now)
        return Decision(step, True, True, wait=wait, supersede=supersede, tiers=tiers)
