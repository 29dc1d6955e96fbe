"""Rate limit, retries, counting and scripted faults; all clocks are the test's own."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from everstep.backends.api import Backend, Item, Notes, Writer
from everstep.backends.conformance import content, names_of, put
from everstep.backends.count import Counting
from everstep.backends.errors import (
    BackendError,
    Conflict,
    NoSpace,
    NotFound,
    Permanent,
    Retryable,
    ShortRead,
)
from everstep.backends.faults import Fault, Faulty
from everstep.backends.files import LocalBackend
from everstep.backends.limit import RateLimited
from everstep.backends.retry import Retrying
from everstep.backends.wrap import Wrapper, WriterWrapper

T = TypeVar("T")


class FakeTime:
    """A clock on which sleeping is going on; sleepers are woken in the order of their time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._waiting: list[tuple[float, asyncio.Event]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        event = asyncio.Event()
        self._waiting.append((self.now + seconds, event))
        await event.wait()

    async def run(self, job: Awaitable[T]) -> T:
        """Let ``job`` go on; time passes only when all tasks wait for it."""
        task = asyncio.ensure_future(job)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done() and self._waiting:
                due = min(self._waiting, key=lambda waiting: waiting[0])
                self._waiting.remove(due)
                self.now = max(self.now, due[0])
                due[1].set()
        return task.result()


class Sink(Wrapper):
    """Takes bytes and notes when they passed; ``pause`` seconds go by within each write."""

    def __init__(self, time: FakeTime, inner: Backend, pause: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(inner)
        self.time = time
        self.pause = pause
        self.passed: list[tuple[float, int]] = []

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        return SinkWriter(self)

    async def create(self, name: str, data: bytes) -> None:
        self.passed.append((self.time.now, len(data)))

    async def write(self, name: str, data: bytes) -> None:
        self.passed.append((self.time.now, len(data)))

    def bytes_within(self, start: float, seconds: float) -> int:
        moments = [moment for moment, _ in self.passed]
        first, last = bisect_left(moments, start), bisect_right(moments, start + seconds)
        return sum(nbytes for _, nbytes in self.passed[first:last])

    def most_within(self, seconds: float) -> int:
        """The most that passed in any stretch of that length."""
        most = within = first = 0
        for moment, nbytes in self.passed:
            within += nbytes
            while self.passed[first][0] < moment - seconds:
                within -= self.passed[first][1]
                first += 1
            most = max(most, within)
        return most


class SinkWriter(WriterWrapper):
    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    async def write(self, view: memoryview) -> None:
        self.sink.passed.append((self.sink.time.now, view.nbytes))
        pause = self.sink.pause()
        if pause:
            await self.sink.time.sleep(pause)

    async def commit(self) -> None:
        pass

    async def abort(self) -> None:
        pass


RATE = 10e6


def limited(
    pause: Callable[[], float] = lambda: 0.0, rate: float = RATE
) -> tuple[FakeTime, Sink, RateLimited]:
    time = FakeTime()
    sink = Sink(time, LocalBackend("/nonexistent"), pause)
    return time, sink, RateLimited(sink, rate, time.clock, time.sleep)


@pytest.mark.parametrize("view_bytes", [5000, 8 << 20, 200 << 20], ids=["small", "8 MiB", "larger than 5 s"])
def test_the_rate_is_kept_and_used(view_bytes: int) -> None:
    """Over any five seconds within 5 % of the limit, from both sides."""
    time, sink, backend = limited()
    total = 200 << 20 if view_bytes > 5000 else 60_000_000

    async def main() -> None:
        writer = await backend.open_writer("a", total)
        view = memoryview(bytes(view_bytes))
        for _ in range(total // view_bytes):
            await writer.write(view)

    started = time.now
    asyncio.run(time.run(main()))
    assert sum(nbytes for _, nbytes in sink.passed) == total // view_bytes * view_bytes
    assert sink.most_within(5.0) <= 5 * RATE * 1.05
    for second in range(int(time.now - started) - 5):
        assert sink.bytes_within(started + second, 5.0) >= 5 * RATE * 0.95
    assert max(nbytes for _, nbytes in sink.passed) <= RATE * 0.1


def test_slices_keep_to_whole_blocks(tmp_path: Path) -> None:
    _, sink, backend = limited()

    async def main() -> None:
        writer = await backend.open_writer("a", 8 << 20)
        await writer.write(memoryview(bytes(8 << 20)))

    asyncio.run(sink.time.run(main()))
    assert all(nbytes % 4096 == 0 for _, nbytes in sink.passed)


def test_several_writers_share_one_rate() -> None:
    time, sink, backend = limited()

    async def one(name: str) -> None:
        writer = await backend.open_writer(name, 40 << 20)
        for _ in range(10):
            await writer.write(memoryview(bytes(4 << 20)))

    async def main() -> None:
        await asyncio.gather(*(one(name) for name in "abc"))

    started = time.now
    asyncio.run(time.run(main()))
    assert sink.most_within(5.0) <= 5 * RATE * 1.05
    assert 120 * (1 << 20) / RATE * 0.95 <= time.now - started <= 120 * (1 << 20) / RATE * 1.05


def test_no_catching_up_after_the_disk_stood_still() -> None:
    slices = itertools.count()
    time, sink, backend = limited(pause=lambda: 20.0 if next(slices) in (50, 51, 120) else 0.0)

    async def main() -> None:
        writer = await backend.open_writer("a", 120 << 20)
        for _ in range(30):
            await writer.write(memoryview(bytes(4 << 20)))

    asyncio.run(time.run(main()))
    assert time.slept.count(20.0) == 3
    assert sink.most_within(5.0) <= 5 * RATE * 1.05


def test_a_very_low_rate() -> None:
    time, sink, backend = limited(rate=5000)

    async def main() -> None:
        writer = await backend.open_writer("a", 100_000)
        await writer.write(memoryview(bytes(100_000)))

    asyncio.run(time.run(main()))
    assert sink.most_within(5.0) <= 25_000 * 1.05
    assert time.now - 1000.0 == pytest.approx(20, abs=1)


def test_small_objects_count_too() -> None:
    time, sink, backend = limited(rate=1e6)

    async def main() -> None:
        for index in range(100):
            await backend.create(f"a{index}", bytes(60_000))
            await backend.write(f"b{index}", bytes(60_000))
        await backend.write("large", bytes(3_000_000))

    asyncio.run(time.run(main()))
    assert sink.most_within(5.0) <= 5e6 * 1.05 + 60_000
    assert time.now - 1000.0 == pytest.approx(15, rel=0.05)
    assert max(nbytes for _, nbytes in sink.passed) <= 100_000


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(Permanent):
        RateLimited(LocalBackend("/nonexistent"), rate)


def test_limited_writes_are_whole_and_reads_pass(tmp_path: Path) -> None:
    time = FakeTime()
    data = content(3_000_001)

    async def main() -> None:
        backend = RateLimited(LocalBackend(tmp_path), 1e6, time.clock, time.sleep)
        task = asyncio.ensure_future(put(backend, "a", data))
        while not task.done():
            await asyncio.sleep(0.0005)
            for due, event in time._waiting:
                time.now = max(time.now, due)
                event.set()
            time._waiting.clear()
        await task
        waits = len(time.slept)
        assert await backend.read("a") == data
        assert len(time.slept) == waits > 20
        await backend.close()

    asyncio.run(main())


# -- faults ----------------------------------------------------------------------------------------------


def script(backend: Faulty, *faults: Fault) -> None:
    backend.script[:] = faults


def with_faulty(tmp_path: Path, job: Callable[[Faulty], Awaitable[None]]) -> None:
    async def main() -> None:
        backend = Faulty(LocalBackend(tmp_path))
        await job(backend)
        await backend.close()

    asyncio.run(main())


def test_faults_strike_when_they_should(tmp_path: Path) -> None:
    async def job(backend: Faulty) -> None:
        script(backend, Fault("write", name="b", nth=2, times=2, error=lambda name: NoSpace(name, "full")))
        await backend.write("a", b"1")
        await backend.write("b", b"1")
        for _ in range(2):
            with pytest.raises(NoSpace):
                await backend.write("b", b"2")
        assert await backend.read("b") == b"1"
        await backend.write("b", b"3")
        assert await backend.read("b") == b"3"
        assert backend.calls[:2] == [("write", "a"), ("write", "b")]

    with_faulty(tmp_path, job)


def test_lost_answers(tmp_path: Path) -> None:
    async def job(backend: Faulty) -> None:
        script(
            backend,
            Fault("create", after=True),
            Fault("writer.commit", after=True),
            Fault("delete", after=True),
        )
        with pytest.raises(Retryable):
            await backend.create("a", b"1")
        await backend.create("a", b"1")
        with pytest.raises(Retryable):
            await put(backend, "b", b"2")
        assert await backend.read("b") == b"2"
        with pytest.raises(Retryable):
            await backend.delete(["a", "b"])
        assert await names_of(backend) == {"b"}
        script(backend, Fault("open_writer", after=True))
        with pytest.raises(Retryable):
            await backend.open_writer("c", 1)
        assert await backend.leftovers() == []

    with_faulty(tmp_path, job)


def test_mangled_reads(tmp_path: Path) -> None:
    def flip(view: memoryview) -> None:
        view[0] ^= 1

    async def job(backend: Faulty) -> None:
        await backend.write("a", b"1234")
        script(backend, Fault("read", mangle=flip), Fault("read_into", nth=2, mangle=flip))
        assert await backend.read("a") == b"0234"
        assert await backend.read("a") == b"1234"
        view = memoryview(bytearray(2))
        await backend.read_into("a", 1, view)
        assert bytes(view) == b"23"
        await backend.read_into("a", 1, view)
        assert bytes(view) == b"33"

    with_faulty(tmp_path, job)


# -- retries ---------------------------------------------------------------------------------------------


async def every_operation(backend: Backend) -> dict[str, object]:
    """Does each operation once; what it gave."""
    await backend.write("d/a", b"123")
    await backend.create("d/b", b"45")
    view = memoryview(bytearray(2))
    await backend.read_into("d/a", 1, view)
    writer = await backend.open_writer("d/c", 1)
    left = await backend.leftovers()
    await backend.discard_leftovers([*left, Item("d/.tmp-gone", 0)])
    await writer.abort()
    found = {
        "read": await backend.read("d/a"),
        "view": bytes(view),
        "size": await backend.size("d/a"),
        "left": len(left),
        "names": sorted(await backend.list_names("d")),
        "list": await names_of(backend),
    }
    await backend.delete(["d/a", "d/b"])
    return {**found, "after": await names_of(backend)}


OPERATIONS = (
    *("write", "create", "read_into", "open_writer", "leftovers", "discard_leftovers", "read", "size"),
    *("list_names", "list", "delete"),
)


@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_is_repeated(op: str, after: bool, tmp_path: Path) -> None:
    time = FakeTime()

    async def main() -> None:
        faulty = Faulty(LocalBackend(tmp_path), [Fault(op, times=3, after=after)])
        backend = Retrying(faulty, sleep=instantly(time))
        found = await every_operation(backend)
        assert found == await every_operation(faulty.inner)
        assert len(time.slept) == 3
        assert sum(call == op for call, _ in faulty.calls) >= 4
        await backend.close()

    asyncio.run(main())


def instantly(time: FakeTime) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        time.slept.append(seconds)
        time.now += seconds

    return sleep


def test_waits_double_up_to_a_bound_and_then_the_error_passes(tmp_path: Path) -> None:
    time = FakeTime()

    async def main(draw: float) -> None:
        time.slept.clear()
        faulty = Faulty(LocalBackend(tmp_path), [Fault("read", times=100)])
        backend = Retrying(
            faulty, tries_max=6, wait_s_first=1, wait_s_max=5, sleep=instantly(time), draw=lambda: draw
        )
        with pytest.raises(Retryable):
            await backend.read("a")
        assert len(faulty.calls) == 6
        await backend.close()

    asyncio.run(main(draw=1.0))
    assert time.slept == [1, 2, 4, 5, 5]
    asyncio.run(main(draw=0.0))
    assert time.slept == [0.5, 1, 2, 2.5, 2.5]


@pytest.mark.parametrize("kind", [NotFound, Conflict, Permanent, NoSpace, ShortRead, BackendError])
def test_only_retryable_is_retried(kind: type[BackendError], tmp_path: Path) -> None:
    time = FakeTime()

    async def main() -> None:
        faulty = Faulty(LocalBackend(tmp_path), [Fault("read", error=kind)])
        with pytest.raises(kind):
            await Retrying(faulty, sleep=instantly(time)).read("a")
        assert len(faulty.calls) == 1 and time.slept == []
        await faulty.close()

    asyncio.run(main())


def test_a_conflict_after_a_lost_answer_with_other_bytes_passes(tmp_path: Path) -> None:
    async def main() -> None:
        faulty = Faulty(LocalBackend(tmp_path), [Fault("create")])
        await faulty.inner.create("a", b"theirs")
        with pytest.raises(Conflict):
            await Retrying(faulty, sleep=instantly(FakeTime())).create("a", b"ours")
        await faulty.close()

    asyncio.run(main())


# -- counting --------------------------------------------------------------------------------------------


def test_counting(tmp_path: Path) -> None:
    async def main() -> None:
        backend = Counting(LocalBackend(tmp_path))
        await put(backend, "a", b"12345", piece=2)
        await backend.write("b", b"12")
        await backend.create("c", b"1")
        with pytest.raises(Conflict):
            await backend.create("c", b"2222")
        await backend.read("a")
        await backend.read_into("a", 0, memoryview(bytearray(3)))
        assert (backend.bytes_written, backend.bytes_read) == (8, 8)
        assert backend.operations["writer.write"] == 3 and backend.operations["create"] == 2
        assert await names_of(backend) == {"a", "b", "c"}
        assert backend.operations["list"] == 1
        backend.reset()
        assert not backend.operations and not backend.bytes_read
        await backend.close()

    asyncio.run(main())
