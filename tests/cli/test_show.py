"""``everstep show``."""

from __future__ import annotations

from pathlib import Path

from cli_kit import ADOPTED_STEP, LATER_STEP, arena_with_snapshot, bare_run, everstep, incarnation
from everstep.format import names
from everstep.memory.header import Kind


def test_the_newest_without_a_step(made_run: Path) -> None:
    found = everstep("show", made_run, "--json").json
    assert found["checkpoint"]["manifest"]["step"] == LATER_STEP
    assert [r["adopted_step"] for r in found["incarnations"]] == [None, ADOPTED_STEP]
    assert found["record"]["hash_id"] == "xxh3-128"


def test_sizes_by_part_and_dtype(made_run: Path) -> None:
    found = everstep("show", made_run, str(ADOPTED_STEP), "--json").json["checkpoint"]
    sizes = {(d["part"], d["dtype"]): (d["tensors"], d["nbytes"]) for d in found["dtypes"]}
    parameters = 64 * 32 + 32
    assert sizes[("model", "float32")] == (2, 4 * parameters)
    assert sizes[("optimizer", "float32")] == (6, 4 * (2 * parameters + 2))
    assert found["parts"]["model"] >= 4 * parameters
    assert sum(found["parts"].values()) == found["nbytes"]


def test_text_for_people(made_run: Path) -> None:
    out = everstep("show", made_run, "3").out
    assert "in lineage  no" in out
    assert "loss=0.3333" in out
    assert "torch" in out
    assert "step 2 of 1" in out


def test_what_this_nodes_memory_has_of_the_checkpoint(made_run: Path, tmp_path: Path) -> None:
    assert "in memory   not on this node" in everstep("show", made_run, "3", "--memory", tmp_path).out
    with arena_with_snapshot(tmp_path, made_run, step=3, rank=5, kind=Kind.HELD):
        said = everstep("show", made_run, "3", "--memory", tmp_path)
        assert "in memory   on this node, of rank(s) held 5" in said.out
        found = everstep("show", made_run, "3", "--memory", tmp_path, "--json").json["checkpoint"]["memory"]
        assert [(s["kind"], s["rank"]) for s in found] == [("held", 5)]


def test_no_such_step_and_no_such_rank(made_run: Path) -> None:
    missing = everstep("show", made_run, "77")
    assert (missing.code, missing.out) == (1, "")
    assert "no checkpoint of step 77" in missing.err
    assert "steps 1 to 5" in missing.err
    rank = everstep("show", made_run, "--values", "--rank", "9")
    assert rank.code == 1
    assert "no rank 9" in rank.err


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    root = bare_run(tmp_path / "run", incarnation(1), manifests=[])
    said = everstep("show", root)
    assert said.code == 0
    assert "no checkpoint yet" in said.out


def test_damage_is_told_by_name(run: Path) -> None:
    bad = run / names.state(LATER_STEP, 2, 1, 0)
    data = bytearray(bad.read_bytes())
    data[3] ^= 1
    bad.write_bytes(data)
    assert everstep("show", run).code == 0
    said = everstep("show", run, "--values")
    assert said.code == 1
    assert "rank-00000.state.msgpack" in said.err
