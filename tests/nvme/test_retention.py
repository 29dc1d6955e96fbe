"""What goes from a node's tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Retention
from everstep.store.blocking import run_blocking
from everstep.store.runs import create_run, read_incarnations
from everstep.store.staged import retain

from tests.small_run import CHUNK, open_incarnation

from .kit import staged


@pytest.mark.parametrize(
    ("keep", "newest", "in_use", "left"),
    [
        (Retention(2), 6, (), [5, 6]),
        (Retention(1), 4, (), [4, 5, 6]),
        (Retention(1), 4, (2,), [2, 4, 5, 6]),
        (Retention(1, keep_every=2), 5, (), [2, 4, 5, 6]),
        (Retention(9), 6, (), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_nothing_newer_than_the_root_and_nothing_in_use(
    tmp_path: Path, keep: Retention, newest: int, in_use: tuple[int, ...], left: list[int]
) -> None:
    near, root = LocalBackend(tmp_path / "nvme"), LocalBackend(tmp_path / "run")

    async def look() -> Lineage:
        for step in range(1, 7):
            for name in (names.vote(step, 1, 1, 0), names.state(step, 1, 1, 0)):
                await near.write(name, b"x")
        return Lineage(await read_incarnations(root))

    async def crash() -> None:
        writer = await near.open_writer(names.image(1, 1, 2, 0, "model"), 4)
        await writer.write(memoryview(b"half"))
        assert await near.leftovers(names.checkpoint_dir(1, 1))

    run_blocking(create_run(root, chunk_bytes=CHUNK))
    open_incarnation(root, 1, None)
    lineage = run_blocking(look())
    run_blocking(crash())
    removed = run_blocking(retain(near, keep, lineage, (1, newest), {(1, step) for step in in_use}))
    assert staged(tmp_path / "nvme") == left
    assert sorted([*left, *(step for _, step in removed)]) == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "nvme").glob("checkpoints/000000001/*/*/*")) or 1 in left
