"""Jobs whose ranks are threads on simulated nodes, with every byte counted that they read from the root."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep.agent.values import TierSettings
from everstep.backends.api import Backend
from everstep.backends.open import open_backend
from everstep.backends.wrap import Wrapper
from everstep.loading import Loader, Recovery
from everstep.mending import Mending
from everstep.places import locate
from everstep.plan.retention import Retention
from everstep.ranks import Ranks
from everstep.reading import into_state
from everstep.state.sharded import Shards
from everstep.store.blocking import run_blocking
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.exchange.kit import Job, erase

from .worlds import numbered, rows

TIMEOUT_S = 30.0
TENSORS = 5
FULL = numbered(1000, 601)
"""Each tensor: a share has several chunks of a megabyte, and is not a number of whole ones."""

Make = Callable[[int, int, float], everstep.TrainState]
"""The state of one rank (rank, world), each number multiplied."""


def replicated(rank: int, world: int, times: float) -> everstep.TrainState:
    """As DDP holds it: one model on all ranks, of which each stores some."""
    model = {f"t{at}": (FULL + at) * times for at in range(TENSORS)}
    return everstep.TrainState(rng=False, replicated={"model"}, model=model, note={"n": 3 * times})


def sharded(rank: int, world: int, times: float) -> everstep.TrainState:
    """As FSDP holds it: rows of each tensor, and a small one that all have."""
    size = -(-len(FULL) // world)
    begin, end = min(rank * size, len(FULL)), min((rank + 1) * size, len(FULL))
    model = {f"t{at}": rows((FULL + at) * times, begin, end) for at in range(TENSORS)}
    small = {"s": torch.ones(5) * times}
    return everstep.TrainState(rng=False, replicated={"small"}, model=model, small=small)


def tensors_of(state: everstep.TrainState) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in state.live_parts().values():
        for value in part.values():
            found += value.tensors if isinstance(value, Shards) else []
            found += [value] if isinstance(value, torch.Tensor) else []
    return found


class Read(Wrapper):
    """A backend, with the bytes that were read of each object."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.nbytes: Counter[str] = Counter()

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        data = await self.inner.read(name, nbytes_max)
        self.nbytes[name] += len(data)
        return data

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self.nbytes[name] += view.nbytes
        await self.inner.read_into(name, offset, view)


@dataclass
class Loaded:
    """What one rank's load gave, and read: from the root, and from its node's tier."""

    recovery: Recovery
    root: Mapping[str, int]
    near: Mapping[str, int]
    warned: list[str] = field(default_factory=list)


def save(job: Job, node: str, make: Make, world: int, steps: Sequence[int] = (1,)) -> None:
    """As ``world`` ranks of one node, all durable at the root; nothing stays in memory."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Any) -> None:
        with ckpt:
            ckpt.load(make(rank, world, 0))
            for step in steps:
                ckpt.save(step, make(rank, world, step)).wait()

    job.run([node] * world, body, policy={"keep_last": 100})
    erase(job.root, node)


def load(
    root: Path,
    places: Sequence[str],
    make: Make,
    *,
    near: Callable[[str], Path] | None = None,
    mend: bool = False,
    keep_last: int = 2,
    step: int | None = None,
) -> list[Loaded]:
    """One rank on each of ``places`` (names of nodes) loads, each on a thread, and has every bit of the step."""
    store = HashStore()
    results: list[Any] = [None] * len(places)

    def run(rank: int) -> None:
        backend = Read(open_backend(locate(root).url, shared=True))
        tier = _tier(near(places[rank]), keep_last) if near is not None else None
        own = Read(open_backend(tier.url)) if tier is not None else None
        try:
            ranks = Ranks(rank, len(places), store if len(places) > 1 else None, prefix="t")
            mending = Mending(own, tier, timeout_s=TIMEOUT_S) if mend else None
            loader = Loader(
                backend, ranks, [], timeout_s=TIMEOUT_S, node=places[rank], near=own, mending=mending
            )
            state = make(rank, len(places), 0)
            bring = mending.bring if mending is not None else None
            found = loader.load(into_state(state, bring=bring), step=step)
            assert found is not None
            wanted = tensors_of(make(rank, len(places), found[0].step))
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), wanted, strict=True))
            results[rank] = Loaded(found[0], backend.nbytes, own.nbytes if own is not None else {})
        except BaseException as error:
            results[rank] = error
        finally:
            run_blocking(backend.close())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
        result.warned = [str(one.message) for one in caught if "random numbers" not in str(one.message)]
    return results


def _tier(path: Path, keep_last: int) -> TierSettings:
    return TierSettings("nvme", locate(path).url, Retention(keep_last), None, node=True)


def read_by(loaded: Sequence[Loaded], suffix: str = ".safetensors") -> dict[str, int]:
    """Bytes that these ranks together read from the root, by object."""
    total: Counter[str] = Counter()
    for one in loaded:
        total.update({name: nbytes for name, nbytes in one.root.items() if name.endswith(suffix)})
    return dict(total)


def stored(root: Path, step: int, suffix: str = ".safetensors") -> dict[str, int]:
    """Sizes of the step's objects at the root."""
    directory = root / "checkpoints" / f"{step:09d}"
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in directory.rglob(f"*{suffix}")
        if path.is_file()
    }
