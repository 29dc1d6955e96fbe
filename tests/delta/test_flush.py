"""Deltas and compressed images: what is written, and that it comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.count import Counting
from everstep.backends.files import LocalBackend
from everstep.errors import BadOption
from everstep.format import names, packed
from everstep.format.layout import Box, EntrySpec, Scope, build_layout
from everstep.format.manifest import Abort, Manifest, Tombstone, encode_decision
from everstep.format.vote import STATE_IMAGE
from everstep.plan.reads import plan_reads
from everstep.store import bases, packing
from everstep.store.catalog import list_step, read_decision, read_decision_at
from everstep.store.commit import try_commit
from everstep.store.fill import fill
from everstep.store.rotate import rotate

from tests.store import store_kit

from . import kit


@pytest.fixture(params=[4 * kit.CHUNK, 8 << 20])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of many pieces, and of one."""
    for module in (bases, packing):
        monkeypatch.setattr(module, "PIECE_BYTES", request.param)


STATES = [kit.first(rank) for rank in range(kit.WORLD)]


@pytest.mark.parametrize("change", [kit.sparse, kit.dense, lambda data, seed: data])
def test_a_delta_comes_back(tmp_path: Path, pieces: None, change: object) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        assert (full.kind, full.parent) == ("full", None)
        changed = [change(data, rank) for rank, data in enumerate(STATES)]  # type: ignore[operator]
        delta = await kit.save(backend, 2, changed, kit.source_of(backend, full))
        assert (delta.kind, delta.parent) == ("delta", {"incarnation": 1, "step": 1, "attempt": 1})
        source = kit.source_of(backend, delta)
        for rank, data in enumerate(changed):
            assert await kit.images(source, rank) == data
            record = delta.ranks[rank]
            sizes = [image.object.nbytes for image in (await source.vote_of(rank)).images[:-1]]
            assert record.stored_nbytes == sum(sizes) < record.images_nbytes * 1.02
        await kit.load([source], changed)
        share = delta.ranks[0].stored_nbytes / delta.ranks[0].images_nbytes
        assert share < (0.95 if change is kit.dense else 0.1)

    kit.on(tmp_path, work)


