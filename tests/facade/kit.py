"""Small runs through the public face: a model that uses every kind of state, storage that fails on command, and
scripts in processes of their own."""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import torch
from everstep.backends.api import Backend
from everstep.backends.faults import Fault, Faulty
from everstep.backends.open import open_backend
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.places import locate
from torch import nn

from tests.matrix import launch

torch.set_num_threads(1)

SHM = Path("/dev/shm")
SOON_S = 30.0
"""Far more than anything here takes; what is awaited is an event, never the time itself."""

QUICK: dict[str, Any] = {
    "full_every": None,
    "linger_s": 0.5,
    "rank_timeout_s": 20.0,
    "slot_timeout_s": 20.0,
    "close_timeout_s": 30.0,
    "commit_timeout_s": 20.0,
}


def policy(**changes: Any) -> everstep.Policy:
    return everstep.Policy(**{**QUICK, **changes})


def opened(root: Path, **options: Any) -> everstep.Checkpointer:
    """A checkpointer with its agent on a thread and bounded waits; a ``dict`` as policy changes QUICK."""
    given = options.pop("policy", None)
    made = given if isinstance(given, everstep.Policy) else policy(**(given or {}))
    return everstep.Checkpointer(root, policy=made, agent=options.pop("agent", "inline"), **options)


def until(look: Callable[[], Any], what: str, timeout_s: float = SOON_S) -> Any:
    """The first true value of ``look``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


# -- a training run


class Loader:
    """A shuffled stream of batches that knows its position."""

    def __init__(self, seed: int = 3) -> None:
        self._rng = np.random.default_rng(seed)
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.from_numpy(self._rng.normal(size=(4, 8)).astype(np.float32))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._rng.bit_generator.state = state["rng"]


class Training:
    """Model with dropout and batch norm, AdamW, a scheduler, a loader, all three random generators."""

    def __init__(self, seed: int = 1, width: int = 16) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=200)
        self.loader = Loader()
        self.extra: dict[str, Any] = {"best": float("inf"), "history": []}
        self.state = everstep.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            extra=self.extra,
            data="stream",
        )

    def step(self) -> float:
        batch = self.loader.next() + random.random() + float(np.random.rand())
        loss: torch.Tensor = self.model(batch).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        value = loss.item()
        self.extra["best"] = min(self.extra["best"], value)
        self.extra["history"] = [*self.extra["history"][-3:], value]
        return value

    def weights(self) -> dict[str, torch.Tensor]:
        found = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{k}": v.clone() for k, v in state.items()}
        return found


def undisturbed(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a run that nothing interrupts."""
    training = Training()
    return [training.step() for _ in range(steps)], training.weights()


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and torch.equal(left[k], right[k])
        for k in left
    )


# -- what is there


def steps_on_disk(root: Path) -> list[int]:
    """Steps that have a manifest as their highest decision."""
    found = []
    for directory in sorted((root / "checkpoints").glob("*/*")):
        decisions = sorted(directory.glob("manifest-*.json"), key=lambda p: int(p.stem.split("-")[1]))
        texts = [p.read_text() for p in decisions]
        if any('"manifest"' in t for t in texts) and '"tombstone"' not in (texts[-1] if texts else ""):
            found.append(int(directory.parent.name))
    return sorted(found)


def arena_directory(root: Path, base: Path = SHM) -> Path:
    return base / f"everstep-{os.getuid()}" / locate(root).run_key


def arenas_of(root: Path, base: Path = SHM) -> list[Any]:
    return find_arenas(arena_directory(root, base))


def forget_memory(root: Path, base: Path = SHM) -> None:
    """As if the node had been restarted: nothing is left in shared memory."""
    for info in arenas_of(root, base):
        assert info.path is not None
        info.path.unlink()


def in_memory(root: Path) -> list[int]:
    """Steps in this node's arenas."""
    found: set[int] = set()
    for info in arenas_of(root):
        with Arena.attach(info.path) as arena:
            found |= {snapshot.step for snapshot in arena.snapshots()}
    return sorted(found)


# -- faults


@dataclass
class Storage:
    """What the inline agents of a test write through; ``script`` may be changed at any time."""

    script: list[Fault] = field(default_factory=list)
    made: list[Faulty] = field(default_factory=list)

    def open(self, url: str, options: Mapping[str, Any]) -> Backend:
        backend = Faulty(open_backend(url, shared=True, options=options))
        backend.script = self.script
        self.made.append(backend)
        return backend

    def fail(self, *faults: Fault) -> None:
        self.script[:] = faults

    def heal(self) -> None:
        self.script.clear()


# -- other processes

SCRIPT_HEAD = """
import os, sys, signal, time, warnings
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch, everstep
from tests.facade.kit import *
root = Path(sys.argv[1])
def say(*words):
    print(*words, flush=True)
"""


class Script:
    """A script in a process of its own; it talks by lines on standard output."""

    def __init__(self, body: str, *args: object, env: dict[str, str] | None = None) -> None:
        head = SCRIPT_HEAD.format(tests=str(Path(__file__).parents[2]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(body), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise AssertionError(f"the script ended: {self.end()}")
        return line

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """(exit code, rest of its output, its errors)."""
        out, err = self.process.communicate(timeout=250)
        return self.process.returncode, out, err

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _written(body: str, beside: object) -> Path:
    path = Path(str(beside)).parent / f"job-{random.randrange(10**9)}.py"
    path.write_text(SCRIPT_HEAD.format(tests=str(Path(__file__).parents[2])) + textwrap.dedent(body))
    return path


def run_ranks(body: str, *args: object, ranks: int = 2, timeout_s: float = 280) -> None:
    """A script as all ranks of a job, none of which takes the seconds of importing torch; all must end well."""
    path, port = _written(body, args[0]), launch.free_port()
    outs = [path.with_suffix(f".{rank}.txt") for rank in range(ranks)]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(port)}
    processes = [
        launch.start(_run, path, args, out=out, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, out in enumerate(outs)
    ]
    codes = launch.ended(processes, timeout_s)
    assert codes == [0] * ranks, "\n----\n".join(out.read_text() for out in outs if out.exists())


def _run(path: Path, args: Sequence[object]) -> None:
    sys.argv = [str(path), *map(str, args)]
    runpy.run_path(str(path), run_name="__main__")


def torchrun(body: str, *args: object, ranks: int = 2, restarts: int = 0, timeout_s: float = 280) -> str:
    """The combined output of a script under torchrun; it must end well."""
    path = _written(body, args[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(path), *map(str, args)]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20000:]}"
    return done.stdout


def words(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line]


class Forked:
    """``body`` in a child of this process: as a process of its own, without the seconds that an import of torch
    takes. What it says with the function that it is given are lines here."""

    def __init__(self, body: Callable[[Callable[..., None]], object]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            code = 1
            try:
                with os.fdopen(writing, "w") as out:
                    body(lambda *words: print(*words, file=out, flush=True))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        self._lines = os.fdopen(reading)
        self._status: int | None = None

    def line(self) -> str:
        return self._lines.readline().strip()

    def end(self) -> tuple[int, list[str]]:
        """(exit code, minus the signal's number if one killed it; the rest of what it said)."""
        lines = [line.strip() for line in self._lines]
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self._status), lines

    def stop(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitpid(self.pid, 0)[1]
        self._lines.close()
