"""What lies on disk and in memory of the demonstration's run, as the story needs it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ..backends.api import Backend
from ..backends.open import open_backend
from ..format import names
from ..format.manifest import Manifest
from ..memory.directory import arena_dir
from ..places import locate
from ..store.blocking import run_blocking
from ..store.catalog import list_steps, read_decision
from ..store.findings import Severity
from ..store.fsck import check
from ..store.runs import read_incarnations

MEMORY = Path("/dev/shm")

Checkpoint = tuple[int, int]
"""(incarnation, step)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the run's directory: what is committed (oldest first), and what was begun but is
    undecided."""

    committed: tuple[Checkpoint, ...]
    undecided: tuple[Checkpoint, ...]


def look(root: Path) -> Seen:
    """What a loader would find in ``root``. Nothing where there is no directory yet."""
    return run_blocking(_look(root))


async def _look(root: Path) -> Seen:
    backend = open_backend(str(root))
    try:
        return await _sort_out(backend)
    finally:
        await backend.close()


async def _sort_out(backend: Backend) -> Seen:
    committed: list[Checkpoint] = []
    undecided: list[Checkpoint] = []
    for found in await list_steps(backend):
        decision = await read_decision(backend, found)
        if isinstance(decision, Manifest):
            committed.append((found.incarnation, found.step))
        elif decision is None:
            undecided.append((found.incarnation, found.step))
    return Seen(tuple(committed), tuple(undecided))


def written_files(root: Path, checkpoint: Checkpoint) -> list[str]:
    """Names of the files that lie under a checkpoint's directory, unfinished ones included."""
    incarnation, step = checkpoint
    top = root / names.checkpoint_dir(step, incarnation)
    return sorted(
        str(Path(directory, file).relative_to(root)) for directory, _, files in os.walk(top) for file in files
    )


def adoptions(root: Path) -> list[Checkpoint | None]:
    """What each incarnation of the run went on from, oldest first."""
    return run_blocking(_adoptions(root))


async def _adoptions(root: Path) -> list[Checkpoint | None]:
    backend = open_backend(str(root))
    try:
        records = await read_incarnations(backend)
    finally:
        await backend.close()
    return [
        None
        if r.adopted_incarnation is None or r.adopted_step is None
        else (r.adopted_incarnation, r.adopted_step)
        for r in records
    ]


def damage(root: Path) -> list[str]:
    """What a full check of the run finds damaged, or cannot tell."""
    return run_blocking(_damage(root))


async def _damage(root: Path) -> list[str]:
    backend = open_backend(str(root))
    try:
        bad = (Severity.DAMAGE, Severity.CANNOT_TELL)
        return [finding.message async for finding in check(backend) if finding.severity in bad]
    finally:
        await backend.close()


def forget_memory(root: Path) -> None:
    """Remove the run's arenas and their directory: nobody goes on from them."""
    wipe_memory(root)
    with contextlib.suppress(OSError):
        arena_dir(MEMORY, locate(root).run_key).rmdir()


def wipe_memory(root: Path) -> int:
    """Remove the run's arenas on this node, as the loss of the node would; how many there were."""
    directory = arena_dir(MEMORY, locate(root).run_key)
    arenas = [path for path in directory.iterdir() if path.is_file()]
    for path in arenas:
        path.unlink()
    return len(arenas)
