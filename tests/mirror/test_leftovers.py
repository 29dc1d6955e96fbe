"""What crashed writers left goes; what anybody may need stays."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.errors import SaveAbandoned
from everstep.format import names
from everstep.format.beacon import Beacon, BeaconRank, encode_beacon
from everstep.format.manifest import Abort, Manifest, Tombstone, encode_decision
from everstep.store.catalog import list_step, list_steps, read_decision, read_decision_at
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.leftovers import Collected, collect_leftovers
from everstep.store.mirror import conclude, copy_records, mirror_rank
from everstep.store.runs import now

from tests.mirror import kit
from tests.store import store_kit

HOUR_S = 3600.0
LATER = 2 * HOUR_S


def on_run(tmp_path: Path, work: Callable[[LocalBackend], Any]) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path / "run")
        await store_kit.start_run(backend)
        try:
            await work(backend)
        finally:
            points.hook = None
            await backend.close()

    asyncio.run(go())


async def collect(backend: LocalBackend, *, after_s: float = LATER, **options: Any) -> Collected:
    """As it is ``after_s`` from now."""
    return await collect_leftovers(backend, clock=lambda: time.time() + after_s, **options)


async def unfinished(backend: LocalBackend, name: str, data: bytes = b"half") -> None:
    """A temporary, as a writer leaves it that is killed."""
    writer = await backend.open_writer(name, 2 * len(data))
    await writer.write(memoryview(data))


def test_a_half_mirrored_checkpoint_goes_and_can_be_mirrored_after_all(tmp_path: Path) -> None:
    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifests = [await store_kit.save(source, step) for step in (1, 2)]
        await kit.mirror(source, target, manifests[0])
        await kit.send(source, target, manifests[1], [0])
        half = sum(
            path.stat().st_size for path in (tmp_path / "target" / names.attempt_dir(2, 1, 1)).iterdir()
        )
        assert (await collect(target, after_s=HOUR_S / 2)).attempts == []
        report = await collect(target)
        assert report.attempts == [((1, 2), 1)] and report.freed_bytes == half
        assert not (tmp_path / "target" / names.attempt_dir(2, 1, 1)).exists()
        # The abort record outlives every commit that may still be under way, and then goes as well.
        assert isinstance(await conclude(source, target, manifests[1]), Abort)
        assert not (await collect(target)).attempts
        assert [found.key for found in await list_steps(target, empty=True)] == [(1, 1)]
        assert await kit.mirror(source, target, manifests[1]) == manifests[1]
        assert await store_kit.loadable(target) == ({(1, 1), (1, 2)}, {})

    kit.on_two(tmp_path, work)


def test_whoever_is_taken_for_dead_and_is_not_gets_an_error_not_half_a_checkpoint(tmp_path: Path) -> None:
    """At every place at which it may stand still while this collects."""
    for point in ("mirror.image.piece", "mirror.vote.before", "mirror.vote.after", "mirror.manifest.before"):

        async def work(source: LocalBackend, target: LocalBackend, point: str = point) -> None:
            manifest = await store_kit.save(source, 1)
            run = await copy_records(source, target)
            stopped, go_on = asyncio.Event(), asyncio.Event()
            slow = Stopping(target, stopped, go_on)

            def hook(name: str, detail: str) -> None:
                if name == point:
                    points.hook = None
                    slow.stop = True

            async def copy() -> object:
                for rank in (0, 1):
                    await mirror_rank(source, slow, manifest, rank, run=run, pool=kit.POOL)
                return await conclude(source, slow, manifest)

            points.hook = hook
            copying = asyncio.ensure_future(copy())
            await asyncio.wait_for(stopped.wait(), 30)
            report = await collect(target)
            complete = point == "mirror.manifest.before"
            assert bool(report.attempts) != complete
            go_on.set()
            (ended,) = await asyncio.gather(copying, return_exceptions=True)
            good, bad = await store_kit.loadable(target)
            assert not bad
            assert good == ({(1, 1)} if complete else set()), point
            if complete:
                assert ended == manifest
            else:
                assert isinstance(ended, (Abort, SaveAbandoned, type(None))) or "cannot write" in str(ended)

        kit.on_two(tmp_path / point, work)


class Stopping(kit.Wrapper):
    """Stands still at the next operation once told to."""

    def __init__(self, inner: LocalBackend, stopped: asyncio.Event, go_on: asyncio.Event) -> None:
        super().__init__(inner)
        self.stop = False
        self._stopped, self._go_on = stopped, go_on

    async def _gate(self) -> None:
        if self.stop:
            self.stop = False
            self._stopped.set()
            await self._go_on.wait()

    async def open_writer(self, name: str, nbytes: int, notes: Any = None, **more: Any) -> Any:
        await self._gate()
        return await self.inner.open_writer(name, nbytes, notes, **more)

    async def create(self, name: str, data: bytes) -> None:
        await self._gate()
        await self.inner.create(name, data)

    async def size(self, name: str) -> int:
        await self._gate()
        return await self.inner.size(name)

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        await self._gate()
        return await self.inner.read(name, nbytes_max)


def test_unfinished_files_go_wherever_they_lie(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.save(backend, 1)
        lost = ["layouts/" + "0" * 32, "run.json", names.image(1, 1, 1, 0, "model"), "events/x.jsonl"]
        for name in lost:
            await unfinished(backend, name)
        assert len(kit.temporaries(tmp_path / "run")) == 4
        young = await collect(backend, after_s=0)
        assert not young.temporaries and len(young.kept) == 4
        report = await collect(backend)
        assert len(report.temporaries) == 4 and report.freed_bytes >= 16 and not report.kept
        assert not kit.temporaries(tmp_path / "run")
        assert await store_kit.loadable(backend) == ({(1, 1)}, {})

    on_run(tmp_path, work)


def test_attempts_that_are_decided_against_or_below_a_decided_one_go(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.flush(backend, 1, 0)
        await abort_attempt(backend, 1, 1, 1, reason="rank 1 failed")
        for attempt in (2, 3):  # written twice: the second one counts
            for rank in (0, 1):
                await store_kit.flush(backend, 1, rank, attempt=attempt)
            assert isinstance(await try_commit(backend, 1, 1, attempt, 2), Manifest)
        report = await collect(backend)
        assert report.attempts == [((1, 1), 1), ((1, 1), 2)]
        assert (await list_step(backend, 1, 1)).attempts == (3,)
        assert await store_kit.loadable(backend) == ({(1, 1)}, {})
        assert [f.message for f in await kit.findings(backend)] == []

    on_run(tmp_path, work)


def test_a_removal_that_broke_off_is_finished(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await store_kit.save(backend, step)
        tombstone = Tombstone(1, 1, 2, "retention", now())
        await backend.create(names.decision(1, 1, 2), encode_decision(tombstone))
        report = await collect(backend)
        assert report.removed == [(1, 1)] and report.freed_bytes > 40_000
        assert await store_kit.loadable(backend) == ({(1, 2)}, {})

    on_run(tmp_path, work)


@pytest.mark.parametrize("age_s", [0.0, LATER, 1e9])
def test_open_attempts_of_the_living_stay_whatever_their_age(tmp_path: Path, age_s: float) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.flush(backend, 1, 0)
        await unfinished(backend, names.image(1, 1, 1, 1, "model"))
        await unfinished(backend, names.image(2, 1, 1, 1, "model"))
        await store_kit.save(backend, 3)
        before = [*kit.objects(tmp_path / "run"), *kit.temporaries(tmp_path / "run")]
        report = await collect(backend, after_s=age_s, living=[1], older_than_s=0.0)
        assert [*kit.objects(tmp_path / "run"), *kit.temporaries(tmp_path / "run")] == before
        assert not report.attempts and not report.temporaries and not report.freed_bytes
        assert {name.rpartition("/a1")[0] for name, _ in report.kept} == {
            names.checkpoint_dir(1, 1),
            names.checkpoint_dir(2, 1),
        }
        # Somebody who is gone: nothing of it stays.
        report = await collect(backend, after_s=age_s + 1, older_than_s=0.0)
        assert ((1, 1), 1) in report.attempts
        assert not kit.temporaries(tmp_path / "run")
        assert await store_kit.loadable(backend) == ({(1, 3)}, {})

    on_run(tmp_path, work)


def test_a_checkpoint_that_lacks_only_its_manifest_stays(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in (0, 1):
            await store_kit.flush(backend, 1, rank)
        report = await collect(backend)
        assert not report.attempts and "not decided" in report.kept[0][1]
        assert isinstance(await try_commit(backend, 1, 1, 1, 2), Manifest)

    on_run(tmp_path, work)


def test_storage_that_cannot_decide_keeps_attempts_and_loses_unfinished_files(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.flush(backend, 1, 0)
        await unfinished(backend, names.image(1, 1, 1, 1, "model"))
        plain = kit.WithoutCreate(backend)
        plain.tried = True
        report = await collect_leftovers(plain, clock=lambda: time.time() + LATER)
        assert not report.attempts and len(report.temporaries) == 1
        assert "no atomic create" in dict(report.kept)[names.attempt_dir(1, 1, 1)]
        assert (tmp_path / "run" / names.vote(1, 1, 1, 0)).exists()

    on_run(tmp_path, work)


def test_what_has_no_record_or_cannot_be_read_stays(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.flush(backend, 1, 0)
        await store_kit.save(backend, 2)
        (tmp_path / "run" / names.attempt_dir(3, 7, 1)).mkdir(parents=True)
        lone = tmp_path / "run" / names.vote(3, 7, 1, 0)
        lone.write_bytes(b"of an incarnation whose record is lost")
        foreign = tmp_path / "run" / "checkpoints" / "mine.txt"
        foreign.write_bytes(b"mine")
        manifest = tmp_path / "run" / names.decision(2, 1, 1)
        manifest.write_bytes(manifest.read_bytes()[:-1])
        report = await collect(backend)
        assert report.attempts == [((1, 1), 1)]
        assert lone.exists() and foreign.exists() and manifest.exists()
        assert (tmp_path / "run" / names.image(2, 1, 1, 0, "model")).exists()
        assert (names.attempt_dir(3, 7, 1), "the record of its incarnation is missing") in report.kept

    on_run(tmp_path, work)


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await store_kit.flush(backend, 1, 0)
        await unfinished(backend, names.image(1, 1, 1, 1, "model"))
        await store_kit.save(backend, 2)
        await unfinished(backend, names.image(2, 1, 1, 1, "model"))
        await store_kit.save(backend, 3)
        tombstone = Tombstone(2, 1, 2, "retention", now())
        await backend.create(names.decision(2, 1, 2), encode_decision(tombstone))
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        dry = await collect(backend, dry_run=True)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
        wet = await collect(backend)
        assert wet == dry and wet.freed_bytes > 0 and wet.attempts and wet.removed

    on_run(tmp_path, work)


def test_a_kill_at_any_point_of_it_leaves_the_same_checkpoints(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    async def make(backend: LocalBackend) -> None:
        await store_kit.save(backend, 1)
        await store_kit.flush(backend, 2, 0)
        await store_kit.flush(backend, 3, 0)
        await abort_attempt(backend, 3, 1, 1, reason="x")
        await unfinished(backend, names.image(3, 1, 1, 1, "model"))

    def tried(root: Path, nth: int) -> int:
        """Stops at the ``nth`` point; how many there were."""
        met = 0

        async def work(backend: LocalBackend) -> None:
            nonlocal met
            await make(backend)

            def hook(name: str, detail: str) -> None:
                nonlocal met
                met += name.endswith((".before", ".after"))
                if met == nth:
                    raise Killed

            points.hook = hook
            try:
                await collect(backend)
            except Killed:
                points.hook = None
            points.hook = None
            assert await store_kit.loadable(backend) == ({(1, 1)}, {})
            await collect(backend)
            await collect(backend)
            assert [found.key for found in await list_steps(backend, empty=True)] == [(1, 1)]
            assert not kit.temporaries(root / "run")

        on_run(root, work)
        return met

    count = tried(tmp_path / "whole", 0)
    assert count > 20
    for nth in range(1, count + 1, 3):
        tried(tmp_path / str(nth), nth)


# -- the command


def gc(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["gc", *(str(arg) for arg in args)], catch_exceptions=False)


@pytest.fixture
def crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with one checkpoint, and half of another that is three hours old."""
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))

    async def make(backend: LocalBackend) -> None:
        await store_kit.save(backend, 1)
        await store_kit.flush(backend, 2, 0)

    on_run(tmp_path, make)
    then = time.time() - 3 * HOUR_S
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (then, then))
    return tmp_path / "run"


