"""What the machine can do at best with a state's bytes, in a worker of its own at both ends of every round."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..common import Samples, drop_caches, in_turn
from ..floors import Buffer, CopyFloor, raw_read, raw_write
from .api import State
from .states import local


def measure_floors(
    state: State, wanted: Collection[str], directory: Path, repeats: int
) -> dict[str, list[float]]:
    """Seconds by "floor" or "floor:way", of those of :data:`~.results.FLOORS` that are ``wanted`` and known here."""
    found: dict[str, Samples] = {}
    if {"copy", "copy_fresh"} & set(wanted):
        _copies(state, found, repeats)
    if {"write", "read"} & set(wanted):
        _disk(state.nbytes, found, directory, repeats)
    times = {name: samples.seconds for name, samples in found.items()}
    if {"s3_put", "s3_get"} & set(wanted):
        from .stores import measure_store

        times |= measure_store(state.nbytes, directory, repeats)
    return {name: seconds for name, seconds in times.items() if name.partition(":")[0] in wanted}


def send_over_gloo(nbytes: int, rank: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of "gloo": ``nbytes`` from rank 0 to rank 1, until both know that they are there."""
    import torch
    import torch.distributed as dist

    room = torch.zeros(max(1, nbytes), dtype=torch.uint8)
    sends = Samples()

    def send() -> None:
        if rank == 0:
            dist.send(room, 1)
        elif rank == 1:
            dist.recv(room, 0)
        dist.barrier()

    for turn in range(1 + repeats):
        dist.barrier()
        if turn == 0:
            send()  # connects
        else:
            sends.time(send)
    return {"gloo": sends.seconds}


def _copies(state: State, found: dict[str, Samples], repeats: int) -> None:
    floor = CopyFloor([local(tensor) for tensor in state.tensors().values()])
    ways = {
        "copy:flat": floor.flat,
        "copy:fused": floor.fused,
        "copy:one by one": floor.one_by_one,
        "copy_fresh": floor.fresh,
    }
    for way in ways.values():
        way()
    for turn in range(repeats):
        in_turn(turn, [partial(found.setdefault(name, Samples()).time, way) for name, way in ways.items()])


def _disk(nbytes: int, found: dict[str, Samples], directory: Path, repeats: int) -> None:
    buffer = Buffer(nbytes)
    path = directory / "floor"
    for turn in range(repeats):
        for kind in ("direct", "buffered") if turn % 2 == 0 else ("buffered", "direct"):
            direct = kind == "direct"
            write, read = (found.setdefault(f"{name}:{kind}", Samples()) for name in ("write", "read"))
            os.sync()
            try:
                write.time(lambda direct=direct: raw_write(path, buffer, direct=direct))
                drop_caches([path])
                read.time(lambda direct=direct: raw_read([path], buffer, direct=direct))
            except OSError as error:
                if not (direct and error.errno == errno.EINVAL):  # a file system without direct I/O
                    raise
                del found[f"write:{kind}"], found[f"read:{kind}"]
            finally:
                with suppress(FileNotFoundError):
                    path.unlink()


__all__ = ["measure_floors", "send_over_gloo"]
