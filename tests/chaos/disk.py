"""The run's directory as the chaos sees it: what stands, a full disk, damage."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.backends.api import Backend
from everstep.backends.open import open_backend
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.plan.lineage import Lineage
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_steps, read_decision
from everstep.store.findings import Finding, Severity
from everstep.store.fsck import check
from everstep.store.runs import read_incarnations

DISK_BYTES = 24 << 20
Key = tuple[int, int]
"""(incarnation, step)"""


@contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A file system of its own at ``directory``, where this user may mount one; whether it is."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(directory)]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    mounted = done.returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], capture_output=True, timeout=20, check=False)


def fill(directory: Path, leave: int) -> Path:
    """Fill the file system but for about ``leave`` bytes; the file that does it."""
    path = directory / "filler"
    with path.open("ab", buffering=0) as file:
        block = 1 << 16
        while block >= 512:
            try:
                file.write(bytes(block))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block //= 2
        file.truncate(max(0, file.tell() - leave))
    return path


def standing(root: Path) -> list[Key]:
    """Committed checkpoints of the run's lineage, oldest first."""
    return run_blocking(_standing(root)) if (root / "run.json").exists() else []


async def _standing(root: Path) -> list[Key]:
    backend = open_backend(str(root))
    try:
        lineage = Lineage(await read_incarnations(backend))
        return [found.key for found in await list_steps(backend) if await _counts(backend, lineage, found)]
    finally:
        await backend.close()


async def _counts(backend: Backend, lineage: Lineage, found: object) -> bool:
    from everstep.store.catalog import StepNames

    assert isinstance(found, StepNames)
    with contextlib.suppress(EverstepError):
        return lineage.counts(*found.key) and isinstance(await read_decision(backend, found), Manifest)
    return False


def holding_images(root: Path) -> set[Key]:
    """Every checkpoint of which images lie on disk, whatever was decided of it."""
    found = set()
    for path in (root / names.CHECKPOINTS).rglob("*.safetensors"):
        step, incarnation = path.relative_to(root / names.CHECKPOINTS).parts[:2]
        found.add((int(incarnation), int(step)))
    return found


def findings(root: Path) -> list[Finding]:
    """What fsck says is damaged, or cannot tell."""
    return run_blocking(_findings(root)) if (root / "run.json").exists() else []


async def _findings(root: Path) -> list[Finding]:
    backend = open_backend(str(root))
    try:
        bad = (Severity.DAMAGE, Severity.CANNOT_TELL)
        return [finding async for finding in check(backend) if finding.severity in bad]
    finally:
        await backend.close()


def damage(root: Path, key: Key, how: str, draw: random.Random) -> str:
    """Damage one file of the checkpoint; what was done."""
    top = root / names.checkpoint_dir(key[1], key[0])
    files = sorted(Path(where, name) for where, _, found in os.walk(top) for name in found)
    victim = draw.choice([path for path in files if path.stat().st_size])
    size = victim.stat().st_size
    if how == "remove":
        victim.unlink()
        return f"removed {victim.relative_to(root)}"
    at = draw.randrange(size)
    if how == "shorten":
        os.truncate(victim, at)
        return f"shortened {victim.relative_to(root)} from {size} to {at}"
    with victim.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))
    return f"flipped a bit of byte {at} of {victim.relative_to(root)}"
