"""Rotation: what goes, what stays, in what order; dependents, superseded writers, leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.errors import Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import CannotTell, Pruned
from everstep.format import names
from everstep.format.manifest import Manifest, Tombstone, encode_decision
from everstep.plan.retention import RetentionPlan
from everstep.store.catalog import list_step, list_steps, read_decision, require_standing
from everstep.store.commit import abort_attempt, next_attempt, try_commit
from everstep.store.findings import Kind, Severity
from everstep.store.fsck import check
from everstep.store.rotate import RotationReport, rotate
from everstep.store.runs import add_incarnation

from tests.store import store_kit as kit


def with_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            points.hook = None
            await backend.close()

    asyncio.run(go())


async def rotate_to(backend: LocalBackend, keep_last: int = 1, **options: object) -> RotationReport:
    plan = await kit.plan_for(backend, keep_last)
    return await rotate(backend, plan, is_superseded=kit.not_superseded, **options)  # type: ignore[arg-type]


def test_the_order_is_tombstones_votes_images_decisions(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        seen: list[str] = []

        def hook(name: str, detail: str) -> None:
            if name == "unlink.after" and ".tmp-" not in detail:
                seen.append(detail.rpartition("/")[2])
            if name.startswith("rotate."):
                seen.append(name)

        points.hook = hook
        report = await rotate_to(backend)
        votes = seen.index("rotate.deleted.votes")
        assert seen[:3] == ["rotate.tombstoned", "rotate.looked", "rotate.settled"]
        assert sorted(seen[3:votes]) == ["rank-00000.vote", "rank-00001.vote"]
        assert all(name.endswith((".safetensors", ".msgpack")) for name in seen[votes + 1 : -4])
        assert seen[-4] == "rotate.deleted.images" and seen[-1] == "rotate.deleted.decisions"
        assert seen[-3:-1] == ["manifest-1.json", "manifest-2.json"]
        assert report.removed == report.waiting == [(1, 1)] and report.freed_bytes > 20_000
        decision = await read_decision(backend, await list_step(backend, 1, 1))
        assert isinstance(decision, Tombstone) and decision.number == 3

    with_run(tmp_path, work)


def test_a_tombstone_goes_when_no_commit_can_be_late_any_more(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        late = await kit.save(backend, 1)
        await kit.save(backend, 2)
        await rotate_to(backend)
        # A commit that was decided on long ago and only now arrives: it lies below the tombstone.
        await backend.create(names.decision(1, 1, 1), encode_decision(late))
        assert isinstance(await read_decision(backend, await list_step(backend, 1, 1)), Tombstone)
        assert await kit.loadable(backend) == ({(1, 2)}, {})
        assert (await rotate_to(backend, tombstone_wait_s=1000.0)).waiting == [(1, 1)]
        await rotate_to(backend, tombstone_wait_s=0.0)
        assert not (tmp_path / names.step_dir(1)).exists()

    with_run(tmp_path, work)


def test_a_checkpoint_that_is_adopted_meanwhile_comes_back(tmp_path: Path) -> None:
    """The rotator looks after its tombstone; the adopter published before it: the checkpoint is put back."""

    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        plan = await kit.plan_for(backend)
        await kit.adopt(backend, 1, 2)  # goes back to step 2: by the plan, made before, step 2 goes
        report = await rotate(backend, plan, is_superseded=kit.not_superseded)
        assert report.removed == [(1, 1)]
        assert [key for key, _ in report.kept] == [(1, 2)] and "incarnation 2 adopted it" in report.kept[0][1]
        found = await list_step(backend, 2, 1)
        decision = await read_decision(backend, found)
        assert found.decisions == (1, 2, 3) and isinstance(decision, Manifest)
        assert (decision.attempt, decision.revision) == (1, 3)
        assert (await kit.loadable(backend))[0] == {(1, 2), (1, 3)}
        assert await next_attempt(backend, 2, 1) == (4, decision)
        assert [f async for f in check(backend) if f.severity is not Severity.INFO and f.step == 2] == []
        # Once the new incarnation has something of its own, it can go for good.
        await kit.save(backend, 4, incarnation=2)
        report = await rotate_to(backend)
        assert (1, 2) in report.removed
        assert await kit.loadable(backend) == ({(2, 4)}, {})

    with_run(tmp_path, work)


def test_a_crash_between_tombstone_and_look_is_made_good(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        await kit.adopt(backend, 1, 1)
        tomb = Tombstone(1, 1, 2, "retention", "2026-01-01T00:00:00Z")
        await backend.create(names.decision(1, 1, 2), encode_decision(tomb))
        report = await rotate(backend, RetentionPlan((), ()), is_superseded=kit.not_superseded)
        assert [key for key, _ in report.kept] == [(1, 1)] and not report.removed
        assert (1, 1) in (await kit.loadable(backend))[0]

    with_run(tmp_path, work)


def test_a_look_that_gets_no_answer_takes_the_tombstone_back(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        plan = await kit.plan_for(backend)
        whole = backend.read

        async def failing(name: str, nbytes_max: int = 256 << 20) -> bytes:
            if name == names.incarnation(1):
                raise Retryable(name, "timed out")
            return await whole(name, nbytes_max)

        backend.read = failing  # type: ignore[method-assign]
        with pytest.raises(CannotTell):
            await rotate(backend, plan, is_superseded=kit.not_superseded)
        backend.read = whole  # type: ignore[method-assign]
        assert await kit.loadable(backend) == ({(1, 1), (1, 2)}, {})
        assert (await rotate(backend, plan, is_superseded=kit.not_superseded)).removed == [(1, 1)]

    with_run(tmp_path, work)


def test_who_adopts_and_then_looks_sees_the_tombstone(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        assert (await require_standing(backend, 1, 1)).step == 1
        await rotate_to(backend)
        await kit.adopt(backend, 1, 1)
        with pytest.raises(Pruned):
            await require_standing(backend, 1, 1)

    with_run(tmp_path, work)


def test_a_superseded_writer_deletes_nothing(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        plan = await kit.plan_for(backend)

        async def superseded() -> bool:
            return True

        report = await rotate(backend, plan, is_superseded=superseded)
        assert report.superseded and not report.removed
        asked = 0

        async def after_the_tombstone() -> bool:
            nonlocal asked
            asked += 1
            return asked > 1

        report = await rotate(backend, plan, is_superseded=after_the_tombstone)
        assert report.superseded and not report.removed
        assert await kit.loadable(backend) == ({(1, 1), (1, 2)}, {})

    with_run(tmp_path, work)


def test_foreign_files_and_damaged_checkpoints_stay(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        plan = await kit.plan_for(backend)
        mine = [
            tmp_path / names.attempt_dir(1, 1, 1) / "notes.txt",
            tmp_path / names.attempt_dir(1, 1, 1) / "rank-00000.model.safetensors.bak",
            tmp_path / names.checkpoint_dir(1, 1) / "manifest-01.json",
            tmp_path / "checkpoints" / "12" / "model.pt",
        ]
        for path in mine:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        damaged = tmp_path / names.decision(2, 1, 1)
        damaged.write_bytes(damaged.read_bytes()[:-1])
        report = await rotate(backend, plan, is_superseded=kit.not_superseded, tombstone_wait_s=0.0)
        await rotate(backend, plan, is_superseded=kit.not_superseded, tombstone_wait_s=0.0)
        assert all(path.read_text() == "mine" for path in mine)
        assert len(report.foreign) == 2
        assert (tmp_path / names.image(2, 1, 1, 0, "model")).exists()
        assert [key for key, _ in report.kept] == [(1, 2)]
        foreign = [f.name async for f in check(backend) if f.kind is Kind.FOREIGN]
        assert len(foreign) == 4

    with_run(tmp_path, work)


def test_what_the_plan_keeps_is_never_removed(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        plan = RetentionPlan(keep=(((1, 1), "pinned"),), remove=((1, 1), (1, 2)))
        report = await rotate(backend, plan, is_superseded=kit.not_superseded)
        # (1, 2) is the newest that counts: even a plan that says so does not take it away.
        assert not report.removed and [key for key, _ in report.kept] == [(1, 2)]
        assert await kit.loadable(backend) == ({(1, 1), (1, 2)}, {})

    with_run(tmp_path, work)


def test_leftover_attempts_go_when_they_are_decided_or_their_writer_is_gone(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.flush(backend, 1, 0)
        await abort_attempt(backend, 1, 1, 1, reason="rank 1 failed")
        await kit.save(backend, 2)
        await kit.flush(backend, 3, 0)  # undecided: in flight, for all that is known
        report = await rotate_to(backend)
        assert report.collected == [((1, 1), 1)]
        assert not (tmp_path / names.attempt_dir(1, 1, 1)).exists()
        assert (tmp_path / names.vote(3, 1, 1, 0)).exists()
        await kit.adopt(backend, 1, 2)
        await kit.save(backend, 3, incarnation=2)
        assert not (await rotate_to(backend)).collected
        report = await rotate_to(backend, is_gone=lambda incarnation: incarnation == 1)
        assert report.collected == [((1, 3), 1)]
        await rotate_to(backend, is_gone=lambda incarnation: incarnation == 1, tombstone_wait_s=0.0)
        assert [found.key for found in await list_steps(backend)] == [(2, 3)]
        assert await kit.loadable(backend) == ({(2, 3)}, {})

    with_run(tmp_path, work)


def test_a_complete_attempt_without_a_decision_is_left_to_be_committed(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        for rank in range(2):
            await kit.flush(backend, 2, rank)
        report = await rotate_to(backend, is_gone=lambda incarnation: True)
        assert not report.collected and [key for key, _ in report.kept] == [(1, 2)]
        assert isinstance(await try_commit(backend, 2, 1, 1, 2), Manifest)

    with_run(tmp_path, work)


def test_steps_compare_as_numbers(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (9, 10, 99, 10**9, 10**12):
            await kit.save(backend, step)
        report = await rotate_to(backend, 2)
        assert report.removed == [(1, 9), (1, 10), (1, 99)]
        assert (await kit.loadable(backend))[0] == {(1, 10**9), (1, 10**12)}

    with_run(tmp_path, work)


def test_a_fresh_start_does_not_lose_the_former_checkpoints_before_it_has_its_own(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 5)
        await add_incarnation(backend, lambda n: replace(kit.incarnation_record(n), fresh="new data"))
        assert not (await rotate_to(backend)).removed
        assert (await kit.loadable(backend))[0] == {(1, 5)}
        await kit.save(backend, 6, incarnation=2)
        assert (await rotate_to(backend)).removed == [(1, 5)]

    with_run(tmp_path, work)


def test_asking_to_delete_what_is_not_there_removes_empty_directories(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        await backend.delete(["a/b/c", "x/y"])
        assert not (tmp_path / "a").exists()
        missing = LocalBackend(tmp_path / "nowhere")
        await missing.delete(["a/b"])
        await missing.close()

    with_run(tmp_path, work)
