"""Where a run's bytes lie: by checkpoint, part and kind of object, from one listing."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.format import names
from everstep.format.names import Kind

from .asking import reading

Key = tuple[int, int]
"""(incarnation, step)"""

IMAGES = "images"
PLAIN = "plain values"
VOTES = "votes"
RECORDS = "records"
LEFTOVERS = "leftovers"
FOREIGN = "foreign"


@dataclass(slots=True)
class StepUsage:
    """One checkpoint's directory: bytes of its images by part, of its votes, and of all else in it; and how much of
    all that lies in which attempt."""

    by_part: dict[str, int] = field(default_factory=dict)
    votes: int = 0
    records: int = 0
    by_attempt: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.by_part.values()) + self.votes + self.records

    def beside(self, attempt: int) -> int:
        """Bytes of other attempts than ``attempt``."""
        return sum(nbytes for number, nbytes in self.by_attempt.items() if number != attempt)


@dataclass(slots=True)
class Usage:
    """Of one place. ``records`` are layouts, incarnations, events and the like, ``leftovers`` what writers have
    under way, or left when they died, ``foreign`` what is not of this format."""

    steps: dict[Key, StepUsage] = field(default_factory=dict)
    records: int = 0
    leftovers: int = 0
    foreign: int = 0
    objects: int = 0

    @property
    def nbytes(self) -> int:
        own = sum(step.nbytes for step in self.steps.values())
        return own + self.records + self.leftovers + self.foreign

    def by_kind(self) -> dict[str, int]:
        """Bytes of images, plain values, votes, records, leftovers, foreign objects."""
        found = dict.fromkeys((IMAGES, PLAIN, VOTES, RECORDS, LEFTOVERS, FOREIGN), 0)
        for step in self.steps.values():
            for part, nbytes in step.by_part.items():
                found[PLAIN if part == PLAIN else IMAGES] += nbytes
            found[VOTES] += step.votes
            found[RECORDS] += step.records
        found[RECORDS] += self.records
        found[LEFTOVERS], found[FOREIGN] = self.leftovers, self.foreign
        return found

    def by_part(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for step in self.steps.values():
            for part, nbytes in step.by_part.items():
                found[part] = found.get(part, 0) + nbytes
        return found


async def usage(backend: Backend) -> Usage:
    """What the listing says; no object is read. Raises CannotTell."""
    found = Usage()
    with reading(backend, ""):
        async for item in backend.list(""):
            found.objects += 1
            _count(found, item.name, item.nbytes)
        found.leftovers = sum(item.nbytes for item in await backend.leftovers(""))
    return found


def _count(found: Usage, name: str, nbytes: int) -> None:
    parsed = names.parse(name)
    if parsed is None:
        found.foreign += nbytes
        return
    if parsed.step is None or parsed.incarnation is None:
        found.records += nbytes
        return
    step = found.steps.setdefault((parsed.incarnation, parsed.step), StepUsage())
    if parsed.kind is not Kind.DECISION and parsed.attempt is not None:
        step.by_attempt[parsed.attempt] = step.by_attempt.get(parsed.attempt, 0) + nbytes
    if parsed.kind in (Kind.IMAGE, Kind.STATE):
        part = PLAIN if parsed.kind is Kind.STATE else _part_of(parsed.image or parsed.text or "?")
        step.by_part[part] = step.by_part.get(part, 0) + nbytes
    elif parsed.kind in (Kind.VOTE, Kind.GATHER):
        step.votes += nbytes
    else:
        step.records += nbytes


def _part_of(image: str) -> str:
    """The part whose image it is: an image that several ranks keep has these behind a plus sign."""
    return image.partition("+")[0] if names.shared_with(image) else image
