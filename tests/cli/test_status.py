"""``everstep status``."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import arena_with_snapshot, bare_run, everstep, incarnation, manifest
from click.testing import CliRunner
from everstep.cli.main import main
from everstep.format import names
from everstep.format.beacon import Beacon, BeaconRank, encode_beacon
from everstep.memory.process import Process

TIMEOUT_S = 0.6
RANK = BeaconRank(0, 11, 22, True, 8, 0.5, 1.0, 0.1, 8, 7)


def beacon(node: str, *ranks: int, count: int = 1, alive: bool = True, **changes: Any) -> Beacon:
    some = tuple(dataclasses.replace(RANK, rank=rank, alive=alive) for rank in ranks)
    made = Beacon(node, node, f"boot-{node}", 9, 9, count, 0.1, TIMEOUT_S, 1, 2, some, 7, 1, 30.0, 1)
    return dataclasses.replace(made, **changes)


def put(root: Path, one: Beacon) -> None:
    path = root / names.beacon(one.node)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".tmp-{one.node}")
    temporary.write_bytes(encode_beacon(one))
    temporary.rename(path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run of two ranks, with one checkpoint."""
    record = dataclasses.replace(incarnation(1), world=2, mesh={"data": 2})
    return bare_run(tmp_path / "run", record, manifests=[manifest(1, 1, 2)])


@pytest.fixture
def lit() -> Iterator[Callable[..., None]]:
    """Keeps beacons going."""
    stop = threading.Event()
    threads = []

    def light(root: Path, *some: Beacon) -> None:
        def go_on() -> None:
            count = 1
            while not stop.is_set():
                for one in some:
                    put(root, dataclasses.replace(one, count=count))
                count += 1
                stop.wait(0.1)

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()

    yield light
    stop.set()
    for thread in threads:
        thread.join()


def states(said: Any) -> list[str]:
    return [rank["state"] for rank in said.json["ranks"]]


def test_other_nodes_are_seen_by_their_beacons(two: Path, lit: Callable[..., None], tmp_path: Path) -> None:
    lit(two, beacon("a", 0), beacon("b", 1))
    before = sorted(path.name for path in two.rglob("*") if "live" not in str(path))
    said = everstep("status", two, "--json", "--memory", tmp_path, blocked=True)
    assert (said.code, said.err, said.json["health"]) == (0, "", "healthy")
    assert states(said) == ["alive", "alive"]
    assert said.json["tiers"] == {
        "memory": {"step": 8},
        "protected": {"step": 7},
        "complete": {"step": 7},
        "durable": {"step": 1, "kind": "full", "base": None, "age_s": 30.0, "age_by": "agent"},
    }
    assert said.json["queue"] == 2 and said.json["ranks"][1]["node"] == "b"
    assert sorted(path.name for path in two.rglob("*") if "live" not in str(path)) == before, (
        "it writes nothing"
    )
    assert not any(tmp_path.glob("everstep-*")), "and makes no directory"


def test_two_hosts_of_one_name_are_two_nodes(two: Path, lit: Callable[..., None], tmp_path: Path) -> None:
    """Of which one may be this very host."""
    memory = tmp_path / "memory"
    arena = arena_with_snapshot(memory, two, step=6)
    arena.beat(2.0)
    mine = everstep("status", two, "--json", "--memory", memory, "--wait", "0").json["nodes"][0]["node"]
    lit(two, dataclasses.replace(beacon("a", 1), node=mine))
    said = everstep("status", two, "--json", "--memory", memory)
    assert (said.code, states(said), said.json["out_of_sight"]) == (0, ["alive", "alive"], [])
    arena.close()


def test_a_run_that_has_just_begun(tmp_path: Path, lit: Callable[..., None]) -> None:
    """Other nodes say something only after an interval."""
    now = datetime.datetime.now(datetime.timezone.utc)
    for age_s, health in ((0, "just begun"), (600, "cannot tell")):
        created = (now - datetime.timedelta(seconds=age_s)).isoformat()
        record = dataclasses.replace(incarnation(1), world=2, mesh={"data": 2}, created=created)
        root = bare_run(tmp_path / f"run-{age_s}", record, manifests=[])
        lit(root, beacon("a", 0, interval_s=60.0))
        while not list(root.glob("live/*.json")):
            time.sleep(0.01)
        said = everstep("status", root, "--json", "--memory", tmp_path)
        assert (said.code, said.json["health"], said.json["out_of_sight"]) == (8, health, [1])


def test_ages_of_a_node_that_says_nothing_more_are_lower_bounds(
    two: Path, lit: Callable[..., None], tmp_path: Path
) -> None:
    lit(two, beacon("a", 0))
    put(two, beacon("b", 1))
    out = everstep("status", two, "--memory", tmp_path).out
    assert re.search(r"^ *0  a +11  alive +8 +0\.5 s +0\.1 s", out, re.M), out
    assert re.search(r"^ *1  b +11  suspect +8 +> 1\.\d s +> 0\.\d s", out, re.M), out
    ranks = everstep("status", two, "--json", "--memory", tmp_path).json["ranks"]
    assert [rank["ages_at_least"] for rank in ranks] == [False, True] and ranks[1]["step_age_s"] > 1


