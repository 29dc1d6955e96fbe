"""Back after the death of the process: from its own memory, from another node's, from disk; and, where there is CUDA,
back in the living process from the device's memory."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch

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
        between = bench.system.from_peer(bench.state.nbytes, bench.repeats, bench.directory)
        for work, seconds in (between or {}).get("works", {}).items():
            found.works.setdefault(work, []).extend(seconds)
        for floor, seconds in (between or {}).get("floors", {}).items():
            found.floors.setdefault(floor, []).extend(seconds)
    found.checked = EQUAL


def from_device(bench: Bench, device: str) -> None:
    """``device_recovery``: a rollback of as many bytes on ``device``, beside a copy of them there."""
    copy, state = Samples(), _on_device(bench.state.nbytes, device)
    tensors = list(state.tensors().values())
    rooms = [torch.empty_like(tensor) for tensor in tensors]

    def plain_copy() -> None:
        torch._foreach_copy_(rooms, tensors)
        _finish(device)

    plain_copy()
    for _ in range(bench.repeats):
        copy.time(plain_copy)
    del rooms
    bench.found.floors["device_copy"] = copy.seconds
    directory = bench.directory / "device"
    directory.mkdir()
    with closing(bench.system.open(Job(directory, state, options={"device_slot": True}))) as session:
        for step in range(1, 1 + SAVES):
            state.change()
            session.save(step).wait()
        expected = state.hashes()
        for number in range(1, 2 + bench.repeats):
            state.scramble()
            _finish(device)
            took = bench.timed(lambda: (session.rollback(), _finish(device)))
            require_equal(state.hashes(), expected, f"rollback {number}")
            bench.found.add("device_recovery" if number > 1 else "first_device_recovery", took)


def _on_device(nbytes: int, device: str) -> ModelState:
    with torch.device(device):
        return gpt(nbytes)


def _finish(device: str) -> None:
    """Wait for what the device has to do."""
    if device != "cpu":
        torch.cuda.synchronize()


__all__ = ["from_device", "recover"]
