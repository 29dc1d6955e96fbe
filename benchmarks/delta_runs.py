"""Deltas as a run has them: written by an agent, read back as a load does.

A pair of states becomes two checkpoints of a run, a full and the delta on it. Sizes are those of the objects on disk.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import everstep
import torch
from everstep.backends.files import LocalBackend
from everstep.format.manifest import Manifest
from everstep.format.vote import STATE_IMAGE
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_step, read_decision
from everstep.store.runs import open_run
from everstep.store.sources import DurableSource

from .common import Mismatch, Samples, Step, drop_caches, end_run, in_turn
from .delta_codec import Image
from .delta_training import Sizes, State, Trainer
from .memory_ranks import cpu_seconds
from .state import hashes, require_equal, scramble

COPIES = 8
"""How often the state is in the one that is restored: one alone is read faster than a load begins."""
CORE, ENGINE_CORE = 0, 1
LOOP_STEPS = 20
DELTA_EVERY = 10
"""Steps of a training loop that is measured, and between its deltas."""


def tensors_of(state: State) -> list[torch.Tensor]:
    return [tensor for held in state.values() for tensor in held.values()]


def nbytes_of(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


@contextmanager
def _opened(root: Path, **policy: Any) -> Iterator[everstep.Checkpointer]:
    """A run whose flushes all are waited for; its agent ends with it."""
    given = {"full_every": None, "keep_last": 1000, "on_slow": "wait", "linger_s": 5.0, **policy}
    agent_pid = None
    ckpt = everstep.Checkpointer(root, policy=everstep.Policy(**given))
    try:
        yield ckpt
        agent_pid = ckpt.agent_pid
    finally:
        ckpt.close(flush=False)
        end_run(root, agent_pid)


BASE, NEW = 1, 2
"""Steps of the full and of the delta on it."""


def write_pair(root: Path, base: State, new: State) -> None:
    """A run with ``base`` as a full, and ``new`` as a delta on it."""
    with _opened(root, delta_every=1) as ckpt:
        ckpt.load(base)
        ckpt.save(BASE, base).wait()
        handle = ckpt.step(NEW, new)
        if handle is None:
            raise RuntimeError("the delta was not due")
        handle.wait()


def read_pair(root: Path, base: State, new: State) -> list[Image]:
    """The images of the delta, with their bases. Both states are loaded and compared, bit for bit, first."""
    _compare(root, BASE, base)
    _compare(root, NEW, new)
    return run_blocking(_with(root, _images))


T = TypeVar("T")


async def _with(root: Path, work: Callable[[LocalBackend, int], Awaitable[T]]) -> T:
    """What ``work`` finds in the run, given its chunk size."""
    backend = LocalBackend(str(root))
    try:
        return await work(backend, (await open_run(backend)).chunk_bytes)
    finally:
        await backend.close()


def _compare(root: Path, step: int, state: State) -> None:
    found = everstep.load(root, step=step)
    wrong = [
        f"{part}/{name}"
        for part, held in state.items()
        for name, tensor in held.items()
        if not torch.equal(_bits(found[part][name]), _bits(tensor))
    ]
    if wrong:
        raise Mismatch(f"step {step}: {len(wrong)} tensors came back with other bytes: {wrong[0]}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


async def _images(backend: LocalBackend, chunk_bytes: int) -> list[Image]:
    base, new = [await _source(backend, chunk_bytes, step) for step in (BASE, NEW)]
    if new.manifest.parent_key != (base.incarnation, base.step):
        raise Mismatch(f"no delta on step {BASE}: {new.manifest.kind} on {new.manifest.parent_key}")
    layout = await new.layout(0)
    found = []
    for name, record in (await new.records(0)).items():
        if name == STATE_IMAGE:
            continue
        mine, its = [await _read(source, name, record.nbytes) for source in (new, base)]
        found.append(Image(name, layout, chunk_bytes, mine, its, record.object.nbytes))
    return found


async def _read(source: DurableSource, name: str, nbytes: int) -> memoryview:
    view = memoryview(bytearray(nbytes))
    await source.read_into(0, name, 0, view)
    return view


async def _source(backend: LocalBackend, chunk_bytes: int, step: int) -> DurableSource:
    decision = await read_decision(backend, await list_step(backend, step, 1))
    if not isinstance(decision, Manifest):
        raise Mismatch(f"step {step} does not count")
    return DurableSource(backend, decision, chunk_bytes)


def _many(state: State, copies: int) -> State:
    return {
        part: {
            f"{name}.{copy}": tensor.detach().clone()
            for copy in range(copies)
            for name, tensor in held.items()
        }
        for part, held in state.items()
    }


def measure_restore(
    root: Path, base: State, new: State, repeats: int, tell: Step, copies: int = COPIES
) -> dict[str, Any]:
    """Cold, verified loads into tensors that are there: of a full, and of a delta with its base, in turn."""
    pair = _many(base, copies), _many(new, copies)
    expected = {step: hashes(tensors_of(state)) for step, state in zip((BASE, NEW), pair, strict=True)}
    nbytes = nbytes_of(pair[0])
    tell("writing what is restored")
    write_pair(root, *pair)
    live = pair[1]
    files = sorted(path for path in (root / "checkpoints").rglob("*") if path.is_file())
    stored = {step: stored_bytes(root, step) for step in (BASE, NEW)}
    samples = {BASE: Samples(), NEW: Samples()}
    cold_by = ""

    def load(step: int) -> None:
        nonlocal cold_by
        scramble(tensors_of(live))
        cold_by = drop_caches(files)
        samples[step].time(lambda: everstep.load(root, step=step, into=live))
        require_equal(hashes(tensors_of(live)), expected[step], f"the load of step {step}")

    load(BASE)
    load(NEW)
    samples = {BASE: Samples(), NEW: Samples()}
    for turn in range(repeats):
        tell(f"restore {turn + 1}")
        in_turn(turn, [partial(load, BASE), partial(load, NEW)])
    ratio = stored[NEW] / stored[BASE]
    pairs = zip(samples[NEW].seconds, samples[BASE].seconds, strict=True)
    return {
        "restore_vs_full": Samples([delta / full for delta, full in pairs]).median,
        "restore_bound": 1.1 * (1 + ratio),
        "restore_ratio": ratio,
        "restore_bytes": nbytes,
        "restore_full": samples[BASE].summary(nbytes),
        "restore_delta": samples[NEW].summary(nbytes),
        "cold_by": cold_by,
    }


def stored_bytes(root: Path, step: int) -> int:
    """Of the objects of the step's images."""

    async def read(backend: LocalBackend, chunk_bytes: int) -> int:
        records = await (await _source(backend, chunk_bytes, step)).records(0)
        return sum(record.object.nbytes for name, record in records.items() if name != STATE_IMAGE)

    return run_blocking(_with(root, read))


