"""The whole path once: run, flush, commit, load, rotate, fsck."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.store.fsck import check
from everstep.store.rotate import rotate

from tests.store import store_kit as kit


def test_saved_steps_load_and_rotation_leaves_the_kept_ones(tmp_path: Path) -> None:
    async def story() -> None:
        backend = LocalBackend(tmp_path / "run")
        await kit.start_run(backend)
        for step in (9, 10, 100):
            await kit.save(backend, step)
        assert (await kit.loadable(backend))[0] == {(1, 9), (1, 10), (1, 100)}
        assert [finding async for finding in check(backend)] == []
        report = await rotate(backend, await kit.plan_for(backend, 2), is_superseded=kit.not_superseded)
        assert report.removed == [(1, 9)]
        assert await kit.loadable(backend) == ({(1, 10), (1, 100)}, {})
        await rotate(
            backend, await kit.plan_for(backend, 2), is_superseded=kit.not_superseded, tombstone_wait_s=0
        )
        assert not (tmp_path / "run" / names.step_dir(9)).exists()
        assert [finding async for finding in check(backend)] == []
        await backend.close()

    asyncio.run(story())
