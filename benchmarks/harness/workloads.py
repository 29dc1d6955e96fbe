"""Which workloads there are, by name. A new one is a function that builds its state, and an entry here; one that does
something else than saving and loading has a ``run`` of its own (see :mod:`.training`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .systems import UnknownName

if TYPE_CHECKING:
    from .api import State
    from .measuring import Bench

Build = Callable[[int, int, int], "State"]
"""State of about so many bytes, all ranks together, for (rank, world)."""


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


def _loop(nbytes: int, rank: int, world: int) -> State:
    from .training import LoopState

    return LoopState(nbytes)


def _train(bench: Bench) -> None:
    from .training import train

    train(bench)


def _recover(bench: Bench) -> None:
    from .recovery import recover

    recover(bench)


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
)


def chosen(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, or all. Raises UnknownName, telling the known ones."""
    known = {workload.name: workload for workload in ALL}
    for name in names:
        if name not in known:
            raise UnknownName(f"there is no workload {name!r}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(ALL)


__all__ = ["ALL", "Workload", "chosen", "save_and_load"]
