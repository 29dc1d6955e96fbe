"""Repair from places that have a checkpoint stored in another way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.store.commit import try_commit
from everstep.store.findings import Severity
from everstep.store.flush import FlushJob
from everstep.store.merge import merge_rank
from everstep.store.mirror import conclude, copy_records, mirror_rank
from everstep.store.repair_run import check_and_mend
from everstep.store.runs import open_run
from everstep.store.sources import DurableSource

from tests.repair.damages import flip, remove
from tests.shelves import kit


async def merged(backend: LocalBackend, delta: Manifest) -> None:
    run = await open_run(backend)
    source = DurableSource(backend, delta, run.chunk_bytes)
    with ThreadPoolExecutor(1) as pool:
        for rank in range(kit.WORLD):
            job = FlushJob(delta.step, delta.incarnation, 2, rank, kit.WORLD)
            await merge_rank(backend, job, source, run=run, pool=pool)
    found = await try_commit(backend, delta.step, delta.incarnation, 2, kit.WORLD)
    assert isinstance(found, Manifest) and found.kind == "full"


async def merged_beside_a_delta(backend: LocalBackend, tier: Path) -> LocalBackend:
    """Step 2 is a synthetic full here; the tier, which is given back, has the delta that it was."""
    full = await kit.save(backend, 1)
    delta = await kit.save(backend, 2, full)
    beside = LocalBackend(tier)
    run = await copy_records(backend, beside)
    with ThreadPoolExecutor(1) as pool:
        for manifest in (full, delta):
            for rank in range(kit.WORLD):
                await mirror_rank(backend, beside, manifest, rank, run=run, pool=pool)
            await conclude(backend, beside, manifest)
    await merged(backend, delta)
    return beside


@pytest.mark.parametrize("harm", [flip(-5), remove])
def test_a_synthetic_full_is_mended_from_the_delta_that_a_tier_has(tmp_path: Path, harm: object) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    image = root / names.image(2, 1, 2, 0, "model")
    state = root / names.state(2, 1, 2, 1)

    async def work(backend: LocalBackend) -> None:
        beside = await merged_beside_a_delta(backend, tier)
        right = image.read_bytes(), state.read_bytes()
        for path in (image, state):
            harm(path)  # type: ignore[operator]
        mended = await check_and_mend(backend, others=[beside])
        assert [f for f in mended.after if f.severity is Severity.DAMAGE] == [], mended
        assert (image.read_bytes(), state.read_bytes()) == right
        assert all(beside.url in one.how for one in mended.done)
        await beside.close()

    kit.with_run(root, work)


def test_nothing_is_taken_that_is_not_right(tmp_path: Path) -> None:
    """The tier's delta is damaged, too."""
    root, tier = tmp_path / "run", tmp_path / "tier"

    async def work(backend: LocalBackend) -> None:
        beside = await merged_beside_a_delta(backend, tier)
        flip(5)(tier / names.packed(2, 1, 1, 0, "model"))
        image = root / names.image(2, 1, 2, 0, "model")
        flip(-5)(image)
        harmed = image.read_bytes()
        mended = await check_and_mend(backend, others=[beside])
        assert image.read_bytes() == harmed and names.image(2, 1, 2, 0, "model") in mended.failed
        await beside.close()

    kit.with_run(root, work)
