"""What agents owe of deltas: to the journal, to further tiers, and to the trainer that asks which flush makes way."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everstep.agent.client import Progress
from everstep.agent.flushes import Flush, Job
from everstep.agent.journal import JobEntry, LmdbJournal, MergeEntry, MirrorEntry
from everstep.agent.merging import WAIT_S, WAITING_MAX, Merges, merge_of
from everstep.agent.mirrors import Line
from everstep.agent.uploads import _spare
from everstep.agent.writing import Jobs
from everstep.errors import EverstepError
from everstep.outcomes import Outcomes
from everstep.plan.chains import Key

from tests.facade.kit import policy

JOB = JobEntry(1, 5, 0, "run", 2, "", 0, 1, "delta", 1, 5, (1, 1, "boot"), base=(1, 3), merge=True)
MERGE = MergeEntry("run", 1, 5, 2, 2, (0, 1), ("far",))


def mirror(step: int, base: int | None = None, attempt: int = 1) -> MirrorEntry:
    return MirrorEntry("far", "run", 1, step, attempt, (0,), None if base is None else (1, base))


def test_the_journal_keeps_what_is_to_be_merged(tmp_path: Path) -> None:
    journal = LmdbJournal(tmp_path / "journal")
    journal.put_job(JOB)
    journal.close()
    journal = LmdbJournal(tmp_path / "journal")
    assert journal.jobs() == [JOB]
    journal.drop_jobs([JOB], [mirror(5, 3)], MERGE)
    journal.put_upload(MERGE, "a2/model", b"half")
    journal.close()
    journal = LmdbJournal(tmp_path / "journal")
    assert (journal.jobs(), journal.mirrors(), journal.merges()) == ([], [mirror(5, 3)], [MERGE])
    assert journal.upload(MERGE, "a2/model") == b"half"
    journal.drop_merge(MERGE, [mirror(5, attempt=2)])
    assert (journal.merges(), journal.mirrors()) == ([], [mirror(5, attempt=2)])
    assert journal.upload(MERGE, "a2/model") is None
    journal.drop_mirror(mirror(5, 3))  # the delta came to its end: the full is still owed
    assert journal.mirrors() == [mirror(5, attempt=2)]
    journal.drop_mirror(mirror(5, attempt=2))
    assert journal.mirrors() == []
    journal.close()


def test_what_is_merged_of_a_checkpoint() -> None:
    class Made:
        kind, incarnation, step, attempt, world = "delta", 1, 5, 1, 2

    manifest: Any = Made()
    jobs = [replace(JOB, tiers=("far",)), replace(JOB, rank=1, merge=False)]
    assert merge_of(jobs, manifest) == MERGE
    assert merge_of([replace(JOB, merge=False)], manifest) is None
    manifest.kind = "full"
    assert merge_of(jobs, manifest) is None


@pytest.mark.parametrize(
    ("waiting", "dropped"),
    [
        ([mirror(1), mirror(2), mirror(3)], 1),
        ([mirror(1), mirror(2, 1), mirror(3, 1)], 2),  # not what the others stand on
        ([mirror(1), mirror(2), mirror(3, 1), mirror(4, 2)], 3),  # a delta before a full
        ([mirror(1), mirror(2, 1), mirror(3, 2)], None),  # the newest needs all of them
        ([mirror(2, 1)], None),
    ],
)
def test_what_a_tier_goes_without(waiting: list[MirrorEntry], dropped: int | None) -> None:
    line = Line.__new__(Line)
    line._waiting = deque(waiting)
    found = line._spare()
    assert (found.step if found is not None else None) == dropped


def test_a_full_takes_the_place_of_its_delta() -> None:
    line = Line.__new__(Line)
    line._now, line._waiting, line._more = mirror(5, 3), deque(), asyncio.Event()
    line._add(mirror(5, attempt=2))  # the delta is under way: the full comes behind it
    assert list(line._waiting) == [mirror(5, attempt=2)]
    line._add(mirror(5, 3))
    assert list(line._waiting) == [mirror(5, attempt=2)] and line._more.is_set()
    line._waiting = deque([mirror(6, 3)])
    line._add(mirror(6, attempt=2))
    assert list(line._waiting) == [mirror(6, attempt=2)]


def test_what_the_root_goes_without() -> None:
    def flush(step: int, base: int | None) -> Flush:
        entry = replace(JOB, step=step, base=None if base is None else (1, base))
        none: Any = None
        return Flush(1, step, 1, 1, {0: Job(entry, none)})

    for steps, dropped in (([(1, None), (2, None), (3, None)], 1), ([(4, None), (5, 1), (6, 1)], 5)):
        assert _spare([flush(*one) for one in steps]).step == dropped


def test_of_too_many_merges_the_oldest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []

    async def give_up(self: Merges, entry: MergeEntry, began: float, error: EverstepError) -> None:
        dropped.append(entry.step)

    async def for_ever(self: Merges) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Merges, "_give_up", give_up)
    monkeypatch.setattr(Merges, "_work", for_ever)

    class Closed:
        async def close(self) -> None: ...

    async def main() -> set[Key]:
        none: Any = None
        backend: Any = Closed()
        merges = Merges(none, backend, none, none)
        entries = [replace(MERGE, step=step) for step in range(1, WAITING_MAX + 3)]
        merges.owe([*entries, *entries[2:]])
        await asyncio.sleep(0)
        owed = merges.owed()
        await merges.close()
        return owed

    assert asyncio.run(main()) == {(1, 3), (1, 4)} and dropped == [1, 2]


@pytest.mark.parametrize(
    ("lost", "at_work", "seconds", "expected"),
    [
        ([], False, 10.0, ""),
        ([], False, 31.0, "the shares of ranks [1, 2] did not come within 30 s"),
        ([], True, 31.0, ""),  # it is slow
        ([], True, WAIT_S + 1, "the shares of ranks [1, 2] did not come within 3600 s"),
        ([2], True, 3.0, "ranks [2]: gone"),
        ([2], False, 1.0, ""),  # most come sooner
    ],
)
def test_how_long_the_shares_of_other_nodes_are_waited_for(
    lost: list[int], at_work: bool, seconds: float, expected: str
) -> None:
    class Owner:
        patience_s = 30.0

        async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
            assert (incarnation, missing) == (1, [1, 2])
            return lost, "gone"

        def at_work_elsewhere(self, missing: list[int]) -> bool:
            return at_work

    merges = Merges.__new__(Merges)
    owner: Any = Owner()
    merges._owner = owner
    assert asyncio.run(merges._why_not(replace(MERGE, world=3), (0,), seconds)) == expected


def test_a_delta_is_written_behind_the_verdict_on_its_base() -> None:
    def job(step: int, base: int | None, rank: int = 0) -> tuple[Flush, Job]:
        flush = known.setdefault(step, Flush(1, step, 1, 2))
        none: Any = None
        entry = replace(JOB, step=step, rank=rank, base=None if base is None else (1, base))
        made = flush.jobs[rank] = Job(entry, none)
        return flush, made

    async def main() -> list[tuple[int, int]]:
        jobs = Jobs(lambda key: key[1] in waiting)
        for one in [job(1, None), job(2, 1), job(1, None, 1), job(3, None), job(4, 2)]:
            jobs.put(*one)
        found = [await jobs.next() for _ in range(2)]
        rest = asyncio.ensure_future(jobs.next())
        await asyncio.sleep(0.01)
        assert not rest.done() and len(jobs) == 3  # a later one does not pass by
        waiting.remove(1)
        jobs.look()
        found += [await rest, await jobs.next()]
        known[4].settled = True
        last = asyncio.ensure_future(jobs.next())
        await asyncio.sleep(0.01)
        assert not last.done() and len(jobs) == 0
        last.cancel()
        return [(one.entry.step, one.entry.rank) for _, one in found]

    known: dict[int, Flush] = {}
    waiting = {1, 2, 3}
    assert asyncio.run(main()) == [(1, 0), (1, 1), (2, 0), (3, 0)]


def test_which_flush_makes_way() -> None:
    outcomes = Outcomes(policy(), 1)
    for step, delta in ((1, False), (2, True), (3, True)):
        outcomes.expect(step, 1, delta=delta)
    assert outcomes.holding_deltas() == 2
    assert outcomes.to_give_up(delta=True) == outcomes.to_give_up(delta=False) == 2
    for step in (2, 3):
        outcomes.note(Progress(step, 1, 1, "root", "committed", kind="delta", base=(1, 1)))
    assert outcomes.to_give_up(delta=True) is None and outcomes.to_give_up(delta=False) == 1
