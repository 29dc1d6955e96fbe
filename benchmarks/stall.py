"""How long training stands still for a snapshot, against a plain copy of the same bytes.

The floor is measured in the same repeats, before or after in turn. Every snapshot that is timed is of changed
bytes; the last one is loaded back and compared before anything counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import everstep
import torch
from torch import Tensor

from .common import MIB, Samples, Step, best, end_run, in_turn, machine, workspace
from .floors import CopyFloor
from .state import BenchState, hashes, require_equal, scramble

WARM_UP = 4
"""Snapshots before the first that counts: each slot is written once, and one again."""
SMALL_COUNT = 10_000
SMALL_BYTES = 256
COMPUTE_RATIO = 1.5
"""Simulated forward and backward take this many times an eager snapshot."""
COMPUTE_WIDTH = 256


def run_stall(size_mib: int, repeats: int, directory: Path | None, tell: Step) -> dict[str, Any]:
    """All measurements of ``bench stall``; times in seconds. Raises Mismatch where bytes come back
    changed."""
    with workspace(directory) as work:
        tell("making the state")
        state = BenchState(size_mib * MIB)
        eager, floor, floors = measure_eager(state, repeats, work / "eager", tell)
        overlap = measure_overlap(state, repeats, work / "overlap", eager.median, tell)
        small = _small(repeats, work / "small", tell)
        calls, waits = overlap["call"], overlap["wait"]
        blocking = Samples([call + wait for call, wait in zip(calls.seconds, waits.seconds, strict=True)])
        return {
            "benchmark": "stall",
            "blocking_vs_copy": eager.median / floor.median,
            "overlap_blocking_vs_copy": blocking.median / floor.median,
            "small_tensors_s": small.median,
            "size_bytes": state.nbytes,
            "tensors": len(state.tensors),
            "repeats": repeats,
            "eager": eager.summary(state.nbytes),
            "overlap_blocking": blocking.summary(),
            "overlap_call": calls.summary(),
            "overlap_wait": waits.summary(),
            "overlap_compute": overlap["compute"].summary(),
            "compute_alone": overlap["alone"].summary(),
            "floors": {name: samples.summary(state.nbytes) for name, samples in floors.items()},
            "small_tensors": {**small.summary(), "count": SMALL_COUNT, "tensor_bytes": SMALL_BYTES},
            "checked": "the last snapshot of each kind was loaded back; every tensor equal, bit for bit",
            "machine": machine(work),
        }


@contextmanager
def _opened(
    root: Path, trained: everstep.TrainState, copy: Literal["eager", "overlap"] = "eager"
) -> Iterator[everstep.Checkpointer]:
    """A new run with one durable checkpoint, of step 1: whatever comes once has been done."""
    policy = everstep.Policy(snapshot_every=1, full_every=None, linger_s=5.0)
    ckpt = everstep.Checkpointer(root, memory=everstep.Memory(slots=3, copy=copy), policy=policy)
    agent_pid = None
    try:
        ckpt.load(trained)
        ckpt.save(1, trained).wait()
        agent_pid = ckpt.agent_pid
        yield ckpt
    finally:
        ckpt.close(flush=False)
        end_run(root, agent_pid)


def _train_state(state: BenchState) -> everstep.TrainState:
    return everstep.TrainState(model=state.module, optimizer=state.optimizer, rng=False)


def measure_eager(
    state: BenchState, repeats: int, root: Path, tell: Step
) -> tuple[Samples, Samples, dict[str, Samples]]:
    """(eager snapshots, best floor, all floors), in a new run at ``root``."""
    trained = _train_state(state)
    floor = CopyFloor(state.tensors)
    floors = {"flat_copy": Samples(), "fused_copy": Samples(), "copy_one_by_one": Samples()}
    eager = Samples()
    with _opened(root, trained) as ckpt:
        step = _warm_up(ckpt, state, trained)
        floor.fused()
        for turn in range(repeats):
            tell(f"eager snapshot {turn + 1}")
            state.change()
            step += 1
            in_turn(
                turn,
                [
                    partial(floors["flat_copy"].time, floor.flat),
                    partial(floors["fused_copy"].time, floor.fused),
                    partial(floors["copy_one_by_one"].time, floor.one_by_one),
                    partial(eager.time, ckpt.step, step, trained),
                ],
            )
        _check(root, step, trained, state.tensors)
    return eager, best(*floors.values()), floors


def _warm_up(ckpt: everstep.Checkpointer, state: BenchState, trained: everstep.TrainState) -> int:
    """Snapshots into every slot, and into one again; the last one's step."""
    for step in range(2, 2 + WARM_UP):
        state.change()
        ckpt.step(step, trained)
        state.optimizer.step()
    return 1 + WARM_UP


def _check(root: Path, step: int, trained: everstep.TrainState, tensors: Sequence[Tensor]) -> None:
    """Load ``step`` back, which lies in memory only, over scrambled tensors."""
    expected = hashes(tensors)
    scramble(tensors)
    everstep.load(root, step=step, into=trained)
    require_equal(hashes(tensors), expected, f"the snapshot of step {step}")


def measure_overlap(
    state: BenchState, repeats: int, root: Path, eager_s: float, tell: Step
) -> dict[str, Samples]:
    """Snapshots whose copy hides behind computing: the call, the wait in the optimizer's hook, and the
    computing beside a copy and alone."""
    trained = _train_state(state)
    compute = Compute(eager_s * COMPUTE_RATIO)
    found = {name: Samples() for name in ("call", "wait", "compute", "alone")}
    with _opened(root, trained, "overlap") as ckpt:
        step = _warm_up(ckpt, state, trained)
        for turn in range(repeats):
            tell(f"overlapped snapshot {turn + 1}")
            found["alone"].time(compute.run)
            state.change()
            step += 1
            found["call"].time(ckpt.step, step, trained)
            found["compute"].time(compute.run)
            found["wait"].time(state.optimizer.step)
        _check(root, step, trained, state.tensors)
    return found


class Compute:
    """Matrix products that take about ``seconds``, as forward and backward would."""

    def __init__(self, seconds: float) -> None:
        self._a = torch.rand(COMPUTE_WIDTH, COMPUTE_WIDTH)
        self._rounds = 1
        self.run()  # the first product of a process takes as long as many
        while min(self._time(), self._time()) < seconds:
            self._rounds *= 2

    def run(self) -> None:
        a = self._a
        for _ in range(self._rounds):
            a = torch.mm(self._a, a)
            a = a / a.sum()

    def _time(self) -> float:
        begun = time.perf_counter()
        self.run()
        return time.perf_counter() - begun


def _small(repeats: int, root: Path, tell: Step) -> Samples:
    """Snapshots of very many small tensors."""
    tensors = {f"t{i}": torch.rand(SMALL_BYTES // 4) for i in range(SMALL_COUNT)}
    trained = everstep.TrainState(rng=False, small=tensors)
    samples = Samples()
    with _opened(root, trained) as ckpt:
        for step in range(2, 2 + WARM_UP):
            ckpt.step(step, trained)
        for turn in range(repeats):
            tell(f"small tensors {turn + 1}")
            torch._foreach_add_(list(tensors.values()), 1)
            step += 1
            samples.time(ckpt.step, step, trained)
        _check(root, step, trained, list(tensors.values()))
    return samples


__all__ = ["Compute", "measure_eager", "measure_overlap", "run_stall"]
