"""How fast bytes may go: a fixed rate, a share of what the link can do, or as fast as training is not slowed down.

Pure: whoever sends says when and how much, and asks for the rate; seconds are those of any clock that never goes back.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ..errors import BadOption

ADAPTIVE = "adaptive"
TIER_RATE = "50%"
"""Of the way to a further tier that all nodes share, unless something else is said."""
MIB = 1 << 20

FILL_S = 0.5
"""The beginning of a stretch of sending is not measured: buffers on the way take that at any speed."""
WINDOW_S = 1.0
"""How long one measurement of a link takes."""
GAP_S = 2.0
"""Silence that ends a stretch of sending."""
WINDOWS_MAX = 300
"""Measurements remembered: some minutes of sending."""

BURST_EVERY_S = 60.0
"""How often a share's link is measured anew, by a burst without a limit."""
BURST_S_MAX = 10.0
"""A burst that was not measured by then ends all the same."""

FLOOR_SHARE = 1 / 16
"""A flush never takes longer than about the inverse of this, times what it takes alone; and a sixteenth of what the
disk can do is little to be disturbed by."""
FLOOR_BYTES_PER_S = MIB
STEP_SHARE = 1 / 16
"""What is added to the rate, as a share of the link, after a judgement that training is not slowed down."""
DOWN = 0.5
TOLERANCE = 0.05
"""Steps may be longer than the baseline by this before they are slow."""
SIGMAS, SIGMAS_EARLY = 2.0, 3.0
"""How far above the baseline chance takes the mean: at the end of a judgement, and before that."""
CLIP = 3.0
"""A step counts as this many times the baseline at most: one evaluation is no slow disk, but a loop that waits for
its data in every fourth step is slowed down."""
JUDGED_STEPS = 8
JUDGED_S = 10.0
"""Steps that are judged together: at least so many, then until their mean says enough; at most what fills this
time."""
QUIET_STEPS_MIN = 8
QUIET_STEPS_MAX = 64
"""Steps that the baseline is made of."""

_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Rate:
    """What a user asks for: at most one of these; none: no limit."""

    bytes_per_s: float | None = None
    share: float | None = None
    adaptive: bool = False


def parse_rate(value: float | str | None, option: str) -> Rate:
    """The rate that ``value`` says. Raises :class:`BadOption`, naming ``option``."""
    if value is None:
        return Rate()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return Rate(bytes_per_s=float(value))
    if isinstance(value, str):
        if value.strip() == ADAPTIVE:
            return Rate(adaptive=True)
        match = _SHARE.fullmatch(value.strip())
        if match and 0 < float(match[1]) <= 100:
            return Rate(share=float(match[1]) / 100)
    raise BadOption(
        f"{option} cannot be used",
        found=repr(value),
        expected='bytes per second (a number above 0), a share of the link ("50%"), "adaptive", or None',
        option=option,
    )


class Governor(Protocol):
    """Says how fast bytes may go."""

    def rate(self, now: float) -> float | None:
        """Bytes per second; None: no limit."""
        ...

    def sent(self, now: float, nbytes: int) -> None:
        """``nbytes`` were let through just now."""
        ...

    def status(self) -> dict[str, float | None]:
        """What it goes by, for people who look."""
        ...


def governor(rate: Rate) -> Governor:
    """Whoever keeps to ``rate``."""
    if rate.adaptive:
        return Adaptive()
    return Share(rate.share) if rate.share is not None and rate.share < 1 else Fixed(rate.bytes_per_s)


class Fixed:
    """Always the same rate."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s

    def rate(self, now: float) -> float | None:
        return self._bytes_per_s

    def sent(self, now: float, nbytes: int) -> None:
        pass

    def status(self) -> dict[str, float | None]:
        return {}


class LinkMeter:
    """What a link can do: the most that went through it within one window of unbroken sending, of the last ones."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=WINDOWS_MAX)
        self._last = -math.inf
        self._from = 0.0
        self._bytes = 0
        self._filling = True

    @property
    def bytes_per_s(self) -> float | None:
        return max(self._windows, default=None)

    @property
    def last(self) -> float:
        """When something was sent last; minus infinity before that."""
        return self._last

    def restart(self) -> None:
        """What comes next goes at another rate: it is measured by itself."""
        self._last = -math.inf

    def sent(self, now: float, nbytes: int) -> bool:
        """Whether that completed a measurement."""
        began = now - self._last > GAP_S
        self._last = now
        if began:
            self._from, self._bytes, self._filling = now, 0, True
            return False
        self._bytes += nbytes
        if now - self._from < (FILL_S if self._filling else WINDOW_S):
            return False
        measured = not self._filling
        if measured:
            self._windows.append(self._bytes / (now - self._from))
        self._from, self._bytes, self._filling = now, 0, False
        return measured


