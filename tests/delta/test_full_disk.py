"""A run of deltas on a disk of 30 MB, on which a full has no room beside the one that is there."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.agent.merging import Merges
from everstep.errors import NoCheckpoint, Pruned, SaveFailed, StorageFull

from tests.facade.kit import forget_memory, until

from .runs_kit import deltas, stands

DISK = "30m"
FROZEN, TRAINED = 1 << 20, 1 << 19
"""Elements (float32): a full takes 6 MiB, a delta 2 MiB."""
FULL, DELTA = 4 * (FROZEN + TRAINED), 4 * TRAINED
KEPT = 3
MARGIN = 1 << 19
"""For records, votes, and what a file system rounds up."""


class Half:
    """Of the state one third is noise at each step, and the rest never changes."""

    def __init__(self) -> None:
        self.frozen = torch.randn(FROZEN, generator=torch.Generator().manual_seed(7))

    def at(self, step: int) -> dict[str, Any]:
        trained = torch.randn(TRAINED, generator=torch.Generator().manual_seed(step))
        return {"model": {"frozen": self.frozen, "trained": trained, "count": step}}

    def is_at(self, step: int, found: dict[str, Any]) -> bool:
        want = self.at(step)["model"]
        return found["model"]["count"] == step and all(
            torch.equal(found["model"][key], want[key]) for key in ("frozen", "trained")
        )


@pytest.fixture
def disk(root: Path) -> Iterator[Path]:
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(root)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield root
    forget_memory(root)
    subprocess.run(["umount", "-l", str(root)], check=True)


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


class Ballast:
    """A file of somebody else."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._path = disk / "ballast"

    def leave(self, nbytes: int) -> None:
        """So much of the disk is left free."""
        self.drop()
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free(self._disk) - nbytes)

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)


def run_on(disk: Path) -> everstep.Checkpointer:
    return deltas(disk, full_every=None, max_chain=3, keep_last=KEPT, failures_max=None)


def saved(ckpt: everstep.Checkpointer, work: Half, step: int) -> bool:
    handle = ckpt.step(step, work.at(step))
    assert handle is not None
    try:
        handle.wait()
    except SaveFailed as error:
        assert isinstance(error, StorageFull) or "no room" in str(error), error
        return False
    return True


def all_load(disk: Path, work: Half) -> list[int]:
    """The steps that stand, but for those that rotation removes meanwhile."""
    found = []
    for step in sorted(stands(disk)):
        try:
            assert work.is_at(step, everstep.load(disk, step=step))
            found.append(step)
        except (NoCheckpoint, Pruned):
            assert step not in stands(disk)
    return found


def merging(ckpt: everstep.Checkpointer) -> list[int]:
    return ckpt.status()["agent"]["merging"]  # type: ignore[no-any-return]


def test_a_merge_makes_way_for_a_flush(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written all its shares, and would be committed, when a flush finds no room."""
    really: Callable[..., Any] = Merges._conclude
    hold = [True]

    async def conclude(merges: Merges, entry: Any) -> Any:
        while hold:
            await asyncio.sleep(0.01)
        return await really(merges, entry)

    monkeypatch.setattr(Merges, "_conclude", conclude)
    work, ballast = Half(), Ballast(disk)
    ckpt = run_on(disk)
    ckpt.load(work.at(0))
    step = 0
    while not list(disk.glob("checkpoints/*/*/a2/*.vote")):
        step += 1
        assert saved(ckpt, work, step) and step < 8
        until(
            lambda: not merging(ckpt) or list(disk.glob("checkpoints/*/*/a2/*.vote")), "shares, or no merge"
        )
    kept = all_load(disk, work)[-KEPT:]
    ballast.leave(DELTA // 2)
    with pytest.warns(RuntimeWarning, match="room"):
        assert not saved(ckpt, work, step + 1)
        until(lambda: not merging(ckpt), "the merge has made way")
        until(lambda: not list(disk.glob("checkpoints/*/*/a2/*")), "and its bytes are gone")
        assert free(disk) >= DELTA + MARGIN
        assert set(kept) <= set(all_load(disk, work))
        assert saved(ckpt, work, step + 2)
    assert max(all_load(disk, work)) == step + 2
    # With room again, a later one becomes a full, and what it replaces goes.
    hold.clear()
    ballast.drop()
    for later in range(step + 3, step + 12):
        assert saved(ckpt, work, later)
        until(lambda: not merging(ckpt), "nothing is merged")
    fulls = [at for at, one in stands(disk).items() if one.kind == "full"]
    assert fulls and min(fulls) > step
    ckpt.close()
    assert all_load(disk, work)[-1] == step + 11


def test_training_goes_on_where_no_merge_has_room(disk: Path) -> None:
    """For as long as it lasts: what retention gives up has the room of the next delta."""
    work, ballast = Half(), Ballast(disk)
    ckpt = run_on(disk)
    ckpt.load(work.at(0))
    with pytest.warns(RuntimeWarning):
        for step in (1, 2):
            assert saved(ckpt, work, step)
        ballast.leave(
            3 * DELTA + 2 * MARGIN
        )  # for a delta, and those that wait to be removed; not for a full
        done = []
        for step in range(3, 25):
            done += [step] if saved(ckpt, work, step) else []
            newest = max(stands(disk))
            assert newest == max([2, *done]) and work.is_at(newest, everstep.load(disk, step=newest))
        assert len(done) > 11, done
        all_load(disk, work)
        ballast.drop()
        for step in range(25, 34):
            assert saved(ckpt, work, step)
            until(lambda: not merging(ckpt), "nothing is merged")
    ckpt.close()
    fulls = [at for at, one in stands(disk).items() if one.kind == "full"]
    assert fulls and min(fulls) > 24
    assert all_load(disk, work)[-1] == 33
    used = sum(path.stat().st_blocks * 512 for path in disk.rglob("*"))
    assert used < 2 * FULL + 6 * DELTA + MARGIN, "nothing is left behind"
