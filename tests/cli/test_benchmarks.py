"""The benchmarks run, small, and check what they measure; numbers of this size mean nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cli_kit import everstep
from everstep.benchmarks.common import Mismatch, Samples, best, drop_caches, file_system, in_turn
from everstep.benchmarks.memory import PeakWatch, resident_bytes

MIB = 1 << 20


def bench(name: str, directory: Path) -> dict[str, Any]:
    said = everstep("bench", name, "--json", "--size-mib", "4", "--repeats", "2", "--dir", directory)
    assert said.code == 0, said.err
    assert os.listdir(directory) == []
    found: dict[str, Any] = said.json
    assert found["repeats"] == 2
    assert abs(found["size_bytes"] - 4 * MIB) < 0.01 * MIB
    assert {"cores", "memory_bytes", "python", "torch", "file_system"} <= found["machine"].keys()
    return found


def test_stall(tmp_path: Path) -> None:
    found = bench("stall", tmp_path)
    for field in ("blocking_vs_copy", "overlap_blocking_vs_copy", "small_tensors_s"):
        assert found[field] > 0
    for samples in (found["eager"], found["overlap_blocking"], *found["floors"].values()):
        assert 0 < samples["min_s"] <= samples["median_s"] <= samples["max_s"]


def test_save_load(tmp_path: Path) -> None:
    found = bench("save-load", tmp_path)
    for field in (
        "flush_vs_raw_write",
        "flush_vs_raw_write_from_slots",
        "load_vs_raw_read",
        "peak_extra_mib",
    ):
        assert found[field] > 0
    assert "posix_fadvise" in found["cold_by"]
    assert set(found["write_floors"]) == {"buffered", "direct", "direct_from_slots"}


def test_plan(tmp_path: Path) -> None:
    """512 ranks of 100 entries: what is asserted is structure, and sizes, not time."""
    said = everstep("bench", "plan", "--json", "--ranks", "512", "--entries", "100", "--dir", tmp_path)
    assert said.code == 0, said.err
    assert os.listdir(tmp_path) == []
    found = said.json
    assert (found["ranks"], found["entries"]) == (512, 124)
    for field in ("planning_s", "peak_rss_gib", "steady_commit_s", "steady_in_memory_s", "manifest_mib"):
        assert found[field] > 0, field
    assert found["manifest_mib"] * MIB < 512 * 160 + 4096
    assert found["rank"]["stored_layout_bytes"] < found["rank"]["layout_bytes"] < 124 * 100
    assert found["coordinator"]["read_bytes"] < 512 * 2048
    assert [one["ranks"] for one in found["growth"]] == [512]
    assert any(note.startswith("not simulated") for note in found["notes"])
    from everstep.cli.bench import _plan_text

    (row,) = [line.split() for line in _plan_text(found).splitlines() if line.lstrip().startswith("512")]
    assert row[-2:] == [f"{found['peak_rss_gib']:.2f}", "GiB"]


def test_the_jobs_that_are_simulated() -> None:
    from everstep.cli.bench import worlds_up_to

    assert worlds_up_to(16384) == [256, 1024, 4096, 16384]
    assert worlds_up_to(512) == [512] and worlds_up_to(1024) == [256, 1024]


def test_a_simulation_that_is_not_what_planning_makes_is_refused() -> None:
    from everstep.benchmarks.simulated import Job, check_simulation

    job = Job(100, 60)
    check_simulation(job, range(100))
    job.owners[job.tensors[0].part, job.tensors[0].key] ^= 1
    with pytest.raises(Mismatch, match="simulated layout"):
        check_simulation(job, range(100))


def test_table_for_people(tmp_path: Path) -> None:
    from everstep.cli.bench import _as_text

    samples = Samples([0.5, 0.25, 1.0]).summary(MIB)
    machine = {"cores": 2, "memory_bytes": 1 << 30, "python": "3", "torch": "2", "file_system": "ext4"}
    found = {"benchmark": "stall", "size_bytes": MIB, "tensors": 3, "repeats": 3, "blocking_vs_copy": 1.25}
    text = _as_text({**found, "floors": {"plain": samples}, "machine": machine, "checked": "all of it"})
    assert "blocking_vs_copy  1.250" in text
    assert "floor: plain  500.0 ms  250.0 ms  1000.0 ms  2.0 MiB/s" in text


def test_floors_move_the_bytes(tmp_path: Path) -> None:
    from everstep.benchmarks.floors import Buffer, raw_read, raw_write, read_room

    source = Buffer(3 * MIB + 5)
    wanted = bytes(source.view[: source.nbytes])
    for direct in (False, True):
        path = tmp_path / f"file-{direct}"
        raw_write(path, source, direct=direct)
        assert path.read_bytes() == wanted
    files = sorted(tmp_path.iterdir())
    drop_caches(files)
    for direct in (False, True):
        target = Buffer(read_room(files))
        raw_read(files, target, direct=direct)
        second = read_room(files[:1])
        assert bytes(target.view[: source.nbytes]) == wanted
        assert bytes(target.view[second : second + source.nbytes]) == wanted


def test_the_copy_floor_copies() -> None:
    import torch
    from everstep.benchmarks.floors import CopyFloor

    tensors = [torch.rand(3, 5), torch.rand(7), torch.tensor(2.0)]
    floor = CopyFloor(tensors)
    floor.flat()
    assert all(torch.equal(a, b) for a, b in zip(floor._targets, tensors, strict=True))
    for copy in (floor.fused, floor.one_by_one):
        tensors[0].add_(1)
        copy()
        assert all(torch.equal(a, b) for a, b in zip(floor._targets, tensors, strict=True))


@pytest.mark.parametrize("size_mib", [1, 16, 1024])
def test_shapes_come_to_the_size(size_mib: int) -> None:
    import math

    from everstep.benchmarks.state import gpt_shapes

    shapes = gpt_shapes(size_mib * MIB)
    total = 12 * sum(math.prod(shape) for _, shape in shapes)
    assert abs(total - size_mib * MIB) < 0.01 * size_mib * MIB
    assert len({name for name, _ in shapes}) == len(shapes) > 100


def test_a_change_of_one_bit_is_a_mismatch() -> None:
    from everstep.benchmarks.state import BenchState, require_equal

    state = BenchState(MIB)
    before = state.hashes()
    require_equal(state.hashes(), before, "nothing")
    state.tensors[5].view(-1)[:1].mul_(-1)
    with pytest.raises(Mismatch, match="1 of"):
        require_equal(state.hashes(), before, "one bit")


def test_samples_and_turns() -> None:
    low, high = Samples([1.0, 2.0, 9.0]), Samples([3.0, 3.0, 0.5])
    assert best(low, high) is low
    assert low.summary(10)["bytes_per_s"] == 5.0
    order: list[str] = []
    for turn in range(2):
        in_turn(turn, [lambda: order.append("a"), lambda: order.append("b")])
    assert order == ["a", "b", "b", "a"]


def test_peak_of_memory_is_seen_and_slots_are_not(tmp_path: Path) -> None:
    import mmap

    before = resident_bytes(os.getpid())
    with PeakWatch([os.getpid()]) as watch:
        with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            block[:] = b"x" * len(block)
            seen = resident_bytes(os.getpid())
    assert seen - before > 30 * MIB
    assert watch.peak_bytes >= before
    with open(tmp_path / "rank-00000.abc.arena", "w+b") as file:
        file.truncate(32 * MIB)
        with mmap.mmap(file.fileno(), 32 * MIB) as slots:
            slots[:] = b"x" * len(slots)
            assert resident_bytes(os.getpid()) - before < 16 * MIB


def test_file_system_of_a_directory(tmp_path: Path) -> None:
    assert " on " in file_system(tmp_path)
    assert file_system(Path("/proc")).startswith("proc")
