"""One short check on a machine with a GPU, for the days on which there is one: ``python benchmarks/gpu_check.py`` in a
checkout (or ``python -m everstep.benchmarks.gpu_check``) prints one line of JSON. It takes under three minutes.

Checked, bit for bit: what is taken on the device, drained into shared memory, rolled back to, and loaded again from
memory and from disk. Measured: what a snapshot costs the trainer, the copies' bandwidth against a plain copy of as many
bytes, and how much a running loop of matrix products slows down. The exit code is 1 where bits differ. Without CUDA the
same is done on the CPU, with small sizes, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def _use_checkout() -> None:
    """Where everstep is not installed: from the checkout that this file lies in."""
    top = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "everstep",
        top / "engine" / "__init__.py",
        submodule_search_locations=[str(top / "engine"), str(top)],
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"no everstep in {top}")
    sys.modules["everstep"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if importlib.util.find_spec("everstep") is None:
    _use_checkout()

import everstep  # noqa: E402
from everstep.memory.arena import Arena  # noqa: E402
from everstep.memory.process import Process  # noqa: E402
from everstep.planning import LayoutPlanner  # noqa: E402
from everstep.snapshot.copier import Copier  # noqa: E402
from everstep.snapshot.device import DeviceSlot  # noqa: E402
from everstep.snapshot.pinning import pin  # noqa: E402

GIB = 1 << 30
CUDA_BYTES = 2 * GIB
CPU_BYTES = 16 << 20
SLOTS = 3
ROOM = 1.5
"""What a slot takes at most, in sizes of the state."""
KINDS: dict[str, dict[str, Any]] = {
    "device_slot": {"device_slots": 1},
    "eager": {"copy": "eager"},
    "overlap": {"copy": "overlap"},
}
REPEATS = 7
LOOP_S = {"cuda": 2.0, "cpu": 0.1}
"""Of one loop of matrix products."""
WAIT_S = 60.0
CHUNK_BYTES = 1 << 20


class Differs(Exception):
    """Bits are not what they were."""


class Trainer:
    """Tensors of many kinds on ``device``, about ``nbytes`` of them, and an optimizer with its state."""

    def __init__(self, device: torch.device, nbytes: int, seed: int) -> None:
        torch.manual_seed(seed)
        width = max(64, int((nbytes / 12 / 8) ** 0.5) // 8 * 8)
        layers = [torch.nn.Linear(width, width, bias=number % 2 == 0) for number in range(8)]
        self.width, self.device = width, device
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(width)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.extra: dict[str, Any] = {
            "half": torch.randn(1001, device=device).to(torch.bfloat16),
            "whole": torch.randint(-9, 9, (33, 7), device=device),
            "mask": torch.rand(77, device=device) > 0.5,
            "turned": torch.randn(40, 50, device=device).t(),
            "scalar": torch.tensor(float(seed), dtype=torch.float64, device=device),
            "host": torch.randn(123),
            "number": seed,
        }
        self.state = everstep.TrainState(model=self.model, optimizer=self.optimizer, extra=self.extra)

    def step(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(16, self.width, device=self.device)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.extra["number"] += 1
        for value in self.extra.values():
            if isinstance(value, torch.Tensor):
                value.copy_(value.flip(0) if value.dim() else value + 1)

    def bits(self) -> dict[str, Any]:
        """Copies of everything, on the host."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for at, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{at}.{name}": value for name, value in state.items()}
        found |= {f"extra.{name}": value for name, value in self.extra.items()}
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return {name: value.detach().cpu().clone() for name, value in tensors.items()} | {
            "number": self.extra["number"]
        }


