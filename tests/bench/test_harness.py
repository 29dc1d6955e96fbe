"""The harness runs, small, and checks what it measures; numbers of this size mean nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from everstep.benchmarks.harness import processes, results, runner, systems, words, worker, workloads
from everstep.benchmarks.harness.api import WORKS
from everstep.benchmarks.harness.runner import Options, Run
from everstep.benchmarks.harness.workloads import ALL
from everstep.cli import harness
from everstep.cli.harness import as_text, ours_failed
from everstep.cli.options import mebibytes
from everstep.memory.process import Process
from everstep.places import locate
from reports import example

MIB = 1 << 20
LIMIT_S = 280.0
pytestmark = pytest.mark.timeout(300)  # on a busy machine; alone each takes seconds
HERE = Path(__file__).parent
SAVES = {"open", "first_blocking", "first_durable", "blocking", "blocking_alone", "durable", "durable_synced"}
EVERSTEP, OVERLAP, TORCH = (
    "everstep.benchmarks.harness.ours:Everstep",
    "everstep.benchmarks.harness.ours:EverstepOverlap",
    "everstep.benchmarks.harness.plain:Torch",
)


@pytest.fixture(autouse=True)
def adapters_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By this process, and by workers."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))


def bench(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everstep.cli", "bench", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def measure(workload: str, system: str, directory: Path, mib: int = 1) -> dict[str, Any]:
    """What a worker finds, here in this process."""
    directory.mkdir()
    number = {"nbytes": mib * MIB, "repeats": 1, "turn": 0, "rank": 0, "world": 1, "result_fd": -1}
    rest = {"memory": False, "directory": str(directory), "token": "", "store": ""}
    return worker.run(worker.Task(system=system, workload=workload, **number, **rest))


def test_a_run_of_three_systems(tmp_path: Path) -> None:
    file, work, page, pictures = (tmp_path / name for name in ("r.json", "work", "r.html", "png"))
    work.mkdir()
    said = bench(
        "run", "gpt-fp32", "--system", "adapters:Crash", "--system", "everstep", "--system", "torch",
        *("--size", "4", "--repeats", "1", "--rounds", "1", "--dir", work),
        *("--json", file, "--html", page, "--png", pictures),
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert os.listdir(work) == []
    report = results.read(file)
    found = report["workloads"]["gpt-fp32"]
    assert abs(found["size_bytes"] - 4 * MIB) < 0.01 * MIB and found["tensors"] == 580
    assert set(found["floors"]) == {"copy", "copy_fresh", "write", "read"}
    assert all(len(one["samples_s"]) == 2 for one in found["floors"].values())
    assert set(found["left_out"]) == {"crash"} and "exit code 3" in found["left_out"]["crash"]
    assert "last words of a crash" in found["left_out"]["crash"] and "left out: crash: rank 0" in said.stdout
    assert "posix_fadvise" in found["cold_by"]
    for system in ("everstep", "torch"):
        one = found["systems"][system]
        assert set(one["works"]) == {*SAVES, "cold_load"}
        assert all(0 < work["min_s"] <= work["median_s"] <= work["max_s"] for work in one["works"].values())
        assert one["works"]["durable"]["min_s"] >= one["works"]["blocking"]["min_s"]
        assert one["memory"] is not None and "bit for bit" in one["checked"] and not one["wrong"]
        assert one["version"]
    line = found["systems"]["everstep"]["timelines"]["save"]
    assert [one["phase"] for one in line] == ["snapshot", "flush", "commit"]
    assert all(0 <= one["begin_s"] <= one["end_s"] < 60 for one in line)
    assert all(a["end_s"] == b["begin_s"] for a, b in pairwise(line))
    assert report["summary"] == results.summary(report["workloads"])
    assert {"durable_vs_floor", "cold_load_vs_best_rival", "peak_memory_mib"} <= set(report["summary"])
    assert {"cores", "memory_bytes", "cpu", "disk", "file_system", "versions"} <= set(report["machine"])
    assert "eager_blocking_vs_floor" in said.stdout and "bit" not in said.stderr
    assert "gpt-fp32" in page.read_text() and os.listdir(pictures)


@pytest.mark.parametrize(
    ("workload", "system"),
    [
        *((workload, EVERSTEP) for workload in ("gpt-bf16", "small-10k", "small-100k", "huge")),
        *((workload, TORCH) for workload in ("gpt-bf16", "small-10k", "small-100k", "huge")),
        ("gpt-bf16", OVERLAP),  # the others have no optimizer: nothing is copied late
    ],
)
def test_saves_and_loads(workload: str, system: str, tmp_path: Path) -> None:
    found = measure(workload, system, tmp_path / "work")
    assert set(found["works"]) == {*SAVES, "cold_load"}
    assert all(len(seconds) == 1 for seconds in found["works"].values())
    assert "bit for bit" in found["checked"] and "wrong" not in found
    assert abs(found["size_bytes"] - MIB) < 0.02 * MIB
    assert not arenas_of(tmp_path / "work").exists()


def test_training(tmp_path: Path) -> None:
    """A worker of its own: it pins its process and threads."""
    job = {"system": EVERSTEP, "workload": "training", "nbytes": 12 * MIB, "repeats": 1, "turn": 0}
    outcome = processes.launch({**job, "memory": False, "directory": str(tmp_path)}, 1, 100)
    assert outcome.problem == "" and outcome.result is not None
    works = outcome.result["works"]
    assert set(works) == {"open", "loop", "loop_alone"} and len(works["loop"]) == 1
    assert "same state" in outcome.result["checked"]


def test_recovery(tmp_path: Path) -> None:
    """But for the other node, which ``tests/nodes/test_bench.py`` has."""
    found = measure("recovery", "adapters:NoPeer", tmp_path / "work")
    assert set(found["works"]) == {"open", "first_memory_recovery", "memory_recovery", "disk_recovery"}
    assert [one["phase"] for one in found["timelines"]["recovery"]] == ["load", "reserve"]
    assert "bit for bit" in found["checked"]


def test_memory_that_a_system_keeps_counts_and_no_copy_is_forgiven_who_writes_in_the_call(
    tmp_path: Path,
) -> None:
    options = Options(workloads.chosen(["gpt-fp32"]), {"hoard": "adapters:Hoard"}, True, 32, tmp_path, 1, 1)
    found = Run(options).run(lambda text: None)["workloads"]["gpt-fp32"]
    memory = found["systems"]["hoard"]["memory"]
    assert memory is not None
    assert found["size_bytes"] <= memory["peak_beyond_copy_bytes"] == memory["peak_extra_bytes"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_go_forth_and_back_and_failures_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """With workers that are not started."""
    found = {"works": {"blocking": [1.0, 3.0]}, "floors": {}, "memory": None, "timelines": {}, "notes": ["n"]}
    found |= {
        "numbers": {},
        "checked": "equal",
        "cold_by": "x",
        "size_bytes": 8,
        "tensors": 1,
        "scale": None,
        "version": "1",
    }
    answers = {
        "floor": [processes.Outcome({"floors": {"copy:a": [2.0], "copy:b": [1.0]}})] * 4,
        "adapters:Crash": [processes.Outcome(found), processes.Outcome(None, "rank 0: exit code 3")],
        "adapters:Wrong": [processes.Outcome({**found, "wrong": "1 of 1 tensors"})],
        "adapters:Good": [processes.Outcome(found)] * 2,
    }
    monkeypatch.setattr(runner, "launch", lambda job, ranks, limit_s: answers[job["system"]].pop(0))
    specs = {name: f"adapters:{name.title()}" for name in ("crash", "wrong", "absent", "good")}
    told: list[str] = []
    job = Run(Options(workloads.chosen(["huge"]), specs, True, 1, tmp_path, 1, rounds))
    assert job.workers == 5 * rounds
    report = job.run(told.append)
    order = [*("floor", "crash", "wrong", "good", "floor"), *("floor", "good", "crash", "floor")]
    assert [text.split(": ")[1] for text in told] == order[: 5 if rounds == 1 else None]
    huge = report["workloads"]["huge"]
    assert huge["floors"]["copy"] == results.samples([1.0] * 2 * rounds, 8, "b")
    assert huge["left_out"].pop("absent") == "not installed: pip install absent"
    assert huge["left_out"] == ({} if rounds == 1 else {"crash": "rank 0: exit code 3"})
    assert set(huge["systems"]) == ({"crash", "wrong", "good"} if rounds == 1 else {"wrong", "good"})
    good, wrong = huge["systems"]["good"], huge["systems"]["wrong"]
    assert good["works"]["blocking"]["samples_s"] == [1.0, 3.0] * rounds and not good["wrong"]
    assert wrong["wrong"] and wrong["works"] == {} and wrong["checked"] == "1 of 1 tensors"
    assert os.listdir(tmp_path) == [] and ours_failed(report, job.failed) == []
    assert job.failed == [("huge", "wrong")] + [("huge", "crash")] * (rounds - 1)
    assert "WRONG: wrong: 1 of 1 tensors" in as_text(report)


def test_other_bytes_are_found_and_errors_come_out(tmp_path: Path) -> None:
    found = measure("huge", "adapters:Wrong", tmp_path / "wrong")
    assert found["wrong"] == "cold load 1 of round 1: 1 of 1 tensors came back with other bytes"
    assert "bit for bit" in measure("huge", "adapters:Good", tmp_path / "good")["checked"]
    with pytest.raises(KeyError):
        measure("huge", "adapters:Raise", tmp_path / "raise")


def test_what_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("ADAPTERS_PID_FILE", str(pids))
    limit_s = 2.0
    job = {
        "system": "adapters:Hang",
        "workload": "huge",
        "nbytes": MIB,
        "repeats": 1,
        "turn": 0,
        "memory": False,
    }
    while not pids.exists():  # on a busy machine it takes long to get there
        outcome = processes.launch({**job, "directory": str(tmp_path)}, 1, limit_s)
        assert outcome.result is None and f"not done after {limit_s:g} s" in outcome.problem
        limit_s *= 2
    for pid in map(int, pids.read_text().split()):
        process = Process.of(pid)
        assert process is None or process.wait_dead(5)


def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids, work = tmp_path / "pids", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("ADAPTERS_PID_FILE", str(pids))
    command = [sys.executable, "-m", "everstep.cli", "bench", "run", "huge", "--system", "adapters:Hang"]
    with subprocess.Popen([*command, "--size", "1", "--dir", str(work)]) as process:
        while not (pids.exists() and pids.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 130
    assert os.listdir(work) == []
    for pid in map(int, pids.read_text().split()):
        ended = Process.of(pid)
        assert ended is None or ended.wait_dead(5)


def test_what_a_killed_worker_leaves_in_memory_is_removed(tmp_path: Path) -> None:
    job = {
        "system": "adapters:Lost",
        "workload": "huge",
        "nbytes": MIB,
        "repeats": 1,
        "turn": 0,
        "memory": False,
    }
    outcome = processes.launch({**job, "directory": str(tmp_path)}, 1, 100)
    assert "exit code 3" in outcome.problem
    arenas = arenas_of(tmp_path)
    assert os.listdir(arenas)
    systems.load("adapters:Lost").clean(tmp_path)
    assert not arenas.exists()


def test_others_keep_their_processes() -> None:
    """The mark is that of one worker, wherever its processes are."""
    token = processes.new_token()
    environment = {**os.environ, processes.MARK: token}
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as process:
        while processes.own_processes(token) != [process.pid]:
            assert process.poll() is None
        assert processes.own_processes(token[:-1]) == []
        processes.end_processes(processes.new_token())
        assert process.poll() is None
        processes.end_processes(token)
        assert process.wait(10) == -9


def test_names_that_are_not_known(tmp_path: Path) -> None:
    for args, known in (
        (["huge", "nope"], "known: gpt-fp32, gpt-bf16"),
        (["huge", "--system", "nope"], "known: everstep, everstep-overlap, torch"),
        (["huge", "--system", "adapters:Nope"], "adapters:Nope cannot be loaded"),
        (["huge", "--system", "nothing_here:Nope"], "nothing_here:Nope cannot be loaded"),
        (["huge", "--system", "adapters:OwnMemoryOnly"], "is no subclass"),
        (["huge", "--system", "adapters:Unready"], "works has ['fly']"),
    ):
        said = bench("run", *args, "--dir", tmp_path)
        assert said.returncode == 2 and known in said.stderr, said.stderr
        assert "Traceback" not in said.stderr


def test_a_report_that_could_not_be_written_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    for option, place in (
        ("--json", kept / "a.json"),
        ("--json", Path("/proc/a.json")),
        ("--json", tmp_path),
    ):
        said = bench("run", "huge", "--size", "1", "--dir", tmp_path, option, place)
        assert said.returncode == 2 and "round 1" not in said.stderr, said.stderr
        assert str(place) in said.stderr and "Traceback" not in said.stderr
    said = bench("run", "huge", "--size", "1", "--dir", "/proc")
    assert said.returncode == 2 and "/proc" in said.stderr and "Traceback" not in said.stderr, said.stderr
    assert os.listdir(tmp_path) == ["kept"] and kept.read_text() == "kept"


def test_list() -> None:
    said = json.loads(bench("list", "--json").stdout)
    assert list(said["workloads"]) == [workload.name for workload in ALL]
    assert list(said["systems"])[:3] == ["everstep", "everstep-overlap", "torch"]
    for system in said["systems"].values():
        assert system["meaning"] and set(system["works"]) and "missing" in system
    assert said["systems"]["safetensors"]["missing"] is None


@pytest.mark.parametrize(
    ("text", "mib"), [("4", 4), ("4MiB", 4), ("0.5 GiB", 512), ("1024GiB", 1 << 20), (None, None)]
)
def test_sizes_are_mebibytes_or_have_a_unit(text: str | None, mib: int | None) -> None:
    assert mebibytes(click.Context(harness.run), harness.run.params[0], text) == mib


@pytest.mark.parametrize("text", ["0", "-1", "0.5", "1KB", "1MB", "4mib", "", "1025GiB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size such as 512, 512MiB or 2GiB"):
        mebibytes(click.Context(harness.run), harness.run.params[0], text)


def test_every_system_says_what_it_is() -> None:
    known = systems.all_systems()
    assert len(known) == len(systems.BUILT_IN)
    for name, spec in known.items():
        system = systems.load(spec)
        assert system.name == name == name.lower() and "\n" not in system.meaning
        assert system.works <= WORKS


def test_who_takes_part() -> None:
    small, training = (next(w for w in ALL if w.name == name) for name in ("small-100k", "training"))
    specs = {"everstep": EVERSTEP, "everstep-overlap": OVERLAP, "torch": TORCH}
    unnamed, named = (Run(Options([small, training], specs, asked)) for asked in (False, True))
    assert [why is None for why in unnamed.taking(small).values()] == [True, False, True]
    assert all(why is None for why in named.taking(small).values())
    assert named.taking(training)["torch"] == "it can do none of: async"


def test_everstep_must_not_fail() -> None:
    report = example()
    main = report["workloads"]["gpt-fp32"]
    main["systems"]["everstep"] |= {"wrong": True, "checked": "cold load 1: 2 of 580 tensors"}
    del main["systems"]["everstep-overlap"]
    main["left_out"]["everstep-overlap"] = "failed: OSError: no room"
    failed = [("gpt-fp32", name) for name in ("torchsnapshot", "everstep", "everstep-overlap", "safetensors")]
    assert ours_failed(report, failed) == [
        "gpt-fp32, everstep: cold load 1: 2 of 580 tensors",
        "gpt-fp32, everstep-overlap: failed: OSError: no room",
    ]


def test_modules_are_compiled_although_python_may_keep_no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept = Path(importlib.util.cache_from_source(str(words.__file__)))
    kept.unlink(missing_ok=True)
    runner.compile_everstep()
    assert kept.is_file()


def arenas_of(directory: Path) -> Path:
    """Where everstep's arenas lie of a session in ``directory``."""
    return Path(f"/dev/shm/everstep-{os.getuid()}") / locate(directory / "run").run_key
