"""``everstep ls``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from cli_kit import LATER_STEP, MADE_STEPS, arena_with_snapshot, bare_run, everstep, incarnation, manifest
from everstep.format import names
from everstep.format.manifest import Tombstone, encode_decision
from everstep.memory.header import Kind
from everstep.store.runs import now

MANY = 1000
MANY_CPU_S_MAX = 1.0
TRIES = 3
"""Processor time grows, too, on a machine that is busy."""


def test_lists_what_a_load_may_take(made_run: Path) -> None:
    found = everstep("ls", made_run, "--json").json
    listed = {(c["incarnation"], c["step"]): c["in_lineage"] for c in found["checkpoints"]}
    assert listed == {(1, 1): True, (1, 2): True, (1, 3): False, (1, 4): False, (2, 5): True}
    assert found["newest"] == LATER_STEP
    newest = found["checkpoints"][-1]
    assert (newest["kind"], newest["world"]) == ("full", 1)
    assert newest["metrics"] == {"loss": 1 / LATER_STEP, "worst": "nan"}
    stored = sum(p.stat().st_size for p in Path(made_run, "checkpoints", "000000005").rglob("rank-*[!e]"))
    assert 0 < newest["nbytes"] <= stored


def test_table_for_people(made_run: Path) -> None:
    said = everstep("ls", made_run, "--metrics")
    lines = said.out.splitlines()
    assert lines[0].split()[:3] == ["step", "incarnation", "world"]
    assert len(lines) == 1 + len(MADE_STEPS) + 1
    assert "loss=0.2, worst=nan" in lines[-1]


def test_what_is_not_committed_is_no_checkpoint(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[manifest(1, 1), manifest(2, 1)])
    (root / names.attempt_dir(3, 1, 1)).mkdir(parents=True)
    (root / names.decision(2, 1, 2)).write_bytes(encode_decision(Tombstone(2, 1, 2, "retention")))
    found = everstep("ls", root, "--json").json
    assert [c["step"] for c in found["checkpoints"]] == [1]
    assert found["undecided"] == [{"step": 3, "incarnation": 1}]
    assert found["removing"] == [{"step": 2, "incarnation": 1}]
    assert "1 flush was begun" in everstep("ls", root).out


def test_a_removal_that_broke_off_is_told_until_gc_has_finished_it(tmp_path: Path) -> None:
    """And one that is finished is not, though its tombstone must stand for some time."""
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[manifest(1, 1), manifest(2, 1)])
    old = encode_decision(Tombstone(1, 1, 2, "retention", created="2026-01-01T00:00:00Z"))
    (root / names.decision(1, 1, 1)).unlink()
    (root / names.decision(1, 1, 2)).write_bytes(old)
    said = everstep("ls", root)
    assert "remov" not in said.out and everstep("ls", root, "--json").json["removing"] == []

    image = root / names.image(2, 1, 1, 0, "model")
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(bytes(100))
    (root / names.decision(2, 1, 1)).unlink()
    (root / names.decision(2, 1, 2)).write_bytes(
        encode_decision(Tombstone(2, 1, 2, "retention", created=now()))
    )
    said = everstep("ls", root)
    assert "1 checkpoint is not wholly removed yet" in said.out and "everstep gc finishes it" in said.out
    collected = everstep("gc", root, "--older-than", "0s")
    assert "removed the rest of step 2" in collected.out and "100 B freed" in collected.out, collected
    assert "remov" not in everstep("ls", root).out
    assert not image.exists()


def test_a_damaged_manifest_is_told_and_hides_nothing_else(run: Path) -> None:
    bad = run / names.decision(1, 1, 1)
    bad.write_bytes(bad.read_bytes()[:-9])
    said = everstep("ls", run, "--json")
    assert said.code == 1
    assert "000000001/0001" in said.err
    assert len(said.json["checkpoints"]) == len(MADE_STEPS)
    assert len(said.json["unreadable"]) == 1


def test_a_thousand_checkpoints_in_a_second(tmp_path: Path) -> None:
    steps = [manifest(step, 1, world=2) for step in range(10, 10 * MANY + 1, 10)]
    root = bare_run(tmp_path / "run", incarnation(1), manifests=steps)
    tried = []
    for _ in range(TRIES):
        said = everstep("ls", root, "--json", fresh=True)
        assert len(said.json["checkpoints"]) == MANY
        tried.append(said.cpu_s)
        if said.cpu_s < MANY_CPU_S_MAX:
            return
    raise AssertionError(f"processor seconds, tried {TRIES} times: {tried}")


def test_snapshots_in_memory_are_listed(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[manifest(1, 1)])
    memory = tmp_path / "memory"
    arena = arena_with_snapshot(memory, root, step=7)
    try:
        found = everstep("ls", root, "--memory", memory, "--json").json["memory"]
        assert [(s["incarnation"], s["step"], s["rank"], s["in_use"]) for s in found] == [(1, 7, 0, True)]
        assert "in this node's memory" in everstep("ls", root, "--memory", memory).out
    finally:
        arena.close()


def test_what_is_held_for_other_nodes_is_listed_as_such(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[manifest(1, 1)])
    memory = tmp_path / "memory"
    with contextlib.ExitStack() as stack:
        for rank, kind in ((0, Kind.OWN), (3, Kind.HELD), (2, Kind.HELD), (0, Kind.PARITY)):
            stack.enter_context(arena_with_snapshot(memory, root, step=7, rank=rank, kind=kind))
        found = everstep("ls", root, "--memory", memory, "--json").json["memory"]
        assert [(s["kind"], s["rank"]) for s in found] == [
            ("own", 0),
            ("held", 2),
            ("held", 3),
            ("parity", 0),
        ]
        assert "0; held 2,3; parity" in everstep("ls", root, "--memory", memory).out
        kept = everstep("clean-memory", root, "--memory", memory, "--json").json
        assert kept["removed"] == [] and len(kept["in_use"]) == 4
    removed = everstep("clean-memory", root, "--memory", memory, "--json").json["removed"]
    assert sorted(item["kind"] for item in removed) == ["held", "held", "own", "parity"]


def test_looking_makes_nothing(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[])
    memory = tmp_path / "memory"
    memory.mkdir()
    assert "no checkpoint" in everstep("ls", root, "--memory", memory).out
    assert os.listdir(memory) == []


@pytest.mark.parametrize(
    ("root", "said"),
    [("nowhere", "is not a run"), ("s3://", "supported"), ("file", "a file")],
)
def test_errors_are_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a directory")
    answer = everstep("ls", root, "--json")
    assert answer.code == 1
    assert said in answer.err
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
    assert answer.json["error"]["message"]