def same(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Differs, with ``what``, unless all bits are the same."""
    wrong = [name for name in wanted.keys() | found.keys() if not _equal(found.get(name), wanted.get(name))]
    if wrong:
        raise Differs(f"{what}: {len(wrong)} of {len(wanted)} differ, {sorted(wrong)[:5]}")


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    mine, theirs = (value.contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(mine, theirs)


# -- bits


@dataclass(frozen=True)
class Work:
    """Where runs and their arenas lie while they are needed."""

    runs: Path
    arenas: Path

    @contextlib.contextmanager
    def run(self, name: str) -> Iterator[Path]:
        """A run's root; it and its memory are gone afterwards."""
        root, memory = self.runs / name, self.arenas / name
        memory.mkdir()
        try:
            yield root
        finally:
            shutil.rmtree(memory)
            shutil.rmtree(root, ignore_errors=True)

    @contextlib.contextmanager
    def opened(self, root: Path, **memory: Any) -> Iterator[everstep.Checkpointer]:
        with _open(root, path=self.arenas / root.name, **memory) as ckpt:
            yield ckpt


@contextlib.contextmanager
def working(nbytes: int) -> Iterator[Work]:
    """Arenas lie in shared memory, if there is room for slots of ``nbytes``, else in files on disk."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > SLOTS * ROOM * nbytes
    with (
        tempfile.TemporaryDirectory(prefix="everstep-check-") as runs,
        tempfile.TemporaryDirectory(prefix="everstep-check-", dir=shared if roomy else None) as arenas,
    ):
        yield Work(Path(runs), Path(arenas))


@contextlib.contextmanager
def _open(root: Path, **memory: Any) -> Iterator[everstep.Checkpointer]:
    policy = everstep.Policy(full_every=None, slot_timeout_s=WAIT_S, close_timeout_s=WAIT_S)
    ckpt = everstep.Checkpointer(root, memory=everstep.Memory(**memory), policy=policy, agent="inline")
    try:
        yield ckpt
    finally:
        ckpt.close(flush=False)


def check_bits(device: torch.device, nbytes: int, work: Work) -> list[str]:
    """Snapshot, drain, rollback and reload; what was found equal."""
    done = []
    for name, memory in KINDS.items():
        with work.run(f"bits-{name}") as root:
            done += _check_bits(device, nbytes, work, root, name, memory)
    return done


def _check_bits(
    device: torch.device, nbytes: int, work: Work, root: Path, name: str, memory: dict[str, Any]
) -> list[str]:
    done = []
    trainer = Trainer(device, nbytes, seed=1)
    with work.opened(root, **memory) as ckpt:
        ckpt.load(trainer.state)
        for step in range(1, 4):
            trainer.step()
            ckpt.step(step, trainer.state)
        wanted = trainer.bits()
        trainer.step()
        trainer.step()
        ckpt.rollback(reason="a check")
        done.append(f"{name}: rollback from {_tier(ckpt)}")
        same(trainer.bits(), wanted, done[-1])
    for _ in range(2):  # from memory, then, once that is durable and gone from memory, from disk
        other = Trainer(device, nbytes, seed=2)
        other.step()
        with work.opened(root, **memory) as ckpt:
            ckpt.load(other.state)
            done.append(f"{name}: load from {_tier(ckpt)}")
            same(other.bits(), wanted, done[-1])
            ckpt.close()
    return done


def _tier(ckpt: everstep.Checkpointer) -> str:
    return ckpt.recovery.tier if ckpt.recovery is not None else "nowhere"


# -- times


class Clock:
    """Seconds on the host, and of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def time(self, act: Callable[[], object]) -> tuple[float, float]:
        """(until ``act`` returns, until the current stream has done what it was given)."""
        self.wait()
        began = time.perf_counter()
        act()
        returned = time.perf_counter() - began
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        return returned, time.perf_counter() - began


def median(clock: Clock, act: Callable[[], object]) -> float:
    """Seconds until the stream has done ``act``."""
    clock.time(act)
    return statistics.median(clock.time(act)[1] for _ in range(REPEATS))


def ceilings(device: torch.device, nbytes: int, clock: Clock) -> dict[str, float]:
    """Bytes per second of plain copies of one flat buffer."""
    cuda = device.type == "cuda"
    one, two = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
    return {
        "beside_bytes_per_s": nbytes / median(clock, lambda: two.copy_(one)),
        "to_host_bytes_per_s": nbytes / median(clock, lambda: host.copy_(one, non_blocking=True)),
    }


def copies(trainer: Trainer, clock: Clock, directory: Path) -> dict[str, Any]:
    """The two copies of a snapshot, one by one: beside the tensors, and from there into a slot."""
    flat = trainer.state.flatten()
    plan = LayoutPlanner(0, 1).plan(flat)
    room = sum(-(-size // 4096) * 4096 for _, size in plan.regions(len(flat.state), 0)) + (1 << 20)
    arena = Arena.create(
        directory,
        run_key="check",
        node="check",
        rank=0,
        world=1,
        slot_bytes=room,
        chunk_bytes=CHUNK_BYTES,
    )
    try:
        arena.take(Process.current(), run_id="check", incarnation=1, world=1)
        pinned = pin(arena)
        device, copier = DeviceSlot(), Copier()
        beside, drains = [], []
        for step in range(1, REPEATS + 3):
            beside.append(clock.time(lambda: device.take((1, 1), plan, flat.leaves, flat.state))[1])
            slot = arena.begin(1, step, complete=(1, step - 1))
            if slot is None:
                raise SystemExit("no slot became free")
            places = copier.lay_around(slot, plan, state=flat.state, meta=b"")
            began = time.perf_counter()
            device.drain(slot, plan, places).wait(WAIT_S)
            drains.append(time.perf_counter() - began)
        nbytes = sum(leaf.nbytes for leaf in flat.leaves)
        return {
            "nbytes": nbytes,
            "tensors": len(flat.leaves),
            "pinned": pinned,
            "beside_bytes_per_s": nbytes / statistics.median(beside[2:]),
            "to_host_bytes_per_s": nbytes / statistics.median(drains[2:]),
        }
    finally:
        arena.unlink()
        arena.close()


def stalls(device: torch.device, nbytes: int, clock: Clock, work: Work) -> dict[str, Any]:
    """By kind of copy: seconds that a snapshot keeps the host, and the device's stream, from training; and those of a
    rollback."""
    found = {}
    for name, memory in KINDS.items():
        with work.run(f"stall-{name}") as root:
            found[name] = _stall(Trainer(device, nbytes, seed=3), clock, work, root, memory)
    return found


def _stall(
    trainer: Trainer, clock: Clock, work: Work, root: Path, memory: dict[str, Any]
) -> dict[str, float]:
    with work.opened(root, **memory) as ckpt:
        ckpt.load(trainer.state)
        times = []
        for step in range(1, REPEATS + 4):
            trainer.step()
            times.append(clock.time(functools.partial(ckpt.step, step, trainer.state)))
        trainer.step()
        rollback = clock.time(lambda: ckpt.rollback(reason="a check"))[1]
    host, stream = zip(*times[3:], strict=True)
    return {
        "host_s": statistics.median(host),
        "stream_s": statistics.median(stream),
        "rollback_s": rollback,
    }


def slow_down(device: torch.device, nbytes: int, clock: Clock, work: Work) -> float:
    """A loop of matrix products with a snapshot in each round, against one without; the middle of paired runs."""
    side = 8192 if device.type == "cuda" else 256
    factor = torch.randn(side, side, device=device, dtype=torch.bfloat16 if side > 256 else torch.float32)
    trainer = Trainer(device, nbytes, seed=4)

    def products(count: int) -> None:
        value = factor
        for _ in range(count):
            value = factor @ value

    products(3)
    per_round = max(1, round(LOOP_S[device.type] / 4 / max(clock.time(lambda: products(4))[1] / 4, 1e-6)))
    ratios = []
    with work.run("loop") as root, work.opened(root, device_slots=1) as ckpt:
        ckpt.load(trainer.state)
        trainer.step()
        ckpt.step(1, trainer.state)
        step = 1

        def rounds(snapshots: bool) -> None:
            nonlocal step
            for _ in range(4):
                products(per_round)
                if snapshots:
                    step += 1
                    ckpt.step(step, trainer.state)

        for _ in range(3):
            alone = clock.time(lambda: rounds(False))[1]
            ratios.append(clock.time(lambda: rounds(True))[1] / alone - 1)
    return statistics.median(ratios)


def run(nbytes: int | None = None) -> dict[str, Any]:
    """Everything. Differs where bits do."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    size = nbytes or (CUDA_BYTES if cuda else CPU_BYTES)
    clock = Clock(device)
    began = time.perf_counter()
    with warnings.catch_warnings(), working(size) as work:
        warnings.simplefilter("ignore", RuntimeWarning)
        equal = check_bits(device, size // 8 if cuda else size, work)
        trainer = Trainer(device, size, seed=5)
        trainer.step()
        measured = copies(trainer, clock, work.arenas)
        plain = ceilings(device, measured["nbytes"], clock)
        del trainer
        return {
            "benchmark": "gpu-check",
            "device": torch.cuda.get_device_name(device) if cuda else "CPU only: no CUDA here",
            "cuda": cuda,
            "torch": str(torch.__version__),
            "equal": equal,
            "copies": measured,
            "ceilings": plain,
            "beside_vs_ceiling": measured["beside_bytes_per_s"] / plain["beside_bytes_per_s"],
            "to_host_vs_ceiling": measured["to_host_bytes_per_s"] / plain["to_host_bytes_per_s"],
            "stall": stalls(device, size, clock, work),
            "loop_slow_down": slow_down(device, size, clock, work),
            "seconds": time.perf_counter() - began,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, help="size of the state")
    args = parser.parse_args()
    try:
        found = run(args.mib << 20 if args.mib else None)
    except Differs as error:
        print(json.dumps({"benchmark": "gpu-check", "differs": str(error)}))
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
