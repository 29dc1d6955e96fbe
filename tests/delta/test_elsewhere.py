"""Deltas at other places: mirrored, copied, mended; merged into fulls; runs of the former version."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from everstep.backends.count import Counting
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, NoCheckpoint, Pruned
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord
from everstep.store import streaming
from everstep.store.catalog import list_step, list_steps, read_decision
from everstep.store.commit import try_commit
from everstep.store.copying import copy_run
from everstep.store.findings import Kind, Severity
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.fsck import check
from everstep.store.leftovers import collect_leftovers
from everstep.store.mirror import conclude, copy_records, mend_rank, mirror_rank, missing_ranks
from everstep.store.rotate import rotate
from everstep.store.runs import open_run
from everstep.store.sources import DurableSource, bases_at
from everstep.store.staged import bases_near, claim, near_source, upload_rank

from tests.golden import test_golden as golden
from tests.store import store_kit

from . import kit

STATES = [kit.first(rank) for rank in range(kit.WORLD)]
CHANGED = [kit.dense(data, rank) for rank, data in enumerate(STATES)]


async def two(backend: LocalBackend) -> tuple[Manifest, Manifest]:
    full = await kit.save(backend, 1, STATES)
    return full, await kit.save(backend, 2, CHANGED, kit.source_of(backend, full))


async def send(source: LocalBackend, target: LocalBackend, manifest: Manifest) -> Manifest | object:
    run = await copy_records(source, target)
    with ThreadPoolExecutor(2) as pool:
        for rank in range(manifest.world):
            await mirror_rank(source, target, manifest, rank, run=run, pool=pool)
    return await conclude(source, target, manifest)


async def clean(backend: LocalBackend) -> None:
    async for finding in check(backend, decision_wait_s=0):
        assert finding.severity is Severity.INFO, finding


def objects(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("piece", [4 * kit.CHUNK, 8 << 20])
def test_a_mirror_is_the_same_objects_and_nothing_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", piece)

    async def work(backend: LocalBackend) -> None:
        full, delta = await two(backend)
        target = LocalBackend(tmp_path / "target")
        with pytest.raises(NoCheckpoint, match="base of step 2"):
            await send(backend, target, delta)
        assert await send(backend, target, full) == full
        assert await missing_ranks(target, delta) == []
        shutil.rmtree(tmp_path / "run" / names.checkpoint_dir(1, 1))  # no base is asked for
        assert await send(backend, target, delta) == delta
        assert objects(tmp_path / "target" / names.checkpoint_dir(2, 1)) == objects(
            tmp_path / "run" / names.checkpoint_dir(2, 1)
        )
        await kit.load([kit.source_of(target, delta)], CHANGED)
        await clean(target)
        await target.close()

    kit.on(tmp_path, work)


def test_damage_is_found_before_it_is_spread(tmp_path: Path) -> None:
    name = names.packed(2, 1, 1, 1, "model")

    async def work(backend: LocalBackend) -> None:
        full, delta = await two(backend)
        path = tmp_path / "run" / name
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        target = LocalBackend(tmp_path / "target")
        await send(backend, target, full)
        with pytest.raises(Damaged) as caught:
            await send(backend, target, delta)
        assert caught.value.name == name and not (tmp_path / "target" / name).exists()
        assert await missing_ranks(target, delta) == [1]
        await target.close()

    kit.on(tmp_path, work)


def test_mending_writes_what_is_damaged_and_only_that(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full, delta = await two(backend)
        target = LocalBackend(tmp_path / "target")
        for manifest in (full, delta):
            await send(backend, target, manifest)
        name = names.packed(2, 1, 1, 0, "model")
        path = tmp_path / "target" / name
        data = path.read_bytes()
        path.write_bytes(data[:10] + bytes([data[10] ^ 1]) + data[11:])
        counting = Counting(target)
        run = await open_run(backend)
        with ThreadPoolExecutor(2) as pool:
            for rank in range(kit.WORLD):
                await mend_rank(backend, counting, delta, rank, run=run, pool=pool)
        assert path.read_bytes() == data and counting.operations["open_writer"] == 1
        await kit.load([kit.source_of(target, delta)], CHANGED)
        await target.close()

    kit.on(tmp_path, work)


def test_a_copy_of_a_delta_brings_its_chain(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        states, manifest = STATES, await kit.save(backend, 1, STATES)
        for step in (2, 3):
            states = [kit.sparse(data, step) for data in states]
            manifest = await kit.save(backend, step, states, kit.source_of(backend, manifest))
        await kit.save(backend, 4, states)
        target = LocalBackend(tmp_path / "target")
        report = await copy_run(backend, target, steps=[3])
        assert report.copied == [(1, 1), (1, 2), (1, 3)] and not report.failed
        await kit.load([kit.source_of(target, manifest)], states)
        await clean(target)
        await target.close()

    kit.on(tmp_path, work)


def test_what_another_try_left_in_another_encoding_is_no_lack(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        path = tmp_path / "run" / names.image(2, 1, 1, 0, "model")
        path.write_bytes(bytes(1000))
        assert await missing_ranks(backend, delta) == []
        (tmp_path / "run" / names.packed(2, 1, 1, 0, "model")).unlink()
        assert await missing_ranks(backend, delta) == [0]

    kit.on(tmp_path, work)


def test_a_synthetic_full_needs_no_base_and_deltas_stand_on_it(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        later = [kit.sparse(data, 3) for data in CHANGED]
        third = await kit.save(backend, 3, later, kit.source_of(backend, delta))
        reader = kit.source_of(backend, third)
        await kit.load([reader], later)
        merged = await kit.merge(backend, delta)
        assert (merged.attempt, merged.kind, merged.parent) == (2, "full", None)
        found = await read_decision(backend, await list_step(backend, 2, 1))
        assert found == merged
        for rank, data in enumerate(CHANGED):
            for name, image in data.items():
                assert (tmp_path / "run" / names.image(2, 1, 2, rank, name)).read_bytes() == image
        shutil.rmtree(tmp_path / "run" / names.attempt_dir(2, 1, 1))
        shutil.rmtree(tmp_path / "run" / names.checkpoint_dir(1, 1))
        await kit.load([kit.source_of(backend, merged)], CHANGED)
        await kit.load([kit.source_of(backend, third)], later)
        await kit.load([reader], later)  # which knew of the former attempt
        await clean(backend)

    kit.on(tmp_path, work)


@pytest.mark.parametrize("by", ["rotation", "gc"])
def test_what_was_merged_goes_and_whoever_reads_it_is_told(tmp_path: Path, by: str) -> None:
    """As after a kill between the manifest and the removal: the next rotation or gc removes it, fsck tells of it."""

    async def collect(backend: LocalBackend, held: set[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
        if by == "gc":
            return (await collect_leftovers(backend, older_than_s=0)).attempts
        plan = await store_kit.plan_for(backend, keep_last=9)
        superseded = store_kit.not_superseded
        return (await rotate(backend, plan, is_superseded=superseded, held=lambda: held)).collected

    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        later = [kit.dense(data, 7) for data in CHANGED]
        third = await kit.save(backend, 3, later, kit.source_of(backend, delta))
        reader, other = kit.source_of(backend, delta), kit.source_of(backend, third)
        await kit.load([reader], CHANGED, [0])
        await kit.load([other], later, [0])
        full = await kit.merge(backend, delta)
        found = [one async for one in check(backend, decision_wait_s=0) if one.kind is Kind.LEFTOVER]
        assert [one.name for one in found] == [names.attempt_dir(2, 1, 1)] and "replaced" in found[0].message
        if by == "rotation":  # a flush of this process reads it
            assert await collect(backend, {(1, 2)}) == []
        await kit.load([reader], CHANGED, [0])
        assert await collect(backend, set()) == [((1, 2), 1)]
        assert (await list_step(backend, 2, 1)).attempts == (2,)
        with pytest.raises(Pruned):
            await kit.load([reader], CHANGED, [1])
        await kit.load([other], later)  # whose base is looked for anew
        await kit.load([kit.source_of(backend, full)], CHANGED)
        await clean(backend)

    kit.on(tmp_path, work)


def test_a_merge_of_damage_writes_no_vote(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        path = tmp_path / "run" / names.image(1, 1, 1, 0, "model")
        data = path.read_bytes()
        path.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
        with pytest.raises(Damaged) as caught:
            await kit.merge(backend, delta)
        assert caught.value.name == names.image(1, 1, 1, 0, "model")
        assert not (tmp_path / "run" / names.vote(2, 1, 2, 0)).exists()

    kit.on(tmp_path, work)


@pytest.mark.parametrize("far", [3, 9, None], ids=["another chunk", "the same chunk", "no chunk"])
def test_a_merge_reads_what_is_damaged_of_a_base_from_the_next_holder(
    tmp_path: Path, far: int | None
) -> None:
    """Chunk by chunk, the nearest first; where nobody has one right there is no full, and the delta counts."""
    near, base = 9, names.image(1, 1, 1, 0, "model")

    def damage(place: str, chunk: int) -> None:
        path = tmp_path / place / base
        data = bytearray(path.read_bytes())
        data[chunk * kit.CHUNK + 7] ^= 1
        path.write_bytes(data)

    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        later = [kit.sparse(data, 3) for data in CHANGED]
        third = await kit.save(backend, 3, later, kit.source_of(backend, delta))
        shutil.copytree(tmp_path / "run", tmp_path / "far")
        damage("run", near)
        if far is not None:
            damage("far", far)
        other = LocalBackend(tmp_path / "far")
        bases = bases_at([backend, other], kit.CHUNK)
        source = DurableSource(backend, delta, kit.CHUNK, bases=bases)
        if far == near:
            with pytest.raises(Damaged) as caught:
                await kit.merge(backend, delta, source)
            assert (caught.value.name, caught.value.fields["offset"]) == (base, near * kit.CHUNK)
            assert not (tmp_path / "run" / names.vote(2, 1, 2, 0)).exists()
            assert await read_decision(backend, await list_step(backend, 2, 1)) == delta
        else:
            full = await kit.merge(backend, delta, source)
            for rank, data in enumerate(CHANGED):
                for name, image in data.items():
                    assert (tmp_path / "run" / names.image(2, 1, 2, rank, name)).read_bytes() == image
            shutil.rmtree(tmp_path / "run" / names.checkpoint_dir(1, 1))
            assert (await kit.load([kit.source_of(backend, full)], CHANGED)).fallbacks == []
            await kit.load([kit.source_of(backend, third)], later)
        await other.close()

    kit.on(tmp_path, work)


async def flush_to(
    backend: LocalBackend,
    step: int,
    states: list[kit.Data],
    base: DurableSource,
    *,
    run: RunRecord,
    incarnation: int = 1,
) -> None:
    """All ranks' shares of a step, based on what may lie elsewhere."""
    for rank, data in enumerate(states):
        pinned = kit.snapshot(step, rank, data, incarnation=incarnation)
        pinned.chunk_bytes = run.chunk_bytes
        job = FlushJob(step, incarnation, 1, rank, kit.WORLD)
        await flush_rank(
            backend,
            job,
            pinned,  # type: ignore[arg-type]
            chunk_bytes=run.chunk_bytes,
            run=run,
            base=base,
        )


