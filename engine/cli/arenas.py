"""Arenas of this node, as the commands see them: looking makes no directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

MEMORY = Path("/dev/shm")

memory_option = click.option(
    "--memory",
    type=click.Path(path_type=Path, file_okay=False),
    default=MEMORY,
    show_default=True,
    help="Where this node's arenas lie (Memory(path=...)).",
)
KINDS = ("own", "held", "parity")


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """One snapshot of one rank in this node's memory. ``kind``: "own" of a rank that ran here, "held" for another node,
    or "parity" over those of several (``rank`` means nothing then). ``in_use``: a living process owns the arena."""

    step: int
    incarnation: int
    rank: int
    world: int
    state: str
    in_use: bool
    path: str
    kind: str = "own"


def directory_of_run(memory: Path, run: str) -> Path:
    """Where the arenas of ``run`` lie on this node, whether there are any or not."""
    from everstep.places import locate

    return _of_user(memory) / locate(run).run_key


def arena_directories(memory: Path) -> list[Path]:
    """The directories of all runs of this user that have, or had, arenas here."""
    top = _of_user(memory)
    if not top.is_dir() or top.is_symlink():
        return []
    return sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())


def memory_snapshots(directory: Path) -> list[MemorySnapshot]:
    """Every readable snapshot in a run's arenas, by step and rank."""
    from everstep.errors import EverstepError
    from everstep.memory.arena import Arena
    from everstep.memory.directory import find_arenas

    found: list[MemorySnapshot] = []
    for info in find_arenas(directory):
        if info.path is None:
            continue
        try:
            with Arena.attach(info.path) as arena:
                snapshots = arena.snapshots()
        except (EverstepError, OSError):
            continue
        in_use = info.owner is not None and info.owner.alive()
        found += [
            MemorySnapshot(
                x.step,
                x.incarnation,
                info.rank,
                info.world,
                x.state.name.lower(),
                in_use,
                str(info.path),
                info.kind.name.lower(),
            )
            for x in snapshots
        ]
    return sorted(found, key=lambda x: (x.incarnation, x.step, KINDS.index(x.kind), x.rank))


def ranks_here(snapshots: Sequence[MemorySnapshot]) -> str:
    """Whose snapshots these are, as text: own ranks, those that are held for other nodes, parity."""
    told = []
    for kind in KINDS:
        ranks = sorted({x.rank for x in snapshots if x.kind == kind})
        if kind == "parity" and ranks:
            told.append("parity")
        elif ranks:
            told.append(("held " if kind == "held" else "") + ",".join(map(str, ranks)))
    return "; ".join(told)


def _of_user(memory: Path) -> Path:
    return memory / f"everstep-{os.geteuid()}"
