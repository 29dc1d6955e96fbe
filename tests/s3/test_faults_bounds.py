"""Bounds under a bad network: memory, time, requests; and a server or bucket that is gone for a while."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from everstep.backends import s3writer
from everstep.backends.errors import BackendError, Permanent, Retryable
from everstep.backends.open import open_backend
from everstep.backends.s3 import ABORT_S, S3Backend

from . import proxy as network
from . import stories
from .proxy import Fault, S3Proxy
from .server import S3Server
from .stories import FOREVER, TRIES, Truth
from .wire import Request

PART = 5 << 20
"""Bytes of a part here: the least that all servers take."""

DELAY_S = 0.02
WAIT_S = 30.0


@pytest.fixture(scope="module")
def running(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture
def proxy(running: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> S3Proxy:
    stories.hasty(monkeypatch)
    monkeypatch.setattr(s3writer, "PART_BYTES", PART)
    running.clear()
    return running


def open_through(proxy: S3Proxy, server: S3Server, url: str) -> S3Backend:
    backend = open_backend(url, options=dataclasses.replace(server, endpoint=proxy.endpoint).storage_options)
    assert isinstance(backend, S3Backend)
    return backend


def is_part(request: Request) -> bool:
    return request.is_part


async def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), WAIT_S)


def test_a_stalled_server_bounds_what_is_taken_in(proxy: S3Proxy, s3_server: S3Server) -> None:
    """With no part answered, a writer takes what may be in flight and the part being filled, and no more."""
    count = s3writer.PARTS_IN_FLIGHT + 4
    data = random.Random(1).randbytes(PART)
    taken = 0

    async def feed(backend: S3Backend) -> None:
        nonlocal taken
        writer = await backend.open_writer("d/big", count * PART)
        try:
            for _ in range(count):
                for start in range(0, PART, 1 << 20):
                    await writer.write(memoryview(data)[start : start + (1 << 20)])
                    taken += 1 << 20
            await writer.commit()
        finally:
            await writer.abort()

    async def main() -> None:
        url = s3_server.url()
        backend = open_through(proxy, s3_server, url)
        proxy.faults = [Fault("stall", is_part, times=s3writer.PARTS_IN_FLIGHT)]
        feeding = asyncio.ensure_future(feed(backend))
        try:
            await until(lambda: sum(request.nbytes for request in proxy.requests) >= 8 * PART)
            limit = (s3writer.PARTS_IN_FLIGHT + 1) * PART
            await until(lambda: taken >= limit - (1 << 20))
            for _ in range(100):  # nothing that it waits for can come
                await asyncio.sleep(0)
            assert taken <= limit and not feeding.done()
            assert sum(map(is_part, proxy.requests)) == s3writer.PARTS_IN_FLIGHT
            proxy.release()
            await asyncio.wait_for(feeding, WAIT_S)
        finally:
            await backend.close()
        assert Truth(s3_server, url).get("d/big") == data * count

    asyncio.run(main())


def test_closing_ends_a_stalled_upload(proxy: S3Proxy, s3_server: S3Server) -> None:
    async def main() -> None:
        truth = Truth(s3_server, s3_server.url())
        backend = open_through(proxy, s3_server, truth.url)
        proxy.faults = [Fault("stall", is_part, times=FOREVER)]
        writer = await backend.open_writer("d/big", 3 * PART)
        await writer.write(memoryview(bytes(2 * PART)))
        await until(proxy.stalled.is_set)
        began = time.monotonic()
        await asyncio.wait_for(backend.close(), WAIT_S)
        assert time.monotonic() - began < ABORT_S
        proxy.release()
        await asyncio.to_thread(proxy.wait_quiet)
        again = open_through(proxy, s3_server, truth.url)
        await again.discard_leftovers(await again.leftovers())
        await again.close()
        assert truth.uploads() == [] and truth.names() == set()

    asyncio.run(main())


def test_a_part_that_failed_unseen_leaves_no_upload(proxy: S3Proxy, s3_server: S3Server) -> None:
    """Whoever gives an upload up after a part has failed, and before anybody was told, ends the upload, too."""

    async def main() -> None:
        truth = Truth(s3_server, s3_server.url())
        backend = open_through(proxy, s3_server, truth.url)
        try:
            proxy.faults = [Fault("answer", is_part, answer=network.ACCESS_DENIED)]
            writer = await backend.open_writer("d/big", 3 * PART)
            await writer.write(memoryview(bytes(PART)))
            with pytest.raises(Permanent, match="AccessDenied"):
                for _ in range(int(WAIT_S * 1000)):
                    await asyncio.sleep(0.001)
                    await writer.write(memoryview(b""))
            await writer.abort()
            assert truth.uploads() == []
        finally:
            await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("answer", [network.NO_SUCH_BUCKET, network.ACCESS_DENIED], ids=["bucket", "denied"])
def test_what_cannot_be_helped_is_told_at_once(
    proxy: S3Proxy, s3_server: S3Server, answer: network.Answer
) -> None:
    """A bucket that disappears in mid run: one request finds out. And when it is back, all goes on."""

    async def main() -> None:
        backend = open_through(proxy, s3_server, s3_server.url())
        try:
            await backend.create("d/a", b"1")
            proxy.clear([Fault("answer", times=FOREVER, answer=answer)])
            # (Whether what is denied is there at all, a listing may know.)
            reads = 2 if answer is network.ACCESS_DENIED else 1
            acts: list[tuple[Awaitable[object], int]] = [
                *(
                    (backend.write("d/b", b"2"), 1),
                    (backend.create("d/c", b"3"), 1),
                    (backend.read("d/a"), reads),
                ),
                *((backend.delete(["d/a"]), 1), (backend.list_names(), 1), (backend.leftovers(), 1)),
            ]
            for act, requests in acts:
                before = len(proxy.requests)
                with pytest.raises(Permanent, match=answer.reason):
                    await act
                assert len(proxy.requests) == before + requests
            proxy.clear()
            await backend.write("d/b", b"2")
            assert sorted(await backend.list_names("d")) == ["a", "b"]
        finally:
            await backend.close()

    asyncio.run(main())


def test_a_lasting_fault_is_given_up(proxy: S3Proxy, s3_server: S3Server) -> None:
    async def main() -> None:
        backend = open_through(proxy, s3_server, s3_server.url())
        try:
            proxy.faults = [Fault("answer", times=FOREVER)]
            with pytest.raises(Retryable, match="InternalError"):
                await backend.write("d/a", b"1")
            assert len(proxy.requests) == TRIES
        finally:
            await backend.close()

    asyncio.run(main())


def test_a_server_says_when_to_come_again(proxy: S3Proxy, s3_server: S3Server) -> None:
    """Its Retry-After is kept."""

    async def main() -> None:
        backend = open_through(proxy, s3_server, s3_server.url())
        try:
            proxy.faults = [Fault("answer", answer=network.SLOW_DOWN)]
            await backend.write("d/a", b"1")
            first, second = proxy.requests
            assert first.status == 503 and second.status == 200
            assert second.at_s - first.at_s >= 1.0
        finally:
            await backend.close()

    asyncio.run(main())


def test_a_server_that_is_away(proxy: S3Proxy, s3_server: S3Server) -> None:
    async def main() -> None:
        backend = open_through(proxy, s3_server, s3_server.url())
        try:
            await backend.write("d/a", b"1")
            proxy.refusing = True
            proxy.cut()
            for act in (backend.write("d/b", b"2"), backend.read("d/a"), backend.list_names("d")):
                with pytest.raises(BackendError) as caught:
                    await act
                assert isinstance(caught.value, Retryable), caught.value
            proxy.refusing = False
            await backend.write("d/b", b"2")
            assert sorted(await backend.list_names("d")) == ["a", "b"]
        finally:
            proxy.refusing = False
            await backend.close()

    asyncio.run(main())


def test_far_servers_are_asked_in_parallel(proxy: S3Proxy, s3_server: S3Server) -> None:
    """Where each request takes its time, parts and ranges are under way side by side."""

    async def main() -> None:
        data = random.Random(1).randbytes(5 * PART)
        backend = open_through(proxy, s3_server, s3_server.url())
        try:
            proxy.link.delay_s = DELAY_S
            await backend.write("d/big", data)
            assert 4 <= proxy.busy_max <= s3writer.PARTS_IN_FLIGHT + 1
            proxy.busy_max = 0
            room = bytearray(len(data))
            await backend.read_into("d/big", 0, memoryview(room))
            assert room == data and proxy.busy_max >= 4
        finally:
            await backend.close()

    asyncio.run(main())
