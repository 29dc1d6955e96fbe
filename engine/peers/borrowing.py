"""Asking the agent of another node for what lies in its memory. Nothing of it is believed: whoever asks has hashes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.errors import Damaged, EverstepError, PeerLost
from everstep.format.layout import Layout, decode
from everstep.format.records_table import decode_records
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.store.flush import read_meta
from everstep.store.proving import check_record
from everstep.store.sources import PEER

from .link import Link, connect
from .loans import SMALL_BYTES_MAX, TAKE_BYTES_MAX, Borrow, Given, Key, Lent, Take, What
from .messages import expect

CONNECT_S = 5.0
ANSWER_S = 10.0
"""How long an agent may take to answer, and its bytes to go on coming."""

T = TypeVar("T")


@dataclass(frozen=True)
class Credentials:
    """What proves to the agents of a run that one may ask them. ``me`` is this node's name."""

    run_id: str
    secret: bytes
    me: str

    def __repr__(self) -> str:
        return f"Credentials({self.run_id!r}, ..., {self.me!r})"


class Neighbour:
    """The agent that listens at ``host``, ``port``. Any thread may call; one is served at a time. One that failed is
    not asked again: then everything raises PeerLost, at once."""

    def __init__(
        self, name: str, host: str, port: int, credentials: Credentials, *, answer_s: float = ANSWER_S
    ) -> None:
        self.name = name
        self.host, self.port = host, port
        self.seconds = 0.0
        """How long its last answer to :meth:`ask` took."""
        self.error: EverstepError | None = None
        """Why it is not asked any more."""
        self._credentials = credentials
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._key: Key | None = None

    def ask(self, key: Key) -> Lent:
        """What it has of the checkpoint. PeerLost, and what else it answers."""
        return self._served(lambda: self._borrow(key))

    def take(self, key: Key, take: Take, into: memoryview | None) -> bytes:
        """Bytes of a snapshot of ``key``, into ``into``, or as they are where that is None."""
        return self._served(lambda: self._take(key, take, into))

    def give_up(self, error: EverstepError) -> None:
        """From another thread: it is not waited for any more."""
        self.error = self.error or error
        self.close()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _served(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self.error is not None:
                raise PeerLost(f"node {self.name} is not asked any more", found=self.error, node=self.name)
            old = self._link is not None
            try:
                try:
                    return work()
                except PeerLost as error:
                    if not old or self.error is not None or isinstance(error.__cause__, TimeoutError):
                        raise
                    self.close()  # the other side had ended it, as nothing was said for long
                    return work()
            except PeerLost as error:
                self.give_up(error)
                raise
            except EverstepError:
                raise
            except BaseException:
                self.close()
                raise

    def _open(self) -> Link:
        link = self._link
        if link is None:
            mine, answer_s = self._credentials, self._answer_s
            link = connect(
                self.host, self.port, mine.secret, mine.run_id, me=mine.me, timeout_s=CONNECT_S, io_s=answer_s
            )
            self._link, self._key = link, None
            if self.error is not None:  # given up meanwhile
                self.close()
                raise PeerLost(f"node {self.name} is not waited for any more", node=self.name)
        return link

    def _borrow(self, key: Key) -> Lent:
        link = self._open()
        began = time.monotonic()
        link.send(Borrow(*key))
        self._key = None
        lent = expect(link.receive(self._answer_s), Lent)
        self._key, self.seconds = key, time.monotonic() - began
        return lent

    def _take(self, key: Key, take: Take, into: memoryview | None) -> bytes:
        link = self._open()
        if self._key != key:
            self._borrow(key)
        link.send(take)
        given = expect(link.receive(self._answer_s), Given)
        if given.nbytes != take.nbytes if into is not None else not 0 <= given.nbytes <= SMALL_BYTES_MAX:
            raise PeerLost(
                f"node {self.name} gives another number of bytes than was asked for",
                found=given.nbytes,
                expected=take.nbytes if into is not None else f"at most {SMALL_BYTES_MAX}",
                node=self.name,
            )
        data = bytearray(given.nbytes) if into is None else b""
        link.receive_into(into if into is not None else memoryview(data))
        return bytes(data)


class NeighbourSnapshot:
    """What a neighbour's memory has of a checkpoint: of each of ``copies`` (by rank) one snapshot, with the images that
    it lacks. A :class:`~everstep.store.sources.Source`, of which nothing is proved. Threads of ``pool`` wait for it."""

    kind: str = PEER

    def __init__(
        self,
        neighbour: Neighbour,
        key: Key,
        copies: Mapping[int, tuple[int, Sequence[str]]],
        chunk_bytes: int,
        pool: Executor,
        world: int,
    ) -> None:
        self.label = f"memory of node {neighbour.name}"
        self.incarnation, self.step = key
        self.world = world
        self.chunk_bytes = chunk_bytes
        self.ranks = frozenset(copies)
        self._neighbour = neighbour
        self._key = key
        self._copies = copies
        self._pool = pool

    def has(self, rank: int, image: str) -> bool:
        return image not in self._copies[rank][1]

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        """PeerLost, Damaged; not proved beyond the roots."""
        name = f"{self.label}, records of rank {rank}"
        records = decode_records(await self._small("records", rank), name)
        for record in records:
            check_record(record, self.chunk_bytes, name)
        return {record.name: record for record in records}

    async def meta(self, rank: int) -> dict[str, Any]:
        return read_meta(await self._small("meta", rank), f"{self.label}, meta of rank {rank}")

    async def layout_bytes(self, rank: int) -> bytes:
        return await self._small("layout", rank)

    async def layout(self, rank: int) -> Layout:
        return await asyncio.to_thread(decode, await self.layout_bytes(rank))

    async def state(self, rank: int) -> bytes:
        data = bytearray((await self.records(rank))[STATE_IMAGE].nbytes)
        await self.read_into(rank, STATE_IMAGE, 0, memoryview(data))
        return bytes(data)

    async def check_image(self, rank: int, image: str) -> None:
        if not self.has(rank, image):
            name = self.locate(rank, image)
            raise Damaged(f"{name} is not there", found="nothing", expected="an image", name=name)

    def mapped(self, rank: int, image: str) -> None:
        return None

    def locate(self, rank: int, image: str) -> str:
        return f"{self.label}, rank {rank}, {image}"

    async def confirm(self) -> None:
        """Nothing to ask: whoever reads has hashes."""

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), TAKE_BYTES_MAX):
            part = view[start : start + TAKE_BYTES_MAX]
            take = Take(rank, self._copies[rank][0], "image", image, offset + start, len(part))
            await self._on_thread(take, part)

    async def _small(self, what: What, rank: int) -> bytes:
        return await self._on_thread(Take(rank, self._copies[rank][0], what), None)

    async def _on_thread(self, take: Take, into: memoryview | None) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._neighbour.take, self._key, take, into)


def snapshots_of(
    neighbour: Neighbour, key: Key, lent: Lent, chunk_bytes: int, pool: Executor, world: int
) -> list[NeighbourSnapshot]:
    """What was lent, at most one snapshot of each rank in one of them."""
    found: dict[int, dict[int, tuple[int, Sequence[str]]]] = {}
    for rank, copy, lacks in lent.snapshots:
        found.setdefault(copy, {})[rank] = copy, lacks
    return [
        NeighbourSnapshot(neighbour, key, copies, chunk_bytes, pool, world)
        for _, copies in sorted(found.items())
    ]
