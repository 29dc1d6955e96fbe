"""Ways in which a run comes to harm, by name: what is done to its files, what fsck must say, what repair must reach.

The run has steps 1 to 3 of two ranks; all is done to step 3, or to what all steps need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from everstep.format import names

STEP = 3
LAYOUT = "layout"
"""Stands for the name of the layout of rank 0."""


class Reach(Enum):
    """What repair comes to."""

    MENDED = "mended"
    """Every file is what it was."""
    EQUAL = "equal"
    """The checkpoint loads, bit for bit; a record of it was made anew."""
    ASIDE = "aside"
    """The checkpoint is set aside, the others load."""
    LEFT = "left"
    """The damage stays, and is told."""


@dataclass(frozen=True)
class Damage:
    """``act`` harms a file; ``kind`` and ``name`` are those of the finding. ``alone`` is what repair reaches without
    any other place, ``beside`` with a tier that is whole."""

    act: Callable[[Path], None]
    name: str
    kind: str
    alone: Reach
    beside: Reach = Reach.MENDED


def flip(at: int) -> Callable[[Path], None]:
    """One bit of the byte at ``at`` (from the end, where that is negative)."""

    def act(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    return act


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    """What a file system may show after a power loss, of what was not synced."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def remove(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    """What a mount, an unpacked archive or a person may leave."""
    path.unlink()
    path.mkdir()


def of_another_step(path: Path) -> None:
    """The same file of the step before."""
    path.write_bytes(Path(str(path).replace(f"{STEP:09d}", f"{STEP - 1:09d}")).read_bytes())


def of_another_rank(path: Path) -> None:
    path.write_bytes(Path(str(path).replace("rank-00000", "rank-00001")).read_bytes())


IMAGE = names.image(STEP, 1, 1, 0, "model")
STATE = names.state(STEP, 1, 1, 1)
VOTE = names.vote(STEP, 1, 1, 0)
OTHER_VOTE = names.vote(STEP, 1, 1, 1)
MANIFEST = names.decision(STEP, 1, 1)
RECORD = names.incarnation(1)

DAMAGES: dict[str, Damage] = {
    "a bit of an image's header": Damage(flip(3), IMAGE, "damaged", Reach.ASIDE),
    "a bit of an image's data": Damage(flip(-5), IMAGE, "damaged", Reach.ASIDE),
    "an image cut": Damage(cut, IMAGE, "damaged", Reach.ASIDE),
    "an image grown": Damage(grow, IMAGE, "damaged", Reach.MENDED),
    "an image empty": Damage(empty, IMAGE, "damaged", Reach.ASIDE),
    "half an image of zeros": Damage(zeros, IMAGE, "damaged", Reach.ASIDE),
    "an image missing": Damage(remove, IMAGE, "missing", Reach.ASIDE),
    "an image of another step": Damage(of_another_step, IMAGE, "damaged", Reach.ASIDE),
    "a bit of a state image": Damage(flip(9), STATE, "damaged", Reach.ASIDE),
    "a state image missing": Damage(remove, STATE, "missing", Reach.ASIDE),
    "a bit of a vote's header": Damage(flip(20), VOTE, "damaged", Reach.MENDED),
    "a bit of a vote's index": Damage(flip(-20), VOTE, "damaged", Reach.MENDED),
    "a vote cut": Damage(cut, VOTE, "damaged", Reach.MENDED),
    "a vote missing": Damage(remove, VOTE, "missing", Reach.MENDED),
    "the second rank's vote missing": Damage(remove, OTHER_VOTE, "missing", Reach.MENDED),
    "a vote of another step": Damage(of_another_step, VOTE, "damaged", Reach.MENDED),
    "a vote of another rank": Damage(of_another_rank, VOTE, "damaged", Reach.MENDED),
    "a bit of a layout": Damage(flip(-3), LAYOUT, "damaged", Reach.LEFT),
    "a layout missing": Damage(remove, LAYOUT, "missing", Reach.LEFT),
    "a bit of a manifest": Damage(flip(40), MANIFEST, "damaged", Reach.EQUAL),
    "a manifest empty": Damage(empty, MANIFEST, "damaged", Reach.EQUAL),
    "a manifest missing": Damage(remove, MANIFEST, "undecided", Reach.EQUAL, Reach.EQUAL),
    "a bit of an incarnation's record": Damage(flip(30), RECORD, "damaged", Reach.LEFT),
    "an incarnation's record missing": Damage(remove, RECORD, "missing", Reach.LEFT),
    "a directory for an image": Damage(directory, IMAGE, "damaged", Reach.ASIDE),
    "a directory for a state image": Damage(directory, STATE, "damaged", Reach.ASIDE),
    "a directory for a vote": Damage(directory, VOTE, "damaged", Reach.MENDED),
    "a directory for a layout": Damage(directory, LAYOUT, "damaged", Reach.LEFT),
    "a directory for a manifest": Damage(directory, MANIFEST, "damaged", Reach.EQUAL),
    "a directory for an incarnation's record": Damage(directory, RECORD, "damaged", Reach.LEFT),
    "a directory for run.json": Damage(directory, names.RUN, "damaged", Reach.LEFT),
    "a bit of run.json": Damage(flip(30), names.RUN, "damaged", Reach.LEFT),
}
