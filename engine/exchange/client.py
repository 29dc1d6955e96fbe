"""Reading from another node's memory: a :class:`~everstep.store.sources.Source` over a few connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from everstep.errors import Damaged
from everstep.format.hashing import rank_root
from everstep.format.layout import Layout, decode, layout_hash
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.peers.address import ADDRESS
from everstep.peers.stream import opened
from everstep.store.flush import read_meta
from everstep.store.proving import check_chunks, check_images, check_record
from everstep.store.sources import PEER, once

from .errors import PeerLost
from .protocol import (
    BLOB_BYTES_MAX,
    IO_S,
    LOST,
    MAGIC,
    Line,
    Offer,
    Request,
    Violation,
    What,
    decode_records,
    decode_reply,
)

CONNECTIONS = 4
"""Of one reader to one peer: so many reads at once."""


class PeerSource:
    """The ``ranks`` of a checkpoint that another node offers: of each its ``copy``.

    What counts is the offer, which came through the job's store: layouts are proved by their hash, the records of
    all images by the rank's root, meta by its hash; the reader proves images against the records, chunk by chunk.
    So whatever comes over the connection is believed only as far as this rank believes the offering rank itself.
    A peer that failed once (in a way that a new connection does not mend) is not asked again.
    """

    def __init__(
        self,
        offer: Offer,
        ranks: Collection[int],
        *,
        key: tuple[int, int],
        world: int,
        chunk_bytes: int,
        node: str,
        copy: int = 0,
        io_s: float = IO_S,
    ) -> None:
        self.incarnation, self.step = key
        self.world = world
        self.chunk_bytes = chunk_bytes
        self.label = f"memory of node {node}"
        self.ranks = frozenset(ranks)
        self._offer = offer
        self._copy = copy
        self._proofs = {proof.rank: proof for proof in offer.proofs if proof.copy == copy}
        self._io_s = io_s
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="everstep-exchange-client")
        self._idle: list[Line] = []
        self._lost: PeerLost | None = None
        self._records: dict[int, asyncio.Task[dict[str, ImageRecord]]] = {}
        self._layouts: dict[str, asyncio.Task[Layout]] = {}

    # -- as a source

    kind = PEER

    def has(self, rank: int, image: str) -> bool:
        return image not in self._proofs[rank].lacks

    async def meta(self, rank: int) -> dict[str, Any]:
        data = await self._blob(self._request("meta", rank))
        expected = self._proofs[rank].meta_hash
        if data[: len(expected)] != expected:
            self._lie(f"meta of rank {rank}", data[: len(expected)].hex(), expected.hex())
        return read_meta(data, f"{self.label}, rank {rank}, meta")

    async def layout(self, rank: int) -> Layout:
        key, name = self._proofs[rank].layout_hash, f"{self.label}, layout of rank {rank}"
        layout = await once(self._layouts, key, lambda: self._fetch_layout(rank, key))
        check_images(layout, await self.records(rank), name)
        return layout

    async def _fetch_layout(self, rank: int, key: str) -> Layout:
        data = await self._blob(self._request("layout", rank))
        if layout_hash(data) != key:
            self._lie(f"layout of rank {rank}", layout_hash(data), key)
        return await asyncio.to_thread(decode, data)

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return await once(self._records, rank, lambda: self._fetch_records(rank))

    async def _fetch_records(self, rank: int) -> dict[str, ImageRecord]:
        data = await self._blob(self._request("records", rank))
        try:
            records = decode_records(data)
        except Damaged as error:
            self._lie(f"records of rank {rank}", error, "a table of hashes")
        found, expected = rank_root(records), self._proofs[rank].root
        if found != expected:
            self._lie(f"records of rank {rank}", found.hex(), expected.hex())
        for record in records:
            check_record(record, self.chunk_bytes, self.locate(rank, record.name))
        return {record.name: record for record in records}

    async def state(self, rank: int) -> bytes:
        record = (await self.records(rank))[STATE_IMAGE]
        data = bytearray(record.nbytes)
        await self.read_into(rank, STATE_IMAGE, 0, memoryview(data))
        check_chunks(memoryview(data), 0, record, self.chunk_bytes, self.locate(rank, STATE_IMAGE))
        return bytes(data)

    async def check_image(self, rank: int, image: str) -> None:
        """The records, bound by the root, are of the very bytes that are offered; an image that is missing, or
        shorter, shows when it is read."""
        if image not in await self.records(rank):
            name = self.locate(rank, image)
            raise Damaged(f"{name}: no such image", found="nothing", expected="a record", name=name)

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        await self.read_parts(rank, image, offset, [view])

    async def read_parts(self, rank: int, image: str, offset: int, parts: Sequence[memoryview]) -> None:
        """As :meth:`read_into`, into several views one behind the other."""
        nbytes = sum(map(len, parts))
        await self._ask(Request("read", rank, image, offset, nbytes, self._copy), list(parts))

    def _request(self, what: What, rank: int) -> Request:
        return Request(what, rank, copy=self._copy)

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return None

    def locate(self, rank: int, image: str) -> str:
        return f"{self.label}, rank {rank}, {image}"

    async def confirm(self) -> None:
        """Nothing to ask: every byte was verified."""

    async def close(self) -> None:
        """End the connections, and whatever was still being asked."""
        tasks: list[asyncio.Task[Any]] = [*self._records.values(), *self._layouts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)
        _hang_up(self._idle)

    # -- connections

    async def _blob(self, request: Request) -> bytes:
        whole: list[memoryview] = []
        await self._ask(request, whole)
        return bytes(whole[0])

    async def _ask(self, request: Request, parts: list[memoryview]) -> None:
        """The reply's bytes into ``parts``, one behind the other; where there is none yet, into a new one. PeerLost."""
        async with self._room:
            if self._lost is not None:
                raise self._lost
            asking = _Asking(self._offer, request, parts, self._io_s, self._idle)
            answer = asyncio.get_running_loop().run_in_executor(self._pool, asking.run)
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                # The thread may write into the caller's memory until it has ended.
                asking.abort()
                await asyncio.gather(answer, return_exceptions=True)
                raise
            except LOST as error:
                if self._lost is None:
                    self._lost = self._lost_by(error)
                raise self._lost from error

    def _lost_by(self, error: BaseException) -> PeerLost:
        place = f"{self._offer.host}:{self._offer.port}"
        slow = isinstance(error, TimeoutError)
        told = f"no answer within {self._io_s:g} s" if slow else f"{type(error).__name__}: {error}"
        return PeerLost(
            f"{self.label} cannot be read at {place}",
            found=told,
            expected=f"its snapshot of step {self.step}",
            hint=f"If the other ranks reach that host by another address, set {ADDRESS} there.",
            name=self.label,
        )

    def _lie(self, what: str, found: object, expected: object) -> NoReturn:
        raise PeerLost(
            f"{self.label}: {what} is not what was offered", found=found, expected=expected, name=self.label
        )


