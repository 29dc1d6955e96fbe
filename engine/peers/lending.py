"""Giving what lies in this node's memory to whoever mends the run and knows its secret: own ranks' snapshots, and those
that are kept for other nodes, or parity of them. Reads only.

A slot is pinned for as long as one answer is copied out of it, and never while bytes are sent: whoever asks can hold up
neither a trainer nor another agent. What was reused meanwhile is not given.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import CapacityError, Damaged, EverstepError
from everstep.format.records_table import encode_records
from everstep.format.vote import STATE_IMAGE
from everstep.memory.arena import Arena
from everstep.memory.control import IMAGE_PREFIX, STATE_REGION
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memory.joined import AnyPin
from everstep.store.flush import LAYOUT_REGION, META_REGION
from everstep.store.holdings import Found, Pins, Slot, look_in_memory

from .described import PARITY_RANK
from .link import Link
from .loans import TAKE_BYTES_MAX, Borrow, Given, Key, Lent, Take
from .messages import Message, failed, unexpected
from .rate import Rate

LOANS_MAX = 4
"""Connections over which this node gives at once; each has at most one answer in memory."""
IDLE_S = 10.0
"""How long one of them may say nothing."""

Lots = dict[tuple[int, int], Found]
"""By rank, and by which of the rank's snapshots here it is."""


@dataclass
class Lender:
    """``directory`` is that of the node's arenas; ``nameless`` gives those without a path, which stay their owner's;
    ``nodes`` what this agent knows of the job's nodes; ``used`` is called when something is asked for."""

    directory: Path
    run_id: str
    nameless: Callable[[], Sequence[Arena]]
    nodes: Callable[[], list[tuple[str, str, int]]]
    used: Callable[[], None]
    rate: Rate | None = None

    def __post_init__(self) -> None:
        self._room = threading.Semaphore(LOANS_MAX)

    def serve(self, link: Link, first: Borrow) -> None:
        """On the connection's thread, until it ends. CapacityError where too many ask at once; PeerLost."""
        if not self._room.acquire(blocking=False):
            raise CapacityError(
                "this node gives to as many others as it may at once", found=LOANS_MAX, hint="Ask again later"
            )
        try:
            asked: Message = first
            while isinstance(asked, Borrow):
                asked = self._lend(link, asked)
        finally:
            self._room.release()
        raise unexpected(asked, "what is asked of a snapshot")

    def _lend(self, link: Link, borrow: Borrow) -> Message:
        """Answer, and give what is asked for; the first message that is about something else."""
        with contextlib.ExitStack() as stack:
            self.used()
            lots = self._look((borrow.incarnation, borrow.step), stack)
            ordered = sorted(lots.items(), key=lambda lot: lot[0])
            told = [(*which, sorted(one.lacks)) for which, one in ordered if which[0] != PARITY_RANK]
            link.send(Lent(told, self.nodes(), list(_parity_told(lots))))
            while isinstance(asked := link.receive(IDLE_S), Take):
                self.used()
                self._give(link, lots, asked)
        return asked

    def _look(self, key: Key, stack: contextlib.ExitStack) -> Lots:
        arenas = list(self.nameless())
        for info in find_arenas(self.directory):
            if info.path is not None and info.run_id == self.run_id:
                with contextlib.suppress(EverstepError, OSError):
                    arenas.append(stack.enter_context(Arena.attach(info.path)))
        lots: Lots = {}
        for found in [*look_in_memory(arenas, self.run_id), *_parity_in(arenas, self.run_id)]:
            if found.key == key and _is_sealed(found):
                copy = sum(rank == found.rank for rank, _ in lots)
                lots[found.rank, copy] = found
        return lots

    def _give(self, link: Link, lots: Lots, take: Take) -> None:
        try:
            data = _copied(lots, take)
        except EverstepError as error:
            link.send(failed(error))
            return
        link.send(Given(len(data)))
        link.send_bytes(memoryview(data), self.rate)


def _parity_in(arenas: Sequence[Arena], run_id: str) -> Iterator[Found]:
    """Parity slots, each as the snapshot of a rank that is none."""
    for arena in arenas:
        if arena.info.run_id == run_id and arena.info.kind is Kind.PARITY:
            for one in arena.snapshots():
                slot = Slot(arena, one.index, one.generation)
                yield Found(one.incarnation, one.step, PARITY_RANK, Kind.PARITY, slot, one.layout_hash)


def _parity_told(lots: Lots) -> Iterator[tuple[int, bytes]]:
    for (rank, copy), found in sorted(lots.items(), key=lambda lot: lot[0]):
        if rank == PARITY_RANK:
            with contextlib.suppress(EverstepError), contextlib.ExitStack() as stack:
                pin = found.pin(Pins(stack))
                described = bytes(pin.view(STATE_REGION))
                pin.check()
                yield copy, described


def _is_sealed(found: Found) -> bool:
    with contextlib.ExitStack() as stack, contextlib.suppress(EverstepError):
        return found.pin(Pins(stack)).sealed() is not None
    return False


def _copied(lots: Lots, take: Take) -> bytes:
    """What is asked for, out of the slot. SlotGone, ArenaGone, Damaged."""
    found = lots.get((take.rank, take.copy))
    name = f"snapshot {take.copy} of rank {take.rank}"
    if found is None:
        raise Damaged(f"{name} is not here", found=sorted(lots), expected=name, name=name)
    with contextlib.ExitStack() as stack:
        pin = found.pin(Pins(stack))
        if take.what in ("meta", "layout"):
            data = _region(pin, META_REGION if take.what == "meta" else LAYOUT_REGION, name)
        elif take.what == "records":
            data = encode_records(pin.sealed() or ())
        else:
            data = _part(pin, take, name)
        pin.check()
    return data


def _region(pin: AnyPin, region: str, name: str) -> bytes:
    if region not in pin.regions:
        raise Damaged(f"{name} has no {region}", found=sorted(pin.regions), expected=region, name=name)
    return bytes(pin.view(region))


def _part(pin: AnyPin, take: Take, name: str) -> bytes:
    region = STATE_REGION if take.image == STATE_IMAGE else IMAGE_PREFIX + take.image
    end, there = take.offset + take.nbytes, pin.regions.get(region, -1)
    if take.offset < 0 or not 0 <= take.nbytes <= TAKE_BYTES_MAX or end > there:
        raise Damaged(
            f"{name} does not have these bytes of {take.image!r}",
            found=f"{there} bytes",
            expected=f"{take.offset}..{end}, at most {TAKE_BYTES_MAX} at once",
            name=name,
        )
    return bytes(pin.view(region)[take.offset : end])