def test_a_staged_delta_is_uploaded_and_read_beside_its_base(tmp_path: Path) -> None:
    """The node's tier has shares without decisions; the root decides."""

    async def work(root: LocalBackend) -> None:
        run = await open_run(root)
        near = LocalBackend(tmp_path / "near")
        await claim(near, run)
        full = await kit.save(root, 1, STATES)
        await flush_to(near, 2, CHANGED, kit.source_of(root, full), run=run)
        with ThreadPoolExecutor(2) as pool:
            for rank in range(kit.WORLD):
                vote = await upload_rank(near, root, (2, 1, 1, rank), run=run, pool=pool)
                assert vote.parent == (1, 1, 1)
        delta = await try_commit(root, 2, 1, 1, kit.WORLD)
        assert isinstance(delta, Manifest) and delta.parent_key == (1, 1)
        source = await near_source(near, delta, run, bases_near(near, [root], run))
        assert source is not None and source.ranks == {0, 1}
        await kit.load([source], CHANGED)
        await near.close()

    kit.on(tmp_path, work)


def test_a_run_of_version_3_is_gone_on_with(tmp_path: Path) -> None:
    """Its layouts are named otherwise, so that the first checkpoint of this version is full; then deltas follow."""
    shutil.copytree(golden.RUNS[3] / "pair", tmp_path / "run")

    async def standing(backend: LocalBackend) -> Manifest:
        decision = await read_decision(backend, (await list_steps(backend))[-1])
        assert isinstance(decision, Manifest)
        return decision

    async def work() -> None:
        backend = LocalBackend(tmp_path / "run")
        run = await open_run(backend)
        assert run.format == 3
        former = await standing(backend)
        for step, states, kind in ((1, STATES, "full"), (2, CHANGED, "delta")):
            base = DurableSource(backend, await standing(backend), run.chunk_bytes)
            place = former.step + step, former.incarnation
            await flush_to(backend, place[0], states, base, run=run, incarnation=place[1])
            found = await try_commit(backend, *place, 1, kit.WORLD)
            assert isinstance(found, Manifest) and found.kind == kind
        source = DurableSource(backend, found, run.chunk_bytes)
        for rank, data in enumerate(CHANGED):
            assert await kit.images(source, rank) == data
        await clean(backend)
        await backend.close()

    asyncio.run(work())
