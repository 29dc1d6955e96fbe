"""Keeping snapshots of other nodes' ranks: received into held arenas, proved by their owners' hashes, then sealed.

A held snapshot has the regions that were sent, and ``records``: the hashes of all the rank's images and its state, also
of those that were not sent. Where a rank of this node keeps second copies of all tensors of an image, the image is not
sent: the copy has its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from everstep.errors import (
    CapacityError,
    Closed,
    Damaged,
    EverstepError,
    PeerLost,
    ReplicasDiffer,
    StepOrder,
    Superseded,
)
from everstep.format.constants import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, HASH_BYTES
from everstep.format.hashing import chunk_hashes, image_root, rank_root
from everstep.format.names import copy_region, shared_with
from everstep.format.records_table import decode_records
from everstep.format.vote import ImageRecord
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.control import IMAGE_PREFIX, region_of
from everstep.memory.directory import find_arenas
from everstep.memory.errors import SlotGone
from everstep.memory.header import REGIONS_MAX, SEAL_ENTRY_BYTES, Kind, aligned, pack_key
from everstep.memory.slots import Pinned, Purpose, SnapshotInfo
from everstep.plan.room import GROWTH
from everstep.store.proving import check_record

from .failing import own_failures
from .link import Link
from .messages import Kept, Need, Offer, failed
from .proving import Prover, state_last
from .sender import SMALL_REGIONS
from .shelf import Key, Place, Shelf
from .telling import is_logged

log = logging.getLogger("everstep.peers")

RECORDS_REGION = "records"
LOCAL_WAIT_S = 10.0
"""How long to wait for the same step of a rank of this node, whose copies are then compared instead of sent."""
SLOT_WAIT_S = 30.0
"""How long to wait for a slot: both are read, or hold what W still needs."""
PLACE_WAIT_S = 10.0
"""How long a new connection waits until the former one, of the same rank, has given way."""
POLL_S = 0.5
"""Between looks, where nobody said that there is something to see."""

T = TypeVar("T")

Told = Callable[[int, Key, EverstepError], None]
"""Called with (rank, (incarnation, step), error) when copies that should be equal are not."""


def _say_nothing(rank: int, key: Key, error: EverstepError) -> None:
    return None


class Keeper:
    """The held snapshots of one node, in arenas ``held-*`` in ``directory`` that this process owns.

    ``local`` gives the arena of a rank of this node, None where the rank is not here. Any thread may call; what is
    received of one rank goes through one connection at a time, the newest. The former held snapshot of a rank stays
    until a newer one is sealed, and W's until W is newer (:meth:`completed`).
    """

    def __init__(
        self,
        directory: Path,
        run_key: str,
        node: str,
        run_id: str,
        local: Callable[[int], Arena | None],
        *,
        told: Told = _say_nothing,
        local_wait_s: float = LOCAL_WAIT_S,
        slot_wait_s: float = SLOT_WAIT_S,
    ) -> None:
        self._place = Place(directory, run_key, node, run_id)
        self._local = local
        self._told = told
        self._local_wait_s = local_wait_s
        self._slot_wait_s = slot_wait_s
        self._news = threading.Condition()
        """Guards all below; notified when a local snapshot is there, W moves, or the end has come."""
        self._shelves: dict[int, Shelf] = {}
        self._taken: set[int] = set()
        """Ranks whose shelves are in use."""
        self._refused: dict[int, int] = {}
        """By rank how many times in a row its snapshot was not kept."""
        self._receiving: dict[int, Link] = {}
        """By rank the newest connection with an offer."""
        self._version = 0
        self._complete: Key | None = None
        held = [info for info in find_arenas(directory, Kind.HELD) if info.run_id == run_id]
        self._incarnation = max((info.incarnation for info in held), default=0)
        self._closed = False

    @property
    def directory(self) -> Path:
        """Where this node's arenas lie."""
        return self._place.directory

    # -- what the agent says

    def reserve(self, rank: int, slot_bytes: int, chunk_bytes: int) -> None:
        """Have room for the snapshots of ``rank``, whose own slots have ``slot_bytes``, before they come. Raises
        MemoryTooSmall; RunInUse if another living process keeps them."""
        room = with_records(slot_bytes, chunk_bytes)
        with self._news:
            shelf = self._shelves.get(rank)
        if shelf is not None and shelf.fits(room, chunk_bytes):
            return  # even while something is received
        with self._occupied(rank, None) as shelf:
            shelf.reserve(room, chunk_bytes, self._complete)

    def noticed(self) -> None:
        """A rank of this node has a new snapshot."""
        with self._news:
            self._tell_news()

    def completed(self, key: Key) -> None:
        """W over all nodes, or the adopted snapshot before there is one: it is not overwritten."""
        with self._news:
            self._complete = key
            self._incarnation = max(self._incarnation, key[0])
            self._tell_news()

    def drop(self, below: Key) -> None:
        """Remove the arenas of ranks that are not sent any more: their newest snapshot is older than ``below``."""
        with self._news:
            unused = [rank for rank in self._shelves if rank not in self._taken]
        for rank in unused:
            with self._occupied(rank, None) as shelf:
                if shelf.older_than(below):
                    shelf.close(remove=True)

    def arenas(self) -> dict[int, Arena]:
        """By rank the arena that is written to."""
        with self._news:
            found = {rank: shelf.current for rank, shelf in self._shelves.items()}
        return {rank: arena for rank, arena in found.items() if arena is not None}

    def close(self, *, remove: bool = False) -> None:
        """End what is being received, and let go of the arenas; they stay for the next agent unless ``remove``.
        Safe to call again."""
        with self._news:
            self._closed = True
            ranks = [*self._shelves]
            self._tell_news()
        for rank in ranks:
            with self._occupied(rank, None, closing=True) as shelf:
                shelf.close(remove=remove)

    # -- what other agents send

    def receive(self, link: Link, offer: Offer) -> bool:
        """Keep what is offered, and answer: Kept, or Failed with the reason, an error of this node's memory among
        them. Whether it is kept. On the connection's thread. Raises PeerLost if the connection breaks: nothing of the
        snapshot stays then, but the former one does."""
        try:
            records = self._check(offer)
            what = f"it cannot keep step {offer.step} of rank {offer.rank}"
            with self._occupied(offer.rank, link) as shelf, own_failures(self._place.node, what):
                root = self._keep(link, offer, records, shelf)
        except PeerLost:
            raise
        except EverstepError as error:
            if link.closed:
                raise
            times = self._refused[offer.rank] = self._refused.get(offer.rank, 0) + 1
            if is_logged(times):
                log.warning("a snapshot of rank %s is not kept (%d times now): %s", offer.rank, times, error)
            link.send(failed(error))
            return False
        self._refused.pop(offer.rank, None)
        points.reach("keeper.kept.before", str(offer.step))
        link.send(Kept(root))
        return True

    def _keep(self, link: Link, offer: Offer, records: Sequence[ImageRecord], shelf: Shelf) -> bytes:
        """The root over the records of what is held now."""
        key, root = (offer.incarnation, offer.step), rank_root(records)
        found = shelf.find(key)
        if found is not None and self._is_held(*found, offer):
            return root
        images = [] if offer.mode == "meta" else self._needed(link, offer, records)
        wanted = {*SMALL_REGIONS, *(IMAGE_PREFIX + name for name in images)}
        sent = [(name, nbytes) for name, nbytes in offer.regions if name in wanted]
        regions = [*sent, (RECORDS_REGION, len(offer.records))]
        self._make_room(offer, regions, shelf)
        slot = self._wait(self._slot_wait_s, link, lambda: shelf.begin(key, offer.world, self._complete))
        if slot is None:
            raise self._no_slot(offer)
        with slot:
            views = slot.place(regions)
            link.send(Need(images))
            points.reach("keeper.begun", str(offer.step))
            Prover(link, offer, records, views).receive([name for name, _ in sent])
            views[RECORDS_REGION][:] = offer.records
            slot.publish(offer.layout_hash)
        present = [record for at, record in enumerate(records) if region_of(records, at) in wanted]
        shelf.seal(slot, present, self._complete)
        points.reach("keeper.sealed", str(offer.step))
        return root

    def _check(self, offer: Offer) -> list[ImageRecord]:
        """The offer's records, proved. Superseded; Damaged if it does not fit together."""
        if offer.run_id != self._place.run_id:
            raise Damaged("a snapshot of another run", found=offer.run_id, expected=self._place.run_id)
        pack_key((offer.incarnation, offer.step))  # they are in range
        with self._news:
            newest = self._incarnation = max(self._incarnation, offer.incarnation)
        if offer.incarnation < newest:
            raise Superseded("a snapshot of an older incarnation", found=offer.incarnation, expected=newest)
        name = f"offer of rank {offer.rank}, step {offer.step}"
        records = decode_records(offer.records, name)
        if not CHUNK_BYTES_MIN <= offer.chunk_bytes <= CHUNK_BYTES_MAX or not 0 <= offer.rank < offer.world:
            found = f"chunks of {offer.chunk_bytes} bytes, rank {offer.rank} of {offer.world}"
            raise Damaged(f"{name} cannot be right", found=found, name=name)
        images = [region for region in offer.regions if region[0] not in SMALL_REGIONS]
        told = [(region_of(records, at), record.nbytes) for at, record in enumerate(records)]
        sizes = dict(offer.regions)
        small = [(region, sizes.get(region, -1)) for region in SMALL_REGIONS]
        if (
            offer.regions != [*small, *images]
            or min(sizes.values()) < 0
            or len(sizes) != len(offer.regions)
            or len(sizes) >= REGIONS_MAX
            or not all(region.startswith(IMAGE_PREFIX) for region, _ in images)
            or not state_last(records)
            or told != [*images, small[-1]]
        ):
            raise Damaged(
                f"{name}: regions and records do not fit together", found=offer.regions, expected=told
            )
        for record in records:
            check_record(record, offer.chunk_bytes, f"{name}, {record.name}")
        return records

    def _is_held(self, arena: Arena, info: SnapshotInfo, offer: Offer) -> bool:
        """Whether it is this very snapshot, with all images that would be sent; if it lacks some, it goes. StepOrder if
        it is another one."""
        with arena.pin(info.index, info.generation, purpose=Purpose.REPLICATE) as pinned:
            same = bytes(pinned.view(RECORDS_REGION)) == offer.records
            present = set(pinned.regions)
            pinned.check()
        if not same:
            raise StepOrder(
                f"node {self._place.node} holds another snapshot of that step",
                found=f"rank {offer.rank}, incarnation {offer.incarnation}, step {offer.step}",
                expected="the same bytes, or a newer step",
            )
        images = (
            [name for name, _ in offer.regions if name.startswith(IMAGE_PREFIX)]
            if offer.mode == "full"
            else []
        )
        if all(name in present or shared_with(name.removeprefix(IMAGE_PREFIX)) for name in images):
            return True
        arena.discard(info.index, info.generation)
        return False

    def _make_room(self, offer: Offer, regions: Sequence[tuple[str, int]], shelf: Shelf) -> None:
        need = sum(aligned(nbytes) for _, nbytes in regions)
        if not shelf.fits(need, offer.chunk_bytes):
            owners = with_records(offer.slot_bytes, offer.chunk_bytes)
            shelf.reserve(max(need, min(owners, int(need * GROWTH))), offer.chunk_bytes, self._complete)
            points.reach("keeper.grown", str(offer.rank))

    def _no_slot(self, offer: Offer) -> CapacityError:
        return CapacityError(
            f"node {self._place.node} has no free slot for snapshots of rank {offer.rank}",
            found=f"both in use for {self._slot_wait_s:g} s",
            expected="W to get on, or readers to end",
            rank=offer.rank,
            step=offer.step,
        )

    # -- second copies on this node

    def _needed(self, link: Link, offer: Offer, records: Sequence[ImageRecord]) -> list[str]:
        """The images that have to be sent: all but those whose bytes a rank of this node has."""
        until = time.monotonic() + self._local_wait_s
        return [
            record.name
            for record in records[:-1]
            if not any(self._copied(link, offer, record, rank, until) for rank in shared_with(record.name))
        ]

    def _copied(self, link: Link, offer: Offer, record: ImageRecord, rank: int, until: float) -> bool:
        """Whether ``rank`` is here, and has copied that very image."""
        key = (offer.incarnation, offer.step)
        pinned = self._wait(until - time.monotonic(), link, lambda: self._pin(rank, key))
        if not isinstance(pinned, Pinned):
            return False
        with pinned:
            region = copy_region(offer.rank, record.name)
            if pinned.regions.get(region) != record.nbytes:
                return False
            found = chunk_hashes(pinned.view(region), offer.chunk_bytes)
            try:
                pinned.check()
            except SlotGone:
                return False
        if image_root(record.nbytes, found) == record.root:
            return True
        first = next(
            at
            for at in range(0, len(found), HASH_BYTES)
            if found[at:][:HASH_BYTES] != record.chunks[at:][:HASH_BYTES]
        )
        self._told(
            offer.rank, key, self._differs(offer, record, rank, first // HASH_BYTES * offer.chunk_bytes)
        )
        return False

    def _pin(self, rank: int, key: Key) -> Pinned | bool | None:
        """The local snapshot; None while it may still come, False if it cannot."""
        arena = self._local(rank)
        if arena is None:
            return False
        for found in arena.snapshots():
            if found.key == key:
                with contextlib.suppress(SlotGone):
                    return arena.pin(found.index, found.generation, purpose=Purpose.REPLICATE)
        newest = arena.newest(key[0])
        return False if newest is not None and newest > key[1] else None

    def _differs(self, offer: Offer, record: ImageRecord, rank: int, offset: int) -> ReplicasDiffer:
        return ReplicasDiffer(
            f"ranks {offer.rank} and {rank} hold different bytes of the same tensors, in {record.name!r} of step "
            f"{offer.step} from byte {offset} on",
            found="different hashes",
            expected="replicated tensors that are equal bit for bit",
            hint="The bytes are sent, and both are kept. A rank's memory may be faulty",
            step=offer.step,
            ranks=[offer.rank, rank],
            image=record.name,
        )

    # -- waiting

    def _wait(self, timeout_s: float, link: Link, look: Callable[[], T | None]) -> T | None:
        """What ``look`` gives as soon as that is not None, looking again at news; None after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            with self._news:
                seen = self._version
            self._check_open(link)
            found = look()  # without the lock: it asks others, who may be telling news
            if found is not None or time.monotonic() >= until:
                return found
            with self._news:
                self._news.wait_for(
                    lambda seen=seen: self._version != seen,  # type: ignore[misc]
                    min(max(0.0, until - time.monotonic()), POLL_S),
                )

    def _check_open(self, link: Link | None) -> None:
        if self._closed:
            raise Closed(f"the agent of node {self._place.node} is ending")
        if link is not None and link.closed:
            raise PeerLost("the connection was closed, for there is a newer one", node=link.peer)

    def _tell_news(self) -> None:
        """Under the lock."""
        self._version += 1
        self._news.notify_all()

    @contextlib.contextmanager
    def _occupied(self, rank: int, link: Link | None, *, closing: bool = False) -> Iterator[Shelf]:
        """The rank's shelf, for this thread alone. Whoever receives into it is cut off: its owner has made another
        connection, or will."""
        with self._news:
            former = self._receiving.pop(rank, None)
            if link is not None:
                self._receiving[rank] = link
        if former is not None:
            former.close()
        with self._news:
            try:
                if not self._news.wait_for(lambda: rank not in self._taken, PLACE_WAIT_S):
                    raise CapacityError(
                        f"what is kept of rank {rank} is in use", found=f"for {PLACE_WAIT_S:g} s"
                    )
                if not closing:
                    self._check_open(link)
            except EverstepError:
                self._forget(rank, link)
                raise
            self._taken.add(rank)
            shelf = self._shelves.setdefault(rank, Shelf(self._place, rank))
        try:
            yield shelf
        finally:
            with self._news:
                self._taken.discard(rank)
                self._forget(rank, link)
                self._tell_news()

    def _forget(self, rank: int, link: Link | None) -> None:
        if link is not None and self._receiving.get(rank) is link:
            del self._receiving[rank]


def with_records(slot_bytes: int, chunk_bytes: int) -> int:
    """Room for a snapshot of a slot of ``slot_bytes`` and the table of its records."""
    chunks = -(-slot_bytes // chunk_bytes) + REGIONS_MAX
    return aligned(slot_bytes) + aligned(chunks * HASH_BYTES + REGIONS_MAX * 4 * SEAL_ENTRY_BYTES)