def test_spare_nodes_are_listed(two: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the agent on this node says."""
    spares = [
        {"spare": "h:1", "reached": True, "step": 5, "error": None},
        {"spare": "h:2", "reached": False, "step": None, "error": "no agent can be reached"},
        {"spare": "h:3", "reached": None, "step": None, "error": None},
    ]
    status = {"pid": 1, "guard": {"spares": spares}, "live": {}}
    monkeypatch.setattr("everstep.cli.sight._agent_status", lambda place, run_ids: status)
    said = CliRunner().invoke(main, ["status", str(two), "--json", "--memory", str(tmp_path)])
    assert json.loads(said.output)["spares"] == spares
    said = CliRunner().invoke(main, ["status", str(two), "--memory", str(tmp_path)])
    assert "spare node h:1: reached, keeps step 5 of this node" in said.output
    assert "spare node h:2: not reached: no agent can be reached" in said.output
    assert "spare node h:3: keeps nothing of this node" in said.output


def test_kinds_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"incarnation": 1, "step": 1, "attempt": 1}
    made = [manifest(1, 1), manifest(2, 1, kind="delta", parent=base)]
    root = bare_run(tmp_path / "run", incarnation(1), manifests=made)
    flushes = [
        {"step": 3, "kind": "delta", "base": 1, "attempt": 1},
        {"step": 4, "kind": "full", "base": None},
    ]
    status = {"pid": 1, "flushes": flushes, "merging": [2], "live": {}}
    monkeypatch.setattr("everstep.cli.sight._agent_status", lambda place, run_ids: status)
    said = CliRunner().invoke(main, ["status", str(root), "--memory", str(tmp_path)]).output
    assert re.search(r"^durable +2  delta on step 1, ", said, re.M), said
    for line in (
        "flushing step 3: delta on step 1",
        "flushing step 4: full",
        "step 2: a delta that is being",
    ):
        assert line in said
    said = CliRunner().invoke(main, ["status", str(root), "--json", "--memory", str(tmp_path)]).output
    told = json.loads(said)
    assert told["flushes"][0] == {"step": 3, "kind": "delta", "base": 1} and told["merging"] == [2]
    assert (told["tiers"]["durable"]["kind"], told["tiers"]["durable"]["base"]) == ("delta", 1)


def test_text_for_people(two: Path, lit: Callable[..., None], tmp_path: Path) -> None:
    lit(two, beacon("a", 0), beacon("b", 1))
    out = everstep("status", two, "--memory", tmp_path).out
    assert re.search(r"^healthy: incarnation 1, 2 rank", out)
    assert re.search(r"^ *1  b +11  alive +8 +0\.5 s", out, re.M)
    assert re.search(r"^durable +1  full, 30\.0 s ago$", out, re.M)
    assert "flushes unfinished: 2" in out


def test_a_rank_is_suspect_only_when_its_beacon_stood_still_for_long(
    two: Path, lit: Callable[..., None], tmp_path: Path
) -> None:
    lit(two, beacon("a", 0))
    put(two, beacon("b", 1))
    said = everstep("status", two, "--json", "--memory", tmp_path)
    assert (said.code, states(said)) == (5, ["alive", "suspect"])
    assert "its node's beacon stands still" in said.json["ranks"][1]["why"]
    put(two, beacon("b", 1, timeout_s=60.0))
    hasty = everstep("status", two, "--json", "--memory", tmp_path, "--wait", "0.3")
    assert (hasty.code, states(hasty)[1]) == (0, "late"), "one sign alone"
    blind = everstep("status", two, "--json", "--memory", tmp_path, "--wait", "0")
    assert (blind.code, states(blind)) == (8, ["unknown", "unknown"]), "one look proves nothing"


def test_a_process_that_is_gone(two: Path, lit: Callable[..., None], tmp_path: Path) -> None:
    gone = dataclasses.replace(RANK, rank=1, alive=False, beat_age_s=99.0)
    lit(two, beacon("a", 0), beacon("b", 1, ranks=(gone,)))
    said = everstep("status", two, "--json", "--memory", tmp_path)
    assert (said.code, states(said)) == (5, ["alive", "suspect"])
    assert "its process is gone" in said.json["ranks"][1]["why"]


def test_ranks_out_of_sight(two: Path, lit: Callable[..., None], tmp_path: Path) -> None:
    lit(two, beacon("a", 0), beacon("b", 1, incarnation=1, ranks=()))
    said = everstep("status", two, "--json", "--memory", tmp_path)
    assert (said.code, said.json["out_of_sight"]) == (8, [1])
    assert said.json["tiers"]["memory"]["step"] is None, "what all ranks have is not known"


def test_nothing_is_running(two: Path, made_run: Path, tmp_path: Path) -> None:
    for run in (two, made_run):
        said = everstep("status", run, "--json", "--memory", tmp_path, blocked=True)
        assert (said.code, said.json["health"], said.json["ranks"]) == (3, "nothing is running", [])
    put(two, beacon("a", 0, 1, alive=False))  # lingers alone
    assert everstep("status", two, "--json", "--memory", tmp_path).code == 3
    put(two, beacon("a", 0, 1))  # a node that died long ago
    began = time.monotonic()
    assert everstep("status", two, "--json", "--memory", tmp_path).code == 3
    assert time.monotonic() - began > TIMEOUT_S
    put(two, beacon("a", 0, 1, incarnation=0))
    assert everstep("status", two, "--json", "--memory", tmp_path, "--wait", "0").code == 3, (
        "a former incarnation's"
    )


def test_no_run_and_cannot_tell(two: Path, tmp_path: Path) -> None:
    said = everstep("status", tmp_path / "nowhere")
    assert said.code == 1 and "is not a run" in said.err
    (two / "run.json").write_text("{}")
    said = everstep("status", two, "--json", "--memory", tmp_path)
    assert said.code == 8 and "Damaged" in said.json["problems"][0]
    assert everstep("status").code == 2


def test_this_node_s_arenas_are_enough(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[manifest(1, 1)])
    memory = tmp_path / "memory"
    arena = arena_with_snapshot(memory, root, step=6)
    arena.beat(2.0)
    arena.stepped((1, 6), time.monotonic_ns())
    arena.protected = arena.complete = (1, 5)
    said = everstep("status", root, "--json", "--memory", memory, blocked=True)
    assert (said.code, said.err) == (0, "")
    (rank,) = said.json["ranks"]
    assert (rank["pid"], rank["state"], rank["step"], rank["step_s"]) == (os.getpid(), "alive", 6, 2.0)
    assert (rank["in_memory"], rank["protected"], rank["source"]) == (6, 5, "memory")
    assert said.json["tiers"]["durable"]["age_by"] == "clock"
    assert "no agent answers" in everstep("status", root, "--memory", memory).out
    (root / "run.json").unlink()
    said = everstep("status", root, "--json", "--memory", memory)
    assert (said.code, states(said)) == (8, ["alive"]), "the ranks are seen, the checkpoints are not"
    arena.close()


def test_the_arena_of_a_killed_process(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    arena = arena_with_snapshot(tmp_path / "memory", root, step=6)
    arena.beat(1.0)
    owner = Process.of(child.pid)
    assert owner is not None
    arena.close()  # given back: nobody's rank
    assert everstep("status", root, "--json", "--memory", tmp_path / "memory").json["ranks"] == []
    from everstep.memory.arena import Arena

    assert arena._path is not None
    with Arena.attach(arena._path) as again:
        again.take(owner, run_id="ab" * 16, incarnation=1, world=1)
        child.kill()
        child.communicate()
        said = everstep("status", root, "--json", "--memory", tmp_path / "memory")
    assert (said.code, states(said)) == (3, ["late"])
    assert said.json["ranks"][0]["why"] == "its process is gone"


TRAIN = """
import sys, everstep, torch
ckpt = everstep.Checkpointer(sys.argv[1], policy=everstep.Policy(full_every=None, heartbeat_s=0.2, linger_s=1))
ckpt.load({"n": 0})
ckpt.step(1, {"n": 1})
ckpt.save(2, {"n": 2}).wait()
print("open", flush=True)
input()
ckpt.close()
"""


def test_a_live_run(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "EVERSTEP_RUNTIME_DIR": str(tmp_path / "runtime"),
        "EVERSTEP_NODE": f"test-status-{os.getpid()}",
    }
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAIN), str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        said = everstep("status", tmp_path / "run", "--json", env=env, blocked=True)
        assert (said.code, said.err) == (0, "")
        assert said.json["ranks"][0]["pid"] == child.pid and said.json["ranks"][0]["step"] == 2
        (node,) = said.json["nodes"]
        assert node["agent"] and node["source"] == "memory" and node["queue"] == 0
        assert (
            said.json["tiers"]["durable"]["step"] == 2 and said.json["tiers"]["durable"]["age_by"] == "agent"
        )
        assert said.json["tiers"]["complete"]["step"] == 2
        elsewhere = {**env, "EVERSTEP_NODE": "somewhere-else"}
        deadline = time.monotonic() + 20
        while (seen := everstep("status", tmp_path / "run", "--json", env=elsewhere)).code == 3:
            assert time.monotonic() < deadline, "the beacon"
        assert seen.code == 0 and seen.json["ranks"][0]["source"] == "beacon"
    finally:
        child.communicate("\n", timeout=60)
    assert child.returncode == 0
    said = everstep("status", tmp_path / "run", "--json", env=env)
    assert (said.code, said.json["ranks"]) == (3, [])