def test_what_has_not_changed_is_a_reference_and_the_base_is_not_read(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        counting = Counting(backend)
        changed = kit.sparse(STATES[0], 5)
        vote = await kit.flush(backend, 2, 0, changed, kit.source_of(counting, full))
        source = counting.operations
        assert source["read_into"] <= 2, "one chunk of each image has changed"
        record = next(record for record in vote.images if record.name == "model")
        assert record.encoding == "delta" and record.base is not None
        stored = (tmp_path / "run" / record.object_name(2, 1, 1, 0)).read_bytes()
        size = packed.tail_bytes(record.nbytes, kit.CHUNK)
        table = packed.decode_tail(stored[-size:], record.nbytes, kit.CHUNK, len(stored), "x")
        assert sum(code != packed.REFERENCE for code in table.encodings) == 1
        assert vote.images[-1].name == STATE_IMAGE and vote.images[-1].encoding == "plain"

    kit.on(tmp_path, work)


def test_images_are_compressed_when_asked(tmp_path: Path, pieces: None) -> None:
    async def work(backend: LocalBackend) -> None:
        zeros = [kit.zeros(data) for data in STATES]
        manifest = await kit.save(backend, 1, zeros, compress="zstd")
        assert (
            manifest.kind == "full" and manifest.ranks[0].stored_nbytes < manifest.ranks[0].images_nbytes / 20
        )
        await kit.load([kit.source_of(backend, manifest)], zeros)
        delta = await kit.save(backend, 2, STATES, kit.source_of(backend, manifest), compress="zstd")
        await kit.load([kit.source_of(backend, delta)], STATES)
        with pytest.raises(BadOption):
            await kit.flush(backend, 3, 0, STATES[0], compress="brotli")

    kit.on(tmp_path, work)


def test_a_chain_of_deltas_comes_back(tmp_path: Path, pieces: None) -> None:
    async def work(backend: LocalBackend) -> None:
        states, manifest = STATES, await kit.save(backend, 1, STATES)
        for step in range(2, 9):
            change = kit.sparse if step % 3 else kit.dense
            states = [change(data, 10 * step + rank) for rank, data in enumerate(states)]
            manifest = await kit.save(backend, step, states, kit.source_of(backend, manifest))
            assert manifest.parent_key == (1, step - 1)
        await kit.load([kit.source_of(backend, manifest)], states)
        for rank, data in enumerate(states):
            assert await kit.images(kit.source_of(backend, manifest), rank) == data

    kit.on(tmp_path, work)


def test_odd_ranges_are_read_too(tmp_path: Path, pieces: None) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        changed = [kit.dense(data, rank) for rank, data in enumerate(STATES)]
        source = kit.source_of(backend, await kit.save(backend, 2, changed, kit.source_of(backend, full)))
        image = changed[0]["model"]
        for offset, nbytes in ((0, 1), (1, 4096), (4095, 2), (5000, 20000), (len(image) - 3, 3), (7, 0)):
            view = bytearray(nbytes)
            await source.read_into(0, "model", offset, memoryview(view))
            assert view == image[offset : offset + nbytes], (offset, nbytes)

    kit.on(tmp_path, work)


def test_resharding_reads_only_the_chunks_that_it_needs(tmp_path: Path) -> None:
    """One rank that holds rows of the middle of a tensor that two ranks stored."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        changed = [kit.dense(data, rank) for rank, data in enumerate(STATES)]
        delta = await kit.save(backend, 2, changed, kit.source_of(backend, full))
        counting = Counting(backend)
        source = kit.source_of(counting, delta)
        layouts = [await source.layout(rank) for rank in range(kit.WORLD)]
        box = Box((290, 0), (20, 33))
        mine = build_layout([EntrySpec("model", "sharded", "float32", (600, 33), (box,), Scope.GLOBAL)])
        reads = plan_reads(mine.entries, layouts)
        target = bytearray(20 * 33 * 4)
        before = counting.bytes_read
        await fill([source], reads, {0: memoryview(target)}, headers=False)
        expected = b""
        for rank, rows in ((0, slice(290, 300)), (1, slice(0, 10))):
            entry = next(e for e in layouts[rank].entries if e.key == "sharded")
            at = entry.offset + rows.start * 33 * 4
            expected += bytes(changed[rank]["model"][at : at + 10 * 33 * 4])
        assert target == expected
        assert counting.bytes_read - before < 12 * kit.CHUNK, "of about 80 chunks"

    kit.on(tmp_path, work)


@pytest.mark.parametrize("why", ["gone", "damaged vote", "another layout", "not older", "lost image"])
def test_without_a_usable_base_images_are_stored_full(tmp_path: Path, why: str) -> None:
    async def work(backend: LocalBackend) -> None:
        step = 7 if why == "not older" else 1
        full = await kit.save(backend, step, STATES)
        path = tmp_path / "run" / names.checkpoint_dir(step, 1)
        if why == "gone":
            for file in path.rglob("*"):
                if file.is_file():
                    file.unlink()
        elif why == "damaged vote":
            (tmp_path / "run" / names.vote(1, 1, 1, 0)).write_bytes(b"EVSTVOTE")
        elif why == "lost image":
            (tmp_path / "run" / names.image(1, 1, 1, 0, "model")).unlink()
        rows = 602 if why == "another layout" else 600
        data = kit.first(0, rows)
        vote = await kit.flush(backend, 2, 0, data, kit.source_of(backend, full), rows=rows)
        assert vote.kind == "full" and all(record.encoding == "plain" for record in vote.images)
        for name, image in data.items():
            assert (tmp_path / "run" / names.image(2, 1, 1, 0, name)).read_bytes() == image

    kit.on(tmp_path, work)


def test_a_damaged_chunk_of_the_base_is_done_without(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        path = tmp_path / "run" / names.image(1, 1, 1, 0, "model")
        data = bytearray(path.read_bytes())
        changed = [kit.dense(one, rank) for rank, one in enumerate(STATES)]
        data[3 * kit.CHUNK + 5] ^= 1
        path.write_bytes(data)
        delta = await kit.save(backend, 2, changed, kit.source_of(backend, full))
        source = kit.source_of(backend, delta)
        assert await kit.images(source, 0) == changed[0]
        table = await source.table(0, "model")
        assert table is not None and table.encodings[3] not in packed.WITH_BASE
        assert table.encodings[4] in packed.WITH_BASE

    kit.on(tmp_path, work)


def test_a_flush_again_ends_in_the_same_vote(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        changed, base = kit.dense(STATES[0], 1), kit.source_of(backend, full)
        vote = await kit.flush(backend, 2, 0, changed, base)
        assert await kit.flush(backend, 2, 0, changed, base) == vote
        assert await kit.flush(backend, 2, 0, changed) == vote, "the standing vote counts"
        (tmp_path / "run" / names.vote(2, 1, 1, 0)).unlink()
        assert await kit.flush(backend, 2, 0, changed, base) == vote, "the same bytes"

    kit.on(tmp_path, work)


def test_ranks_with_different_bases_are_refused(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        one, two = await kit.save(backend, 1, STATES), await kit.save(backend, 2, STATES)
        for rank, manifest in enumerate((one, two)):
            await kit.flush(backend, 3, rank, STATES[rank], kit.source_of(backend, manifest))
        decision = await try_commit(backend, 3, 1, 1, kit.WORLD)
        assert isinstance(decision, Abort) and "differ in base" in decision.reason

    kit.on(tmp_path, work)


def test_a_rank_may_be_full_where_others_are_deltas(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        await kit.flush(backend, 2, 0, STATES[0])
        await kit.flush(backend, 2, 1, STATES[1], kit.source_of(backend, full))
        decision = await try_commit(backend, 2, 1, 1, kit.WORLD)
        assert isinstance(decision, store_kit.Manifest) and decision.parent_key == (1, 1)
        await kit.load([kit.source_of(backend, decision)], STATES)

    kit.on(tmp_path, work)


def test_a_delta_whose_base_is_removed_in_the_very_moment_goes_too(tmp_path: Path) -> None:
    """The base's tombstone comes between the look at the base and the manifest, as only the other side can see."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        for rank in range(kit.WORLD):
            await kit.flush(backend, 2, rank, STATES[rank], kit.source_of(backend, full))

        def bury(point: str, detail: str) -> None:
            if point == "manifest.before":
                tombstone = Tombstone(1, 1, 2, "retention", "2026-01-31T12:00:00Z")
                (tmp_path / "run" / names.decision(1, 1, 2)).write_bytes(encode_decision(tombstone))

        points.hook = bury
        try:
            decision = await try_commit(backend, 2, 1, 1, kit.WORLD)
        finally:
            points.hook = None
        assert isinstance(decision, Abort) and "its base, step 1" in decision.reason
        assert isinstance(await read_decision(backend, await list_step(backend, 2, 1)), Tombstone)

    kit.on(tmp_path, work)


def test_a_delta_whose_base_was_removed_meanwhile_is_not_committed(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        for rank in range(kit.WORLD):
            await kit.flush(backend, 3, rank, STATES[rank], kit.source_of(backend, full))
        tombstone = Tombstone(1, 1, 2, "retention", "2026-01-31T12:00:00Z")  # of one that had looked before
        (tmp_path / "run" / names.decision(1, 1, 2)).write_bytes(encode_decision(tombstone))
        decision = await try_commit(backend, 3, 1, 1, kit.WORLD)
        assert isinstance(decision, Abort) and "its base, step 1" in decision.reason
        assert await read_decision_at(backend, 3, 1, 1) == decision

    kit.on(tmp_path, work)


def test_a_base_that_votes_stand_on_is_not_removed(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        await kit.save(backend, 2, STATES)
        for rank in range(kit.WORLD):
            await kit.flush(backend, 3, rank, STATES[rank], kit.source_of(backend, full))
        plan = await store_kit.plan_for(backend)
        await rotate(backend, plan, is_superseded=store_kit.not_superseded)
        assert isinstance(await try_commit(backend, 3, 1, 1, kit.WORLD), Manifest)

    kit.on(tmp_path, work)
