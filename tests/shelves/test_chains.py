"""Rotation and deltas: what stands on what, who is first, and crashes at every point."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import Abort, Manifest, Tombstone, encode_decision
from everstep.plan.retention import Retention, RetentionPlan
from everstep.store.catalog import list_step, read_decision
from everstep.store.commit import try_commit
from everstep.store.pins import add_pin
from everstep.store.rotate import rotate
from everstep.store.shelf import Shelf

from tests.machine.places import PutOnly
from tests.store import store_kit

from . import kit


def test_bases_stay_as_long_as_something_stands_on_them(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        first = await kit.save(backend, 2, full)
        await kit.save(backend, 3, first)
        await kit.save(backend, 4, full)
        report = await kit.prune(backend)
        assert report.removed == [(1, 2), (1, 3)]
        assert await kit.check(backend) == {(1, 1), (1, 4)}
        # In a new process, with nothing in memory; then with a full one.
        assert (await kit.prune(backend)).removed == []
        await kit.save(backend, 5)
        assert (await kit.prune(backend)).removed == [(1, 1), (1, 4)]
        assert await kit.check(backend) == {(1, 5)}

    kit.with_run(tmp_path, work)


def test_a_chain_stays_for_its_last_one(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        before = await kit.save(backend, 1)
        for step in (2, 3, 4):
            before = await kit.save(backend, step, before)
        assert (await kit.prune(backend)).removed == []
        assert await kit.check(backend) == {(1, step) for step in (1, 2, 3, 4)}

    kit.with_run(tmp_path, work)


def test_a_base_that_was_removed_by_hand(tmp_path: Path) -> None:
    """The delta cannot be loaded, so it is not what keep_last=1 is about."""

    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        full = await kit.save(backend, 2)
        await kit.save(backend, 3, full)
        for path in (tmp_path / names.checkpoint_dir(2, 1)).rglob("*"):
            if path.is_file():
                path.unlink()
        report = await kit.prune(backend)
        assert report.removed == []
        assert set(await kit.standing(backend)) == {(1, 1), (1, 3)}

    kit.with_run(tmp_path, work)


# -- a delta's commit against the rotation of its base


def test_the_delta_comes_while_its_base_is_buried(tmp_path: Path) -> None:
    """Tombstone first; then votes and commit; then the rotator looks: the commit finds the tombstone and gives up."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2)

        async def commit() -> None:
            other = LocalBackend(tmp_path)
            for rank in range(kit.WORLD):
                await kit.flush(other, (1, 3), rank, full)
            decision = await try_commit(other, 3, 1, 1, kit.WORLD)
            assert isinstance(decision, Abort) and "its base, step 1" in decision.reason
            await other.close()

        ended = kit.on_point("rotate.tombstoned", commit)
        await kit.prune(backend)
        await ended()
        assert (1, 2) in await kit.check(backend) and (1, 3) not in await kit.check(backend)

    kit.with_run(tmp_path, work)


def test_votes_alone_hold_the_base(tmp_path: Path) -> None:
    """The rotator looks while the delta's votes are there and its manifest is not: the base comes back."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        assert plan.remove == ((1, 1),)
        await kit.flush(backend, (1, 3), 1, full)  # one rank of two
        report = await rotate(backend, plan, is_superseded=store_kit.not_superseded)
        assert kit.reasons(report) == {(1, 1): "step 3 stands on it"} and not report.removed
        await kit.flush(backend, (1, 3), 0, full)
        assert isinstance(await try_commit(backend, 3, 1, 1, kit.WORLD), Manifest)
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 3)}
        # A plan that is made now keeps it from the beginning.
        assert (await kit.prune(backend)).removed == [(1, 2)]

    kit.with_run(tmp_path, work)


def test_a_flush_under_way_holds_its_base_in_the_plan(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2)
        await kit.flush(backend, (1, 3), 1, full)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        assert plan.keep[0] == ((1, 1), "protected") and not plan.remove

    kit.with_run(tmp_path, work)


def test_the_commit_is_first(tmp_path: Path) -> None:
    """The plan did not know of the delta; the look after the tombstone finds it."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        await kit.save(backend, 3, full)
        report = await rotate(backend, plan, is_superseded=store_kit.not_superseded)
        assert not report.removed
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 3)}

    kit.with_run(tmp_path, work)