def test_the_command_says_what_it_did(crashed: Path, tmp_path: Path) -> None:
    memory = ("--memory", tmp_path / "memory")
    assert json.loads(gc(crashed, "--json", "--older-than", "1d", *memory).stdout)["attempts"] == []
    dry = gc(crashed, "--dry-run", *memory)
    assert dry.exit_code == 0 and "would remove attempt 1 of step 2" in dry.stdout
    assert (crashed / names.vote(2, 1, 1, 0)).exists()
    result = gc(crashed, "--json", *memory)
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["attempts"] == [{"step": 2, "incarnation": 1, "attempt": 1}]
    assert said["freed_bytes"] > 10_000 and said["dry_run"] is False
    assert not (crashed / names.vote(2, 1, 1, 0)).exists()
    assert isinstance(asyncio.run(read_decision_at(LocalBackend(crashed), 2, 1, 1)), Abort), (
        "late commits have to find it"
    )


def test_a_run_whose_beacon_goes_on_keeps_its_open_attempts(crashed: Path, tmp_path: Path) -> None:
    """A rank on another host trains: its beacon is made anew while the command looks."""
    import threading

    path = crashed / names.beacon("0123456789abcdef")
    path.parent.mkdir()
    ended = threading.Event()

    def live() -> None:
        count = 0
        while not ended.is_set():
            count += 1
            rank = BeaconRank(0, 99, 1, True, 5, 0.1, 1.0, 0.1, 5, None)
            beacon = Beacon(
                "there", "there", "boot", 98, 1, count, 0.2, 1.0, 1, 2, (rank,), None, None, None, 0
            )
            fresh = path.with_name(".tmp-beacon")
            fresh.write_bytes(encode_beacon(beacon))
            fresh.rename(path)
            ended.wait(0.1)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        result = gc(crashed, "--json", "--older-than", "0s", "--memory", tmp_path / "memory")
    finally:
        ended.set()
        thread.join()
    said = json.loads(result.stdout)
    assert result.exit_code == 0 and not said["attempts"]
    assert {"name": names.attempt_dir(2, 1, 1), "reason": "its incarnation may be at work"} in said["kept"]
    # It stands still: whoever wrote it is gone.
    result = gc(crashed, "--json", "--memory", tmp_path / "memory")
    assert json.loads(result.stdout)["attempts"] == [{"step": 2, "incarnation": 1, "attempt": 1}]


@pytest.mark.parametrize("text", ["1", "-1h", "1w", "x", ""])
def test_wrong_calls(crashed: Path, text: str) -> None:
    assert gc(crashed, "--older-than", text).exit_code == 2


def test_no_run(tmp_path: Path) -> None:
    result = gc(tmp_path / "nowhere")
    assert result.exit_code == 1 and "is not a run" in result.stderr


def test_nothing_to_do(crashed: Path, tmp_path: Path) -> None:
    assert gc(crashed, "--memory", tmp_path / "memory").exit_code == 0
    result = gc(crashed, "--memory", tmp_path / "memory")
    assert result.exit_code == 0 and result.stdout.endswith("0 B freed\n")

    async def look() -> object:
        return await read_decision(LocalBackend(crashed), await list_step(LocalBackend(crashed), 1, 1))

    assert isinstance(asyncio.run(look()), Manifest)
