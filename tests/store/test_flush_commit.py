"""Flush and commit: repeated, raced, disagreeing, superseded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends.api import Notes
from everstep.backends.errors import NoSpace, Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, SaveAbandoned, SaveFailed, StorageFull, UsageError
from everstep.format import names
from everstep.format.layout import Box, EntrySpec, Scope, build_layout
from everstep.format.manifest import Abort, Manifest
from everstep.memory.errors import SlotGone
from everstep.store import flush
from everstep.store.catalog import list_step, read_decision, read_vote
from everstep.store.commit import abort_attempt, next_attempt, try_commit

from tests.store import store_kit as kit

STEP = 3


def with_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())


def test_flushing_again_finds_the_same_vote_and_writes_nothing(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        vote = await kit.flush(backend, STEP, 0)
        image = tmp_path / names.image(STEP, 1, 1, 0, "model")
        before = image.stat().st_ino
        assert await kit.flush(backend, STEP, 0) == vote
        assert image.stat().st_ino == before
        image.unlink()
        assert await kit.flush(backend, STEP, 0) == vote
        assert image.exists()

    with_run(tmp_path, work)


def test_a_vote_is_never_followed_by_other_bytes(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.flush(backend, STEP, 0)
        image = tmp_path / names.image(STEP, 1, 1, 0, "model")
        before = image.read_bytes()
        other = kit.snapshot(STEP, 0)
        other.data["image:model"][-1] ^= 1
        with pytest.raises(SaveFailed, match="other bytes"):
            await kit.flush(backend, STEP, 0, pinned=other)
        assert image.read_bytes() == before

    with_run(tmp_path, work)


def test_bytes_that_changed_after_sealing_never_become_a_vote(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        pinned = kit.snapshot(STEP, 0)
        pinned.seal(pinned.compute(["image:model", "image:optimizer", "state"]))
        pinned.data["image:model"][5000] ^= 4
        with pytest.raises(Damaged, match=r"image:model.*chunk at 4096") as caught:
            await kit.flush(backend, STEP, 0, pinned=pinned)
        assert caught.value.offset == 4096 and caught.value.rank == 0
        assert not (tmp_path / names.vote(STEP, 1, 1, 0)).exists()
        assert not (tmp_path / names.image(STEP, 1, 1, 0, "model")).exists()
        assert not await backend.leftovers()

    with_run(tmp_path, work)


def test_a_reused_slot_never_becomes_a_vote(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        pinned = kit.snapshot(STEP, 0)
        pinned.gone = True
        with pytest.raises(SlotGone):
            await kit.flush(backend, STEP, 0, pinned=pinned)
        with pytest.raises(SaveFailed, match="another snapshot"):
            await kit.flush(backend, STEP, 0, pinned=kit.snapshot(STEP + 1, 0))
        assert not (tmp_path / names.vote(STEP, 1, 1, 0)).exists()

    with_run(tmp_path, work)


def test_a_damaged_layout_object_is_put_right(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        vote = await kit.flush(backend, STEP, 0)
        path = tmp_path / names.layout(vote.layout_hash)
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        await kit.flush(backend, STEP, 0, attempt=2)
        assert path.read_bytes() == good

    with_run(tmp_path, work)


@pytest.mark.parametrize(
    ("raised", "expected"), [(NoSpace("x", "ENOSPC"), StorageFull), (Retryable("x", "reset"), SaveFailed)]
)
def test_a_failing_backend_leaves_no_vote_and_the_attempt_can_be_done_again(
    tmp_path: Path, raised: Exception, expected: type[Exception]
) -> None:
    async def work(backend: LocalBackend) -> None:
        real = backend.open_writer
        left = 2

        async def failing(name: str, nbytes: int, notes: Notes | None = None) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise raised
            return await real(name, nbytes, notes)

        backend.open_writer = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(expected) as caught:
            await kit.flush(backend, STEP, 0)
        assert caught.value.step == STEP  # type: ignore[attr-defined]
        assert not (tmp_path / names.vote(STEP, 1, 1, 0)).exists() and not await backend.leftovers()
        assert isinstance(await kit.save(backend, STEP), Manifest)

    with_run(tmp_path, work)


def test_no_decision_while_votes_are_missing_and_one_when_they_are_in(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        assert await next_attempt(backend, STEP, 1) == (1, None)
        assert await try_commit(backend, STEP, 1, 1, 2) is None
        await kit.flush(backend, STEP, 1)
        assert await try_commit(backend, STEP, 1, 1, 2) is None
        await kit.flush(backend, STEP, 0)
        both = await asyncio.gather(*(try_commit(backend, STEP, 1, 1, 2) for _ in range(4)))
        assert len({manifest.created for manifest in both if manifest}) == 1 and None not in both
        manifest = both[0]
        assert isinstance(manifest, Manifest)
        assert manifest.mesh == {"dp": 2} and manifest.parts["optimizer"]["class"] == "AdamW"
        assert manifest.data == {"kind": "finite", "position": 7} and manifest.rng == ("python", "torch")
        votes = [(await read_vote(backend, STEP, 1, 1, rank))[1] for rank in range(2)]
        assert [record.nbytes for record in manifest.ranks] == [
            sum(image.nbytes for image in vote.images) for vote in votes
        ]
        assert await next_attempt(backend, STEP, 1) == (2, manifest)
        assert await abort_attempt(backend, STEP, 1, 1, reason="too late") == manifest

    with_run(tmp_path, work)


def test_giving_up_wins_over_a_later_commit_and_the_next_attempt_counts(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.flush(backend, STEP, 0)
        given_up = await abort_attempt(backend, STEP, 1, 1, reason="rank 1 lost its disk", rank=1)
        assert given_up == Abort(STEP, 1, 1, "rank 1 lost its disk", 1)
        with pytest.raises(SaveAbandoned, match="lost its disk"):
            await kit.flush(backend, STEP, 1)
        assert await try_commit(backend, STEP, 1, 1, 2) == given_up
        with pytest.raises(UsageError):
            await try_commit(backend, STEP, 1, 3, 2)
        manifest = await kit.save(backend, STEP)
        assert manifest.attempt == 2
        assert await kit.loadable(backend) == ({(1, STEP)}, {})

    with_run(tmp_path, work)


def specs_with(rank: int, **changed: object) -> list[EntrySpec]:
    values = {"stored": rank == 0, "shape": (8,), "dtype": "float32", **changed}
    shape: tuple[int, ...] = values["shape"]  # type: ignore[assignment]
    return [
        EntrySpec(
            "model",
            "w",
            str(values["dtype"]),
            shape,
            (Box.full(shape),),
            Scope.GLOBAL,
            bool(values["stored"]),
        ),
        EntrySpec("optimizer", "own", "uint8", (4,), (Box.full((4,)),)),
    ]


@pytest.mark.parametrize(
    ("rank1", "meta1", "world1", "words"),
    [
        ({}, {"config_hash": "other"}, 2, ["config_hash", "rank 1", "'other'"]),
        ({}, {"mesh": {"dp": 3}}, 2, ["mesh", "rank 1"]),
        ({}, {"parts": {"model": {}}}, 2, ["parts", "rank 1"]),
        ({}, {}, 3, ["rank 1", "another world"]),
        ({"stored": True}, {}, 2, ["model/w", "stored 2 times"]),
        ({"shape": (9,)}, {}, 2, ["model/w", "[9] on rank 1"]),
        ({"dtype": "float16"}, {}, 2, ["model/w", "float16"]),
    ],
)
def test_votes_that_disagree_abort_the_attempt_and_say_why(
    tmp_path: Path, rank1: dict[str, object], meta1: dict[str, object], world1: int, words: list[str]
) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank, changed, meta, world in ((0, {}, {}, 2), (1, rank1, meta1, world1)):
            pinned = kit.snapshot(
                STEP,
                rank,
                layout=build_layout(specs_with(rank, **changed)),
                meta={**kit.meta_of(rank, 2), **meta},
            )
            await kit.flush(backend, STEP, rank, pinned=pinned, world=world)
        decision = await try_commit(backend, STEP, 1, 1, 2)
        assert isinstance(decision, Abort)
        assert all(word in decision.reason for word in words), decision.reason
        assert await read_decision(backend, await list_step(backend, STEP, 1)) is None

    with_run(tmp_path, work)


def test_a_tensor_that_no_rank_stores_aborts(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in range(2):
            layout = build_layout(specs_with(rank, stored=False))
            await kit.flush(backend, STEP, rank, pinned=kit.snapshot(STEP, rank, layout=layout))
        decision = await try_commit(backend, STEP, 1, 1, 2)
        assert isinstance(decision, Abort) and "stored by no rank" in decision.reason

    with_run(tmp_path, work)


def test_a_damaged_vote_aborts_and_names_the_rank(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in range(2):
            await kit.flush(backend, STEP, rank)
        path = tmp_path / names.vote(STEP, 1, 1, 1)
        path.write_bytes(path.read_bytes()[:-1])
        decision = await try_commit(backend, STEP, 1, 1, 2)
        assert isinstance(decision, Abort) and decision.rank == 1

    with_run(tmp_path, work)


def test_a_superseded_writer_commits_only_up_to_the_cut(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 3)
        await kit.adopt(backend, 1, 3)
        for step in (2, 4):
            for rank in range(2):
                await kit.flush(backend, step, rank)
        assert isinstance(await try_commit(backend, 2, 1, 1, 2), Manifest)
        decision = await try_commit(backend, 4, 1, 1, 2)
        assert isinstance(decision, Abort) and "incarnation 2" in decision.reason

    with_run(tmp_path, work)


@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 20, 48 << 20])
@pytest.mark.parametrize("nbytes", [0, 1, 4 << 20, (100 << 20) + 5])
def test_an_image_is_written_in_pieces_that_grow(nbytes: int, chunk_bytes: int) -> None:
    """All of it, in order, in whole chunks; the first piece is small, so that writing begins soon."""
    pieces = list(flush._pieces(nbytes, chunk_bytes, 32 << 20))
    assert [start for start, _ in pieces] + [nbytes] == [0] + [end for _, end in pieces]
    sizes = [end - start for start, end in pieces]
    assert all(size % chunk_bytes == 0 for size in sizes[:-1]) and all(size > 0 for size in sizes)
    assert max(sizes, default=0) <= max(32 << 20, chunk_bytes)
    assert sizes == sorted(sizes[:-1]) + sizes[-1:]
    assert not sizes or sizes[0] <= max(flush.FIRST_PIECE_BYTES, chunk_bytes)
