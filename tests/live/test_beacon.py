"""What an agent says on the shared tier of the ranks on its node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import everstep
from everstep.format.beacon import Beacon
from everstep.store.beacons import read_beacons

from tests.facade.kit import Forked, opened, until

from .kit import BEAT_S, QUICK, beacon_of, beacons, hold_open, put, record_of


def only(root: Path) -> Beacon:
    return until(lambda: next(iter(beacons(root).values()), None), "a beacon")


def test_it_says_who_lives_here_and_how_far_they_are(root: Path, node: str) -> None:
    ckpt = opened(root, policy=QUICK, agent="process")
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    ckpt.step(2, {"n": 2})
    beacon = until(lambda: (b := only(root)).ranks and b.ranks[0].step == 2 and b, "step 2")
    (rank,) = beacon.ranks
    assert (beacon.node, beacon.incarnation, beacon.world, beacon.queue) == (node, 1, 1, 0)
    assert (rank.rank, rank.pid, rank.alive, rank.snapshot) == (0, os.getpid(), True, 2)
    assert rank.beat_age_s is not None and rank.beat_age_s < 20 and beacon.agent_pid == ckpt.agent_pid
    assert beacon.durable == 1 and (beacon.durable_age_s or 0) >= 0
    assert (beacon.interval_s, beacon.timeout_s) == (BEAT_S, 4 * BEAT_S)
    count = beacon.count
    until(lambda: only(root).count > count + 1, "it goes on")
    assert [path.name for path in (root / "live").iterdir() if not path.name.startswith(".tmp-")] == [
        f"{ckpt._place.run_key}-{beacon.boot[:8]}.json"
    ]
    ckpt.close()


def test_it_says_at_once_that_they_have_died_and_then_is_quiet(
    root: Path, forked: Callable[..., Forked]
) -> None:
    child = forked(hold_open(root))
    assert child.line() == "open"
    until(lambda: only(root).living, "a living rank")
    os.kill(child.pid, signal.SIGKILL)
    beacon = until(lambda: not (b := only(root)).living and not b.queue and b, "the death")
    assert [(rank.pid, rank.alive) for rank in beacon.ranks] == [(child.pid, False)]
    time.sleep(5 * BEAT_S)
    assert only(root).count <= beacon.count + 1, "an agent that lingers alone writes nothing"
    os.kill(beacon.agent_pid, signal.SIGTERM)
    until(lambda: not beacons(root), "an agent that ends takes its beacon back")


def test_it_goes_at_an_orderly_end(root: Path) -> None:
    for agent in ("inline", "process"):
        ckpt = opened(root, policy={**QUICK, "linger_s": 0.3}, agent=agent)
        ckpt.load({"n": 0})
        ckpt.step(1 if agent == "inline" else 2, {"n": 1})
        name = next(iter(until(lambda: beacons(root), "a beacon")))
        assert ("-00000" in name) is (agent == "inline")
        ckpt.close()
        until(lambda: not beacons(root), "its end")


def test_short_jobs_leave_no_trace(root: Path) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
    assert not (root / "live").exists()


def test_beacons_are_small_private_matters(root: Path) -> None:
    """Other commands do not stumble over them, whatever they hold."""
    from everstep.backends.files import LocalBackend
    from everstep.store.blocking import run_blocking
    from everstep.store.fsck import check

    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
    path = put(root, beacon_of(record_of(root)))
    path.with_name("damaged.json").write_bytes(b"{}")

    async def findings() -> list[str]:
        return [str(one) async for one in check(LocalBackend(str(root)))]

    assert run_blocking(findings()) == []
    found, unreadable = run_blocking(read_beacons(LocalBackend(str(root))))
    assert list(found) == ["live/far.json"] and list(unreadable) == ["live/damaged.json"]
    with opened(root, policy={"keep_last": 1}) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(2, {"n": 2}).wait()
    assert path.exists() and everstep.load(root)["n"] == 2, "rotation leaves them alone"


def test_a_beacon_that_cannot_be_written_hinders_nobody(root: Path) -> None:
    root.mkdir()
    (root / "live").write_text("a file where the directory belongs")
    ckpt = opened(root, policy=QUICK, agent="process")
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})
    until(lambda: ckpt.status()["agent"]["live"]["error"], "the agent's complaint")
    ckpt.save(2, {"n": 2}).wait()
    ckpt.close()
    assert everstep.load(root)["n"] == 2


def test_what_lost_nodes_left_is_swept_by_the_first_rank_s_agent(root: Path) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
    lost = put(root, beacon_of(record_of(root)), "lost")
    still_there = put(root, beacon_of(record_of(root), incarnation=2), "of-now")
    ckpt = opened(root, policy={**QUICK, "heartbeat_s": 0.05})
    ckpt.load({"n": 0})
    ckpt.step(2, {"n": 2})
    until(lambda: not lost.exists(), "the sweep")
    assert still_there.exists()
    ckpt.close()
