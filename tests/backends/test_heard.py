"""What fails after its caller has gone is heard of here, not by asyncio's own report on stderr."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from everstep.backends.errors import Permanent
from everstep.backends.files import LocalBackend
from everstep.backends.fsspecfs import FsspecBackend
from everstep.backends.parallel import ended, finished, together
from everstep.backends.s3body import Flow
from everstep.errors import SaveFailed
from everstep.store.blocking import run_blocking
from everstep.store.flush import FIRST_PIECE_BYTES, FlushJob, write_image

Body = Callable[[], Coroutine[Any, Any, None]]


class Failing:
    """A job of a thread that fails once it is told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(10)
        raise Permanent("x", "a failed job")


@pytest.fixture
def quietly() -> Iterator[Callable[[Body], None]]:
    """Runs a test's body on a loop, and fails where asyncio had something to report."""
    reports: list[dict[str, Any]] = []

    def run(body: Body) -> None:
        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
            await body()
            gc.collect()

        asyncio.run(watched())
        gc.collect()
        assert not reports, reports

    yield run


async def cancelled_at_work(calls: list[Coroutine[Any, Any, Any]], job: Failing) -> None:
    """Cancel the calls while the job is under way, which fails then."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.to_thread(job.begun.wait, 10)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    job.go_on.set()
    for told in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(told, asyncio.CancelledError)


def test_a_job_of_a_file(tmp_path: Path, quietly: Callable[[Body], None]) -> None:
    async def body() -> None:
        backend, job = LocalBackend(tmp_path), Failing()
        await cancelled_at_work([backend._run(job)], job)
        await backend.close()

    quietly(body)


def test_a_job_of_fsspec(quietly: Callable[[Body], None]) -> None:
    async def body() -> None:
        backend, job = FsspecBackend("memory://heard"), Failing()
        await cancelled_at_work([backend.run("x", job)], job)
        await backend.close()

    quietly(body)


def test_a_job_that_was_cancelled_twice(quietly: Callable[[Body], None]) -> None:
    """It is waited for all the same; one that has not begun never does."""

    async def body() -> None:
        job = Failing()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(job)
            waiting = pool.submit(job)
            first, second = (asyncio.ensure_future(finished(one)) for one in (running, waiting))
            await asyncio.to_thread(job.begun.wait, 10)
            for _ in range(3):
                first.cancel()
                second.cancel()
                await asyncio.sleep(0)
            assert not first.done() and waiting.cancelled()
            job.go_on.set()
            await asyncio.gather(first, second, return_exceptions=True)
            assert running.done() and first.cancelled() and second.cancelled()

    quietly(body)


def test_a_request_that_fails_as_it_is_given_up(quietly: Callable[[Body], None]) -> None:
    async def stalled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise Permanent("x", "a failed end")

    async def body() -> None:
        watching = asyncio.ensure_future(Flow(None).watched("x", stalled(), 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await ended([watching])
        assert watching.cancelled()

    quietly(body)


def test_what_is_done_together_has_ended(quietly: Callable[[Body], None]) -> None:
    left: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("slow")
            raise Permanent("x", "a failed end")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise Permanent("x", "the first error")

    async def body() -> None:
        with pytest.raises(Permanent, match="the first error"):
            await together([slow(), fails(), slow()])
        assert left == ["slow", "slow"]

    quietly(body)


def test_a_piece_that_cannot_be_read_beside_one_that_cannot_be_written(
    tmp_path: Path, quietly: Callable[[Body], None]
) -> None:
    class Source:
        nbytes = 2 * FIRST_PIECE_BYTES

        def piece(self, start: int, end: int) -> memoryview:
            if start:
                raise Permanent("x", "a failed read")
            return memoryview(bytes(end - start))

    class Writing:
        async def write(self, view: memoryview) -> None:
            raise Permanent("x", "a failed write")

        async def abort(self) -> None:
            pass

    class Backend(LocalBackend):
        async def open_writer(self, *_: Any, **__: Any) -> Any:
            return Writing()

    async def body() -> None:
        backend = Backend(tmp_path)
        job = FlushJob(1, 1, 1, 0, 1)
        with ThreadPoolExecutor(2) as pool, pytest.raises(SaveFailed, match="a failed write"):
            await write_image(backend, job, "w", "w", Source(), 4096, pool)
        await backend.close()

    quietly(body)


def test_an_interrupted_call_that_fails_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is what the caller hears of."""
    reports: list[dict[str, Any]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reports.append(report))
        main.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise Permanent("x", "a failed end")

    async def tidy() -> None:
        gc.collect()
        asyncio.get_running_loop().set_exception_handler(None)

    main = threading.Event()

    class Interrupted(Exception):
        pass

    def result(self: Any, timeout: float | None = None) -> Any:
        assert main.wait(10)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", result)
        with pytest.raises(Interrupted):
            run_blocking(work())
    run_blocking(tidy())
    assert not reports, reports
