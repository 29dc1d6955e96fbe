"""How fast a snapshot becomes durable, and comes back, against raw writes and reads of the same bytes.

Floors are measured in the same repeats, before or after in turn. Every load is compared, tensor by tensor,
before anything counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import everstep

from .common import MIB, Samples, Step, best, drop_caches, end_run, in_turn, machine, workspace
from .floors import Buffer, raw_read, raw_write, read_room
from .memory import PeakWatch, resident_bytes
from .state import BenchState, require_equal

KEEP = 2
QUIET_S = 30.0
"""Bound of the wait for rotation to finish between two measurements."""
POLL_S = 0.05


def run_save_load(size_mib: int, repeats: int, directory: Path | None, tell: Step) -> dict[str, Any]:
    """All measurements of ``bench save-load``; times in seconds. Raises Mismatch where bytes come back
    changed."""
    with workspace(directory) as work:
        tell("making the state")
        state = BenchState(size_mib * MIB)
        trained = everstep.TrainState(model=state.module, optimizer=state.optimizer, rng=False)
        root = work / "run"
        before = resident_bytes(os.getpid())
        peak = _peak(state, trained, work / "peak", before, tell)
        saves = _Saves(state, trained, root, work / "raw")
        saves.run(repeats, tell)
        loads = _Loads(state, trained, root)
        loads.run(repeats, tell)
        write_floor, read_floor = best(*saves.floors.values()), best(*loads.floors.values())
        return {
            "benchmark": "save-load",
            "flush_vs_raw_write": saves.flush.median / write_floor.median,
            "flush_vs_raw_write_from_slots": saves.flush.median / saves.floors["direct_from_slots"].median,
            "load_vs_raw_read": loads.load.median / read_floor.median,
            "peak_extra_mib": peak["save_and_load_bytes"] / MIB,
            "size_bytes": state.nbytes,
            "tensors": len(state.tensors),
            "repeats": repeats,
            "save_call": saves.call.summary(state.nbytes),
            "flush": saves.flush.summary(state.nbytes),
            "load": loads.load.summary(state.nbytes),
            "write_floors": {name: x.summary(state.nbytes) for name, x in saves.floors.items()},
            "read_floors": {name: x.summary(state.nbytes) for name, x in loads.floors.items()},
            "peak": peak,
            "cold_by": loads.cold_by,
            "checked": "every load was compared; every tensor equal, bit for bit",
            "machine": machine(work),
        }


@contextmanager
def _opened(root: Path, trained: everstep.TrainState) -> Iterator[everstep.Checkpointer]:
    """A new run with one durable checkpoint, of step 1: whatever comes once has been done."""
    policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=KEEP, linger_s=5.0)
    agent_pid = None
    try:
        with everstep.Checkpointer(root, memory=everstep.Memory(slots=3), policy=policy) as ckpt:
            ckpt.load(trained)
            ckpt.save(1, trained).wait()
            agent_pid = ckpt.agent_pid
            yield ckpt
    finally:
        end_run(root, agent_pid)


class _Saves:
    """Saves, from the call's return (the snapshot is in its slot) to durable; and raw writes between them."""

    def __init__(self, state: BenchState, trained: everstep.TrainState, root: Path, raw: Path) -> None:
        self.call, self.flush = Samples(), Samples()
        self.floors = {"buffered": Samples(), "direct": Samples(), "direct_from_slots": Samples()}
        self._state, self._trained, self._root, self._raw = state, trained, root, raw
        self._step = 1

    def run(self, repeats: int, tell: Step) -> None:
        buffer, shared = Buffer(self._state.nbytes), Buffer(self._state.nbytes, shared=True)
        self._raw.mkdir()
        with _opened(self._root, self._trained) as ckpt:
            for turn in range(repeats):
                tell(f"save {turn + 1}")
                self._state.change()
                in_turn(
                    turn,
                    [
                        lambda: self._save(ckpt),
                        lambda: self._raw_write("direct", buffer),
                        lambda: self._raw_write("direct_from_slots", shared),
                        lambda: self._raw_write("buffered", buffer),
                    ],
                )

    def _save(self, ckpt: everstep.Checkpointer) -> None:
        self._step += 1
        handles: list[everstep.SaveHandle] = []
        self.call.time(lambda: handles.append(ckpt.save(self._step, self._trained)))
        self.flush.time(handles[0].wait)
        self._await_rotation()

    def _await_rotation(self) -> None:
        """Deleting old checkpoints must not run beside the next measurement."""
        end = time.monotonic() + QUIET_S
        while len(_with_images(self._root)) > KEEP and time.monotonic() < end:
            time.sleep(POLL_S)

    def _raw_write(self, name: str, buffer: Buffer) -> None:
        path = self._raw / "file"
        self.floors[name].time(lambda: raw_write(path, buffer, direct=name != "buffered"))
        path.unlink()


