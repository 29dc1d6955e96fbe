"""A small run whose state is a function of the step, and what a reader makes of it after something was changed."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everstep
import torch
from click.testing import CliRunner
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.errors import EverstepError
from everstep.memory.arena import Arena
from everstep.store.blocking import run_blocking
from everstep.store.runs import create_run

CHUNK_BYTES = 4096
OLD, NEW = 7, 9


def state_of(step: int) -> dict[str, Any]:
    """Several chunks in one part, a small one, and plain values."""
    numbers = torch.arange(3000, dtype=torch.float32)
    return {
        "model": {"w": numbers.reshape(30, 100) * step, "b": numbers[:5].to(torch.bfloat16) + step},
        "optimizer": {"m": numbers[:300].double() - step, "count": step},
        "notes": {"step": step, "text": "x" * 20, "names": ["a", ("b", None)]},
    }


def same(found: Any, step: int) -> bool:
    expected = state_of(step)
    if list(found) != list(expected) or found["notes"] != expected["notes"]:
        return False
    pairs = [(found["model"][key], expected["model"][key]) for key in ("w", "b")]
    pairs.append((found["optimizer"]["m"], expected["optimizer"]["m"]))
    tensors_equal = all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    return tensors_equal and found["optimizer"]["count"] == step


def write(root: Path, memory: Path) -> Path:
    """Steps OLD and NEW, both durable and both in ``memory``; the arena is left there. Returns its path."""
    run_blocking(create_run(LocalBackend(root), chunk_bytes=CHUNK_BYTES))
    policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=10, linger_s=0.2)
    ckpt = everstep.Checkpointer(
        root, memory=everstep.Memory(path=memory, bytes=256 << 10), policy=policy, agent="inline"
    )
    ckpt.load(everstep.TrainState(rng=False, **state_of(0)))
    for step in (OLD, NEW):
        ckpt.save(step, everstep.TrainState(rng=False, **state_of(step))).wait(timeout_s=30)
    (path,) = memory.rglob("*.arena")
    kept = path.read_bytes()
    ckpt.close()
    path.write_bytes(kept)
    path.chmod(0o600)
    return path


@dataclass(frozen=True)
class Answer:
    """What a reader got: a step, or an error, and what was said on the way."""

    step: int | None
    error: EverstepError | None
    told: str


def read(root: Path) -> Answer:
    """Load, and say of which step the values are; AssertionError if of none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = everstep.load(root)
        except EverstepError as error:
            told = [str(one.message) for one in caught] + [str(error)]
            return Answer(None, error, "\n".join(told))
    told = "\n".join(str(one.message) for one in caught)
    assert isinstance(found, dict), f"no values: {found!r}; {told}"
    for step in (NEW, OLD):
        if same(found, step):
            return Answer(step, None, told)
    raise AssertionError(f"wrong values were given; {told}")


def fsck(root: Path) -> tuple[int, str]:
    """Exit code, and all that it said."""
    said = CliRunner().invoke(main, ["fsck", str(root), "--json"])
    if said.exit_code:
        json.loads(said.stdout)
    return said.exit_code, said.stdout + said.stderr


def sealed_steps(path: Path) -> list[int]:
    with Arena.attach(path) as arena:
        return [info.step for info in arena.snapshots() if info.state.name == "SEALED"]