def test_a_damaged_manifest_still_holds_its_base(tmp_path: Path) -> None:
    """Whoever mends the manifest needs the base: the votes say which it is."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2, full)
        await kit.save(backend, 3)
        path = tmp_path / names.decision(2, 1, 1)
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        report = await kit.prune(backend)
        assert not report.removed
        path.write_bytes(good)
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 3)}

    kit.with_run(tmp_path, work)


def test_a_damaged_manifest_does_not_stop_rotation(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3, 4):
            await kit.save(backend, step)
        path = tmp_path / names.decision(2, 1, 1)
        path.write_bytes(path.read_bytes()[:-1])
        assert (await kit.prune(backend)).removed == [(1, 1), (1, 3)]
        assert (tmp_path / names.vote(2, 1, 1, 0)).exists()

    kit.with_run(tmp_path, work)


def test_a_delta_that_another_process_removes_may_come_back(tmp_path: Path) -> None:
    """Another rotator has buried the delta and may find a pin: its base is not ours to remove yet."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2, full)
        await kit.save(backend, 3)
        plan = RetentionPlan((((1, 3), "newest"),), ((1, 1),))
        tomb = Tombstone(2, 1, 2, "retention", "2026-01-01T00:00:00Z")

        def bury(name: str, detail: str) -> None:
            if name == "rotate.tombstoned":
                (tmp_path / names.decision(2, 1, 2)).write_bytes(encode_decision(tomb))

        points.hook = bury
        report = await rotate(backend, plan, is_superseded=store_kit.not_superseded)
        points.hook = None
        assert kit.reasons(report) == {(1, 1): "step 2 stands on it"}
        # Nobody comes back to it: the next rotations end both, one after the other.
        assert (await kit.prune(backend)).removed == [(1, 2)]
        assert (await kit.prune(backend)).removed == [(1, 1)]

    kit.with_run(tmp_path, work)


# -- crashes

