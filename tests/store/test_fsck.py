"""What fsck says of runs that are not simply whole or damaged, and its exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends.errors import Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import NoCheckpoint, NotARun
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.store.catalog import list_step
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.findings import Finding, Kind, Severity, exit_code
from everstep.store.fsck import check
from everstep.store.rotate import rotate

from tests.store import store_kit as kit


def with_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())


async def findings(backend: LocalBackend, **options: object) -> list[Finding]:
    found = [f async for f in check(backend, **{"decision_wait_s": 0, **options})]  # type: ignore[arg-type]
    assert all(f.hurts for f in found if f.severity is Severity.CANNOT_TELL)
    assert not any(f.hurts for f in found if f.severity in (Severity.INFO, Severity.WARNING))
    return found


def brief(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.severity.value, f.kind.value, f.name) for f in found]


def test_exit_codes_are_those_of_fsck() -> None:
    def code(*severities: Severity, kind: Kind = Kind.DAMAGED) -> int:
        return exit_code([Finding(one, kind, "x", None, None, "") for one in severities])

    assert code() == code(Severity.INFO, Severity.WARNING) == 0
    assert code(Severity.DAMAGE, Severity.INFO) == code(Severity.WARNING, kind=Kind.QUARANTINE) == 4
    assert code(Severity.CANNOT_TELL) == 8
    assert code(Severity.CANNOT_TELL, Severity.DAMAGE) == 12


def test_what_is_no_run_is_no_finding(tmp_path: Path) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path)
        with pytest.raises(NotARun):
            await findings(backend)
        await kit.start_run(backend)
        with pytest.raises(NoCheckpoint):
            await findings(backend, step=5)
        await backend.close()

    asyncio.run(go())


def test_a_lost_manifest_is_damage_until_it_is_committed_again(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        name = names.decision(1, 1, 1)
        (tmp_path / name).unlink()
        assert brief(await findings(backend)) == [("damage", "undecided", name)]
        assert isinstance(await try_commit(backend, 1, 1, 1, 2), Manifest)
        assert await findings(backend) == []

    with_run(tmp_path, work)


def test_an_attempt_that_commits_while_fsck_looks_is_no_damage(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in range(2):
            await kit.flush(backend, 1, rank)

        async def commit_soon() -> None:
            await try_commit(backend, 1, 1, 1, 2)

        found, _ = await asyncio.gather(findings(backend, decision_wait_s=0.5), commit_soon())
        assert found == []

    with_run(tmp_path, work)


def test_unfinished_and_given_up_attempts_are_no_damage(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.flush(backend, 1, 0)
        await kit.flush(backend, 2, 0)
        await abort_attempt(backend, 2, 1, 1, reason="rank 1 failed")
        await kit.save(backend, 3)
        await kit.flush(backend, 4, 1)
        assert brief(await findings(backend)) == [
            ("info", "leftover", names.attempt_dir(2, 1, 1)),
            ("warning", "leftover", names.attempt_dir(1, 1, 1)),
            ("info", "leftover", names.attempt_dir(4, 1, 1)),
        ]

    with_run(tmp_path, work)


def test_a_complete_attempt_beyond_the_cut_is_no_damage(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        for rank in range(2):
            await kit.flush(backend, 2, rank)
        await kit.adopt(backend, 1, 1)
        await kit.save(backend, 2, incarnation=2)
        assert brief(await findings(backend)) == [("warning", "leftover", names.attempt_dir(2, 1, 1))]

    with_run(tmp_path, work)


def test_tombstones_are_told_apart_by_what_is_left(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        image = tmp_path / names.image(1, 1, 1, 0, "model")
        data = image.read_bytes()
        await rotate(backend, await kit.plan_for(backend), is_superseded=kit.not_superseded)
        name = names.decision(1, 1, 3)
        assert brief(await findings(backend)) == [("info", "tombstone", name)]
        image.parent.mkdir()
        image.write_bytes(data)
        assert brief(await findings(backend)) == [("warning", "tombstone", name)]

    with_run(tmp_path, work)


def test_foreign_and_temporary_files_are_named(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        (tmp_path / "notes.txt").write_text("mine")
        directory = tmp_path / names.attempt_dir(1, 1, 1)
        (directory / "rank-00000.extra.safetensors").write_bytes(b"x")
        temporary = f"{names.attempt_dir(1, 1, 1)}/.tmp-rank-00000.model.safetensors.77.abcdefabcdef"
        (tmp_path / temporary).write_bytes(b"half")
        assert brief(await findings(backend)) == [
            ("info", "foreign", f"{names.attempt_dir(1, 1, 1)}/rank-00000.extra.safetensors"),
            ("info", "foreign", "notes.txt"),
            ("info", "temporary", temporary),
        ]

    with_run(tmp_path, work)


def test_every_object_without_an_answer_is_cannot_tell(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        whole = backend.read
        votes = names.vote(1, 1, 1, 1)

        async def failing(name: str, nbytes_max: int = 256 << 20) -> bytes:
            if name in (votes, names.decision(2, 1, 1)):
                raise Retryable(name, "timed out")
            return await whole(name, nbytes_max)

        backend.read = failing  # type: ignore[method-assign]
        found = await findings(backend)
        assert sorted(f.name for f in found) == [votes, names.decision(2, 1, 1)]
        assert exit_code(found) == 8

    with_run(tmp_path, work)


def test_one_step_can_be_checked_alone(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        for step in (1, 2):
            (tmp_path / names.image(step, 1, 1, 0, "model")).unlink()
        assert [f.step for f in await findings(backend, step=2)] == [2]
        assert {f.kind for f in await findings(backend)} == {Kind.MISSING}

    with_run(tmp_path, work)


def test_one_damaged_layout_hurts_every_step_that_names_it(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        manifests = [await kit.save(backend, step) for step in (1, 2)]
        name = names.layout(manifests[0].ranks[1].layout_hash)
        (tmp_path / name).write_bytes(b"")
        assert [(f.name, f.step) for f in await findings(backend)] == [(name, 1), (name, 2)]

    with_run(tmp_path, work)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        manifest = await kit.save(backend, 1)
        seen: list[tuple[int, int]] = []
        await findings(backend, progress=lambda done, total: seen.append((done, total)))
        total = sum(record.nbytes for record in manifest.ranks)
        assert seen[-1] == (total, total) and seen == sorted(seen)

    with_run(tmp_path, work)


def test_a_missing_abort_record_below_a_manifest_is_named(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await abort_attempt(backend, 1, 1, 1, reason="given up")
        await kit.save(backend, 1)
        (tmp_path / names.decision(1, 1, 1)).unlink()
        assert (await list_step(backend, 1, 1)).decisions == (2,)
        assert [(f.severity, f.name, f.hurts) for f in await findings(backend)] == [
            (Severity.DAMAGE, names.decision(1, 1, 1), "")
        ]

    with_run(tmp_path, work)


def test_an_abort_record_alone_lacks_nothing(tmp_path: Path) -> None:
    """A mirror of a second attempt that was given up: nobody was there to decide the first one."""

    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        await abort_attempt(backend, 2, 1, 2, reason="too many wait for the tier")
        assert await findings(backend) == []

    with_run(tmp_path, work)