def _with_images(root: Path) -> list[Path]:
    """The directories of the steps whose images are there (a removed step's tombstone stays for a while)."""
    steps = {image.relative_to(root).parts[1] for image in (root / "checkpoints").rglob("*.safetensors")}
    return sorted((root / "checkpoints" / step for step in steps), key=lambda path: int(path.name))


class _Loads:
    """Cold, verified loads into existing tensors; and raw cold reads of the same files between them."""

    def __init__(self, state: BenchState, trained: everstep.TrainState, root: Path) -> None:
        self.load = Samples()
        self.floors = {"buffered": Samples(), "direct_4_threads": Samples()}
        self.cold_by = ""
        self._state, self._trained, self._root = state, trained, root
        newest = _with_images(root)[-1]
        self._files = sorted(
            path for path in newest.rglob("*") if path.suffix in (".safetensors", ".msgpack")
        )

    def run(self, repeats: int, tell: Step) -> None:
        expected = self._state.hashes()
        buffer = Buffer(read_room(self._files))
        for turn in range(repeats):
            tell(f"load {turn + 1}")
            self._state.scramble()
            in_turn(
                turn,
                [
                    self._load,
                    lambda: self._raw_read("direct_4_threads", buffer, direct=True),
                    lambda: self._raw_read("buffered", buffer, direct=False),
                ],
            )
            require_equal(self._state.hashes(), expected, f"load {turn + 1}")

    def _load(self) -> None:
        self.cold_by = drop_caches(self._files)
        self.load.time(lambda: everstep.load(self._root, into=self._trained))

    def _raw_read(self, name: str, buffer: Buffer, *, direct: bool) -> None:
        drop_caches(self._files)
        self.floors[name].time(lambda: raw_read(self._files, buffer, direct=direct))


def _peak(
    state: BenchState, trained: everstep.TrainState, root: Path, before: int, tell: Step
) -> dict[str, int]:
    """Memory beyond the state and the slots: of trainer and agent together while saving, of a loader while
    loading. Looking costs time, so nothing is timed here."""
    tell("memory of a save")
    with _opened(root, trained) as ckpt:
        agents = [pid for pid in (ckpt.agent_pid,) if pid is not None and pid != os.getpid()]
        with PeakWatch([os.getpid(), *agents]) as saving:
            state.change()
            ckpt.save(2, trained).wait()
        agent = sum(resident_bytes(pid) for pid in agents)
        expected = state.hashes()
    tell("memory of a load")
    state.scramble()
    with PeakWatch([os.getpid()]) as loading:
        everstep.load(root, into=trained)
    require_equal(state.hashes(), expected, "the load whose memory was watched")
    save, load = max(0, saving.peak_bytes - before), max(0, loading.peak_bytes - before)
    return {
        "save_and_load_bytes": max(save, load),
        "save_bytes": save,
        "load_bytes": load,
        "agent_bytes": agent,
    }


__all__ = ["run_save_load"]