POINTS = (
    "rotate.tombstoned",
    "rotate.looked",
    "rotate.settled",
    "rotate.put_back",
    "rotate.deleted.votes",
    "rotate.deleted.images",
    "rotate.deleted.decisions",
)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("pin", [False, True])
def test_a_crash_at_each_point(tmp_path: Path, point: str, count: int, pin: bool) -> None:
    """Two chains go, of which one may be pinned after the plan; what stands is loadable at every moment, and the next
    rotation ends what this one began."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        first = await kit.save(backend, 2, full)
        await kit.save(backend, 3, first)
        other = await kit.save(backend, 4)
        await kit.save(backend, 5, other)
        await kit.save(backend, 6)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        assert len(plan.remove) == 5
        if pin:
            await add_pin(backend, (1, 3), reason="figure 2")
        left = count

        def hook(name: str, detail: str) -> None:
            nonlocal left
            left -= name == point
            if name == point and left == 0:
                raise Killed

        points.hook = hook
        try:
            await rotate(backend, plan, is_superseded=store_kit.not_superseded, tombstone_wait_s=0.0)
            crashed = False
        except Killed:
            crashed = True
        points.hook = None
        reached = {
            "rotate.tombstoned": 5,
            "rotate.settled": 2 if pin else 5,
            "rotate.put_back": 3 if pin else 0,
        }
        assert crashed == (count <= reached.get(point, 1))
        assert (1, 6) in await kit.check(backend)
        await kit.prune(backend, tombstone_wait_s=0.0)
        await kit.prune(backend, tombstone_wait_s=0.0)
        expected = {(1, 6)} | ({(1, 1), (1, 2), (1, 3)} if pin else set())
        assert await kit.check(backend) == expected
        assert not (tmp_path / names.step_dir(5)).exists()

    kit.with_run(tmp_path, work)


def test_many_go_with_one_look_each_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.store import rotate as module

    monkeypatch.setattr(module, "TOGETHER_MAX", 3)
    looks: list[str] = []

    async def work(backend: LocalBackend) -> None:
        before: Manifest | None = None
        for step in range(1, 9):
            before = await kit.save(backend, step, before if step % 4 != 1 else None)
        points.hook = lambda name, detail: looks.append(detail) if name == "rotate.looked" else None
        report = await kit.prune(backend)
        assert report.removed == [(1, step) for step in (1, 2, 3, 4)]
        assert await kit.check(backend) == {(1, step) for step in (5, 6, 7, 8)}
        assert [detail.split("/")[1] for detail in looks] == ["000000004", "000000001"]

    kit.with_run(tmp_path, work)


def test_a_merged_checkpoint_needs_no_base(tmp_path: Path) -> None:
    """Once more as a full one, by the agent: the old attempt goes, then the base may."""
    from concurrent.futures import ThreadPoolExecutor

    from everstep.store.flush import FlushJob
    from everstep.store.merge import merge_rank
    from everstep.store.runs import open_run
    from everstep.store.sources import DurableSource

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        delta = await kit.save(backend, 2, full)
        run = await open_run(backend)
        with ThreadPoolExecutor(1) as pool:
            for rank in range(kit.WORLD):
                source = DurableSource(backend, delta, run.chunk_bytes)
                await merge_rank(backend, FlushJob(2, 1, 2, rank, kit.WORLD), source, run=run, pool=pool)
        # Not decided yet: nothing goes.
        assert not (await kit.prune(backend)).removed
        assert isinstance(await try_commit(backend, 2, 1, 2, kit.WORLD), Manifest)
        report = await kit.prune(backend)
        assert report.removed == [(1, 1)] and report.collected == [((1, 2), 1)]
        assert await kit.check(backend) == {(1, 2)}
        assert (await list_step(backend, 2, 1)).attempts == (2,)

    kit.with_run(tmp_path, work)


def test_two_rotations_side_by_side(tmp_path: Path) -> None:
    """The agent's, and an operator's prune."""

    async def work(backend: LocalBackend) -> None:
        before: Manifest | None = None
        for step in range(1, 13):
            before = await kit.save(backend, step, before if step % 3 != 1 else None)
        other = LocalBackend(tmp_path)
        await asyncio.gather(kit.prune(backend), kit.prune(other, 2))
        found = await kit.check(backend)
        assert {(1, 10), (1, 11), (1, 12)} <= found
        await kit.prune(backend)
        await kit.prune(backend)
        assert await kit.check(backend) == {(1, 10), (1, 11), (1, 12)}
        assert isinstance(await read_decision(backend, await list_step(backend, 9, 1)), Tombstone)
        await other.close()

    kit.with_run(tmp_path, work)


@pytest.mark.parametrize("point", ["rotate.tombstoned", "rotate.deleted.votes"])
def test_what_is_adopted_meanwhile_comes_back_or_is_seen_to_be_gone(tmp_path: Path, point: str) -> None:
    """By a rotator that does not know of the new incarnation: the look behind its tombstones tells it."""

    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        stood: list[bool] = []

        async def adopt() -> None:
            other = LocalBackend(tmp_path)
            await store_kit.adopt(other, 1, 1)
            stood.append(isinstance(await read_decision(other, await list_step(other, 1, 1)), Manifest))
            await other.close()

        ended = kit.on_point(point, adopt)
        report = await kit.prune(backend)
        await ended()
        late = point == "rotate.deleted.votes"
        assert stood == [not late]  # whoever adopted it looks once more, and goes on from what is there
        assert kit.reasons(report) == (
            {} if late else {(1, 1): "incarnation 2 adopted it, and nothing newer is complete"}
        )
        assert await kit.check(backend) == ({(1, 3)} if late else {(1, 1), (1, 3)})

    kit.with_run(tmp_path, work)


@pytest.mark.parametrize("tombstones", [1, 2])
def test_a_writer_that_is_superseded_behind_its_tombstones_takes_them_back(
    tmp_path: Path, tombstones: int
) -> None:
    """Nothing is deleted yet."""

    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        reached: list[str] = []
        points.hook = lambda name, detail: reached.append(name)

        async def is_superseded() -> bool:
            return reached.count("rotate.tombstoned") == tombstones

        plan = (await Shelf().look(backend)).plan(Retention(1))
        report = await rotate(backend, plan, is_superseded=is_superseded)
        assert report.superseded and not report.removed
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 3)}

    kit.with_run(tmp_path, work)


@pytest.mark.parametrize("behind", ["rotate.looked", "rotate.deleted.votes"])
def test_where_two_may_create_one_name_what_lost_its_votes_is_buried_again(
    tmp_path: Path, behind: str
) -> None:
    """Storage without an atomic create. At the same moment another rotation deletes what this one puts back, or puts
    back what this one deletes."""

    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        await kit.save(backend, 2)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        manifest = (await kit.standing(backend))[1, 1]

        async def other() -> None:
            if behind == "rotate.looked":
                (tmp_path / names.vote(1, 1, 1, 1)).unlink()
            else:
                late = replace(manifest, revision=4)
                (tmp_path / names.decision(1, 1, 4)).write_bytes(encode_decision(late))

        if behind == "rotate.looked":
            await add_pin(backend, (1, 1))
        ended = kit.on_point(behind, other)
        put_only = PutOnly(tmp_path)
        report = await rotate(put_only, plan, is_superseded=store_kit.not_superseded)
        await put_only.close()
        await ended()
        assert not report.kept
        assert await kit.check(backend) == {(1, 2)}

    kit.with_run(tmp_path, work)


class Noting(LocalBackend):
    """Notes what is created and deleted, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[tuple[str, str]] = []

    async def create(self, name: str, data: bytes) -> None:
        await super().create(name, data)
        self.done.append(("create", name))

    async def delete(self, names: Iterable[str]) -> None:
        every = [*names]
        self.done += [("delete", name) for name in every]
        await super().delete(every)


def test_tombstones_twice_then_votes_then_images_then_decisions(tmp_path: Path) -> None:
    """Whatever is cut off, what counts is whole, and what is not does not count."""

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2, full)
        await kit.save(backend, 3)
        noting = Noting(tmp_path)
        await kit.prune(noting)
        await noting.close()

        def rank(one: tuple[str, str]) -> int:
            parsed = names.parse(one[1])
            assert parsed is not None
            if one[0] == "create":
                return 0
            return {names.Kind.VOTE: 1, names.Kind.DECISION: 3}.get(parsed.kind, 2)

        ranks = [rank(one) for one in noting.done]
        assert ranks == sorted(ranks)
        assert [ranks.count(kind) for kind in (0, 1, 3)] == [4, 2 * kit.WORLD, 4] and ranks.count(2) >= 4
        tombs = [name for how, name in noting.done if how == "create"]
        expected = [names.decision(step, 1, number) for number in (2, 3) for step in (2, 1)]
        assert tombs == expected, "deltas before their bases"

    kit.with_run(tmp_path, work)
