"""One rank's snapshot out of several slots of a node, as one."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.errors import Damaged
from everstep.format.records_table import decode_records
from everstep.format.vote import STATE_IMAGE, ImageRecord

from .control import IMAGE_PREFIX
from .slots import Pinned

RECORDS_REGION = "records"
"""Of a held slot: the records of all the rank's images, as its owner took them, those that are not in the slot too."""


class Joined:
    """A snapshot that this node holds for another: what its owner's agent sent lies in the held slot, and of images
    that ranks of this node copied for themselves, the bytes are in those ranks' own slots. It reads as one
    :class:`Pinned`, sealed with the owner's hashes. Images that are nowhere on this node are in no region."""

    def __init__(self, slot: Pinned, elsewhere: Mapping[str, tuple[Pinned, str]]) -> None:
        """``elsewhere``: images (by name) that lie in regions of other slots. Pins stay the caller's. Damaged where
        the slot's table of records is no such table, or not that of its own seal."""
        self.info = slot.info
        self._slot = slot
        self._places = {IMAGE_PREFIX + image: place for image, place in elsewhere.items()}
        self.records = records_of(slot)
        self.regions: dict[str, int] = dict(slot.regions)
        for name, (pin, region) in self._places.items():
            self.regions[name] = pin.regions[region]

    def view(self, name: str) -> memoryview:
        """The region's bytes, read-only. KeyError."""
        place = self._places.get(name)
        return self._slot.view(name) if place is None else place[0].view(place[1])

    def check(self) -> None:
        """SlotGone unless all slots still hold these very snapshots."""
        self._slot.check()
        for pin, _ in self._places.values():
            pin.check()

    def sealed(self) -> tuple[ImageRecord, ...]:
        """The owner's records of all images and the state."""
        self.check()
        return self.records


AnyPin = Pinned | Joined


def records_of(slot: Pinned) -> tuple[ImageRecord, ...]:
    """The table of records in a held slot, which must agree with what the slot was sealed with. Damaged."""
    name = f"records of step {slot.info.step} in held slot {slot.info.index}"
    if RECORDS_REGION not in slot.regions:
        raise Damaged(f"{name} are missing", found="nothing", expected="a table of records", name=name)
    records = tuple(decode_records(slot.view(RECORDS_REGION), name))
    known = {record.name: record for record in records}
    for record in slot.sealed() or ():
        if known.get(record.name) != record:
            raise Damaged(
                f"{name} do not agree with the slot's seal",
                found=f"another record of {record.name!r}",
                expected=record.root.hex(),
                name=name,
            )
    if STATE_IMAGE not in known or len(known) != len(records):
        raise Damaged(
            f"{name} do not fit together", found=sorted(known), expected="each image once", name=name
        )
    slot.check()
    return records