class Share:
    """A share of what the link can do. That is measured by transfers that are made anyway: the first second and a half
    of sending, and again each minute, goes without a limit. What such a burst sent above the share is paid back at
    once, at half the rate, so that the share holds on average."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._meter = LinkMeter()
        self._burst: tuple[float, int] | None = None
        """When the present burst began, and the bytes that it sent."""
        self._next = -math.inf
        self._owed = 0.0

    def rate(self, now: float) -> float | None:
        can = self._meter.bytes_per_s
        if can is None or self._burst is not None:
            return None
        return self._share * can * (0.5 if self._owed > 0 else 1.0)

    def sent(self, now: float, nbytes: int) -> None:
        if self._burst is not None and now - self._meter.last > GAP_S:
            self._end_burst(self._meter.last)  # it broke off
        if self._burst is None and now >= self._next:
            self._burst = now, 0
            self._meter.restart()
        if self._burst is None:
            self._owed = max(0.0, self._owed - nbytes)
            return
        since, sent = self._burst
        self._burst = since, sent + nbytes
        if self._meter.sent(now, nbytes) or now - since > BURST_S_MAX:
            self._end_burst(now)

    def status(self) -> dict[str, float | None]:
        return {"link_bytes_per_s": self._meter.bytes_per_s}

    def _end_burst(self, now: float) -> None:
        """Without a measurement so far it is followed by another one."""
        assert self._burst is not None
        (since, sent), self._burst = self._burst, None
        can = self._meter.bytes_per_s
        if can is not None:
            self._owed += max(0.0, sent - self._share * can * (now - since))
            self._next = now + BURST_EVERY_S


class Adaptive:
    """As fast as training does not become slower: additive up, multiplicative down.

    The *baseline* is made of steps during which nothing was sent, or no more than the floor: the median of the last
    ones is robust against the odd evaluation, follows a training that becomes slower by itself, and owes nothing to
    the steps that are to be judged by it. Steps are judged some at a time, each as a multiple of the baseline: they
    are slow when their mean is above that of the quiet ones by more than the tolerance, and by more than chance
    explains.

    What the link can do is measured at the very beginning, and whenever there is no limit. Then it goes at the floor
    until there is a baseline, and doubles its rate until training first becomes slower. While the trainer waits for
    the agent anyway there is no limit.
    """

    def __init__(self) -> None:
        self._meter = LinkMeter()
        self._rate = 0.0
        self._last = -math.inf
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS_MAX)
        self._judged: list[float] = []
        self._limit: float | None = None
        self._since = -math.inf
        """The limit that the last bytes went at, and since when."""
        self._was_slow = False
        self.waited_for = False
        """Whether the trainer does nothing but wait for what is sent."""

    @property
    def link_bytes_per_s(self) -> float | None:
        """What the link can do, as far as it was measured."""
        return self._meter.bytes_per_s

    @property
    def floor(self) -> float:
        """The rate never falls below this, so that every flush ends."""
        return max(FLOOR_BYTES_PER_S, FLOOR_SHARE * (self.link_bytes_per_s or 0.0))

    @property
    def baseline_s(self) -> float | None:
        """An undisturbed step; None while that is not known."""
        return statistics.median(self._quiet) if len(self._quiet) >= QUIET_STEPS_MIN else None

    def rate(self, now: float) -> float | None:
        can = self.link_bytes_per_s
        if self.waited_for or can is None or self._rate >= can:
            return None
        return max(self._rate, self.floor)

    def sent(self, now: float, nbytes: int) -> None:
        limit, self._last = self.rate(now), now
        if limit != self._limit:
            self._limit, self._since = limit, now
        if limit is None:
            self._meter.sent(now, nbytes)
        else:
            self._meter.restart()

    def status(self) -> dict[str, float | None]:
        return {"link_bytes_per_s": self.link_bytes_per_s, "baseline_s": self.baseline_s}

    def stepped(self, now: float, took_s: float) -> None:
        """A training step ended ``now`` that took ``took_s``, without what it waited for the agent."""
        if took_s <= 0:
            return
        can, began = self.link_bytes_per_s, now - took_s
        if self._last < began:
            self._quiet.append(took_s)
            self._judged = []
            return
        if can is None or self._since > began:
            return  # there is nothing to choose from yet, or the step began at another rate
        if self._limit is not None and self._limit <= self.floor:
            self._quiet.append(took_s)
        if self.baseline_s is not None:
            self._judged.append(took_s)
            slow = self._is_slow(self.baseline_s)
            if slow is not None:
                self._change(slow, can)

    def _is_slow(self, baseline_s: float) -> bool | None:
        """None: that cannot be said yet. Where steps differ much it takes many to say that all is well, and few to say
        that something is badly wrong."""
        full = sum(self._judged) >= JUDGED_S
        if len(self._judged) < JUDGED_STEPS and not full:
            return None
        quiet = [min(one / baseline_s, CLIP) for one in self._quiet]
        judged = [min(one / baseline_s, CLIP) for one in self._judged]
        chance = statistics.pstdev(quiet) / math.sqrt(len(judged))
        excess = statistics.fmean(judged) - statistics.fmean(quiet)
        if excess > max(TOLERANCE, SIGMAS_EARLY * chance):
            return True
        if full or SIGMAS * chance <= TOLERANCE:
            return excess > max(TOLERANCE, SIGMAS * chance)
        return None

    def _change(self, slow: bool, can: float) -> None:
        self._judged = []
        rate = min(max(self._rate, self.floor), can)
        if slow:
            self._was_slow = True
            rate *= DOWN
        elif self._was_slow:
            rate += STEP_SHARE * can
        else:
            rate *= 2
        self._rate = max(rate, self.floor)
