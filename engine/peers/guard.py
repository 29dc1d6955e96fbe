"""A node's part in protecting a job's snapshots against the loss of nodes.

The guard lives in the agent. One thread per *duty* (a peer that keeps this node's snapshots, or a share of parity)
works off the snapshots of the local ranks in order: pin, seal, send. What all duties have done is protected; the
agent of the first node, the hub, finds W over all nodes from that, and every guard writes it into the local arenas.
While a node gets no protection for too long, the hub goes on without it; an agent without a hub goes on alone. Both
are told, and neither stops training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.errors import Closed, EverstepError, PeerLost
from everstep.memory.arena import Arena
from everstep.memory.control import Purpose
from everstep.memory.errors import ArenaGone, SlotGone
from everstep.memory.slots import Pinned, SnapshotInfo

from .duties import ReplicaDuty, Reserve, answer_reserve, reserve_at_spare
from .failing import own_failure
from .hub import NO_STEP, Hear, Hub
from .keeper import Keeper
from .lending import Lender
from .line import HubLine
from .link import Link, connect
from .loans import Borrow
from .messages import Complete, Message, Mode, Moved, Offer, Standing, Wire, unexpected
from .nodemap import NodeMap
from .parity import ParityOffer, parity_duties
from .paritykeeper import ParityKeeper
from .rate import Rate
from .shelf import is_removed
from .telling import is_logged, newest_in, spares_of, step_or_none, text_of

log = logging.getLogger("everstep.peers")

LOOK_S = 0.2
"""A thread with nothing to do looks around at least this often."""
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0
CONNECT_S = 5.0
JOIN_S = 5.0
ARENAS_PER_RANK_MAX = 2
"""The present one, and the one that it replaced."""
HASHERS = 2
MOVED_TRIES_MAX = 20

Key = tuple[int, int]
Told = Callable[[str, int, Wire | None], None]
"""Stage, step and error of what trainers are to hear."""


class Duty(Protocol):
    """Something that has to be done with each snapshot of this node before it is protected."""

    name: str

    @property
    def moved(self) -> int:
        """Bytes handed over so far: it only grows, and only by what had not come as far before."""
        ...

    def protect(self, key: Key, pins: dict[int, Pinned]) -> None:
        """With the pinned and sealed snapshots of all local ranks. Called from one thread, again after it raised.
        Raises EverstepError, OSError (of this node itself); Closed with ``left`` if there is nothing to do for it any
        more."""
        ...

    def close(self) -> None:
        """From any thread: end what is under way."""
        ...


@dataclass(frozen=True)
class Terms:
    """What the trainers of one incarnation agreed on. ``me`` is this node's position in ``nodes``; ``rate`` bytes per
    second; ``timeout_s`` and ``limit_s``: see :class:`~.hub.Tally`."""

    nodes: NodeMap
    me: int
    run_id: str
    incarnation: int
    secret: bytes
    chunk_bytes: int
    rate_bytes_per_s: float | None
    timeout_s: float
    limit_s: float
    adopted: Key | None = None
    """What the incarnation loaded: it is kept until there is a W."""

    @property
    def name(self) -> str:
        return self.nodes.nodes[self.me].name

    @property
    def local(self) -> tuple[int, ...]:
        return self.nodes.nodes[self.me].ranks


@dataclass
class _Post:
    """A duty, how far it came, and what went wrong last."""

    duty: Duty
    done: int = NO_STEP
    error: Wire | None = None
    failures: int = 0
    """In a row."""
    moved: int = 0
    """How far the duty had come when it failed last."""
    over: bool = False

    @property
    def hopeful(self) -> bool:
        """Whether the last try has not failed, or this one has come further than any before."""
        return self.error is None or self.duty.moved > self.moved


class Guard:
    """``told`` is called from its threads. :meth:`start` may wait for peers; nothing else does, but :meth:`close`
    for its threads."""

    def __init__(self, terms: Terms, keeper: Keeper, parity: ParityKeeper, told: Told) -> None:
        self.terms = terms
        self.keeper = keeper
        self.parity = parity
        self.complete = NO_STEP
        self.protected = NO_STEP
        self.last_work = time.monotonic()
        """When something was sent, kept or asked for last. A try that comes no further than the last is no work."""
        self.told = told
        self._changed = threading.Condition()
        self._sealing = threading.Lock()
        self._arenas: dict[int, list[Arena]] = {rank: [] for rank in terms.local}
        self._places = {one.name: (one.host, one.port) for one in terms.nodes.nodes}
        self.rate = Rate(terms.rate_bytes_per_s)
        self._posts = [_Post(duty) for duty in self._make_duties()]
        self._pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="everstep-seal")
        self._line = HubLine(self)
        lender = Lender(keeper.directory, terms.run_id, self._nameless, self.places, self._in_use, self.rate)
        self.handlers: dict[type[Message], Callable[[Link, Any], None]] = {
            Offer: self._take_offer,
            ParityOffer: self._take_parity,
            Reserve: self._take_reserve,
            Moved: self._note_moved,
            Complete: self._note_complete,
            Standing: self._listen_to,
            Hear: self._tell_hub,
            Borrow: lender.serve,
        }
        """What is done with what other agents say, by the kind of message."""
        self._links: set[Link] = set()
        self._threads: list[threading.Thread] = []
        self.end = threading.Event()
        self.over = False
        """Whether the trainers have left, with everything durable."""
        self._spare_for = 0
        self._unkept: set[str] = set()
        """Nodes that sent last what is not kept, or not yet."""

    def _make_duties(self) -> list[Duty]:
        """One for each node that keeps this one's snapshots, or parity of them."""
        terms = self.terms
        mode: Mode = "full" if terms.nodes.parity is None else "meta"
        replicas = [
            ReplicaDuty(self, terms.nodes.nodes[index], mode) for index in terms.nodes.holders()[terms.me]
        ]
        return [*replicas, *parity_duties(self)]

    # -- for the agent

    def reserve(self) -> None:
        """Memory for what this node is to keep, and on the spare nodes that keep this one's. May wait for them; one
        that is not there, or is a stranger, is told, and keeps nothing until it comes. Raises MemoryTooSmall."""
        terms = self.terms
        if terms.adopted is not None:
            self.keeper.completed(terms.adopted)
            self.parity.completed(terms.adopted)
        if parity_bytes := terms.nodes.parity_bytes(terms.me, terms.chunk_bytes):
            self.parity.reserve(parity_bytes, terms.chunk_bytes)
        if terms.nodes.parity is not None:
            return  # what is kept besides is small, and no images: its room is made when it comes
        for rank, slot_bytes in terms.nodes.held_by(terms.me):
            self.keeper.reserve(rank, slot_bytes, terms.chunk_bytes)
        for index in terms.nodes.holders()[terms.me]:
            node = terms.nodes.nodes[index]
            if node.spare:
                try:
                    reserve_at_spare(self, node.name)
                except PeerLost as error:  # a spare node that is missing must not keep a job from starting
                    self._note(next(one for one in self._posts if one.duty.name == node.name), 0, error)

    def start(self) -> None:
        for post in self._posts:
            self.thread(f"protect-{post.duty.name}", functools.partial(self._work, post))
        if not self.terms.nodes.nodes[self.terms.me].spare:
            self._line.start()

    def adopt(self, rank: int, arena: Arena) -> None:
        """The arena in which the rank's snapshots lie from now on; what a former agent said in it counts."""
        with self._changed:
            arenas = self._arenas.get(rank)
            if arenas is None or (arenas and arenas[0] is arena):
                return
            arenas.insert(0, arena)
            del arenas[ARENAS_PER_RANK_MAX:]
            self._learn(arena)
            self._changed.notify_all()

    def _learn(self, arena: Arena) -> None:
        """Under the lock: W, and what is protected, once all ranks are here."""
        said = arena.complete
        if said is not None and said[0] == self.terms.incarnation:
            self.complete = max(self.complete, said[1])
        if all(self._arenas.values()):
            words = [arenas[0].protected for arenas in self._arenas.values()]
            steps = [word[1] if word and word[0] == self.terms.incarnation else NO_STEP for word in words]
            self.protected = max(self.protected, min(steps))
            for post in self._posts:
                post.done = max(post.done, self.protected)
        self._write_words()

    def nudge(self) -> None:
        """There is a new snapshot, or other news: everybody looks."""
        self.keeper.noticed()
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> None:
        """The trainers have left, and what they wanted is durable: nothing more is sent, or kept for others."""
        with self._changed:
            self.over = True
            self._changed.notify_all()
        for post in self._posts:
            post.duty.close()
        self.keeper.drop((self.terms.incarnation + 1, 0))
        self.parity.drop((self.terms.incarnation + 1, 0))

    @property
    def busy(self) -> bool:
        """Whether something is to be sent that can be: trainers may be gone, their last snapshots are not safe yet.
        What failed is tried again, but nobody stays for it."""
        if self.over or self.end.is_set():
            return False
        return any(self._next(post) is not None and post.hopeful for post in self._posts)

    def status(self) -> dict[str, Any]:
        """Plain values, for people and tests."""
        terms = self.terms
        with self._changed:
            found: dict[str, Any] = {
                "node": terms.name,
                "incarnation": terms.incarnation,
                "complete": step_or_none(self.complete),
                "protected": step_or_none(self.protected),
                "holders": {
                    post.duty.name: {"step": step_or_none(post.done), "error": text_of(post.error)}
                    for post in self._posts
                },
            }
        found["spares"] = spares_of(terms.nodes, terms.name, found["holders"])
        found["parity"] = self.parity.newest()
        found["held"] = {str(rank): newest_in(arena) for rank, arena in self.keeper.arenas().items()}
        return {**found, **self._line.status()}

    def close(self) -> None:
        """End all threads."""
        with self._changed:
            self.end.set()
            links = list(self._links)
            self._changed.notify_all()
        self._line.close()
        self.rate.close()
        self.parity.interrupt()
        for post in self._posts:
            post.duty.close()
        for link in links:
            link.close()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._pool.shutdown(wait=False)

    # -- connections

    def open_link(self, name: str) -> Link:
        """A connection to the agent of the node ``name``. Raises PeerLost."""
        with self._changed:
            if self.end.is_set():
                raise PeerLost("this agent is leaving")
            host, port = self._places[name]
        terms = self.terms
        link = connect(host, port, terms.secret, terms.run_id, me=terms.name, timeout_s=CONNECT_S)
        with self._changed:
            self._links.add(link)
            ended = self.end.is_set()
        if ended:
            self.drop_link(link)
            raise PeerLost("this agent is leaving")
        return link

    def drop_link(self, link: Link) -> None:
        with self._changed:
            self._links.discard(link)
        link.close()

    def serve(self, link: Link, message: Message) -> None:
        """One message of another agent, on the thread of its connection. It may go on talking until that ends."""
        handler = self.handlers.get(type(message))
        if handler is None:
            raise unexpected(message, "a message that this agent serves")
        handler(link, message)

    def _listen_to(self, link: Link, standing: Standing) -> None:
        self._hub().listen_to(link, standing)

    def _tell_hub(self, link: Link, _: Hear) -> None:
        self._hub().tell(link)

    def _hub(self) -> Hub:
        hub = self._line.hub
        if hub is None:
            raise PeerLost("this agent is not the hub", found=self.terms.name)
        return hub

    def _take_reserve(self, link: Link, message: Reserve) -> None:
        answer_reserve(self.keeper, self.terms.name, link, message)

    def _take_offer(self, link: Link, offer: Offer) -> None:
        with self._taking(link.peer) as taken:
            self._check_offer(offer)
            if self.keeper.receive(link, offer):
                taken()

    def _take_parity(self, link: Link, offer: ParityOffer) -> None:
        with self._taking(link.peer) as taken:
            self._check_offer(offer)
            self.parity.receive(link, offer)
            taken()

    @contextlib.contextmanager
    def _taking(self, peer: str) -> Iterator[Callable[[], None]]:
        """Gives what to call once it is kept. After one that was not, the next is work only once it is."""
        if peer not in self._unkept:
            self.last_work = time.monotonic()
        self._unkept.add(peer)

        def taken() -> None:
            self._unkept.discard(peer)
            self.last_work = time.monotonic()

        yield taken

    def _check_offer(self, offer: Offer | ParityOffer) -> None:
        if self.over:
            raise Closed("the trainers of this node have left", node=self.terms.name, left=True)
        if offer.incarnation < self.terms.incarnation:
            raise PeerLost(
                "a peer sends snapshots of a former incarnation",
                found=offer.incarnation,
                expected=self.terms.incarnation,
            )

    def _note_moved(self, link: Link, moved: Moved) -> None:
        with self._changed:
            if moved.node in self._places:
                log.info("the agent of node %s is at %s:%d now", moved.node, moved.host, moved.port)
                self._places[moved.node] = moved.host, moved.port
                self._changed.notify_all()

    def _note_complete(self, link: Link, complete: Complete) -> None:
        """On a spare node, from those whose snapshots it keeps."""
        if complete.step >= 0:
            self.keeper.completed((complete.incarnation, complete.step))
            if complete.incarnation > self._spare_for:
                self._spare_for = complete.incarnation
                self.keeper.drop((complete.incarnation, 0))

    def announce(self, host: str, port: int) -> None:
        """This agent listens elsewhere than the node map says: tell the others, from a thread of its own."""
        self._places[self.terms.name] = host, port
        self.thread("announce", lambda: self._announce(Moved(self.terms.name, host, port)))

    def _announce(self, moved: Moved) -> None:
        missing = [one.name for one in self.terms.nodes.nodes if one.name != self.terms.name]
        for _ in range(MOVED_TRIES_MAX):
            for name in list(missing):
                with contextlib.suppress(EverstepError, OSError):
                    link = self.open_link(name)
                    try:
                        link.send(moved)
                    finally:
                        self.drop_link(link)
                    missing.remove(name)
            if not missing or self.pause(PAUSE_MAX_S):
                return
        log.warning("these nodes do not know where this agent listens now: %s", ", ".join(missing))

    # -- what is lent

    def places(self) -> list[tuple[str, str, int]]:
        """Of the job's nodes names and addresses, this one's among them."""
        with self._changed:
            return [(name, *place) for name, place in self._places.items()]

    def _nameless(self) -> list[Arena]:
        """Arenas without a path, which nobody else finds."""
        with self._changed:
            found = [arena for arenas in self._arenas.values() for arena in arenas]
        return [arena for arena in (*found, *self.keeper.arenas().values()) if arena.info.path is None]

    def _in_use(self) -> None:
        self.last_work = time.monotonic()

    # -- duties, each on its thread

    def _work(self, post: _Post) -> None:
        pause = PAUSE_FIRST_S
        while not (self.end.is_set() or post.over):
            step = self._next(post)
            if step is None:
                self.await_change()
                continue
            try:
                self._protect(post, step)
                pause = PAUSE_FIRST_S
            except (SlotGone, ArenaGone):
                self.pause(PAUSE_FIRST_S)  # reused meanwhile: this node's W has moved on
            except Exception as error:
                if self.end.is_set() or self.over:
                    return
                if isinstance(error, Closed) and error.fields.get("left"):
                    log.info("node %s: %s", post.duty.name, error)
                    post.over = True
                    return
                self._failed(post, step, error)
                self.pause(pause)
                pause = min(2 * pause, PAUSE_MAX_S)

    def _next(self, post: _Post) -> int | None:
        """The step that the duty does next. At most one after W: who keeps it has room for W and one more."""
        if self.over or post.over:
            return None
        with self._changed:
            done, complete = post.done, self.complete
            steps = [step for step in self._steps() if step > done]
        if not steps or done > complete >= 0:
            return None
        return min([step for step in steps if step >= complete] or [max(steps)])

    def _steps(self) -> list[int]:
        """Steps that all local ranks hold, oldest first. Under the lock."""
        common: set[int] | None = None
        for arenas in self._arenas.values():
            steps = {one.step for _, one in self._snapshots(arenas)}
            common = steps if common is None else common & steps
        return sorted(common or ())

    def _snapshots(self, arenas: list[Arena]) -> list[tuple[Arena, SnapshotInfo]]:
        """Of this incarnation, those in the newest arena first."""
        found = []
        for arena in arenas:
            with contextlib.suppress(ArenaGone):
                found += [
                    (arena, one) for one in arena.snapshots() if one.incarnation == self.terms.incarnation
                ]
        return found

    def _protect(self, post: _Post, step: int) -> None:
        with contextlib.ExitStack() as stack:
            pins: dict[int, Pinned] = {}
            for rank, arenas in list(self._arenas.items()):
                pins[rank] = stack.enter_context(self._pin(list(arenas), step))
            for pin in pins.values():
                self._seal(pin)
            if post.hopeful:
                self.last_work = time.monotonic()
            post.duty.protect((self.terms.incarnation, step), pins)
            self.last_work = time.monotonic()
        with self._changed:
            post.done, before = step, post.error
            post.error, post.failures = None, 0
        if before is not None:
            log.info("node %s has step %d", post.duty.name, step)
        self._advance()

    def _pin(self, arenas: list[Arena], step: int) -> Pinned:
        for arena, one in self._snapshots(arenas):
            if one.step == step:
                return arena.pin(one.index, one.generation, purpose=Purpose.REPLICATE)
        raise SlotGone(f"step {step} is in no slot any more")

    def _seal(self, pin: Pinned) -> None:
        """Once for all duties. Damaged if the bytes changed since they were sealed."""
        with self._sealing:
            if pin.sealed() is None:
                records = pin.compute(pool=self._pool)
                pin.check()
                pin.seal(records)

    def _failed(self, post: _Post, step: int, error: Exception) -> None:
        """The hub decides when training does not wait for it any more. What is no EverstepError is this node's own."""
        if not isinstance(error, EverstepError):
            if not isinstance(error, OSError) and is_logged(post.failures + 1):
                log.exception("a duty failed")
            error = own_failure(
                self.terms.name, f"step {step} could not be sent to node {post.duty.name}", error
            )
        self._note(post, step, error)

    def _note(self, post: _Post, step: int, error: EverstepError) -> None:
        """Told once for as long as it lasts, logged ever more seldom."""
        post.failures += 1
        if is_logged(post.failures):
            log.warning("node %s, step %d, try %d: %s", post.duty.name, step, post.failures, error)
        with self._changed:
            first = post.error is None
            post.error, post.moved = error.to_wire(), post.duty.moved
            self._changed.notify_all()
        if first:
            self.told("peer_failed", step, post.error)

    def _advance(self) -> None:
        """After a duty came further."""
        with self._changed:
            if self._posts:
                done = [post.done for post in self._posts if not post.over]
                if done:
                    self.protected = max(self.protected, min(done))
            self._write_words()
            self._changed.notify_all()

    def _write_words(self) -> None:
        """Under the lock: what trainers, and whoever recovers, read in the arenas' headers."""
        incarnation = self.terms.incarnation
        for arenas in self._arenas.values():
            for arena in list(arenas):
                with contextlib.suppress(ArenaGone):
                    if arena is not arenas[0] and is_removed(arena):
                        arenas.remove(arena)
                        continue
                    if self.protected >= 0:
                        arena.protected = incarnation, self.protected
                    if self.complete >= 0:
                        arena.complete = incarnation, self.complete

    # -- W

    def standing(self) -> Standing:
        """What this node has to say."""
        with self._changed:
            steps = self._steps()
            valid = max([*steps, self.protected])
            protected = self.protected if self._posts else valid
            errors = [post.error for post in self._posts if post.error is not None]
            moved = sum(post.duty.moved for post in self._posts)
        return Standing(
            self.terms.name, self.terms.incarnation, valid, protected, moved, errors[0] if errors else None
        )

    def set_complete(self, step: int) -> None:
        with self._changed:
            if step <= self.complete:
                return
            first = self.complete < 0
            self.complete = step
            self._write_words()
            self._changed.notify_all()
        self.keeper.completed((self.terms.incarnation, step))
        self.parity.completed((self.terms.incarnation, step))
        if first:
            self.keeper.drop((self.terms.incarnation, 0))
            self.parity.drop((self.terms.incarnation, 0))

    # -- inside

    def thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"everstep-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def await_change(self) -> None:
        """Until something changed, for a moment."""
        with self._changed:
            if not self.end.is_set():
                self._changed.wait(LOOK_S)

    def pause(self, seconds: float) -> bool:
        """Whether the end came meanwhile."""
        with self._changed:
            return self._changed.wait_for(lambda: self.end.is_set(), seconds)
