"""The event log, and running storage code from synchronous callers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from pathlib import Path

import pytest
from everstep.backends.errors import Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import SaveFailed, UsageError
from everstep.format import names
from everstep.store.blocking import run_blocking
from everstep.store.events import SEGMENT_BYTES_MAX, EventLog, read_events


def test_events_come_back_in_time_order_over_writers_and_segments(tmp_path: Path) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path)
        times = iter(range(10**6))
        logs = [EventLog(backend, name, clock=lambda: float(next(times))) for name in ("agent-1", "rank/0")]
        count = 3 * SEGMENT_BYTES_MAX // 1000
        for number in range(count):
            logs[number % 2].append("committed", step=number, text="x" * 900, loss=math.nan)
            if number % 50 == 0:
                await logs[number % 2].flush()
        for log in logs:
            await log.flush()
        events, bad = await read_events(backend)
        assert [event.fields["step"] for event in events] == list(range(count)) and not bad
        assert events[0].fields["loss"] == "nan" and events[0].kind == "committed"
        assert {event.writer for event in events} == {"agent-1", "rank/0"}
        files = sorted(path.name for path in (tmp_path / "events").iterdir())
        assert len(files) >= 4 and all(names.parse(f"events/{name}") for name in files)
        assert all(path.stat().st_size <= SEGMENT_BYTES_MAX for path in (tmp_path / "events").iterdir())
        await backend.close()

    asyncio.run(go())


def test_a_line_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path)
        log = EventLog(backend, "a")
        log.append("one")
        log.append("two", big="x" * (1 << 20))
        await log.flush()
        path = tmp_path / names.events("a")
        path.write_bytes(path.read_bytes() + b'{"kind": "hal')
        events, bad = await read_events(backend)
        assert [event.kind for event in events] == ["one", "two"] and bad == ["events/a.jsonl line 3"]
        assert "cut_bytes" in events[1].fields
        for line in path.read_bytes().splitlines()[:2]:
            json.loads(line, parse_constant=lambda text: pytest.fail(text))
        await backend.close()

    asyncio.run(go())


def test_events_wait_while_the_storage_fails_and_the_oldest_go_first(tmp_path: Path) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path)
        log = EventLog(backend, "a")
        log.append("first")
        write = backend.write

        async def failing(name: str, data: bytes) -> None:
            raise Retryable(name, "timed out")

        backend.write = failing  # type: ignore[method-assign]
        with pytest.raises(SaveFailed):
            await log.flush()
        backend.write = write  # type: ignore[method-assign]
        log.append("second")
        await log.flush()
        assert [event.kind for event in (await read_events(backend))[0]] == ["first", "second"]
        for number in range(5000):
            log.append("many", number=number)
        assert log.dropped == 5000 - 4096
        await backend.close()

    asyncio.run(go())


async def _thread() -> str:
    return threading.current_thread().name


def test_blocking_calls_work_inside_a_running_loop_and_share_one() -> None:
    async def inside() -> str:
        return run_blocking(_thread())

    assert asyncio.run(inside()) == run_blocking(_thread()) == "everstep-storage"


def test_blocking_calls_raise_what_the_coroutine_raises_and_refuse_to_wait_for_themselves() -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_blocking(fails())

    async def nested() -> str:
        return run_blocking(_thread())

    with pytest.raises(UsageError, match="itself"):
        run_blocking(nested())


def test_an_interrupted_call_waits_for_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cleaned = threading.Event(), threading.Event()

    async def slow() -> None:
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    real = asyncio.run_coroutine_threadsafe

    def interrupted(coro: object, loop: asyncio.AbstractEventLoop) -> object:
        future = real(coro, loop)  # type: ignore[arg-type, var-annotated]
        monkeypatch.setattr(future, "result", lambda: (started.wait(10), _raise(KeyboardInterrupt()))[1])
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_blocking(slow())
    assert cleaned.is_set()


def _raise(error: BaseException) -> None:
    raise error


def test_a_forked_child_gets_a_loop_of_its_own() -> None:
    run_blocking(_thread())
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run_blocking(_thread()) == "everstep-storage" else 1)
    assert os.waitpid(pid, 0)[1] == 0
