"""On a store without directories one listing says what many would."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from everstep.backends.api import Capabilities
from everstep.backends.count import Counting
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.vote import STATE_IMAGE
from everstep.store import catalog
from everstep.store.catalog import StepNames, list_step, list_steps, look_at, voted
from everstep.store.commit import try_commit
from everstep.store.rotate import rotate
from everstep.store.runs import add_incarnation, read_incarnations
from everstep.store.shelf import Shelf
from everstep.store.sources import DurableSource

from tests.store import store_kit as kit


class Flat(LocalBackend):
    """Local files, as if each request cost something."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.capabilities = Capabilities(atomic_create=True, shared=True, flat=True)


async def scattered(backend: LocalBackend, rng: random.Random) -> None:
    """Checkpoints in all states, and names that are not ours."""
    for _ in range(rng.randrange(2, 25)):
        step, incarnation = rng.randrange(1, 6), rng.randrange(1, 3)
        attempt, rank = rng.randrange(1, 4), rng.randrange(3)
        place = step, incarnation, attempt
        some = [
            names.decision(step, incarnation, attempt),
            names.vote(*place, rank),
            names.gather(*place, rank),
            names.image(*place, rank, "model"),
            names.state(*place, rank),
            f"{names.checkpoint_dir(step, incarnation)}/notes",
            f"{names.step_dir(step)}/mine/x",
            f"{names.CHECKPOINTS}/readme",
        ]
        for name in rng.sample(some, rng.randrange(1, len(some))):
            await backend.write(name, b"x")


@pytest.mark.parametrize("seed", range(6))
def test_a_flat_listing_says_what_the_directories_say(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        plain, flat = LocalBackend(tmp_path), Counting(Flat(tmp_path))
        await scattered(plain, random.Random(seed))
        found = await list_steps(plain)
        assert found and await list_steps(flat) == found
        assert flat.operations.total() == 1
        for one in found:
            for attempt in (1, 2, 3):
                place = *one.place, attempt
                flat.reset()
                seen = await look_at(flat, *place)
                assert flat.operations.total() == 1
                assert seen == await look_at(plain, *place)
                assert seen.names == await list_step(plain, *one.place)
                assert (list(seen.ranks), list(seen.gathers)) == tuple(await voted(plain, *place))
        monkeypatch.setattr(catalog, "FLAT_ITEMS_MAX", 1)
        assert await list_steps(flat) == found, "too many objects for one listing"
        await plain.close()
        await flat.close()

    asyncio.run(main())


def test_what_never_changes_is_read_once(tmp_path: Path) -> None:
    async def main() -> None:
        backend = Counting(Flat(tmp_path))
        await kit.start_run(backend)
        known = {record.number: record for record in await read_incarnations(backend)}
        for step in (1, 2, 3):
            for rank in range(kit.WORLD):
                await kit.flush(backend, step, rank)
            backend.reset()
            seen = await look_at(backend, step, 1, 1)
            decided = await try_commit(backend, step, 1, 1, kit.WORLD, standing=seen, known=known)
            assert isinstance(decided, Manifest)
            assert backend.operations["list"] == 1 and backend.operations["list_names"] == 1
            layouts = 2 if step == 1 else 0
            assert backend.operations["read"] <= kit.WORLD + layouts, "the votes"
        number = (await add_incarnation(backend, lambda number: kit.incarnation_record(number))).number
        backend.reset()
        assert [one.number for one in await read_incarnations(backend, known)] == [1, number]
        assert backend.operations["read"] == 1 and sorted(known) == [1, number]
        await backend.close()

    asyncio.run(main())


def test_a_tombstone_that_only_waits_is_not_asked_after(tmp_path: Path) -> None:
    async def main() -> None:
        backend = Counting(Flat(tmp_path))
        await kit.start_run(backend)
        for step in (1, 2, 3):
            await kit.save(backend, step)
        plan = await kit.plan_for(backend, 1)
        report = await rotate(backend, plan, is_superseded=kit.not_superseded)
        assert report.removed == [(1, 1), (1, 2)]
        shelf = Shelf()
        seen = (await shelf.look(backend)).seen
        assert len([one for one in seen.values() if one.tombstone is not None]) == 2
        backend.reset()
        again = await rotate(
            backend,
            plan,
            is_superseded=kit.not_superseded,
            shelf=shelf,
        )
        assert again.waiting == [(1, 1), (1, 2)] and not again.removed
        assert backend.operations["list"] == backend.operations.total() == 1
        late = await rotate(
            backend,
            plan,
            is_superseded=kit.not_superseded,
            shelf=shelf,
            tombstone_wait_s=0.0,
        )
        assert late.waiting == [] and [one.key for one in await list_steps(backend)] == [(1, 3)]
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("change", ["longer", "shorter"])
@pytest.mark.parametrize("what", ["vote", "state"])
def test_a_wrong_size_is_told_without_asking_for_it(tmp_path: Path, change: str, what: str) -> None:
    async def main() -> None:
        backend = Counting(LocalBackend(tmp_path))
        run = await kit.start_run(backend)
        manifest = await kit.save(backend, 1)
        name = names.vote(1, 1, 1, 0) if what == "vote" else names.state(1, 1, 1, 0)
        path = tmp_path / name
        data = path.read_bytes()
        path.write_bytes(data + b"x" if change == "longer" else data[:-1])
        source = DurableSource(backend, manifest, run.chunk_bytes)
        backend.reset()
        with pytest.raises(Damaged, match=f"{name}.*wrong size"):
            await source.state(0)
        assert not backend.operations["size"]
        path.write_bytes(data)
        source = DurableSource(backend, manifest, run.chunk_bytes)
        backend.reset()
        assert len(await source.state(0)) == (await source.records(0))[STATE_IMAGE].nbytes
        assert backend.operations.total() == 2
        await backend.close()

    asyncio.run(main())


def test_names_of_a_step() -> None:
    assert StepNames.of(3, 1, ["a2", "a1", "manifest-2.json", "x", "a1"]) == StepNames(3, 1, (2,), (1, 2))
