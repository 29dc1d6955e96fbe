"""``everstep plan-memory``."""

from __future__ import annotations

from pathlib import Path

from cli_kit import everstep


def test_json_and_text_say_the_same() -> None:
    wish = (
        "plan-memory",
        "--bytes",
        "1e6",
        "--nodes",
        "6",
        "--ranks",
        "2",
        "--parity",
        "4,2",
        "--device-slots",
        "1",
    )
    said = everstep(*wish, "--json", blocked=True)
    assert (said.code, said.err) == (0, "")
    found = said.json
    assert found["job"]["parity"] == [4, 2] and found["survives_nodes"] == 2 and found["fits"] is True
    assert found["bytes"]["node"] == sum(
        found["bytes"][name] for name in ("node_own", "node_held", "node_parity", "node_agent")
    )
    assert {one["lost"] for one in found["survival"]} >= {
        "a training process",
        "a node or pod",
        "the job's end",
    }
    text = everstep(*wish).out
    for word in (
        "in training",
        "at the moment of recovery",
        "its share of parity",
        "torchrun",
        "slurm",
        "kubernetes",
    ):
        assert word in text


def test_what_does_not_fit_is_told_with_what_to_set() -> None:
    said = everstep("plan-memory", "--bytes", "1e14", "--slots", "4")
    assert said.code == 4
    assert "it does not fit" in said.out and "--shm-size" in said.out and "slots=3" in said.out


def test_of_a_run(made_run: Path, tmp_path: Path) -> None:
    said = everstep("plan-memory", made_run, "--json", "--replicas", "1", "--nodes", "2", blocked=True)
    assert said.code == 0 and "checkpoint of step 5" in said.json["source"]
    assert said.json["bytes"]["node_held"] > 0
    assert everstep("plan-memory", tmp_path / "nowhere").code == 1


def test_wrong_calls() -> None:
    assert everstep("plan-memory").code == 2
    assert everstep("plan-memory", "runs/x", "--bytes", "5").code == 2
    assert everstep("plan-memory", "--bytes", "many").code == 2
    assert everstep("plan-memory", "--bytes", "5", "--parity", "4").code == 2
    assert everstep("plan-memory", "--bytes", "5", "--slots", "2").code == 2
