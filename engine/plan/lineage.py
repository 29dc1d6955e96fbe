"""Which steps of which incarnations count."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Damaged
from ..format import names
from ..format.records import IncarnationRecord

NOTHING = -1
"""The cut of an incarnation of which no step counts."""


class Lineage:
    """The chain of adoptions from the newest incarnation back. Immutable.

    The newest incarnation adopted a step of an ancestor, which may have adopted one of an earlier one, and so
    on. Of an ancestor those steps count that are not above any step adopted on the way to it: what it wrote
    beyond was given up. Incarnations beside the chain, and all before a fresh start, do not count.
    """

    def __init__(self, records: Sequence[IncarnationRecord]) -> None:
        """``records`` in any order. Raises :class:`Damaged` if one that was adopted from is missing, or if an
        adoption leads forward."""
        by_number = {record.number: record for record in records}
        self.newest: int | None = max(by_number, default=None)
        """Number of the newest incarnation; None without any."""
        self._cuts: dict[int, int | None] = {}
        number, cut = self.newest, None
        while number is not None:
            self._cuts[number] = cut
            record = by_number[number]
            adopted, step = record.adopted_incarnation, record.adopted_step
            if adopted is None or step is None:
                break
            name = names.incarnation(adopted)
            if adopted >= number:
                raise Damaged("an incarnation adopted from a later one", name=name, found=number)
            if adopted not in by_number:
                raise Damaged(
                    "the record of an incarnation is missing", name=name, expected=f"adopted by {number}"
                )
            cut = step if cut is None else min(cut, step)
            number = adopted

    @property
    def chain(self) -> tuple[int, ...]:
        """The incarnations that count, newest first."""
        return tuple(self._cuts)

    def cut(self, incarnation: int) -> int | None:
        """The last step of ``incarnation`` that counts: None if there is no limit (the newest incarnation),
        ``NOTHING`` (-1) if none of its steps counts."""
        return self._cuts.get(incarnation, NOTHING)

    def counts(self, incarnation: int, step: int) -> bool:
        """Whether ``step`` of ``incarnation`` is part of the run's history."""
        cut = self.cut(incarnation)
        return cut is None or step <= cut
