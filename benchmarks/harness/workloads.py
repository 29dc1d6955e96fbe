"""Which workloads there are, by name. A new one is a function that builds its state, and an entry here; one that does
something else than saving and loading has a ``run`` of its own (see :mod:`.training`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .shapes import LLAMA_8B, LLAMA_70B, LLAMA_405B, Family
from .systems import UnknownName

if TYPE_CHECKING:
    from .api import State
    from .measuring import Bench

Build = Callable[[int, int, int], "State"]
"""State of about so many bytes, all ranks together, for (rank, world); (0, 1), without a group, for floors."""


def save_and_load(bench: Bench) -> None:
    """Saves, then cold loads."""
    from .measuring import measure

    measure(bench)


@dataclass(frozen=True)
class Workload:
    """``build`` and ``run`` are called in a worker, of which there are ``ranks`` (process group: gloo). ``floors``:
    those of :data:`~.results.FLOORS` that are measured in the state's size. A system takes part if it can do one of
    ``works``, and "ranks" where there are several; ``by_default``: only these, unless others are asked for by name.
    ``default_mib``, ``repeats`` and ``rounds`` are for who does not say: chosen so that all that the summary needs
    takes less than 20 minutes on two cores. ``memory``: whether memory is looked at."""

    name: str
    meaning: str
    build: Build
    run: Callable[[Bench], None] = save_and_load
    works: frozenset[str] = frozenset({"save", "load"})
    ranks: int = 1
    default_mib: int = 512
    repeats: int = 3
    rounds: int = 2
    floors: tuple[str, ...] = ("copy", "copy_fresh", "write", "read")
    by_default: tuple[str, ...] | None = None
    memory: bool = False
    copies: int = 1
    """How often each byte is there, all ranks together: what is to be saved is that much less."""
    loaders: tuple[int, ...] = ()
    """Numbers of ranks by which what was saved is loaded afterwards, in launches of their own."""
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run here, None if it can."""
    options: dict[str, object] = field(default_factory=dict)
    """Of the :class:`~.api.Job`."""

    def why_not(self, works: frozenset[str]) -> str | None:
        """Why a system that can do ``works`` has nothing to do here; None if it has."""
        if not works & self.works:
            return f"it can do none of: {', '.join(sorted(self.works))}"
        if self.ranks > 1 and "ranks" not in works:
            return "it does not save from several ranks"
        return None


def _gpt(nbytes: int, rank: int, world: int) -> State:
    from .states import gpt

    return gpt(nbytes)


def _gpt_mixed(nbytes: int, rank: int, world: int) -> State:
    from .states import gpt_mixed

    return gpt_mixed(nbytes)


def _small(count: int) -> Build:
    def build(nbytes: int, rank: int, world: int) -> State:
        from .states import small

        return small(count)(nbytes)

    return build


def _huge(nbytes: int, rank: int, world: int) -> State:
    from .states import huge

    return huge(nbytes)


def _moe(nbytes: int, rank: int, world: int) -> State:
    from .states import moe

    return moe(nbytes)


def _llama(family: Family) -> Build:
    def build(nbytes: int, rank: int, world: int) -> State:
        from .states import llama

        return llama(family)(nbytes)

    return build


def _fully_sharded(nbytes: int, rank: int, world: int) -> State:
    from .sharded import fully_sharded

    return fully_sharded(nbytes, rank, world)


def _replicated(nbytes: int, rank: int, world: int) -> State:
    from .sharded import replicated

    return replicated(nbytes, rank, world)


def _reshard(bench: Bench) -> None:
    from .resharding import reshard

    reshard(bench)


def _trained(nbytes: int, rank: int, world: int) -> State:
    from .deltas import TrainedState

    return TrainedState(nbytes)


def _save_deltas(bench: Bench) -> None:
    from .deltas import save_deltas

    save_deltas(bench)


def _put_and_get(bench: Bench) -> None:
    from .stores import put_and_get

    put_and_get(bench)


def _no_store() -> str | None:
    from .stores import missing

    return missing()


def _loop(nbytes: int, rank: int, world: int) -> State:
    from .training import LoopState

    return LoopState(nbytes)


