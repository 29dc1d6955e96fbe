"""Votes read in bulk: gathers stand in for them, and never for more than them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import everstep.agent.flushes as flushes
import pytest
from everstep.agent.journal import JobEntry
from everstep.agent.pipeline import Flush, Pipeline
from everstep.agent.values import Progress
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, StateMismatch
from everstep.format import names
from everstep.format.gather import decode_gather
from everstep.format.layout import Box, EntrySpec, Scope, build_layout, compress, encode, layout_hash
from everstep.format.manifest import Abort, Manifest
from everstep.format.vote import decode_vote, encode_vote, vote_hash
from everstep.store import votes
from everstep.store.catalog import voted
from everstep.store.commit import try_commit
from everstep.store.findings import Finding
from everstep.store.fsck import check
from everstep.store.rotate import rotate
from everstep.store.runs import open_run

from tests.store import store_kit as kit

STEP, WORLD = 3, 4
PLACE = STEP, 1, 1


def with_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())


class Reads(LocalBackend):
    """Which objects were read whole."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.names: list[str] = []

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        self.names.append(name)
        return await super().read(name, nbytes_max)

    def votes(self) -> list[int]:
        parsed = [names.parse(name) for name in self.names]
        return sorted(x.rank for x in parsed if x and x.kind is names.Kind.VOTE and x.rank is not None)


async def flush_all(backend: LocalBackend) -> None:
    for rank in range(WORLD):
        await kit.flush(backend, STEP, rank, world=WORLD)


async def findings(backend: LocalBackend) -> list[Finding]:
    return [finding async for finding in check(backend, decision_wait_s=0)]


def test_a_commit_reads_gathers_and_the_votes_that_they_lack(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        assert await votes.gather_votes(backend, *PLACE, [1, 2])
        assert await votes.gather_votes(backend, *PLACE, [1, 2]), "equal bytes are there already"
        assert not await votes.gather_votes(backend, *PLACE, [1, 2, 3]), "others are not replaced"
        assert await voted(backend, *PLACE) == ([0, 1, 2, 3], [1])
        reads = Reads(tmp_path)
        manifest = await try_commit(reads, *PLACE, WORLD)
        assert isinstance(manifest, Manifest)
        assert reads.votes() == [0, 3], "each once"
        await reads.close()
        for record in manifest.ranks:
            data = (tmp_path / names.vote(*PLACE, record.rank)).read_bytes()
            vote = decode_vote(data, names.vote(*PLACE, record.rank))
            assert (record.vote_hash, record.vote_nbytes) == (vote_hash(data), len(data))
            assert record.layout_hash == vote.layout_hash
            assert record.nbytes == sum(image.nbytes for image in vote.images)
            assert record.state_nbytes == vote.images[-1].nbytes
        await kit.load(backend, manifest)
        assert await findings(backend) == []

    with_run(tmp_path, work)


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "other"])
def test_a_damaged_gather_is_made_up_for_and_told_by_fsck(tmp_path: Path, spoil: str) -> None:
    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        await votes.gather_votes(backend, *PLACE, [0, 1, 2, 3])
        path = tmp_path / names.gather(*PLACE, 0)
        data = path.read_bytes()
        spoiled = {
            "flip": data[:50] + bytes([data[50] ^ 1]) + data[51:],
            "cut": data[:-1],
            "empty": b"",
            "other": (tmp_path / names.vote(*PLACE, 0)).read_bytes(),
        }
        path.write_bytes(spoiled[spoil])
        reads = Reads(tmp_path)
        assert isinstance(await try_commit(reads, *PLACE, WORLD), Manifest)
        assert set(reads.votes()) == {0, 1, 2, 3}
        await reads.close()
        (finding,) = await findings(backend)
        assert (finding.severity.value, finding.name) == ("damage", names.gather(*PLACE, 0))
        assert not finding.hurts

    with_run(tmp_path, work)


