"""What moved from one report to another by more than the noise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from everstep.benchmarks.harness.compare import compare, spread
from everstep.benchmarks.harness.results import ReportDict, samples
from reports import EXAMPLE, example, scaled


def moved(after: ReportDict) -> dict[tuple[str, str, str], str]:
    found = compare(example(), after)
    return {(m.workload, m.system, m.work): m.verdict for m in found.moves if m.verdict != "same"}


def test_the_same_report_has_not_moved() -> None:
    found = compare(example(), example())
    assert len(found.moves) > 50 and found.gone == found.new == []
    assert {move.verdict for move in found.moves} == {"same"}
    assert {"blocking", "cold_load", "slowdown", "peak_memory", "memory_recovery"} <= {
        m.work for m in found.moves
    }


def test_a_slower_machine_moves_nothing() -> None:
    report = example()
    for workload in report["workloads"].values():
        for name, one in workload["floors"].items():
            workload["floors"][name] = scaled(one, 3)
        for system in workload["systems"].values():
            system["works"] = {name: scaled(one, 3) for name, one in system["works"].items()}
    assert not [key for key in moved(report) if key[2] != "open"]


@pytest.mark.parametrize(("factor", "verdict"), [(1.6, "worse"), (0.6, "better"), (1.02, None)])
def test_a_slower_or_faster_work_is_told(factor: float, verdict: str | None) -> None:
    report = example()
    works = report["workloads"]["gpt-fp32"]["systems"]["everstep"]["works"]
    works["cold_load"] = scaled(works["cold_load"], factor)
    key = ("gpt-fp32", "everstep", "cold_load")
    assert moved(report) == ({} if verdict is None else {key: verdict})


def test_what_is_within_the_spread_is_noise() -> None:
    report = example()
    works = report["workloads"]["gpt-fp32"]["systems"]["everstep"]["works"]
    middle = works["cold_load"]["median_s"]
    works["cold_load"] = samples([middle * x for x in (0.5, 0.6, 1.4, 1.5, 2.4, 2.6)])
    assert moved(report) == {}


def test_the_slowdown_moves_by_shares_of_the_loop() -> None:
    report = example()
    works = report["workloads"]["training"]["systems"]["everstep-overlap"]["works"]
    works["loop"] = scaled(works["loop_alone"], 1.5)
    found = [m for m in compare(example(), report).moves if m.work == "slowdown" and m.verdict != "same"]
    assert [(m.system, m.verdict) for m in found] == [("everstep-overlap", "worse")]
    assert found[0].change == pytest.approx(found[0].after - found[0].before)


def test_what_is_gone_wrong_or_new_is_told() -> None:
    report = example()
    main = report["workloads"]["gpt-fp32"]
    del main["systems"]["everstep"]
    main["left_out"]["everstep"] = "failed: OSError: no room"
    main["systems"]["torch"] |= {"wrong": True, "works": {}, "checked": "cold load 1: 2 of 580 tensors"}
    main["systems"]["mine"] = main["systems"]["dcp"]
    del report["workloads"]["recovery"]
    found = compare(example(), report)
    assert found.gone == [
        "gpt-fp32, everstep: failed: OSError: no room",
        "gpt-fp32, torch: cold load 1: 2 of 580 tensors",
        *(
            f"recovery, {name}: not in the second report"
            for name in example()["workloads"]["recovery"]["systems"]
        ),
    ]
    assert found.new == ["gpt-fp32, mine"]


def test_spread_is_half_of_the_middle() -> None:
    assert spread(samples([1.0])) == 0
    assert spread(samples([8.0, 10.0, 14.0])) == pytest.approx(0.3)
    assert spread(samples([1.0, 8.0, 10.0, 10.0, 10.0, 10.0, 14.0, 99.0])) == 0.0
    assert spread(samples([1.0, 8.0, 14.0, 99.0])) == pytest.approx(3 / 11)


def said(*files: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "everstep.cli", "bench", "compare", "--json", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_exit_codes(tmp_path: Path) -> None:
    assert said(EXAMPLE, EXAMPLE)[0] == 0
    second = tmp_path / "second.json"
    for system, code in (("dcp", 0), ("everstep", 1)):
        report = example()
        works = report["workloads"]["gpt-fp32"]["systems"][system]["works"]
        works["blocking"] = scaled(works["blocking"], 2)
        second.write_text(json.dumps(report))
        found, out, _ = said(EXAMPLE, second)
        assert found == code
        (move,) = json.loads(out)["moved"]
        assert (move["system"], move["work"], move["verdict"]) == (system, "blocking", "worse")
    second.write_text("{}")
    code, _, err = said(EXAMPLE, second)
    assert code == 2 and "no report" in err and "Traceback" not in err


def test_a_workload_of_ours_that_is_gone_is_worse(tmp_path: Path) -> None:
    report = example()
    del report["workloads"]["recovery"]
    second = tmp_path / "second.json"
    second.write_text(json.dumps(report))
    code, out, _ = said(EXAMPLE, second)
    assert code == 1 and "recovery, everstep: not in the second report" in json.loads(out)["gone"]
    assert said(second, EXAMPLE)[0] == 0
