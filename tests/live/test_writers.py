"""A writer on another host is not written over while its beacon goes on, and is no hindrance once it has died."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import everstep
import pytest
from everstep import errors, writers
from everstep.backends.files import LocalBackend
from everstep.format.records import IncarnationRecord
from everstep.writers import Lookout

from tests.facade.kit import Forked, opened, until

from .kit import BEAT_S, beacon_of, beacons, hold_open, living, move_writer, put


@pytest.fixture
def record(root: Path) -> IncarnationRecord:
    """Of a run whose writer, on another host, has gone."""
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
    return move_writer(root)


@pytest.fixture
def lit(root: Path, record: IncarnationRecord) -> Iterator[Callable[..., None]]:
    """Keeps a beacon of the far node going."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def light(**changes: object) -> None:
        def go_on() -> None:
            count = 1
            while not stop.is_set():
                put(root, beacon_of(record, count, **changes))
                count += 1
                stop.wait(BEAT_S)

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()
        until(lambda: beacons(root), "the first beacon")

    yield light
    stop.set()
    for thread in threads:
        thread.join()


def looking_costs(root: Path, record: IncarnationRecord) -> tuple[writers.Seen | None, float]:
    began = time.monotonic()
    return Lookout(LocalBackend(str(root))).sees(record), time.monotonic() - began


def test_a_living_writer_elsewhere_refuses_the_opening(
    root: Path, record: IncarnationRecord, lit: Callable[..., None]
) -> None:
    lit()
    ckpt = opened(root)
    assert ckpt.load({"n": 0}) == 1, "reading is free"
    with pytest.raises(errors.RunInUse, match=r"another-host.*last beat 0\.1 s") as caught:
        ckpt.save(2, {"n": 2})
    assert (caught.value.host, caught.value.pid) == ("another-host", record.writer.pid)
    with pytest.raises(errors.RunInUse):
        everstep.save(root, 9, {"n": 9})
    assert len(list((root / "incarnations").iterdir())) == 1, "nothing was written"
    with opened(root, take_over=True) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(2, {"n": 2}).wait()
    assert everstep.load(root)["n"] == 2


def test_a_beacon_that_stands_still_is_waited_for_once_and_not_long(
    root: Path, record: IncarnationRecord
) -> None:
    put(root, beacon_of(record))
    seen, took = looking_costs(root, record)
    assert seen is None and took >= writers.LOOK_INTERVALS * BEAT_S
    lookout = Lookout(LocalBackend(str(root)))
    lookout.begin()
    time.sleep(writers.LOOK_INTERVALS * BEAT_S)  # a load, say
    began = time.monotonic()
    assert lookout.sees(record) is None
    assert time.monotonic() - began < BEAT_S, "that time had been waited already"


@pytest.mark.parametrize(
    "changes",
    [
        {"alive": False},
        {"ranks": ()},
        {"incarnation": 2},
        {"boot": "another"},
    ],
)
def test_a_beacon_that_does_not_name_the_writer_as_living_costs_nothing(
    root: Path, record: IncarnationRecord, lit: Callable[..., None], changes: dict[str, object]
) -> None:
    lit(**changes)
    seen, took = looking_costs(root, record)
    assert seen is None and took < BEAT_S * writers.LOOK_INTERVALS


def test_a_beacon_on_its_way_when_its_ranks_died_is_no_proof(root: Path, record: IncarnationRecord) -> None:
    """One count further may have been made before the death; then the agent says that they are gone."""
    put(root, beacon_of(record, 1))
    lookout = Lookout(LocalBackend(str(root)))
    lookout.begin()
    put(root, beacon_of(record, 2))
    timer = threading.Timer(BEAT_S, lambda: put(root, beacon_of(record, 3, alive=False)))
    timer.start()
    assert lookout.sees(record) is None
    timer.join()


def test_damaged_beacons_and_none_hinder_nobody(root: Path, record: IncarnationRecord) -> None:
    assert looking_costs(root, record)[0] is None
    put(root, beacon_of(record)).write_bytes(b"{}")
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(2, {"n": 2}).wait()


def test_the_agent_s_own_beacons_hold_a_second_job_off_and_let_a_restart_in(
    root: Path, forked: Callable[..., Forked]
) -> None:
    child = forked(hold_open(root))
    assert child.line() == "open"
    until(lambda: living(root) == [child.pid], "the beacon")
    record = move_writer(root)
    assert isinstance(looking_costs(root, record)[0], writers.Seen)
    os.kill(child.pid, signal.SIGKILL)
    ckpt = opened(root, agent="process")
    assert ckpt.load({"n": 0}) == 1
    began = time.monotonic()
    ckpt.save(2, {"n": 2}).wait()  # its agent lingers, and says so
    assert time.monotonic() - began < 20
    assert [
        beacon.ranks for beacon in beacons(root).values() if beacon.incarnation == 1 and beacon.living
    ] == []
    ckpt.close()
