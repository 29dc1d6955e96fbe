"""Runs with quick heartbeats, their beacons, and writers that seem to be on another host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.beacon import Beacon, BeaconRank, encode_beacon
from everstep.format.records import IncarnationRecord, decode_incarnation, encode_incarnation
from everstep.store.beacons import read_beacons
from everstep.store.blocking import run_blocking

from tests.facade.kit import opened, until

BEAT_S = 0.2
QUICK = {"heartbeat_s": BEAT_S, "linger_s": 10.0}


def beacons(root: Path) -> dict[str, Beacon]:
    return run_blocking(read_beacons(LocalBackend(str(root))))[0]


def living(root: Path) -> list[int]:
    """Process ids of all ranks that a beacon calls alive."""
    return [rank.pid for beacon in beacons(root).values() for rank in beacon.living]


def record_of(root: Path, number: int = 1) -> IncarnationRecord:
    name = names.incarnation(number)
    return decode_incarnation((root / name).read_bytes(), name)


def move_writer(root: Path, host: str = "another-host", number: int = 1) -> IncarnationRecord:
    """As if the incarnation's writer ran on ``host``."""
    before = record_of(root, number)
    moved = dataclasses.replace(before, writer=dataclasses.replace(before.writer, host=host))
    (root / names.incarnation(number)).write_bytes(encode_incarnation(moved))
    return moved


def beacon_of(record: IncarnationRecord, count: int = 1, *, alive: bool = True, **changes: Any) -> Beacon:
    """What the writer's node would say."""
    writer = record.writer
    rank = BeaconRank(0, writer.pid, writer.start_time, alive, 3, 0.1, 1.0, 0.1, 3, None)
    made = Beacon(
        "far", writer.host, writer.boot, 77, 88, count, BEAT_S, 4 * BEAT_S, record.number, record.world, (rank,),
        None, None, None, 0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def put(root: Path, beacon: Beacon, key: str = "far") -> Path:
    path = root / names.beacon(key)
    path.parent.mkdir(exist_ok=True)
    before = path.with_name(".tmp-beacon")
    before.write_bytes(encode_beacon(beacon))
    before.rename(path)
    return path


def hold_open(root: Path, **options: Any) -> Callable[[Callable[..., None]], None]:
    """A trainer that makes step 1 durable and then waits for the file "end"."""

    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy=QUICK, **options)
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        say("open")
        until((root.parent / "end").exists, "the word to end")
        ckpt.close()
        say("closed")

    return train


__all__ = ["everstep", "opened", "until"]