def _train(bench: Bench) -> None:
    from .training import train

    train(bench)


def _recover(bench: Bench) -> None:
    from .recovery import recover

    recover(bench)


RANKS_FLOORS = ("copy", "copy_fresh", "write", "read", "gloo")

ALL: tuple[Workload, ...] = (
    Workload("gpt-fp32", "a GPT in fp32 and Adam's state", _gpt, memory=True),
    Workload("gpt-bf16", "a GPT in bf16, masters in fp32 and Adam's state", _gpt_mixed, memory=True),
    Workload(
        "small-10k",
        "10,000 tensors of 256 bytes",
        _small(10_000),
        rounds=1,
        by_default=("everstep", "torch", "safetensors", "dcp", "dcp-async-cached", "dlrover"),
    ),
    Workload(
        "small-100k",
        "100,000 tensors of 256 bytes",
        _small(100_000),
        repeats=1,
        rounds=1,
        by_default=("everstep", "torch", "safetensors", "dcp"),
    ),
    Workload("huge", "one tensor", _huge),
    Workload(
        "moe", "a mixture of experts from large to tiny, in bf16, masters in fp32 and Adam's state", _moe
    ),
    Workload("llama-8b", "the shapes of Llama 3.1 8B made smaller, bf16, masters and Adam", _llama(LLAMA_8B)),
    Workload(
        "llama-70b", "the shapes of Llama 3.1 70B made smaller, bf16, masters and Adam", _llama(LLAMA_70B)
    ),
    Workload(
        "llama-405b", "the shapes of Llama 3.1 405B made smaller, bf16, masters and Adam", _llama(LLAMA_405B)
    ),
    Workload(
        "fsdp2",
        "a transformer in fp32 and Adam's state, sharded by FSDP2 over 4 ranks",
        _fully_sharded,
        ranks=4,
        floors=RANKS_FLOORS,
    ),
    Workload(
        "ddp",
        "a transformer in fp32 and Adam's state, the same on 2 ranks of DDP",
        _replicated,
        ranks=2,
        floors=RANKS_FLOORS,
        copies=2,
    ),
    Workload(
        "reshard",
        "saved by 4 ranks of FSDP2, loaded cold by 2 and by 8",
        _fully_sharded,
        run=_reshard,
        works=frozenset({"load"}),
        ranks=4,
        default_mib=256,
        rounds=1,
        floors=RANKS_FLOORS,
        by_default=("everstep", "dcp"),
        loaders=(2, 8),
    ),
    Workload(
        "training",
        "a training loop on one core, the engine on the other: a snapshot every step, flushes behind it",
        _loop,
        run=_train,
        works=frozenset({"async"}),
        default_mib=192,
        repeats=5,
        rounds=1,
        floors=("copy",),
        by_default=("everstep", "everstep-overlap", "dcp-async-cached", "dcp-async-process", "dlrover"),
        options={"every_step": True},
    ),
    Workload(
        "recovery",
        "back from own memory, from another (simulated) node's, and from disk",
        _gpt,
        run=_recover,
        works=frozenset({"recover"}),
        default_mib=1024,
        rounds=1,
        floors=("copy", "read"),
    ),
    Workload(
        "delta",
        "a GPT in training: what changed in 10 steps, saved beside fulls",
        _trained,
        run=_save_deltas,
        works=frozenset({"delta"}),
        default_mib=48,
        rounds=1,
        floors=("write", "read"),
        options={"deltas": True},
    ),
    Workload(
        "s3",
        "saves into, and loads from, an S3 server on this machine",
        _gpt,
        run=_put_and_get,
        works=frozenset({"s3"}),
        default_mib=256,
        repeats=2,
        rounds=1,
        floors=("s3_put", "s3_get"),
        missing=_no_store,
    ),
)


def chosen(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, or all. Raises UnknownName, telling the known ones."""
    known = {workload.name: workload for workload in ALL}
    for name in names:
        if name not in known:
            raise UnknownName(f"there is no workload {name!r}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(ALL)


__all__ = ["ALL", "Workload", "chosen", "save_and_load"]
