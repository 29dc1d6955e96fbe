"""The workloads of other shapes and of several ranks run, small, and check what they measure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everstep.benchmarks.harness import processes, worker, workloads
from everstep.benchmarks.harness.ours import KEY_FILE
from everstep.benchmarks.harness.runner import Options, Run, joined

MIB = 1 << 20
LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(300)  # on a busy machine; alone each takes seconds
EVERSTEP = "everstep.benchmarks.harness.ours:Everstep"
OVERLAP = "everstep.benchmarks.harness.ours:EverstepOverlap"
DCP = "everstep.benchmarks.harness.rivals.dcp:Dcp"
SAVES = {"open", "first_blocking", "first_durable", "blocking", "blocking_alone", "durable", "durable_synced"}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measure(workload: str, system: str, directory: Path, mib: int) -> dict[str, Any]:
    """What a worker finds, here in this process."""
    directory.mkdir()
    number = {"nbytes": mib * MIB, "repeats": 1, "turn": 0, "rank": 0, "world": 1, "result_fd": -1}
    rest = {"memory": False, "directory": str(directory), "token": "", "store": ""}
    return worker.run(worker.Task(system=system, workload=workload, **number, **rest))


def launch(workload: str, system: str, directory: Path, ranks: int) -> dict[str, Any]:
    """What ``ranks`` processes find, 4 MiB together."""
    job = {"system": system, "workload": workload, "nbytes": 4 * MIB, "repeats": 1, "turn": 0}
    outcome = processes.launch({**job, "memory": False, "directory": str(directory)}, ranks, LIMIT_S)
    assert outcome.problem == "" and outcome.result is not None
    return outcome.result


@pytest.mark.parametrize("workload", ["moe", "llama-8b", "llama-70b", "llama-405b"])
def test_shapes_are_saved_and_loaded(workload: str, tmp_path: Path) -> None:
    found = measure(workload, EVERSTEP, tmp_path / "work", 4)
    assert set(found["works"]) == {*SAVES, "cold_load"}
    assert "bit for bit" in found["checked"] and "wrong" not in found
    assert abs(found["size_bytes"] / (4 * MIB) - 1) < 0.1
    if workload == "moe":
        assert found["scale"] is None
    else:
        assert workload.removeprefix("llama-").upper() == found["scale"]["of"].removeprefix("Llama 3.1 ")
        assert found["scale"]["factor"] > 100


OTHERS = [pytest.param(system, marks=pytest.mark.long) for system in (OVERLAP, DCP)]


@pytest.mark.parametrize("system", [EVERSTEP, *OTHERS])
def test_sharded(system: str, tmp_path: Path) -> None:
    found = launch("fsdp2", system, tmp_path, 2)
    assert set(found["works"]) == {*SAVES, "cold_load"} and "bit for bit" in found["checked"]
    assert abs(found["size_bytes"] / (4 * MIB) - 1) < 0.1


@pytest.mark.parametrize("system", [EVERSTEP, *OTHERS])
def test_replicated(system: str, tmp_path: Path) -> None:
    found = launch("ddp", system, tmp_path, 2)
    assert set(found["works"]) == {*SAVES, "cold_load"} and "bit for bit" in found["checked"]
    assert abs(found["size_bytes"] / (4 * MIB) - 1) < 0.1, "what two hold counts once"


def test_saved_by_two_and_loaded_by_three(tmp_path: Path) -> None:
    (reshard,) = workloads.chosen(["reshard"])
    reshard = replace(reshard, ranks=2, loaders=(3,), floors=())
    report = Run(Options([reshard], {"everstep": EVERSTEP}, True, 4, tmp_path, 1, 1)).run(lambda what: None)
    found = report["workloads"]["reshard"]
    assert found["left_out"] == {}
    ours = found["systems"]["everstep"]
    assert set(ours["works"]) == {"open", "first_durable", "load_at_3"}
    assert "bit for bit" in ours["checked"] and not ours["wrong"] and ours["version"]
    assert found["floors"] == {}
    assert abs(found["size_bytes"] / (4 * MIB) - 1) < 0.1 and "posix_fadvise" in found["cold_by"]


def test_a_send_over_gloo(tmp_path: Path) -> None:
    floors = launch("fsdp2", worker.FLOOR, tmp_path, 2)["floors"]
    assert set(floors) == {"gloo"} and len(floors["gloo"]) == 1 and floors["gloo"][0] > 0


def test_what_went_wrong_at_other_ranks_is_told() -> None:
    saved = {"works": {"open": [1.0]}, "checked": "", "version": "1"}
    right = processes.Outcome(
        {"works": {"load_at_2": [2.0]}, "checked": "equal", "cold_by": "a", "version": ""}
    )
    both = joined(saved, right, 2).result
    assert both is not None and both["works"] == {"open": [1.0], "load_at_2": [2.0]}
    assert (both["checked"], both["cold_by"], both["version"]) == ("equal", "a", "1")
    wrong = joined(saved, processes.Outcome({"works": {}, "wrong": "other bytes"}), 8).result
    assert wrong is not None and wrong["wrong"] == "other bytes"
    assert (
        joined(saved, processes.Outcome(None, "exit code 3"), 8).problem == "failed: at 8 ranks: exit code 3"
    )


def test_deltas(tmp_path: Path) -> None:
    found = measure("delta", EVERSTEP, tmp_path / "work", 4)
    times = {"full_durable", "delta_durable"}
    assert set(found["works"]) == {"open", *times, *(f"first_{work}" for work in times), "delta_load"}
    assert abs(found["size_bytes"] / (4 * MIB) - 1) < 0.2 and "bit for bit" in found["checked"]
    share = found["numbers"]["delta_bytes_over_full"]
    assert 0.05 < share < 0.95 and any(f"{share:.3f} of a full" in note for note in found["notes"])


def test_other_bytes_do_not_count(tmp_path: Path) -> None:
    found = measure("delta", "adapters:WrongDeltas", tmp_path / "deltas", 1)
    assert found["wrong"].startswith("load 1 of a delta: 1 of ")
    found = measure("s3", "adapters:WrongStore", tmp_path / "store", 1)
    assert found["wrong"].startswith("load 1 from the store: 1 of ")


def test_others_save_no_deltas() -> None:
    specs = {"everstep": EVERSTEP, "dcp": DCP}
    taking = Run(Options(workloads.chosen(["delta"]), specs, True)).taking(workloads.chosen(["delta"])[0])
    assert taking == {"everstep": None, "dcp": "it can do none of: delta"}


def test_back_from_the_slot_beside_the_tensors(tmp_path: Path) -> None:
    """On the CPU as on a GPU."""
    from everstep.benchmarks.harness.measuring import Bench
    from everstep.benchmarks.harness.recovery import from_device
    from everstep.benchmarks.harness.states import gpt
    from everstep.benchmarks.harness.systems import load

    bench = Bench(load(EVERSTEP), gpt(4 * MIB), tmp_path, repeats=1)
    from_device(bench, "cpu")
    assert set(bench.found.works) == {"first_device_recovery", "device_recovery"}
    assert len(bench.found.floors["device_copy"]) == 1


def test_in_a_store(tmp_path: Path) -> None:
    found = measure("s3", EVERSTEP, tmp_path / "work", 4)
    assert set(found["works"]) == {"open", "first_s3_save", "s3_save", "s3_load"}
    assert "bit for bit" in found["checked"] and "posix_fadvise" in found["cold_by"]
    assert [one["phase"] for one in found["timelines"]["save"]] == ["snapshot", "flush", "commit"]
    key = (tmp_path / "work" / KEY_FILE).read_text()
    assert not Path(f"/dev/shm/everstep-{os.getuid()}", key).exists()


def test_floors_of_a_store(tmp_path: Path) -> None:
    floors = measure("s3", worker.FLOOR, tmp_path / "work", 4)["floors"]
    assert {"s3_put:boto3", "s3_get:boto3", "s3_put:s3fs_memory"} <= set(floors)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in floors.values())


def test_without_a_server_nothing_is_put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("everstep.benchmarks.harness.stores.SERVER", ("no-such-server",))
    report = Run(Options(workloads.chosen(["s3"]), {"everstep": EVERSTEP}, False, 4, tmp_path)).run(print)
    assert report["workloads"]["s3"]["left_out"] == {
        "everstep": "there is no S3 server here: pip install no-such-server"
    }
