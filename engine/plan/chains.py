"""Which durable checkpoints stand on which: the base of the next delta, and which delta is to be made a full."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from ..errors import Damaged

Key = tuple[int, int]
"""A checkpoint: (incarnation, step)."""

Kind = Literal["full", "delta"]
FULL: Kind = "full"
DELTA: Kind = "delta"

DeltaBase = Literal["full", "previous"]
DELTA_BASES: tuple[DeltaBase, ...] = ("full", "previous")

MAX_CHAIN_MAX = 32
"""A farther tier may be behind by one merge, which makes its chains up to twice as long: half of what can be read."""

KNOWN_MAX = 256
"""Checkpoints that are remembered, the newest ones; many more than a chain has."""

NONE_DURABLE: Mapping[Key, Key | None] = MappingProxyType({})


class Delta(NamedTuple):
    """What a delta stands on, and whether it is to be merged into a full once it is durable."""

    base: Key
    merge: bool


class _Place(NamedTuple):
    depth: int
    full: Key


class Chains:
    """Kept by the one rank that decides. A checkpoint's *depth* is how many deltas lie between it and its full, itself
    included; a full has none.

    Where nothing that is durable will do, deltas stand on the full that was decided last: they are written behind it,
    and in full if it comes to nothing. So one full is enough to begin with.
    """

    def __init__(
        self,
        base: DeltaBase,
        max_chain: int,
        incarnation: int,
        durable: Mapping[Key, Key | None] = NONE_DURABLE,
    ) -> None:
        """``incarnation`` is being written; ``durable`` are the checkpoints that count, with their bases (None: a
        full)."""
        self._previous = base == "previous"
        self._max = max_chain
        self._incarnation = incarnation
        self._known: dict[Key, _Place] = {}
        self._coming: Key | None = None
        """The full that was decided last, until it is durable or lost."""
        self._merging: dict[int, Key] = {}
        """By step of a delta that is to be merged, the full."""
        self._decided: dict[int, Key] = {}
        """By step of a delta that is not durable yet, the full."""
        self._more = 0
        """How many deltas more than usual may stand on one full, as fulls that were due came to nothing."""
        self._spoilt = -1
        """The last step that could not be stored as a delta: nothing older than that is a base any more."""
        for key in sorted(durable, key=_age):
            self.add(key, durable[key])

    def add(self, key: Key, base: Key | None) -> None:
        """``key`` is durable now and stands on ``base``; None: it is a full, from the beginning or merged."""
        self._decided = {step: full for step, full in self._decided.items() if step > key[1]}
        if self._coming is not None and self._coming[1] <= key[1]:
            self._coming = None
        if base is None:
            self._known[key] = _Place(0, key)
            self._more = 0
            self._merging.pop(key[1], None)
        else:
            # Of a base that nobody knows it cannot be told how much is below.
            below = self._known.get(base, _Place(self._max, base))
            self._known.setdefault(key, _Place(below.depth + 1, below.full))
        for old in sorted(self._known, key=_age)[:-KNOWN_MAX]:
            del self._known[old]

    def knows(self, key: Key) -> bool:
        """Whether it was told of that checkpoint."""
        return key in self._known

    def full(self, step: int) -> None:
        """A full is decided for ``step``."""
        self._coming = self._incarnation, step

    def lost(self, step: int) -> None:
        """The flush of ``step``, or its merging, came to nothing: if it was to be merged, another one is. If it was a
        full, for which there may be no room, what is durable serves for ``max_chain`` deltas more."""
        self._decided.pop(step, None)
        self._merging.pop(step, None)
        if self._coming is not None and self._coming[1] == step:
            self._coming = None
            self._more += self._max

    def spoil(self, step: int) -> None:
        """The delta of ``step`` could not be stored as one, by all ranks: none is tried on what is older."""
        self._spoilt = max(self._spoilt, step)

    @property
    def newest_full(self) -> Key | None:
        return max([key for key, place in self._known.items() if not place.depth], key=_age, default=None)

    def base(self) -> Key | None:
        """What a delta would stand on now: the newest full, or the newest checkpoint whose chain is short enough, or a
        full that is on its way. None: a full is due. That is so, too, where twice as many deltas as ``max_chain`` stand
        on one full (more, where fulls come to nothing): the merge that was to end that has not come to its turn."""
        most = self._max - 1 if self._previous else 0
        usable = [
            key for key, place in self._known.items() if place.depth <= most and place.full[1] >= self._spoilt
        ]
        found = max(usable, key=_age, default=None)
        if found is not None and self._standing_on(self._known[found].full) < 2 * self._max + self._more:
            return found
        coming = self._coming
        return coming if coming is not None and coming[1] > self._spoilt else None

    def _standing_on(self, full: Key) -> int:
        """How many deltas stand, or are to stand, on that full, with others between or not."""
        deltas = [place.full for place in self._known.values() if place.depth]
        return [*deltas, *self._decided.values()].count(full)

    def delta(self, step: int) -> Delta | None:
        """The delta that is decided for ``step``; None where a full is due. Once ``max_chain`` stand on the same full
        one of them is to be merged, and another one where that comes to nothing."""
        base = self.base()
        if base is None:
            return None
        full = self._known[base].full if base in self._known else base
        self._decided[step] = full
        merge = self._standing_on(full) >= self._max and full not in self._merging.values()
        if merge:
            self._merging[step] = full
            while len(self._merging) > KNOWN_MAX:
                del self._merging[next(iter(self._merging))]
        return Delta(base, merge)


def next_bases(parents: Mapping[Key, Key | None], *, goes_on: bool = True) -> set[Key]:
    """What the next deltas may stand on, though it may be older than all that retention keeps: the newest full, and,
    where the job ``goes_on`` and may have decided one, as long as nothing stands on that, the full before it."""
    fulls = sorted([key for key, parent in parents.items() if parent is None], key=_age)
    return set(fulls[-2:] if goes_on and fulls and fulls[-1] not in parents.values() else fulls[-1:])


def chain_of(key: Key, parents: Mapping[Key, Key | None]) -> list[Key]:
    """What ``key`` needs to be loaded: its base, that one's, and so on, the nearest first; ends where ``parents`` does.
    Raises Damaged where it leads back to itself."""
    found: list[Key] = []
    below = parents.get(key)
    while below is not None:
        if below in found or below == key:
            raise Damaged(
                f"the chain of step {key[1]} leads back to step {below[1]}",
                found=f"incarnation {below[0]}",
                step=key[1],
            )
        found.append(below)
        below = parents.get(below)
    return found


def _age(key: Key) -> tuple[int, int]:
    return key[1], key[0]
