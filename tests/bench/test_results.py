"""The summary and its aims: numbers in, numbers out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everstep.benchmarks.harness.results import (
    CELLS,
    FLOORS,
    WORKS,
    Found,
    NotAReport,
    aims,
    is_rival,
    ratio,
    read,
    samples,
    summary,
)
from everstep.benchmarks.harness.runner import best_floors
from reports import EXAMPLE, example, scaled


def test_the_example_has_every_cell_and_they_follow_from_its_samples() -> None:
    report = read(EXAMPLE)
    found = summary(report["workloads"])
    assert found == pytest.approx(report["summary"])
    assert list(found) == [cell.name for cell in CELLS]
    assert aims(found) == report["aims"]


def test_samples() -> None:
    one = samples([3.0, 1.0, 2.0, 8.0], 100, "direct")
    assert (one["median_s"], one["min_s"], one["max_s"]) == (2.5, 1.0, 8.0)
    assert one["samples_s"] == [3.0, 1.0, 2.0, 8.0]
    assert (one["bytes_per_s"], one["way"]) == (40.0, "direct")
    assert "bytes_per_s" not in samples([1.0])


def test_cells_are_ratios_of_medians() -> None:
    report = example()
    main = report["workloads"]["gpt-fp32"]
    main["floors"]["copy"] = samples([2.0])
    main["systems"]["everstep"]["works"]["blocking_alone"] = samples([2.0, 3.0, 70.0])
    for name, seconds in (("dlrover", 6.0), ("dcp-async", 4.0), ("dcp-async-process", 5.0)):
        main["systems"][name]["works"]["blocking_alone"] = samples([seconds])
    for name in ("torch", "torch-mmap", "dcp"):
        main["systems"][name]["works"]["blocking_alone"] = samples([60.0])
    found = summary(report["workloads"])
    assert found["eager_blocking_vs_floor"] == 1.5
    assert found["eager_blocking_vs_best_rival"] == found["eager_blocking_vs_dcp"] == 0.75
    main["systems"]["dlrover"]["works"]["blocking_alone"] = samples([2.0])
    found = summary(report["workloads"])
    assert (found["eager_blocking_vs_best_rival"], found["eager_blocking_vs_dcp"]) == (1.5, 0.75)


def test_the_first_save_is_set_against_that_of_dcps_best_mode() -> None:
    report = example()
    systems = report["workloads"]["gpt-fp32"]["systems"]
    systems["everstep"]["works"]["first_blocking"] = samples([1.0])
    for name, later, first in (("dcp-async", 4.0, 10.0), ("dcp-async-process", 5.0, 0.5)):
        systems[name]["works"] |= {"blocking_alone": samples([later]), "first_blocking": samples([first])}
    assert summary(report["workloads"])["eager_first_vs_dcp"] == 0.1


def test_a_synchronous_dcp_is_no_asynchronous_one() -> None:
    report = example()
    systems = report["workloads"]["gpt-fp32"]["systems"]
    del systems["dcp-async"], systems["dcp-async-process"]
    found = summary(report["workloads"])
    assert "eager_blocking_vs_dcp" not in found and "eager_first_vs_dcp" not in found
    assert "eager_blocking_vs_best_rival" in found


def test_what_was_not_measured_is_left_out() -> None:
    report = example()
    del report["workloads"]["gpt-fp32"]["floors"]["copy"]
    del report["workloads"]["small-100k"]["systems"]["everstep"]
    del report["workloads"]["training"]
    gone = {
        *("eager_blocking_vs_floor", "overlap_blocking_vs_floor", "training_slowdown"),
        *("training_slowdown_vs_dcp", "small_tensors_100k_save_vs_dcp", "small_tensors_100k_load_vs_dcp"),
        "small_tensors_100k_vs_dcp",
        "small_tensors_100k_save_vs_dcp_async",
    }
    found = summary(report["workloads"])
    assert set(found) == {cell.name for cell in CELLS} - gone
    assert {one["cell"] for one in aims(found)} == {
        cell.name for cell in CELLS if cell.aim is not None
    } - gone
    assert summary({}) == {} and aims({}) == []


def test_a_wrong_system_counts_for_nothing() -> None:
    report = example()
    wrong = report["workloads"]["gpt-fp32"]["systems"]["safetensors"]
    assert wrong["wrong"] and wrong["works"] == {}
    assert Found(report["workloads"]).best("gpt-fp32", "cold_load") == "torch-mmap"


def test_small_tensors_tell_the_larger_ratio() -> None:
    report = example()
    systems = report["workloads"]["small-10k"]["systems"]
    systems["everstep"]["works"] |= {"blocking_alone": samples([1.0]), "cold_load": samples([3.0])}
    for name in ("dcp", "dcp-async"):
        systems[name]["works"] |= {"blocking_alone": samples([10.0]), "cold_load": samples([10.0])}
    found = summary(report["workloads"])
    assert found["small_tensors_save_vs_dcp"] == 0.1
    assert found["small_tensors_load_vs_dcp"] == found["small_tensors_vs_dcp"] == 0.3


def test_the_slowdown_is_the_median_over_pairs() -> None:
    report = example()
    systems = report["workloads"]["training"]["systems"]
    systems["everstep-overlap"]["works"] = {
        "loop": samples([1.1, 2.4, 3.0]),
        "loop_alone": samples([1.0, 2.0, 3.0]),
    }
    systems["dcp-async"]["works"] = {"loop": samples([2.0]), "loop_alone": samples([1.0])}
    found = summary(report["workloads"])
    assert found["training_slowdown"] == pytest.approx(0.1)
    assert found["training_slowdown_vs_dcp"] == pytest.approx(0.1)
    systems["everstep-overlap"]["works"]["loop"] = samples([0.9, 1.9, 2.9])
    assert summary(report["workloads"])["training_slowdown_vs_dcp"] == 0.0


def test_memory_is_set_against_a_mebibyte_at_least() -> None:
    report = example()
    systems = report["workloads"]["gpt-fp32"]["systems"]
    systems["torch"]["memory"] = {"peak_extra_bytes": 5, "peak_beyond_copy_bytes": 0}
    found = summary(report["workloads"])
    assert found["peak_memory_mib"] == found["peak_memory_vs_best_rival"] == 77


def test_aims_are_at_most_or_less() -> None:
    reached = {
        one["cell"]: one["met"] for one in aims({"cold_load_vs_best_rival": 1.0, "small_tensors_vs_dcp": 0.2})
    }
    assert reached == {"cold_load_vs_best_rival": False, "small_tensors_vs_dcp": True}
    (aim,) = aims({"cold_load_vs_best_rival": 0.999})
    assert aim["met"] and aim["strict"]


def test_rivals_are_all_but_everstep() -> None:
    assert [is_rival(name) for name in ("everstep", "everstep-overlap", "dcp", "everything")] == [
        False,
        False,
        True,
        True,
    ]


def test_ratios_need_both_parts() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 1.0) is ratio(1.0, None) is ratio(1.0, 0.0) is None


def test_the_best_way_is_the_floor() -> None:
    ways = {"write:direct": [3.0, 5.0, 4.0], "write:buffered": [1.0, 9.0, 4.5], "copy": [1.0]}
    found = best_floors(ways, 8)
    assert found["write"]["way"] == "direct" and found["write"]["bytes_per_s"] == 2.0
    assert set(found) == {"write", "copy"} and "way" not in found["copy"]


def test_works_have_floors_that_there_are() -> None:
    assert {work.floor for work in WORKS.values()} - {None} <= set(FLOORS)


def test_other_files_are_no_reports(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("nothing", "[]", '{"format": 7, "workloads": {}}', json.dumps({"benchmark": "stall"})):
        path.write_text(text)
        with pytest.raises(NotAReport, match="file"):
            read(path)


def test_a_report_that_lacks_something_is_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    changes: list[Callable[[Any], object]] = [
        lambda report: report["workloads"].update({"gpt-fp32": None}),
        lambda report: report["workloads"]["gpt-fp32"].pop("systems"),
        lambda report: report["workloads"]["gpt-fp32"]["floors"]["copy"].update(median_s="soon"),
        lambda report: report.pop("summary"),
    ]
    for change in changes:
        report = example()
        change(report)
        path.write_text(json.dumps(report))
        with pytest.raises(NotAReport, match="no whole report"):
            read(path)
    path.write_text(json.dumps(example()))
    assert read(path) == example()


def test_scaling() -> None:
    assert scaled(samples([1.0, 2.0]), 2)["samples_s"] == [2.0, 4.0]
