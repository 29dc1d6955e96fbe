"""What a node keeps for the others of its group: parity of their snapshots, made as they come in.

A slot of the parity arena is published when all members have sent all that they owe, and answered for when it is
sealed. Till then the one before stays as it is, and beyond that until W has gone past it. Members whose connection
broke, or whose agent was started anew, send the rest; where this agent was, all send anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from everstep.errors import AgentError, BadOption, Damaged, EverstepError, PeerLost, StepOrder, Superseded
from everstep.format.constants import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from everstep.format.hashing import rank_root
from everstep.format.records_table import decode_records
from everstep.format.vote import STATE_IMAGE
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind, aligned
from everstep.memory.slots import Pinned, Purpose, WriteSlot
from everstep.plan.room import GROWTH
from everstep.store.proving import check_record

from .described import ImageOf, check_group, check_images_of, decode_described
from .failing import own_failures
from .link import Link
from .messages import Kept
from .parity import PIECE_BYTES, WAIT_S, ParityOffer, Waits, Wanted, pieces
from .shelf import SLOTS, Place, fits, is_removed
from .stripes import Building, Key, Records

log = logging.getLogger("everstep.peers")

WORDS = 8
"""A member that has to wait hears of it so often in the time for which it would wait without a word."""
ROOM_POLL_S = 0.02
"""How often it is looked whether W has gone past a slot."""
TRIES_MAX = 3
"""How often the same bytes are asked for, if they come damaged."""


class ParityKeeper:
    """This node's parity arena, and what is being made in it. :meth:`receive` runs on the connections' threads."""

    def __init__(
        self,
        directory: Path,
        run_key: str,
        node: str,
        run_id: str,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        """A member is kept waiting for the others for as long as anything moved within ``wait_s``."""
        self._place = Place(directory, run_key, node, run_id)
        self._node = node
        self._wait_s = wait_s
        self._changed = threading.Condition()
        """Guards what follows; notified when a member came, when one has sent a stripe, and at the end."""
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._building: Building | None = None
        self._slot: WriteSlot | None = None
        self._sealing = False
        self._complete: Key | None = None
        self._closed = False

    # -- arenas

    def reserve(self, slot_bytes: int, chunk_bytes: int) -> None:
        """Have an arena with slots of at least ``slot_bytes``: the one that a former agent left, if it fits, else a
        new one, beside which the former stays until W lies in the new. MemoryTooSmall."""
        with self._changed:
            self._check_open()
            self._reserve(slot_bytes, chunk_bytes)

    def _reserve(self, slot_bytes: int, chunk_bytes: int) -> Arena:
        if self._arena is None:
            known = {arena.info.path for arena in self._outgrown}
            self._outgrown += [arena for arena in self._left_behind() if arena.info.path not in known]
        elif fits(self._arena.info, slot_bytes, chunk_bytes):
            return self._arena
        else:
            self._outgrown.append(self._arena)
            self._arena = None
        found = next((arena for arena in self._outgrown if fits(arena.info, slot_bytes, chunk_bytes)), None)
        if found is not None:
            self._outgrown.remove(found)
            found.populate("background")
        else:
            found = self._place.create(Kind.PARITY, 0, slot_bytes, chunk_bytes)
        self._arena = found
        return found

    def _left_behind(self) -> list[Arena]:
        """Arenas of dead agents of this run, now this one's; that with the newest snapshot first."""
        mine = []
        for info in find_arenas(self._place.directory, Kind.PARITY):
            if info.path is None or info.run_id != self._place.run_id or info.slots != SLOTS:
                continue
            with contextlib.suppress(EverstepError, FileNotFoundError), contextlib.ExitStack() as stack:
                arena = stack.enter_context(Arena.attach(info.path))
                self._place.take(arena, incarnation=info.incarnation, world=info.world)
                stack.pop_all()  # it is neither a living process's nor cleaned up
                mine.append(arena)
        return sorted(mine, key=lambda arena: _newest(arena) or (0, 0), reverse=True)

    def arenas(self) -> list[Arena]:
        """All that hold parity, the present one first."""
        with self._changed:
            return [arena for arena in (self._arena, *self._outgrown) if arena is not None]

    def newest(self) -> Key | None:
        """Of the snapshots of which parity is here."""
        return max(filter(None, map(_newest, self.arenas())), default=None)

    def completed(self, key: Key) -> None:
        """W over all nodes, or the adopted snapshot before there is one: parity of it is not overwritten."""
        with self._changed:
            self._complete = key
            self._drop_outgrown()
            self._changed.notify_all()

    def _forget_removed(self) -> None:
        """Let go of what somebody removed, unless it is being written to: nobody would find it."""
        for arena in [one for one in (self._arena, *self._outgrown) if one is not None and is_removed(one)]:
            if arena is not self._arena:
                self._outgrown.remove(arena)
            elif self._slot is None and not self._sealing:
                self._arena = None
            else:
                continue
            log.warning("parity is lost: %s was removed", arena.info.path)
            _remove(arena)

    def _drop_outgrown(self) -> None:
        for arena in list(self._outgrown):
            if self._complete is not None and (_newest(arena) or (0, 0)) < self._complete:
                self._outgrown.remove(arena)
                _remove(arena)

    def drop(self, below: Key) -> None:
        """Remove the arenas that are not written to any more: the newest parity in them is older than ``below``."""
        with self._changed:
            for arena in list(self._outgrown):
                if (_newest(arena) or (0, 0)) < below:
                    self._outgrown.remove(arena)
                    _remove(arena)
            present = self._arena
            if present is not None and self._building is None and (_newest(present) or below) < below:
                self._arena = None
                _remove(present)

    def interrupt(self) -> None:
        """What is being made is given up: the agent turns to another incarnation."""
        with self._changed:
            self._give_up(PeerLost("this node's agent turns to something else", node=self._node))
            self._clear()

    def close(self, *, remove: bool = False) -> None:
        """Whoever sends is refused from now on; what is published stays in its arena, unless it is to be removed."""
        with self._changed:
            self._closed = True
            self._give_up(PeerLost("this node's agent ends", node=self._node))
            self._clear()
            for arena in (self._arena, *self._outgrown):
                if arena is not None:
                    _remove(arena) if remove else arena.close()
            self._arena, self._outgrown = None, []

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost("this node's agent ends", node=self._node)

    # -- what members send

    def receive(self, link: Link, offer: ParityOffer) -> None:
        """Serve one member's offer. Errors, for the member: Damaged for what cannot be, or comes damaged again and
        again; StepOrder, Superseded where a newer step was begun; AgentError where other members do not get on;
        MemoryTooSmall. PeerLost if the member is gone."""
        records = self._checked(offer)
        root = self._published(offer, records)
        if root is None:
            building, turn = self._join(link, offer, records)
            self._take_all(link, building, offer.position, turn)
            root = self._finish(link, building)
        link.send(Kept(root))

    def _checked(self, offer: ParityOffer) -> Records:
        """The records of the member's images. Damaged, BadOption."""
        name = f"offer for parity of step {offer.step}"
        check_group(offer.seats, offer.m, offer.position, name)
        if offer.run_id != self._place.run_id:
            raise BadOption("snapshots of another run", found=offer.run_id, expected=self._place.run_id)
        if not 0 <= offer.to < len(offer.seats) or offer.to == offer.position:
            raise Damaged(f"{name}: position of this node", found=offer.to, expected="another's", name=name)
        chunk = offer.chunk_bytes
        if not CHUNK_BYTES_MIN <= chunk <= CHUNK_BYTES_MAX or chunk & (chunk - 1):
            raise Damaged(f"{name}: chunk size", found=chunk, expected="a power of two", name=name)
        records = {}
        for rank, table in offer.records:
            for record in decode_records(table, name):
                check_record(record, chunk, f"{name}, image {record.name!r} of rank {rank}")
                records[rank, record.name] = record
        check_images_of(offer.seats[offer.position], _images(records), name)
        return records

    def _published(self, offer: ParityOffer, records: Records) -> bytes | None:
        """The root of the slot that was made of this member's snapshot already. A slot of that step which was made of
        anything else is of no use, and goes."""
        with self._changed:
            self._check_open()
            self._forget_removed()
            if self._sealing or self._arena is None:
                return None
            for info in self._arena.snapshots():
                if info.key != offer.key:
                    continue
                with self._arena.pin(info.index, info.generation, purpose=Purpose.REPLICATE) as pin:
                    described = decode_described(bytes(pin.view(STATE_IMAGE)), "parity slot")
                    of = described.seats, described.m, described.position, described.chunk_bytes
                    same = of == (offer.seats, offer.m, offer.to, offer.chunk_bytes)
                    if same and described.images[offer.position] == _images(records):
                        return _sealed_root(pin)
                self._arena.discard(info.index, info.generation)
            return None

    def _join(self, link: Link, offer: ParityOffer, records: Records) -> tuple[Building, int]:
        """Take part in the building of the offer's key, once all members do: the building, and this connection's
        turn."""
        patience = _Patience(self._wait_s)
        with self._changed:
            while (building := self._to_join(offer)) is None:
                self._wait(link, patience, self._building, f"parity of step {offer.step} is not begun")
            try:
                turn = building.join(offer.position, records)
            finally:
                self._changed.notify_all()
            while not self._start(building, offer.world):
                self._wait(link, patience, building, f"parity of step {offer.step} is not begun")
        return building, turn

    def _to_join(self, offer: ParityOffer) -> Building | None:
        """The building for the offer's key; None while an older one is being finished."""
        self._check_open()
        now = self._building
        wanted = offer.key, offer.seats, offer.m, offer.to, offer.chunk_bytes
        if now is not None and now.error is None:
            if (now.key, now.seats, now.m, now.position, now.chunk_bytes) == wanted:
                return now
            if now.key > offer.key:
                raise StepOrder("parity of a newer step is made", found=now.key[1], expected=offer.step)
            if now.key < offer.key and now.seats == offer.seats and now.has_all_of(offer.position):
                return None  # the others still send theirs
            name = offer.seats[offer.position].name
            told = f"parity of step {now.key[1]} is given up: node {name} began anew, with step {offer.step}"
            self._give_up(Superseded(told))
        self._clear()
        newest = _newest(self._arena) if self._arena is not None else None
        if newest is not None and newest > offer.key:
            raise StepOrder(
                "parity of a newer step is there", found=offer.step, expected=f"above {newest[1]}"
            )
        self._building = Building(*wanted)
        return self._building

    def _start(self, building: Building, world: int) -> bool:
        """Begin the slot if all members are there, and there is room. Whether it was begun."""
        building.check()
        if building.started:
            return True
        if building.waits_for:
            return False
        what = f"it cannot make parity of step {building.key[1]}"
        try:
            with own_failures(self._node, what):
                begun = self._begin(building, world)
        except EverstepError as error:
            self._give_up(error)
            raise
        if begun:
            self._changed.notify_all()
        return begun

    def _begin(self, building: Building, world: int) -> bool:
        regions = building.regions()
        need = sum(aligned(nbytes) for _, nbytes in regions)
        self._forget_removed()
        arena = self._arena
        if arena is None or not fits(arena.info, need, building.chunk_bytes):
            arena = self._reserve(need if arena is None else int(need * GROWTH), building.chunk_bytes)
        incarnation, step = building.key
        if (arena.info.incarnation, arena.info.world) != (incarnation, world):
            self._place.take(arena, incarnation=incarnation, world=world)
        slot = arena.begin(incarnation, step, complete=self._complete)
        if slot is None:
            return False
        self._slot = slot
        building.start(slot.place(regions))
        return True

    def _take_all(self, link: Link, building: Building, position: int, turn: int) -> None:
        """Receive what a member owes; what came damaged is asked for again."""
        for tries in range(1, TRIES_MAX + 1):
            damaged = self._take(link, building, position, turn)
            if damaged is None:
                return
            if tries == TRIES_MAX:  # its owner's memory is: no one needs to wait for it
                with self._changed:
                    building.give_up(damaged)
                    self._changed.notify_all()
                raise damaged

    def _take(self, link: Link, building: Building, position: int, turn: int) -> Damaged | None:
        """Ask once. Bytes behind damaged ones are received too, but not added."""
        wanted = building.wanted(position)
        link.send(Wanted(wanted))
        chunk_bytes = building.chunk_bytes
        buffer = memoryview(bytearray(max(PIECE_BYTES, chunk_bytes)))
        damaged: Damaged | None = None
        for stripe, chunk in wanted:
            fine = True
            for part in building.parts(position, stripe, chunk):
                for piece in pieces(part, chunk_bytes):
                    link.receive_into(buffer[: piece.nbytes])
                    if not fine:
                        continue
                    whole = -(-piece.nbytes // chunk_bytes) * chunk_bytes
                    try:
                        building.add(position, turn, stripe, piece, buffer[:whole])
                    except Damaged as error:
                        building.check()
                        damaged, fine = error, False
            with self._changed:
                self._changed.notify_all()
        return damaged

    def _finish(self, link: Link, building: Building) -> bytes:
        """All that one member owes is there: whoever comes last publishes, the others wait for it."""
        patience = _Patience(self._wait_s)
        with self._changed:
            while building.root is None:
                building.check()
                if building.is_whole and not self._sealing:
                    self._publish(building)
                else:
                    self._wait(link, patience, building, f"parity of step {building.key[1]} is not whole")
            return building.root

    # -- under the lock

    def _publish(self, building: Building) -> None:
        slot, arena = self._slot, self._arena
        assert slot is not None, "a building that was started has a slot"
        assert arena is not None, "a slot lies in an arena"
        self._sealing = True
        try:
            slot.publish("")
            pin = arena.pin(slot.index, slot.generation, purpose=Purpose.REPLICATE)
            self._changed.release()
            try:  # hashing takes a while; others may come and wait meanwhile
                with pin, own_failures(self._node, f"it cannot seal parity of step {building.key[1]}"):
                    root = _sealed_root(pin)
                if is_removed(arena):
                    raise AgentError(
                        "the parity that was made lies in a file that was removed", node=self._node
                    )
                building.root = root
            finally:
                self._changed.acquire()
            self._building, self._slot = None, None
            self._drop_outgrown()
        except EverstepError as error:
            self._give_up(error)
            raise
        finally:
            self._sealing = False
            self._changed.notify_all()

    def _wait(self, link: Link, patience: _Patience, building: Building | None, what: str) -> None:
        """For a change; the member is told now and then that it has to. AgentError when nothing moved for too long."""
        missing = building.waits_for if building is not None else []
        patience.look(building.moved if building is not None else 0)
        if patience.left_s() <= 0:
            raise AgentError(
                f"node {self._node}: {what}, and nothing moved for {self._wait_s:g} s",
                found=f"nothing from node(s) {', '.join(missing)}"
                if missing
                else "members that do not get on",
                expected="the snapshots of all members of the group",
            )
        if patience.word_is_due():
            self._changed.release()
            try:
                link.send(Waits(missing))
            finally:
                self._changed.acquire()
        no_room = building is not None and not building.started and not missing
        self._changed.wait(ROOM_POLL_S if no_room else patience.next_s())

    def _give_up(self, error: EverstepError) -> None:
        if self._building is not None:
            self._building.give_up(error)
        self._changed.notify_all()

    def _clear(self) -> None:
        """What was given up is gone, and its slot free."""
        if self._building is not None:
            self._building.quiesce()
        if self._slot is not None:
            self._slot.abandon()
        self._building, self._slot = None, None


class _Patience:
    """Waits while something moves, and says a word now and then."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._moved = -1
        self._until = time.monotonic() + wait_s
        self._word = time.monotonic() + wait_s / WORDS

    def look(self, moved: int) -> None:
        if moved != self._moved:
            self._moved = moved
            self._until = time.monotonic() + self._wait_s

    def left_s(self) -> float:
        return self._until - time.monotonic()

    def next_s(self) -> float:
        """Until there is something to do."""
        return max(0.0, min(self._word, self._until) - time.monotonic())

    def word_is_due(self) -> bool:
        now = time.monotonic()
        due = now >= self._word
        if due:
            self._word = now + self._wait_s / WORDS
        return due


def _images(records: Records) -> tuple[ImageOf, ...]:
    return tuple(ImageOf(*at, record.nbytes, record.root) for at, record in records.items())


def _sealed_root(pin: Pinned) -> bytes:
    """The slot is sealed if it is not yet (the agent was killed when it was published)."""
    records = pin.sealed()
    if records is None:
        records = pin.compute()
        pin.seal(records)
    return rank_root(records)


def _newest(arena: Arena) -> Key | None:
    return max((found.key for found in arena.snapshots()), default=None)


def _remove(arena: Arena) -> None:
    arena.unlink()
    arena.close()
