"""Back after the death of the process: from its own memory, from another node's, from disk; and, where there is CUDA,
back in the living process from the device's memory."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from ..common import Samples
from ..state import require_equal
from .api import Job
from .measuring import EQUAL, Bench, drop, opened
from .states import ModelState, gpt

SAVES = 3
"""Each of everstep's slots is written once."""


def recover(bench: Bench) -> None:
    """``first_memory_recovery`` and ``memory_recovery``, ``disk_recovery``, ``peer_recovery`` where the system has such
    a way, and ``device_recovery`` where there is CUDA. Raises Mismatch where bytes come back changed."""
    found = bench.found
    with opened(bench) as session:
        for step in range(1, 1 + SAVES):
            bench.state.change()
            session.save(step).wait()
        expected = bench.state.hashes()
        for tier in bench.system.tiers:
            for number in range(bench.repeats + (tier == "memory")):
                session.lose(tier)
                bench.state.scramble()
                if tier == "disk":
                    bench.first_only(lambda: drop(bench))
                took = bench.timed(partial(session.recover, tier))
                bench.require_equal(expected, f"recovery {number + 1} from {tier}")
                first = tier == "memory" and number == 0
                found.add(f"first_{tier}_recovery" if first else f"{tier}_recovery", took)
            if tier == "memory":
                found.timelines |= session.timelines()
        found.notes += session.notes()
    if bench.can("rollback") and torch.cuda.is_available():
        from_device(bench, "cuda")
    if bench.rank == 0:
        between = bench.system.from_peer(bench.state.nbytes, bench.repeats, bench.directory) or {}
        for kept, kind in ((found.works, "works"), (found.floors, "floors")):
            for name, seconds in between.get(kind, {}).items():
                kept.setdefault(name, []).extend(seconds)
        found.timelines |= between.get("timelines", {})
    found.checked = EQUAL


def from_device(bench: Bench, device: str) -> None:
    """``device_recovery``: a rollback of as many bytes on ``device``, beside a copy of them there."""
    state = _on_device(bench.state.nbytes, device)
    bench.found.floors["device_copy"] = _copies(list(state.tensors().values()), bench.repeats, device)
    directory = bench.directory / "device"
    directory.mkdir()
    with closing(bench.system.open(Job(directory, state, options={"device_slot": True}))) as session:
        for step in range(1, 1 + SAVES):
            state.change()
            session.save(step).wait()
        expected = state.hashes()

        def roll_back() -> None:
            session.rollback()
            _finish(device)

        for number in range(1, 2 + bench.repeats):
            state.scramble()
            _finish(device)
            took = bench.timed(roll_back)
            require_equal(state.hashes(), expected, f"rollback {number}")
            bench.found.add("device_recovery" if number > 1 else "first_device_recovery", took)


def _copies(tensors: list[Tensor], repeats: int, device: str) -> list[float]:
    """Seconds of copies into memory of the same device."""
    rooms = [torch.empty_like(tensor) for tensor in tensors]
    copy = Samples()

    def work() -> None:
        torch._foreach_copy_(rooms, tensors)
        _finish(device)

    work()
    for _ in range(repeats):
        copy.time(work)
    return copy.seconds


def _on_device(nbytes: int, device: str) -> ModelState:
    with torch.device(device):
        return gpt(nbytes)


def _finish(device: str) -> None:
    """Wait for what the device has to do."""
    if device != "cpu":
        torch.cuda.synchronize()


__all__ = ["from_device", "recover"]
