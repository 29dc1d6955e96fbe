"""``everstep prune``, ``pin`` and ``unpin``: what they say, do, and their exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Said, bare_run, everstep, incarnation, manifest, put
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.sealed import seal

MANY = 1000
CHAIN = 10
MANY_CPU_S_MAX = 5.0
GROWS_MAX = 3.0
"""How much longer a thousand may take than five hundred, without the start of the process; squares would take four
times as long."""
TRIES = 3


def steps(said: Said, what: str = "remove") -> list[int]:
    return [one["step"] for one in said.json[what]]


def listed(run: Path) -> list[int]:
    return [one["step"] for one in everstep("ls", run, "--json").json["checkpoints"]]


def test_a_dry_run_changes_nothing_and_says_what_would_go(run: Path) -> None:
    """Steps 1 to 4; then from step 2 on step 5: 3 and 4 were given up, and the run has passed them."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = everstep("prune", run, "--keep-last", "1", "--keep-every", "2", "--dry-run", "--json")
    assert said.code == 0 and said.json["dry_run"] is True
    assert [(one["step"], one["reason"]) for one in said.json["keep"]] == [(2, "every 2"), (5, "newest")]
    assert steps(said) == [1, 3, 4]
    assert said.json["freed_bytes"] == sum(one["nbytes"] for one in said.json["remove"]) > 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    lines = everstep("prune", run, "--keep-last", "1", "--keep-every", "2", "--dry-run").out.splitlines()
    assert lines[1].split()[0] == "1" and lines[1].endswith("would go") and lines[2].endswith("every 2")
    assert "3 would go, 2 stay" in lines[-1] and lines[-1].endswith("would be freed")


def test_what_the_dry_run_said_goes(run: Path) -> None:
    foreign = run / names.attempt_dir(1, 1, 1) / "notes.txt"
    foreign.write_text("mine")
    rules = ["--keep-last", "1", "--keep-every", "2"]
    dry = everstep("prune", run, *rules, "--dry-run", "--json")
    said = everstep("prune", run, *rules, "--json")
    assert said.code == 0 and said.json["remove"] == dry.json["remove"] and steps(said) == [1, 3, 4]
    assert said.json["freed_bytes"] >= dry.json["freed_bytes"] > 0
    assert listed(run) == [2, 5] and foreign.read_text() == "mine"
    again = everstep("prune", run, *rules, "--json")
    assert again.code == 0 and steps(again) == [] and again.json["freed_bytes"] == 0
    assert everstep("fsck", run).code == 0


def test_the_best_by_a_metric(run: Path) -> None:
    """The loss is 1 / step, "worst" is NaN."""
    most = everstep(
        "prune", run, "--keep-last", "1", "--keep-best", "1", "--best", "max:loss", "--dry-run", "--json"
    )
    assert steps(most, "keep") == [1, 5]
    nan = everstep(
        "prune", run, "--keep-last", "1", "--keep-best", "1", "--best", "min:worst", "--dry-run", "--json"
    )
    assert steps(nan, "keep") == [5]


def test_pins_hold_and_are_listed(run: Path) -> None:
    said = everstep("pin", run, "1", "--reason", "figure 2", "--json")
    assert said.code == 0 and (said.json["pin"]["step"], said.json["pin"]["expires"]) == (1, None)
    timed = everstep("pin", run, "3", "--incarnation", "1", "--for", "2h", "--json")
    assert timed.code == 0 and timed.json["pin"]["expires"].endswith("Z")
    pins = everstep("pin", run, "--json").json["pins"]
    assert [(one["step"], one["reason"], one["expired"]) for one in pins] == [
        (1, "figure 2", False),
        (3, "", False),
    ]
    assert "figure 2" in everstep("pin", run).out
    pruned = everstep("prune", run, "--keep-last", "1", "--json")
    assert steps(pruned) == [2, 4]
    assert pruned.json["keep"][0]["reason"] == "pinned: figure 2"
    assert everstep("unpin", run, "1").code == 0
    assert everstep("unpin", run, "--id", pins[1]["id"], "--json").json["removed"][0]["step"] == 3
    assert steps(everstep("prune", run, "--keep-last", "1", "--json")) == [1, 3]
    assert everstep("fsck", run).code == 0


