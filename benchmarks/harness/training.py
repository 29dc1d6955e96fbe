"""A training loop with a snapshot after every step, and the same loop without, in turn: what snapshots cost.

The loop computes on one core, the engine has the others: all its processes, and its threads in this process. The call
itself is not pinned, so that what it starts may run there too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from ..common import Mismatch, Samples, in_turn
from ..memory_ranks import CORE, Loop
from ..state import hashes
from .api import Session
from .measuring import Bench, opened
from .processes import own_processes
from .states import ModelState

LOOP_STEPS = 12
WARM_UP = 6
"""Steps with snapshots before those that count."""


class LoopState(ModelState):
    """The loop's model and AdamW's state."""

    def __init__(self, nbytes: int) -> None:
        self.loop = Loop(nbytes)
        super().__init__(self.loop.model, self.loop.optimizer)


def train(bench: Bench) -> None:
    """``loop`` and ``loop_alone``, in pairs. Raises Mismatch if training ended elsewhere with snapshots."""
    import torch

    if not isinstance(bench.state, LoopState):
        raise TypeError("the workload's state has no loop")
    torch.set_num_threads(1)
    loop = _Pinned(bench.state.loop, bench.token)
    with opened(bench) as session:
        hook = loop.loop.optimizer.register_step_pre_hook(lambda *_: session.settle())
        step = 0

        def snapshot() -> None:
            nonlocal step
            step += 1
            session.snapshot(step)

        for _ in range(WARM_UP):
            loop.step(snapshot)
        for turn in range(bench.repeats):
            ends: dict[str, list[str]] = {}
            in_turn(
                turn + bench.turn,
                [
                    partial(_run, bench, loop, session, "loop", snapshot, ends),
                    partial(_run, bench, loop, session, "loop_alone", lambda: None, ends),
                ],
            )
            if ends["loop"] != ends["loop_alone"]:
                raise Mismatch("training with snapshots ended in another state than training alone")
        hook.remove()
        loop.free()
        session.drain()
        bench.found.notes += session.notes()
    alone = Samples(bench.found.works["loop_alone"]).median / LOOP_STEPS
    bench.found.notes.append(f"a step takes {alone * 1000:.0f} ms without snapshots")
    bench.found.checked = "both loops ended in the same state, bit for bit"


def _run(
    bench: Bench,
    loop: _Pinned,
    session: Session,
    work: str,
    after: Callable[[], None],
    ends: dict[str, list[str]],
) -> None:
    loop.loop.step()  # ends a copy that the run before began
    session.drain()
    bench.quiet()
    loop.loop.begin()
    loop.pin_others()
    loop.step(after)

    def steps() -> None:
        for _ in range(LOOP_STEPS):
            loop.step(after)

    bench.found.add(work, bench.timed(steps))
    ends[work] = hashes(loop.loop.tensors())


class _Pinned:
    """The loop on one core."""

    def __init__(self, loop: Loop, token: str) -> None:
        self.loop = loop
        self._token = token
        self._cores = sorted(os.sched_getaffinity(0))
        self._others = set(self._cores[CORE + 1 :]) or set(self._cores)

    def step(self, after: Callable[[], None]) -> None:
        os.sched_setaffinity(0, {self._cores[CORE]})
        self.loop.step()
        self.free()
        after()

    def free(self) -> None:
        os.sched_setaffinity(0, self._cores)

    def pin_others(self) -> None:
        """All of the engine's processes and threads, and torch's in this process, off the loop's core."""
        main = os.getpid()
        for pid in own_processes(self._token):
            for task in _threads(pid):
                if task != main:
                    try:
                        os.sched_setaffinity(task, self._others)
                    except OSError:
                        continue  # it has ended


def _threads(pid: int) -> list[int]:
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


__all__ = ["LoopState", "train"]
