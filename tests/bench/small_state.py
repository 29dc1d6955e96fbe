"""A small state of many kinds of tensors, and a process that has one system save, load and recover it.

``python -m tests.bench.small_state TASK`` (JSON: system, directory, url). Exits with 0 if the system kept all its
promises; else it tells on standard error which one was broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from everstep.benchmarks.harness.api import Job, Session, State, System
from everstep.benchmarks.harness.processes import MARK, own_processes
from everstep.benchmarks.harness.systems import load
from everstep.benchmarks.state import StillAdam, hashes, scramble
from torch import Tensor

SAVES = 3
SHARED_MEMORY = Path("/dev/shm")
EVEN = ("torchsnapshot", "torchsnapshot-async")
"""torchsnapshot 0.1.0 fails at bf16 tensors with an odd number of elements: it takes whole words of four bytes only."""
ENDING_S = 10.0
BOOKKEEPER = b"multiprocessing.resource_tracker"
"""A process of Python's own, which ends with the one that it serves."""


class Small(torch.nn.Module):
    """fp32, bf16 and int64; a vector, matrices of odd sizes, single numbers."""

    seen: Tensor
    count: Tensor

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(257, 129))
        self.narrow = torch.nn.Parameter(torch.randn(33, 5 if odd else 6).bfloat16())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("seen", torch.arange(13))
        self.register_buffer("count", torch.tensor(7))


class SmallState:
    """A module and an optimizer's nested state with its groups."""

    def __init__(self, odd: bool) -> None:
        torch.manual_seed(1)
        self.module = Small(odd)
        self.optimizer = StillAdam(self.module.parameters())
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def _model(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.module.state_dict(keep_vars=True).items()}

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self._model().items()}
        for name, state in self._moments().items():
            found |= {f"optimizer.state.{name}.{key}": tensor for key, tensor in state.items()}
        return found

    def tree(self) -> dict[str, Any]:
        groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "amsgrad": False, "params": list(self._moments())}]
        return {"model": self._model(), "optimizer": {"state": self._moments(), "param_groups": groups}}

    def change(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.view(-1)[:3].add_(1)

    def scramble(self) -> None:
        scramble(list(self.tensors().values()))

    def hashes(self) -> list[str]:
        return hashes(list(self.tensors().values()))


def require(found: list[str], expected: list[str], state: State, what: str) -> None:
    wrong = [name for name, a, b in zip(state.tensors(), found, expected, strict=True) if a != b]
    if wrong:
        raise AssertionError(f"{what}: other bytes in {', '.join(wrong)}")


def run(system: System, directory: Path, url: str) -> None:
    before = set(os.listdir(SHARED_MEMORY))
    state = SmallState(odd=system.name not in EVEN)
    session, expected = opened_and_saved(system, directory, url, state)
    session.saved()
    for number in (1, 2):
        if {"load", "s3"} & system.works:
            state.scramble()
            session.load(SAVES)
            require(state.hashes(), expected, state, f"load {number}")
    assert all(isinstance(note, str) for note in session.notes())
    session.forget(SAVES)
    session.close()
    if "recover" in system.works:
        recover(system, directory / "again", state)
    nothing_left(before)


def opened_and_saved(
    system: System, directory: Path, url: str, state: SmallState
) -> tuple[Session, list[str]]:
    """A session that has saved steps 1 to SAVES, the last one of them left; and the state's hashes as it was then."""
    session = system.open(Job(directory, state, options={"url": url} if url else {}))
    expected: list[str] = []
    for step in range(1, 1 + SAVES):
        state.change()
        expected = state.hashes()
        pending = session.save(step)
        session.settle()
        state.optimizer.step()
        state.change()  # the training goes on: what is still copied now is lost
        pending.wait()
        if step > 1:
            session.forget(step - 1)
    return session, expected


def recover(system: System, directory: Path, state: SmallState) -> None:
    """In a second session of the process."""
    directory.mkdir()
    session, expected = opened_and_saved(system, directory, "", state)
    for tier in system.tiers:
        session.lose(tier)
        state.scramble()
        session.recover(tier)
        require(state.hashes(), expected, state, f"recovery from {tier}")
    session.close()


def processes_left() -> list[bytes]:
    """Command lines of what this process has started, and what these have."""
    others = [pid for pid in own_processes(os.environ[MARK]) if pid != os.getpid()]
    commands = []
    for pid in others:
        with contextlib.suppress(OSError):  # it has ended
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return [command for command in commands if command and BOOKKEEPER not in command]


def nothing_left(before: set[str]) -> None:
    """No process, and none of the shared memory that a process here has a name for."""
    until = time.monotonic() + ENDING_S
    while left := processes_left():  # one that was told to end may have to load its modules first
        if time.monotonic() > until:
            raise AssertionError(f"processes are left: {left}")
        time.sleep(0.02)
    memory = {
        name for name in set(os.listdir(SHARED_MEMORY)) - before if "ckpt_shm" in name or name[:5] == "torch"
    }
    if memory:
        raise AssertionError(f"shared memory is left: {memory}")


def main() -> None:
    task = json.loads(sys.argv[1])
    try:
        run(load(task["system"]), Path(task["directory"]), task["url"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(f"kept {SAVES} saves", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