def test_a_pin_needs_a_checkpoint_and_an_unpin_a_pin(run: Path) -> None:
    missing = everstep("pin", run, "77")
    assert missing.code == 1 and "no checkpoint at step 77" in missing.err
    given_up = everstep("pin", run, "3")  # given up: only by its incarnation
    assert given_up.code == 1 and "incarnation" in given_up.err
    assert everstep("unpin", run, "1").code == 1
    assert everstep("unpin", run, "--id", "no-such-pin").code == 1
    assert not (run / "pins").exists() or not list((run / "pins").iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ["prune"],
        ["prune", "--keep-last", "0"],
        ["prune", "--keep-last", "x"],
        ["prune", "--keep-every", "2"],
        ["prune", "--keep-last", "1", "--keep-best", "2"],
        ["prune", "--keep-last", "1", "--keep-best", "2", "--best", "loss"],
        ["prune", "--keep-last", "1", "--keep-interval", "soon"],
        ["pin", "--for", "2h", "-1"],
        ["pin", "--for", "long", "1"],
        ["pin", "--for", "0s", "1"],
        ["pin", "--for", "0.0h", "1"],
        ["pin", "--for", "-5m", "1"],
        ["pin", "--for", "nand", "1"],
        ["pin", "--for", "36501d", "1"],
        ["pin", "--for", "9" * 400 + "d", "1"],
        ["unpin"],
        ["unpin", "1", "--id", "x"],
    ],
)
def test_usage(made_run: Path, args: list[str]) -> None:
    said = everstep(args[0], made_run, *args[1:])
    assert said.code == 2, said.err
    assert "Usage" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("args", [["prune", "--keep-last", "1"], ["pin", "1"], ["pin"], ["unpin", "1"]])
def test_no_run_and_an_unknown_format(tmp_path: Path, args: list[str]) -> None:
    nothing = everstep(args[0], tmp_path / "nothing", *args[1:], "--json")
    assert nothing.code == 1 and nothing.json["error"]["type"] == "NotARun"
    put(tmp_path / "new", names.RUN, seal("run", {"what": "ever"}, format=10**6 % 97 + 3))
    assert everstep(args[0], tmp_path / "new", *args[1:]).code == 1


def test_a_damaged_manifest_is_told_and_stays(run: Path) -> None:
    path = run / names.decision(1, 1, 1)
    path.write_bytes(path.read_bytes()[:-1])
    said = everstep("prune", run, "--keep-last", "1", "--json")
    assert said.code == 1 and "step 1 of incarnation 1" in said.err
    assert [one["step"] for one in said.json["unreadable"]] == [1]
    assert steps(said) == [2, 3, 4] and (run / names.vote(1, 1, 1, 0)).exists()


def test_a_missing_incarnation_stops_it(run: Path) -> None:
    (run / names.incarnation(2)).unlink()
    said = everstep("prune", run, "--keep-last", "1")
    assert said.code == 1 and "incarnations/0002.json is missing" in said.err
    assert (run / names.vote(1, 1, 1, 0)).exists()


def many(root: Path, count: int) -> Path:
    """Chains of deltas, as manifests: each tenth is a full one."""
    made: list[Manifest] = []
    for number in range(count):
        step = 10 * (number + 1)
        parent: dict[str, Any] = {}
        if number % CHAIN:
            base = {"incarnation": 1, "step": step - 10, "attempt": 1}
            parent = {"kind": "delta", "parent": base}
        created = f"2026-{1 + number // 336:02d}-{1 + number // 12 % 28:02d}T{2 * (number % 12):02d}:00:00Z"
        made.append(manifest(step, 1, world=2, created=created, metrics={"loss": 1 / (1 + number)}, **parent))
    bare_run(root, incarnation(1), manifests=made)
    for one in made:
        (root / names.attempt_dir(one.step, 1, 1)).mkdir()
    return root


def test_a_thousand_checkpoints_in_chains(tmp_path: Path) -> None:
    whole, half = many(tmp_path / "whole", MANY), many(tmp_path / "half", MANY // 2)
    rules = [
        "--keep-last",
        "3",
        "--keep-interval",
        "2d",
        "--keep-best",
        "2",
        "--best",
        "min:loss",
        "--dry-run",
    ]
    tried = []
    for _ in range(TRIES):
        start = everstep("prune", "--help", fresh=True).cpu_s
        said, less = (everstep("prune", root, *rules, "--json", fresh=True) for root in (whole, half))
        ls = everstep("ls", whole, "--json", fresh=True)
        assert len(ls.json["checkpoints"]) == MANY and len(steps(said)) + len(steps(said, "keep")) == MANY
        assert 500 < len(steps(said)) < 900
        grows = (said.cpu_s - start) / max(less.cpu_s - start, 0.05)
        tried.append((round(said.cpu_s, 2), round(ls.cpu_s, 2), round(grows, 2)))
        if max(said.cpu_s, ls.cpu_s) < MANY_CPU_S_MAX and grows < GROWS_MAX:
            return
    raise AssertionError(f"processor seconds of prune and ls, growth from half of it: {tried}")


def test_a_copied_run_has_no_pins(run: Path, tmp_path: Path) -> None:
    assert everstep("pin", run, "1").code == 0
    assert everstep("copy", run, tmp_path / "copy").code == 0
    assert everstep("pin", tmp_path / "copy", "--json").json["pins"] == []
    shutil.rmtree(tmp_path / "copy")