class _Asking:
    """One request and its reply, on a thread: over a connection of ``idle``, else over a new one, which is kept there
    for the next unless anything goes wrong."""

    def __init__(
        self, offer: Offer, request: Request, parts: list[memoryview], io_s: float, idle: list[Line]
    ) -> None:
        self._offer = offer
        self._request = request
        self._parts = parts
        self._io_s = io_s
        self._idle = idle
        self._guard = threading.Lock()
        self._line: Line | None = None
        self._aborted = False

    def run(self) -> None:
        """One of LOST."""
        try:
            line = self._idle.pop()
        except IndexError:
            pass
        else:
            try:
                return self._over(line, self._exchange)
            except (ConnectionError, EOFError):
                _hang_up(self._idle)  # the server tired of waiting: all that were left alone are gone
        host = self._offer.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        line = Line(opened(lambda: socket.socket(family, socket.SOCK_STREAM)), self._io_s)
        self._over(line, self._greet, self._exchange)

    def abort(self) -> None:
        """From another thread: end it soon."""
        with self._guard:
            self._aborted = True
            if self._line is not None:
                self._line.abort()

    def _over(self, line: Line, *acts: Callable[[Line], None]) -> None:
        try:
            with self._guard:
                if self._aborted:
                    raise ConnectionAbortedError("nobody waits for it any more")
                self._line = line
            for act in acts:
                act(line)
        except BaseException:
            line.close()
            raise
        else:
            self._idle.append(line)
        finally:
            with self._guard:
                self._line = None

    def _greet(self, line: Line) -> None:
        line.connect((self._offer.host, self._offer.port))
        line.send(MAGIC + self._offer.token)
        decode_reply(line.receive_frame())

    def _exchange(self, line: Line) -> None:
        line.send_frame(self._request)
        reply = decode_reply(line.receive_frame())
        if reply.error:
            raise Violation(f"the peer refuses: {reply.error}")
        wanted = sum(map(len, self._parts))
        if not self._parts:
            if not 0 <= reply.nbytes <= BLOB_BYTES_MAX:
                raise Violation(f"{reply.nbytes} bytes; at most {BLOB_BYTES_MAX} are allowed")
            self._parts.append(memoryview(bytearray(reply.nbytes)))
        elif reply.nbytes != wanted:
            raise Violation(f"{reply.nbytes} bytes instead of {wanted}")
        for part in self._parts:
            line.receive_into(part)


def _hang_up(idle: list[Line]) -> None:
    while idle:
        idle.pop().close()
