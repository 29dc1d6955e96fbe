"""A checkpoint at another place: what is copied, when it counts, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.backends.faults import Fault, Faulty
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, NoCheckpoint, Pruned, RunError, SaveAbandoned, SaveFailed
from everstep.format import names
from everstep.format.layout import build_layout
from everstep.format.manifest import Abort, Manifest, Tombstone, decode_decision, encode_decision
from everstep.store import mirror as module
from everstep.store import streaming
from everstep.store.catalog import list_step, read_decision
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.mirror import conclude, copy_records, give_up, mirror_rank, missing_ranks
from everstep.store.rotate import rotate

from tests.mirror import kit
from tests.store import store_kit


def test_the_copy_has_the_same_bytes_loads_and_is_clean(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        assert await kit.mirror(source, target, manifest) == manifest
        assert kit.objects(tmp_path / "target") == kit.objects(tmp_path / "source")
        assert await store_kit.loadable(target) == ({(1, 1)}, {})
        assert await kit.findings(target) == []
        assert not kit.temporaries(tmp_path / "target")

    kit.on_two(tmp_path, work)


def test_nothing_counts_before_all_ranks_are_there(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await copy_records(source, target)
        assert await missing_ranks(target, manifest) == [0, 1]
        await kit.send(source, target, manifest, [1])
        assert await missing_ranks(target, manifest) == [0]
        assert await conclude(source, target, manifest) is None
        assert await read_decision(target, await list_step(target, 1, 1)) is None
        assert await store_kit.loadable(target) == (set(), {})
        await kit.send(source, target, manifest, [0])
        assert await conclude(source, target, manifest) == manifest
        assert await store_kit.loadable(target) == ({(1, 1)}, {})

    kit.on_two(tmp_path, work)


def test_what_is_there_is_not_sent_again(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await kit.send(source, target, manifest)
        (tmp_path / "target" / names.vote(1, 1, 1, 0)).unlink()
        (tmp_path / "target" / names.image(1, 1, 1, 0, "optimizer")).unlink()
        assert await missing_ranks(target, manifest) == [0]
        seen = Faulty(target)
        sent = await kit.send(source, seen, manifest)
        begun = [name for op, name in seen.calls if op in ("open_writer", "write", "create")]
        assert begun == [names.image(1, 1, 1, 0, "optimizer"), names.vote(1, 1, 1, 0)]
        assert sent == (tmp_path / "target" / begun[0]).stat().st_size + manifest.ranks[0].vote_nbytes
        assert await kit.send(source, target, manifest) == 0
        assert await conclude(source, target, manifest) == manifest
        assert kit.objects(tmp_path / "target") == kit.objects(tmp_path / "source")
        read = Faulty(source)
        assert await kit.send(read, target, manifest) == 0
        assert not [name for op, name in read.calls if "/a1/" in name]

    kit.on_two(tmp_path, work)


def test_an_image_that_vanished_is_missed(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await kit.send(source, target, manifest)
        path = tmp_path / "target" / names.image(1, 1, 1, 1, "model")
        path.write_bytes(path.read_bytes()[:-1])
        assert await missing_ranks(target, manifest) == [1]
        assert await conclude(source, target, manifest) is None
        await kit.send(source, target, manifest)
        assert await conclude(source, target, manifest) == manifest

    kit.on_two(tmp_path, work)


@pytest.mark.parametrize("piece", [store_kit.CHUNK, 2 * store_kit.CHUNK])
def test_images_of_many_pieces_need_few_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", piece)
    made: list[int] = []
    plain = streaming.mmap.mmap

    def counted(fd: int, nbytes: int) -> object:
        made.append(nbytes)
        return plain(fd, nbytes)

    monkeypatch.setattr(streaming.mmap, "mmap", counted)

    async def work(source: LocalBackend, target: LocalBackend) -> None:
        for rank in range(2):
            layout = build_layout(store_kit.specs(rank, rows=2000))
            await store_kit.flush(source, 1, rank, pinned=store_kit.snapshot(1, rank, layout=layout))
        manifest = await try_commit(source, 1, 1, 1, 2)
        assert isinstance(manifest, Manifest) and manifest.ranks[0].nbytes > 10 * piece
        await kit.mirror(source, target, manifest)
        assert kit.objects(tmp_path / "target") == kit.objects(tmp_path / "source")
        most = module.IMAGES_PARALLEL * (streaming.PIECES_AHEAD + 1)
        assert set(made) == {piece} and len(made) <= manifest.world * most

    kit.on_two(tmp_path, work)


@pytest.mark.parametrize("what", ["flipped", "cut", "missing"])
def test_a_damaged_image_is_named_by_object_and_chunk(tmp_path: Path, what: str) -> None:
    name = names.image(1, 1, 1, 1, "optimizer")

    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        path = tmp_path / "source" / name
        good = path.read_bytes()
        if what == "missing":
            path.unlink()
        else:
            bad = bytearray(good)
            bad[store_kit.CHUNK + 5] ^= 1
            path.write_bytes(bad if what == "flipped" else good[:-1])
        with pytest.raises(Damaged, match=name) as caught:
            await kit.send(source, target, manifest)
        if what == "flipped":
            assert caught.value.offset == store_kit.CHUNK
        assert not (tmp_path / "target" / name).exists()
        assert not (tmp_path / "target" / names.vote(1, 1, 1, 1)).exists()
        assert not kit.temporaries(tmp_path / "target")
        assert await conclude(source, target, manifest) is None
        path.write_bytes(good)  # mended: it is gone on with
        assert await kit.mirror(source, target, manifest) == manifest

    kit.on_two(tmp_path, work)


def test_bytes_that_change_on_the_wire_are_found(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)

        def flip(view: memoryview) -> None:
            view[-1] ^= 0x80

        faulty = Faulty(source, [Fault("read_into", "state", mangle=flip)])
        with pytest.raises(Damaged, match=r"state\.msgpack"):
            await kit.send(faulty, target, manifest)
        assert await kit.mirror(faulty, target, manifest) == manifest

    kit.on_two(tmp_path, work)


@pytest.mark.parametrize("name", [names.vote(1, 1, 1, 0), "layout"])
def test_a_damaged_vote_or_layout_is_named(tmp_path: Path, name: str) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        at = names.layout(manifest.ranks[0].layout_hash) if name == "layout" else name
        path = tmp_path / "source" / at
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(Damaged, match=at):
            await kit.send(source, target, manifest)
        assert not (tmp_path / "target" / at).exists()

    kit.on_two(tmp_path, work)


def test_a_damaged_layout_at_the_target_is_put_right(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        first, second = await store_kit.save(source, 1), await store_kit.save(source, 2)
        await kit.mirror(source, target, first)
        path = tmp_path / "target" / names.layout(first.ranks[0].layout_hash)
        path.write_bytes(path.read_bytes()[:-1])
        await kit.mirror(source, target, second)
        assert await store_kit.loadable(target) == ({(1, 1), (1, 2)}, {})

    kit.on_two(tmp_path, work)


def test_another_run_or_history_is_refused_by_name(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        other = await store_kit.start_run(target)
        before = kit.objects(tmp_path / "target")
        with pytest.raises(RunError, match=other.run_id):
            await copy_records(source, target)
        assert kit.objects(tmp_path / "target") == before
        shutil.rmtree(tmp_path / "target")
        shutil.copytree(tmp_path / "source", tmp_path / "target")
        await store_kit.adopt(target, 1, 1)
        await store_kit.adopt(source, 1, 2)
        with pytest.raises(RunError, match=names.incarnation(2)):
            await copy_records(source, target)

    kit.on_two(tmp_path, work)


def test_another_vote_at_the_target_stays(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await copy_records(source, target)
        await target.create(names.vote(1, 1, 1, 0), b"another")
        with pytest.raises(SaveFailed, match="another vote"):
            await kit.send(source, target, manifest)
        assert (tmp_path / "target" / names.vote(1, 1, 1, 0)).read_bytes() == b"another"
        assert await conclude(source, target, manifest) is None

    kit.on_two(tmp_path, work)


def test_given_up_is_given_up(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await kit.send(source, target, manifest)
        given = await give_up(target, manifest, "too slow")
        assert isinstance(given, Abort) and given.reason == "too slow"
        assert await conclude(source, target, manifest) == given
        assert await give_up(target, manifest, "again") == given
        with pytest.raises(SaveAbandoned, match="too slow"):
            await kit.send(source, target, manifest)
        assert await store_kit.loadable(target) == (set(), {})

    kit.on_two(tmp_path, work)


def test_what_stands_is_not_given_up(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await kit.mirror(source, target, manifest)
        assert await give_up(target, manifest, "too slow") == manifest

    kit.on_two(tmp_path, work)


def test_what_was_removed_at_the_target_is_not_brought_back(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifests = [await store_kit.save(source, step) for step in (1, 2)]
        for manifest in manifests:
            await kit.mirror(source, target, manifest)
        plan = await store_kit.plan_for(target)
        await rotate(target, plan, is_superseded=store_kit.not_superseded)
        with pytest.raises(SaveAbandoned, match="removed"):
            await kit.send(source, target, manifests[0])
        stood = await conclude(source, target, manifests[0])
        assert isinstance(stood, Abort) and "removed" in stood.reason
        assert isinstance(await give_up(target, manifests[0], "x"), Abort)
        assert await store_kit.loadable(target) == ({(1, 2)}, {})

    kit.on_two(tmp_path, work)


def test_a_second_attempt_and_a_revision_bring_the_decisions_below(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        await store_kit.flush(source, 1, 0)
        await abort_attempt(source, 1, 1, 1, reason="rank 1 failed")
        second = await store_kit.save(source, 1)
        assert second.attempt == 2
        assert await kit.mirror(source, target, second) == second
        first = await store_kit.save(source, 2)
        await source.create(
            names.decision(2, 1, 2), encode_decision(Tombstone(2, 1, 2, "x", "2026-01-01T00:00:00Z"))
        )
        revision = replace(first, revision=3)
        await source.create(names.decision(2, 1, 3), encode_decision(revision))
        assert await kit.mirror(source, target, revision) == revision
        assert (await list_step(target, 2, 1)).decisions == (1, 2, 3)
        assert await kit.findings(target) == []
        assert await store_kit.loadable(target) == ({(1, 1), (1, 2)}, {})
        # What a crash right after the revision leaves is made good by whoever asks next.
        (tmp_path / "target" / names.decision(2, 1, 2)).unlink()
        assert await conclude(source, target, revision) == revision
        assert await kit.findings(target) == []

    kit.on_two(tmp_path, work)


def test_a_delta_needs_its_base(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        base, full = await store_kit.save(source, 1), await store_kit.save(source, 2)
        delta = replace(full, kind="delta", parent={"step": 1, "incarnation": 1, "attempt": 1})
        (tmp_path / "source" / names.decision(2, 1, 1)).write_bytes(encode_decision(delta))
        await kit.send(source, target, delta)
        with pytest.raises(NoCheckpoint, match="base of step 2"):
            await conclude(source, target, delta)
        await kit.mirror(source, target, base)
        assert await conclude(source, target, delta) == delta

    kit.on_two(tmp_path, work)


def test_a_source_that_is_rotated_meanwhile_is_pruned_not_damaged(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await store_kit.save(source, 2)
        await kit.send(source, target, manifest, [0])
        plan = await store_kit.plan_for(source)
        await rotate(source, plan, is_superseded=store_kit.not_superseded)
        with pytest.raises(Pruned):
            await kit.send(source, target, manifest)
        await kit.send(LocalBackend(tmp_path / "source"), target, manifest, [])
        assert await conclude(source, target, manifest) is None

    kit.on_two(tmp_path, work)


def test_a_place_that_cannot_create_atomically_may_be_a_mirror(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest, plain = await store_kit.save(source, 1), kit.WithoutCreate(target)
        await kit.send(source, plain, manifest, [0])
        assert await give_up(plain, manifest, "too slow") is None
        assert await conclude(source, plain, manifest) is None
        assert await kit.mirror(source, plain, manifest) == manifest
        assert await give_up(plain, manifest, "too slow") == manifest
        assert kit.objects(tmp_path / "target") == kit.objects(tmp_path / "source")
        other = LocalBackend(tmp_path / "other")
        await store_kit.start_run(other)
        with pytest.raises(RunError):
            await copy_records(other, plain)
        await other.close()

    kit.on_two(tmp_path, work)


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        run = await copy_records(source, target)
        told: list[int] = []
        await mirror_rank(source, target, manifest, 0, run=run, pool=kit.POOL, told=told.append)
        assert sum(told) == manifest.ranks[0].nbytes

    kit.on_two(tmp_path, work)


def test_the_manifest_is_that_of_the_source(tmp_path: Path) -> None:
    """Not one made anew: its bytes, whatever release wrote them."""

    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        path = tmp_path / "source" / names.decision(1, 1, 1)
        other = replace(manifest, created="2020-01-01T00:00:00Z")
        await kit.send(source, target, manifest)
        path.write_bytes(encode_decision(other))
        with pytest.raises(Damaged, match="another manifest"):
            await conclude(source, target, manifest)
        assert await conclude(source, target, other) == other
        found = decode_decision((tmp_path / "target" / names.decision(1, 1, 1)).read_bytes(), path.name)
        assert isinstance(found, Manifest) and found == other

    kit.on_two(tmp_path, work)
