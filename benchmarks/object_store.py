"""How fast images get into an object store and back, against other clients of the same server in the same run.

Each way has a process of its own and does in turn the same: put all images, get them back, whose hashes must be those
of what was put. In a first round, which is not timed, memory is watched. A rival that fails is named and left out.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from everstep.backends.s3writer import PART_BYTES, PARTS_IN_FLIGHT
from everstep.errors import BadOption, EverstepError
from everstep.store.flush import IMAGES_PARALLEL
from everstep.store.pieces import FROM_OTHERS

from .common import MIB, Mismatch, Samples, Step, in_turn, machine
from .memory import PeakWatch, resident_bytes
from .object_relay import relayed
from .object_ways import FILE_WAYS, WAYS, Setup, mapped
from .s3_server import VOLUMES, S3Server, named_server, own_server

OWN = "everstep"
IMAGES = 4

RATE_WINDOW_S = 5.0
"""In any such time the rate must be the limit."""

RATE_WINDOWS = 1.6
"""Windows that a limited put, or get, takes."""

RATE_BYTES_PER_S_MAX = 16 << 20
"""A limit that a busy machine reaches, too."""

START_S = 60.0
ORDER_S = 600.0
"""Seconds within which a way must be ready, and have done one put or get."""


def run_s3(
    gib: float,
    repeats: int,
    directory: Path | None,
    tell: Step,
    *,
    url: str | None = None,
    window_s: float = RATE_WINDOW_S,
) -> dict[str, Any]:
    """All measurements of ``bench s3``. Raises Mismatch where bytes come back changed by everstep; EverstepError where
    it fails, or no rival is left."""
    image_bytes = max(int(gib * (1 << 30)) // IMAGES, 1)
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        work = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=directory or Path.cwd())
            )
        )
        memory = stack.enter_context(_memory())
        tell("starting the server")
        server = stack.enter_context(_server(url, work, image_bytes * IMAGES * (repeats + 1)))
        hashes = make_images(memory / "source", image_bytes)
        bench = _Bench(server, memory, image_bytes, hashes)
        stack.callback(bench.clear)
        bench.measure(repeats, tell)
        limited = _Limited(bench, window_s)
        limited.run(tell)
        return {
            "benchmark": "s3",
            **bench.ratios(),
            "rate_limit_error": limited.error("put"),
            "rate_limit_get_error": limited.error("get"),
            "size_bytes": image_bytes * IMAGES,
            "images": IMAGES,
            "repeats": repeats,
            **bench.summary(),
            "memory_bound": _bound(),
            "rate": {"limit": limited.rate, "window_s": window_s, **limited.found},
            "left_out": bench.left_out,
            "load_before": load,
            "server": url or "SeaweedFS on the loopback address, its data on the disk",
            "checked": "everything that came back was hashed; every image equal to what was put",
            "machine": machine(work),
        }


def _bound() -> dict[str, float]:
    """What everstep's own way may take, by its constants: parts on the wire and those being filled; pieces of a get."""
    return {
        "put_mib": (PARTS_IN_FLIGHT + IMAGES_PARALLEL) * PART_BYTES / MIB,
        "get_mib": FROM_OTHERS.nbytes / MIB,
    }


