"""A training some steps further: saved as a full, and as what changed since."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from ..delta_training import Sizes, Trainer
from .api import Pending, Session
from .measuring import EQUAL, REPEATS_S, Bench, drop, opened
from .states import MIXED_BYTES, TensorsState

LAYERS = 4
LAYER_SQUARES = 12
"""Parameters of a layer in squares of the width."""
HEADS = 4
LEAST_WIDTH = 8
LENGTH, BATCH = 48, 4
WARM_UP = 30
"""Steps of training before the first save."""
BETWEEN = 10
"""Steps from one save to the next."""


class TrainedState(TensorsState):
    """A byte-level GPT that is trained: bf16, masters in fp32 and Adam's moments."""

    def __init__(self, nbytes: int) -> None:
        wanted = nbytes // MIXED_BYTES
        width = int(math.sqrt(wanted / (LAYERS * LAYER_SQUARES)))
        width = max(LEAST_WIDTH, width // HEADS * HEADS)
        self._trainer = Trainer(
            Sizes(width=width, layers=LAYERS, heads=HEADS, length=LENGTH, batch=BATCH), mixed=True
        )
        self.train(WARM_UP)
        parts = self._trainer.state()
        super().__init__(
            {
                f"{part}.{name}": tensor.detach()
                for part, held in parts.items()
                for name, tensor in held.items()
            }
        )

    def train(self, steps: int) -> None:
        """On one thread: layers as small as these are no faster on more, and much slower beside other work."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(steps):
                self._trainer.step()
        finally:
            torch.set_num_threads(threads)

    def change(self) -> None:
        """So many steps further."""
        self.train(BETWEEN)


def save_deltas(bench: Bench) -> None:
    """``full_durable``, ``delta_durable``, ``delta_load``, and the number ``delta_bytes_over_full``. The first full
    and the first delta of a process do not count. Raises Mismatch where bytes come back changed."""
    found = bench.found
    with opened(bench) as session:
        _pair(bench, session, 1, "first_")
        number = 1
        for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
            _pair(bench, session, 1 + 2 * number, "")
        step = 2 + 2 * number
        share = session.stored_bytes(step) / session.stored_bytes(step - 1)
        found.numbers["delta_bytes_over_full"] = share
        found.notes.append(f"a delta over {BETWEEN} steps takes {share:.3f} of a full's bytes")
        found.notes += session.notes()
        session.saved()
        expected = bench.state.hashes()
        for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
            bench.state.scramble()
            drop(bench)
            found.add("delta_load", bench.timed(lambda: session.load(step)))
            bench.require_equal(expected, f"load {number} of a delta")
    found.checked = EQUAL


def _pair(bench: Bench, session: Session, step: int, prefix: str) -> None:
    """A full at ``step``, and a delta at the next."""
    saves = {"full_durable": session.save, "delta_durable": session.save_delta}
    for at, (work, save) in enumerate(saves.items(), step):
        bench.state.change()
        bench.quiet()
        bench.found.add(prefix + work, bench.timed(partial(_save_and_wait, save, at)))


def _save_and_wait(save: Callable[[int], Pending], step: int) -> None:
    save(step).wait()


__all__ = ["BETWEEN", "TrainedState", "save_deltas"]