def test_gathered_votes_that_are_not_those_of_the_manifest_are_told(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        assert isinstance(await try_commit(backend, *PLACE, WORLD), Manifest)
        path = tmp_path / names.vote(*PLACE, 2)
        data = path.read_bytes()
        vote = decode_vote(data, names.vote(*PLACE, 2))
        path.write_bytes(encode_vote(replace(vote, meta={**vote.meta, "facts": {"other": 1}})))
        await votes.gather_votes(backend, *PLACE, [2, 3])
        path.write_bytes(data)
        (finding,) = await findings(backend)
        assert finding.name == names.gather(*PLACE, 2) and "[2]" in finding.message

    with_run(tmp_path, work)


def test_a_damaged_vote_behind_a_gather_is_found_where_it_is_read(tmp_path: Path) -> None:
    """The commit goes by the header, which was right when it was gathered; whoever loads proves all of it."""

    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        await votes.gather_votes(backend, *PLACE, [0, 1, 2, 3])
        for rank in (0, 3):
            path = tmp_path / names.vote(*PLACE, rank)
            path.write_bytes(path.read_bytes()[:-1])
        decision = await try_commit(backend, *PLACE, WORLD)
        assert isinstance(decision, Abort) and decision.rank == 0

    with_run(tmp_path, work)


def test_a_vote_that_is_not_the_one_gathered_aborts(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        await votes.gather_votes(backend, *PLACE, [0, 1, 2, 3])
        path = tmp_path / names.vote(*PLACE, 0)
        vote = decode_vote(path.read_bytes(), names.vote(*PLACE, 0))
        path.write_bytes(encode_vote(replace(vote, meta={**vote.meta, "metrics": {"loss": 9.0}})))
        decision = await try_commit(backend, *PLACE, WORLD)
        assert isinstance(decision, Abort) and decision.rank == 0
        assert "not the vote that was gathered" in decision.reason

    with_run(tmp_path, work)


def test_votes_that_are_gathered_disagree_like_others(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in range(WORLD):
            meta = {**kit.meta_of(rank, WORLD), "config_hash": "abc" if rank % 2 == 0 else "other"}
            pinned = kit.snapshot(STEP, rank, world=WORLD, meta=meta)
            await kit.flush(backend, STEP, rank, world=WORLD, pinned=pinned)
        await votes.gather_votes(backend, *PLACE, [0, 1, 2, 3])
        decision = await try_commit(backend, *PLACE, WORLD)
        assert isinstance(decision, Abort) and decision.rank == 1
        assert decision.reason == "the ranks differ in config_hash: ranks 1, 3 have 'other', rank 0 has 'abc'"

    with_run(tmp_path, work)


def test_rotation_removes_gathers(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await flush_all(backend)
        await votes.gather_votes(backend, *PLACE, [0, 1, 2, 3])
        await try_commit(backend, *PLACE, WORLD)
        await kit.save(backend, STEP + 1, world=WORLD)
        report = await rotate(backend, await kit.plan_for(backend), is_superseded=kit.not_superseded)
        assert report.removed == [(1, STEP)] and report.foreign == []
        assert not (tmp_path / names.attempt_dir(*PLACE)).exists()

    with_run(tmp_path, work)


# ------------------------------------------------------------------------------------------------ layouts


def store_layouts(root: Path, ranks: list[list[EntrySpec]]) -> list[str]:
    hashes = []
    for specs in ranks:
        encoded = encode(build_layout(specs))
        hashes.append(layout_hash(encoded))
        path = root / names.layout(hashes[-1])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(compress(encoded))
    return hashes


def shard(key: str, rank: int, world: int) -> EntrySpec:
    return EntrySpec("model", key, "float32", (2 * world,), (Box((2 * rank,), (2,)),), Scope.GLOBAL)


def test_layouts_of_more_ranks_than_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "LAYOUTS_AT_ONCE", 3)

    async def work(backend: LocalBackend) -> None:
        ranks = [[shard("a", rank, 10), shard("b", rank, 10)] for rank in range(10)]
        hashes = store_layouts(tmp_path, ranks)
        await votes.check_layouts(backend, hashes)
        with pytest.raises(StateMismatch, match=r"element \(14,\).*stored by no rank"):
            await votes.check_layouts(backend, hashes[:7] + hashes[8:])
        # Ranks of equal layouts, too.
        with pytest.raises(StateMismatch, match=r"stored 6 times, by ranks \[0, 1, 2, 3, 4, 5\]"):
            await votes.check_layouts(backend, hashes[:1] * 6 + hashes[6:])
        (tmp_path / names.layout(hashes[4])).write_bytes(b"EVSTLAYT")
        with pytest.raises(Damaged) as caught:
            await votes.check_layouts(backend, hashes)
        assert caught.value.name == names.layout(hashes[4])
        (tmp_path / names.layout(hashes[4])).unlink()
        with pytest.raises(Damaged, match="is missing"):
            await votes.check_layouts(backend, hashes)

    with_run(tmp_path, work)


# ---------------------------------------------------------------------------------------------- the agent


class NoNotes:
    def load(self) -> bytes | None:
        return None

    async def save(self, data: bytes) -> None: ...


class Owner:
    """What the pipeline needs of an agent that serves ``ranks``."""

    def __init__(self, ranks: set[int]) -> None:
        self.ranks = ranks
        self.stages: list[tuple[str, int]] = []
        self.over = asyncio.Event()

    def report(self, progress: Progress) -> None:
        self.stages.append((progress.stage, progress.rank))
        if progress.stage not in ("queued", "written", "voted"):
            self.over.set()

    def rotate(self, incarnation: int) -> None: ...

    def local_ranks(self, incarnation: int) -> set[int]:
        return self.ranks

    def notes(self, entry: JobEntry, name: str) -> NoNotes:
        return NoNotes()

    async def remember(self, entry: JobEntry) -> None: ...

    async def forget(self, entries: list[JobEntry], manifest: object = None) -> None: ...

    async def stand_in(self, flush: Flush, missing: list[int]) -> list[int]:
        return []

    async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
        return [], ""


@pytest.mark.parametrize(("world_min", "gathered"), [(WORLD, [[1, 2, 3]]), (WORLD + 1, [])])
def test_an_agent_gathers_the_votes_of_its_ranks_once_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_min: int, gathered: list[list[int]]
) -> None:
    monkeypatch.setattr(flushes, "GATHER_WORLD_MIN", world_min)

    async def work(backend: LocalBackend) -> None:
        owner = Owner({1, 2, 3})
        run = await open_run(backend)
        pipeline = Pipeline(owner, run, backend, queue_max=10, commit_timeout_s=60)
        writer = asyncio.ensure_future(pipeline.run())
        try:
            for rank in (3, 1, 2):
                # Later jobs come when earlier ones are written: no gather is made of a part of the ranks.
                entry = JobEntry(1, STEP, rank, "run", WORLD, "", 0, 1, "full", 1, rank, (1, 1, "boot"))
                pinned = kit.snapshot(STEP, rank, world=WORLD)
                monkeypatch.setattr(pinned, "release", lambda: None, raising=False)
                await pipeline.add(entry, lambda pinned=pinned: pinned)
                while ("voted", rank) not in owner.stages:
                    assert not owner.over.is_set(), owner.stages
                    await asyncio.sleep(0.01)
            await kit.flush(backend, STEP, 0, world=WORLD)
            await asyncio.wait_for(owner.over.wait(), 30)
        finally:
            writer.cancel()
            await pipeline.close()
        assert owner.stages[-1][0] == "committed"
        found = sorted((tmp_path / names.attempt_dir(*PLACE)).glob("*.votes"))
        told = [decode_gather(path.read_bytes(), str(path.relative_to(tmp_path))) for path in found]
        assert [[header.rank for header in headers] for headers in told] == gathered

    with_run(tmp_path, work)
