"""What is owed to a tier: each checkpoint once, whoever names it, and none dropped but for newer ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from everstep.agent.journal import JobEntry, LmdbJournal, MirrorEntry
from everstep.agent.mirrors import WAITING_MAX, Line, Mirrors
from everstep.agent.values import TierSettings
from everstep.backends.open import open_backend
from everstep.plan.retention import Retention


def entry(step: int, *ranks: int) -> MirrorEntry:
    return MirrorEntry("far", "run", 1, step, 1, ranks or (0,))


def job(step: int, rank: int = 0, attempt: int = 1) -> JobEntry:
    return JobEntry(1, step, rank, "run", 2, "", 0, 1, "full", attempt, step, (1, 1, "boot"))


class Owner:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open_tier(self, tier: TierSettings) -> Any:
        return open_backend(str(self.directory), shared=True)


def on_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Line], Any]) -> None:
    """``act`` on a line whose mirrors never end."""

    async def for_ever(self: Line, entry: MirrorEntry) -> object:
        await asyncio.Event().wait()
        return None

    dropped: list[int] = []
    monkeypatch.setattr(Line, "_mirror", for_ever)
    monkeypatch.setattr(Line, "_drop", lambda self, entry: dropped.append(entry.step))

    async def main() -> None:
        owner: Any = Owner(tmp_path)
        none: Any = None
        tier = TierSettings("far", str(tmp_path), Retention(keep_last=1, keep_every=None))
        with ThreadPoolExecutor(1) as pool:
            line = Line(owner, none, tier, none, none, pool)
            try:
                await act(line)
                assert dropped == getattr(act, "dropped", [])
            finally:
                line.leave()
                await line.close()

    asyncio.run(main())


def test_after_a_restart_as_many_are_owed_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = range(1, 2 + WAITING_MAX)

    async def act(line: Line) -> None:
        line.owe([entry(step) for step in steps])
        await asyncio.sleep(0)
        assert line.owed() == {(1, step) for step in steps}
        line.owe([entry(step) for step in steps])
        assert line.owed() == {(1, step) for step in steps}

    on_a_line(tmp_path, monkeypatch, act)


def test_of_more_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(line: Line) -> None:
        line.owe([entry(1)])
        await asyncio.sleep(0)
        for step in range(2, 3 + WAITING_MAX):
            line.owe([entry(step)])
        assert line.owed() == {(1, step) for step in (1, *range(3, 3 + WAITING_MAX))}

    act.dropped = [2]  # type: ignore[attr-defined]
    on_a_line(tmp_path, monkeypatch, act)


def test_ranks_that_ask_one_by_one_are_seen_to_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(line: Line) -> None:
        line.owe([entry(1)])
        await asyncio.sleep(0)
        line.owe([entry(2, 0), entry(2, 1), entry(2, 0)])
        line.owe([entry(1, 1)])
        assert [one.ranks for one in line.leave()] == [(0, 1), (0, 1)]

    on_a_line(tmp_path, monkeypatch, act)
    journal = LmdbJournal(tmp_path / "journal")
    journal.drop_jobs([], [entry(2, 0), entry(3)])
    journal.drop_jobs([], [entry(2, 1)])
    assert [(one.step, one.ranks) for one in journal.mirrors()] == [(2, (0, 1)), (3, (0,))]
    journal.close()


def test_a_tier_opened_anew_waits_for_what_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would go on with one upload, and the former line ends by aborting it."""
    told: list[str] = []

    async def mirror(self: Line, entry: MirrorEntry) -> object:
        told.append(f"begun with {self.tier.options['key']}")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # as long as an abortion takes
            told.append(f"taken back with {self.tier.options['key']}")
        return None

    monkeypatch.setattr(Line, "_mirror", mirror)

    def tier(key: str) -> TierSettings:
        keep = Retention(keep_last=1, keep_every=None)
        return TierSettings("far", str(tmp_path), keep, options={"key": key})

    async def main() -> None:
        owner: Any = Owner(tmp_path)
        none: Any = None
        mirrors = Mirrors(owner, none, none, none)
        try:
            mirrors.follow([tier("old")])
            assert mirrors.owe([entry(1)]) == []
            await asyncio.sleep(0)
            mirrors.follow([tier("new")])
            while "begun with new" not in told:
                await asyncio.sleep(0.01)
            assert mirrors.owed() == {(1, 1)}
        finally:
            await mirrors.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert told[:3] == ["begun with old", "taken back with old", "begun with new"]


def test_notes_go_with_what_they_belong_to(tmp_path: Path) -> None:
    journal = LmdbJournal(tmp_path / "journal")
    owners = [job(1), job(1, 1), job(2), entry(1), entry(2)]
    for one in (job(1), job(1, 1), job(2, attempt=2)):
        journal.put_job(one)
    for index, owner in enumerate(owners):
        journal.put_upload(owner, "a", b"%d" % index)
        journal.put_upload(owner, "b", b"other")
    assert [journal.upload(owner, "a") for owner in owners] == [b"0", b"1", b"2", b"3", b"4"]
    journal.drop_jobs([job(1), job(2)], [entry(1)])
    assert [journal.upload(owner, "a") for owner in owners] == [None, b"1", b"2", b"3", b"4"], (
        "a later attempt keeps its notes"
    )
    assert journal.upload(job(1), "b") is None
    journal.drop_mirror(entry(1))
    assert [journal.upload(owner, "b") for owner in owners] == [None, b"other", b"other", None, b"other"]
    journal.close()
