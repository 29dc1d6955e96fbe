"""What goes from a node's tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Retention
from everstep.store.blocking import run_blocking
from everstep.store.runs import create_run, read_incarnations
from everstep.store.staged import discard, retain

from tests.shelves import kit as chains
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


def test_bases_of_what_stays_stay(tmp_path: Path) -> None:
    near = LocalBackend(tmp_path / "run")

    async def story() -> list[list[int]]:
        found = []
        full = await chains.save(near, 1)
        second = await chains.save(near, 2, full)
        third = await chains.save(near, 3, second)
        await chains.save(near, 4, full)
        lineage = Lineage(await read_incarnations(near))
        stood: dict[Any, Any] = {}
        for newest, in_use in ((4, {(1, 3)}), (4, ())):
            await retain(near, Retention(1), lineage, (1, newest), in_use, stood=stood)
            found.append(staged(tmp_path / "run"))
        other = await chains.save(near, 5)
        await retain(near, Retention(1), lineage, (1, 5), stood=stood)
        found.append(staged(tmp_path / "run"))  # what is decided may stand on either full
        await chains.save(near, 6, other)
        await retain(near, Retention(1), lineage, (1, 6), stood=stood)
        found.append(staged(tmp_path / "run"))
        await discard(near, names.checkpoint_dir(5, 1))
        await chains.save(near, 7)
        await retain(near, Retention(1), lineage, (1, 6), stood=stood)
        found.append(staged(tmp_path / "run"))  # what lacks its base here is as good as any
        assert third.parent_key == (1, 2) and {one.step for one in stood} <= {6, 7}
        return found

    run_blocking(create_run(near, chunk_bytes=CHUNK))
    open_incarnation(near, chains.WORLD, None)
    assert run_blocking(story()) == [[1, 2, 3, 4], [1, 4], [1, 5], [5, 6], [6, 7]]