@contextmanager
def _memory() -> Iterator[Path]:
    """A directory in memory for images; its name marks them for those who count memory."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", suffix=".arena", dir="/dev/shm") as name:
        for part in ("source", "memory", "files"):
            Path(name, part).mkdir()
        yield Path(name)


@contextmanager
def _server(url: str | None, work: Path, nbytes: int) -> Iterator[S3Server]:
    """The endpoint of ``url``, or one of our own with room for ``nbytes`` of each way."""
    if url is None:
        with own_server(work / "server", VOLUMES + 2 * len(WAYS) * -(-nbytes >> 30)) as server:
            yield server
        return
    try:
        yield named_server(url, "everstep-bench")
    except ValueError as error:
        raise BadOption(str(error)) from None


def make_images(directory: Path, nbytes: int) -> list[str]:
    """Files of random bytes; their hashes."""
    hashes = []
    for index in range(IMAGES):
        view = mapped(str(directory / str(index)), nbytes, write=True)
        for start in range(0, nbytes, 1 << 20):
            view[start : start + (1 << 20)] = os.urandom(min(1 << 20, nbytes - start))
        hashes.append(xxhash.xxh3_128_hexdigest(view))
    return hashes


class Failed(Exception):
    """A way that could not do what it was told."""


class _Worker:
    """One way in its process."""

    def __init__(self, setup: Setup, env: Mapping[str, str]) -> None:
        self.way = setup.way
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everstep.benchmarks.object_ways", setup.encode()],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, order: str, number: int) -> dict[str, Any]:
        """Order one put or get. Raises Failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{order} {number}\n")
            self._process.stdin.flush()
        return self._answer(ORDER_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.end()
            raise Failed(f"no answer within {timeout_s:g} s") from None
        if not line:
            raise Failed(f"its process ended (exit status {self._process.wait()})")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self.end()
            raise Failed(str(found["error"]))
        return found


class _Bench:
    """All ways, their samples, and those that were left out, with the reason."""

    def __init__(self, server: S3Server, memory: Path, image_bytes: int, hashes: list[str]) -> None:
        self.server = server
        self.memory = memory
        self.image_bytes = image_bytes
        self.left_out: dict[str, str] = {}
        self._hashes = hashes
        self._prefix = f"{server.prefix}/{os.getpid()}-{time.time_ns()}"
        self._number = 0
        self._seconds = {order: {way: Samples() for way in WAYS} for order in ("put", "get")}
        self._cpu_s = {order: {way: Samples() for way in WAYS} for order in ("put", "get")}
        self._extra_bytes: dict[str, dict[str, int]] = {"put": {}, "get": {}}

    def setup(self, way: str, image_bytes: int | None = None, rate: float | None = None) -> Setup:
        target = self.memory / ("files" if way in FILE_WAYS else "memory")
        source = str(self.memory / "source")
        nbytes = image_bytes or self.image_bytes
        return Setup(way, self.server.bucket, self._prefix, source, str(target), IMAGES, nbytes, rate)

    def next(self) -> int:
        self._number += 1
        return self._number

    def measure(self, repeats: int, tell: Step) -> None:
        """The timed rounds, after one whose memory is watched."""
        with ExitStack() as stack:
            workers = []
            for way in WAYS:
                with self._left_out(way):
                    workers.append(_Worker(self.setup(way), self.server.env))
                    stack.callback(workers[-1].end)
            tell("round 0, memory")
            for worker in workers:
                self._round(worker, self._watch)
            for turn in range(repeats):
                tell(f"round {turn + 1}")
                in_turn(turn, [partial(self._round, worker, self._time) for worker in workers])

    def _round(self, worker: _Worker, do: Callable[[_Worker, str, int], dict[str, Any]]) -> None:
        """Put and get once, and see that what comes is what was put."""
        if worker.way in self.left_out:
            return
        number = self.next()
        with self._left_out(worker.way):
            do(worker, "put", number)
            hashes = do(worker, "get", number)["hashes"]
            wrong = sum(a != b for a, b in zip(hashes, self._hashes, strict=True))
            if wrong:
                raise Mismatch(f"{worker.way}: {wrong} of {IMAGES} images came back with other bytes")
        self._delete(number)

    def _time(self, worker: _Worker, order: str, number: int) -> dict[str, Any]:
        done = worker.do(order, number)
        self._seconds[order][worker.way].seconds.append(done["seconds"])
        self._cpu_s[order][worker.way].seconds.append(done["cpu_s"])
        return done

    def _watch(self, worker: _Worker, order: str, number: int) -> dict[str, Any]:
        """Looking costs time, so nothing is timed here."""
        before = resident_bytes(worker.pid)
        with PeakWatch([worker.pid]) as watched:
            done = worker.do(order, number)
        self._extra_bytes[order][worker.way] = max(watched.peak_bytes - before, 0)
        return done

    @contextmanager
    def _left_out(self, way: str) -> Iterator[None]:
        """A rival that fails is left out; what everstep does wrong is raised."""
        try:
            yield
        except (Failed, Mismatch) as error:
            if way == OWN:
                raise (
                    error if isinstance(error, Mismatch) else EverstepError(f"{OWN} failed: {error}")
                ) from None
            self.left_out[way] = str(error)

    def rivals(self) -> list[str]:
        found = [way for way in WAYS if way != OWN and way not in self.left_out]
        if not found:
            raise EverstepError(f"no rival is left: {self.left_out}")
        return found

    def ratios(self) -> dict[str, float]:
        """Our speed over that of the fastest rival."""
        return {
            f"{order}_vs_best_rival": min(self._seconds[order][way].median for way in self.rivals())
            / self._seconds[order][OWN].median
            for order in ("put", "get")
        }

    def summary(self) -> dict[str, Any]:
        nbytes = IMAGES * self.image_bytes
        return {
            order: {
                way: {
                    **self._seconds[order][way].summary(nbytes),
                    "cpu_s": self._cpu_s[order][way].median,
                    "peak_extra_mib": self._extra_bytes[order][way] / MIB,
                }
                for way in (OWN, *self.rivals())
            }
            for order in ("put", "get")
        }

    def _delete(self, number: int | None = None) -> None:
        """What was put under ``number``; all that was ever put, for None."""
        client = self.server.client()
        pages = client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.server.bucket, Prefix=f"{self._prefix}/"):
            keys = [found["Key"] for found in page.get("Contents", ())]
            for key in keys:
                if number is None or f"/{number}/" in key or f"/{number:09d}/" in key:
                    client.delete_object(Bucket=self.server.bucket, Key=key)

    def clear(self) -> None:
        self._delete()


class _Limited:
    """A put and a get of everstep's with a limit, seen by a relay on the way."""

    def __init__(self, bench: _Bench, window_s: float) -> None:
        total = IMAGES * bench.image_bytes
        self.rate = min(total / (RATE_WINDOWS * window_s), RATE_BYTES_PER_S_MAX)
        self.found: dict[str, dict[str, float]] = {}
        """By order: the least and the greatest rate in any window."""
        self._bench = bench
        self._window_s = window_s

    def run(self, tell: Step) -> None:
        tell("with a rate limit")
        bench = self._bench
        image_bytes = max(int(self.rate * RATE_WINDOWS * self._window_s) // IMAGES, 1)
        with relayed(bench.server.endpoint) as relay, ExitStack() as stack:
            env = {
                **bench.server.env,
                "AWS_ENDPOINT_URL": relay.endpoint,
                "AWS_ENDPOINT_URL_S3": relay.endpoint,
            }
            try:
                worker = _Worker(bench.setup(OWN, image_bytes, self.rate), env)
                stack.callback(worker.end)
                number = bench.next()
                for order, passed in (("put", relay.sent), ("get", relay.received)):
                    passed.clear()
                    worker.do(order, number)
                    least, most = passed.rates(self._window_s)
                    self.found[order] = {"least": least, "greatest": most}
            except Failed as error:
                raise EverstepError(f"{OWN} with a rate limit failed: {error}") from None

    def error(self, order: str) -> float:
        """The greatest difference between the limit and the rate, relative to it."""
        return max(abs(rate / self.rate - 1) for rate in self.found[order].values())


__all__ = ["IMAGES", "make_images", "run_s3"]