class Slowdown:
    """A training loop on one core: alone, with snapshots, and with a delta made of each of them on the other core."""

    def __init__(self, root: Path, sizes: Sizes) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._trainer = Trainer(sizes, mixed=True)
        self._trainer.step()
        self._root = root
        self.samples = {name: Samples() for name in ("loop_alone", "loop_with_snapshots", "loop_with_deltas")}
        self.agent_s = 0.0

    def run(self, repeats: int, tell: Step) -> dict[str, Any]:
        at = {"loop_with_snapshots": 0, "loop_with_deltas": 0}
        with (
            _opened(self._root / "snapshots", snapshot_every=DELTA_EVERY) as plain,
            _opened(self._root / "deltas", snapshot_every=DELTA_EVERY, delta_every=DELTA_EVERY) as deltas,
        ):
            both = {"loop_with_snapshots": plain, "loop_with_deltas": deltas}
            for name, ckpt in both.items():
                tell(f"warming up: {name.replace('_', ' ')}")
                ckpt.load(self._trainer.state())
                at[name] = DELTA_EVERY - 1
                ckpt.save(at[name], self._trainer.state()).wait()
                self._loop(ckpt, at, name)
            for ckpt in both.values():
                self._pin(ckpt.agent_pid)
            self.samples = {name: Samples() for name in self.samples}
            self.agent_s = 0.0
            for turn in range(repeats):
                tell(f"training loop {turn + 1}")
                in_turn(
                    turn,
                    [
                        partial(self._loop, None, at, "loop_alone"),
                        *(partial(self._loop, ckpt, at, name) for name, ckpt in both.items()),
                    ],
                )
            tell("comparing a delta")
            due = (at["loop_with_deltas"] // DELTA_EVERY + 1) * DELTA_EVERY
            handle = deltas.step(due, self._trainer.state())
            if handle is None:
                raise RuntimeError("the delta was not due")
            handle.wait()
        _compare(self._root / "deltas", due, self._trainer.state())
        return self._result()

    def _result(self) -> dict[str, Any]:
        def slower(one: str, other: str) -> float:
            pairs = zip(self.samples[one].seconds, self.samples[other].seconds, strict=True)
            return Samples([a / b - 1 for a, b in pairs]).median

        return {
            "step_slowdown": slower("loop_with_deltas", "loop_with_snapshots"),
            "step_slowdown_of_all": slower("loop_with_deltas", "loop_alone"),
            "agent_share_of_a_core": self.agent_s / sum(self.samples["loop_with_deltas"].seconds),
            "loop_steps": LOOP_STEPS,
            "delta_every": DELTA_EVERY,
            **{name: samples.summary() for name, samples in self.samples.items()},
        }

    def _loop(self, ckpt: everstep.Checkpointer | None, at: dict[str, int], name: str) -> None:
        handles = []
        agent = ckpt.agent_pid if ckpt is not None else None
        before = cpu_seconds(agent) if agent is not None else 0.0

        def work() -> None:
            for _ in range(LOOP_STEPS):
                self._trainer.step()
                if ckpt is None:
                    continue
                at[name] += 1
                os.sched_setaffinity(0, self._cores)
                handles.append(ckpt.step(at[name], self._trainer.state()))
                os.sched_setaffinity(0, {self._cores[CORE]})

        os.sched_setaffinity(0, {self._cores[CORE]})
        try:
            self.samples[name].time(work)
        finally:
            os.sched_setaffinity(0, self._cores)
        for handle in handles:
            if handle is not None:
                handle.wait()
        if name == "loop_with_deltas" and agent is not None:
            self.agent_s += cpu_seconds(agent) - before

    def _pin(self, pid: int | None) -> None:
        if pid is None:
            return
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), {self._cores[min(ENGINE_CORE, len(self._cores) - 1)]})


__all__ = [
    "Slowdown",
    "measure_restore",
    "nbytes_of",
    "read_pair",
    "stored_bytes",
    "tensors_of",
    "write_pair",
]
