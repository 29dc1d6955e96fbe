"""Saved under one mesh, loaded under another: parameters, moments and loss are the unsharded reference's, bit for
bit, from disk and from memory."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import job, launch
from .meshes import MESHES

PAIRS = [
    ("one", "fsdp2"),
    ("ddp2", "one"),
    ("ddp2", "fsdp3"),
    ("fsdp2", "fsdp4"),
    ("fsdp3", "fsdp2"),
    ("fsdp4", "one"),
    ("fsdp4", "tp2"),
    ("fsdp8", "fsdp3"),
    ("hsdp2x2", "fsdp2"),
    ("fsdp2", "hsdp2x2"),
    ("tp2", "fsdp2xtp2"),
    ("fsdp2xtp2", "fsdp4"),
    ("fsdp3xtp2", "ddp3"),
    ("fsdp2", "fsdp3xtp2"),
    ("fsdp3xtp2", "fsdp2xtp2"),
    ("pp2", "one"),
    ("pp2", "pp4"),
    ("pp4", "fsdp2"),
    ("pp2xfsdp2", "pp2"),
    ("fsdp8", "pp2xfsdp2"),
    ("fsdp3", "fsdp8"),
    ("fsdp4", "fsdp4"),
    ("fsdp4", "pp4"),
    ("pp4", "hsdp2x2"),
    ("hsdp2x2", "pp2xfsdp2"),
    ("pp2xfsdp2", "fsdp2xtp2"),
    ("pp2xfsdp2xtp2", "fsdp3"),
    ("fsdp3xtp2", "pp2xfsdp2xtp2"),
]
SAMPLE = [
    ("ddp2", "fsdp3"),
    ("fsdp2", "hsdp2x2"),
    ("tp2", "fsdp2xtp2"),
    ("pp2", "one"),
    ("pp2xfsdp2", "pp2"),
]
"""Each kind once, with few ranks."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="everstep-matrix-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run_pairs(pairs: list[tuple[str, str]], directory: Path, shared: Path) -> None:
    """One job per mesh that saves, and one per mesh that loads, for all of its sources."""
    for saved in sorted({pair[0] for pair in pairs}):
        world = MESHES[saved][0]
        launch.run(world, job.save, saved, directory / saved, None)
        (shared / saved).mkdir()
        launch.run(world, job.save, saved, directory / f"{saved}-memory", shared / saved)
    sources: dict[str, list[tuple[str, Path, Path | None]]] = defaultdict(list)
    for saved, loaded in pairs:
        sources[loaded] += [
            (saved, directory / saved, None),
            (saved, directory / f"{saved}-memory", shared / saved),
        ]
    wrong = []
    for loaded, some in sorted(sources.items()):
        for rank, found in enumerate(launch.run(MESHES[loaded][0], job.load, loaded, some)):
            wrong += [f"{s} -> {loaded}, rank {rank}: {text}" for s, texts in found.items() for text in texts]
    assert not wrong, "\n".join(wrong)


def test_the_list_is_long_enough() -> None:
    assert len(set(PAIRS)) >= 12 and {name for pair in PAIRS for name in pair} == set(MESHES) - {"fsdp16"}
    assert set(SAMPLE) < set(PAIRS)


def test_some_pairs(tmp_path: Path, shared: Path) -> None:
    run_pairs(SAMPLE, tmp_path, shared)


@pytest.mark.long
def test_all_pairs(tmp_path: Path, shared: Path) -> None:
    run_pairs(PAIRS, tmp_path, shared)
