"""Hashes in votes, their comparison at the commit, and how it is told; no trainer."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from everstep.agent.client import Progress
from everstep.agent.verdict import error_of, findings, stage_of
from everstep.backends.files import LocalBackend
from everstep.errors import BadOption, Damaged, EverstepError, ReplicasDiffer, SaveFailed, from_wire
from everstep.format.hashing import digest
from everstep.format.layout import build_layout
from everstep.format.manifest import Abort, Manifest
from everstep.format.vote import Vote
from everstep.outcomes import Outcomes
from everstep.plan.agreement import REFUSED
from everstep.policy import Policy
from everstep.store.commit import try_commit
from everstep.store.equality import AUDIT, HASHES, asked

from tests.store import store_kit as kit

STEP = 3
W = 0
"""The place of the replicated tensor in the layout; rank 0 stores it."""


def meta(rank: int, hashes: dict[str, Any], **audit: Any) -> dict[str, object]:
    found = {**kit.meta_of(rank, kit.WORLD), HASHES: hashes}
    return {**found, AUDIT: audit} if audit else found


def stored_bytes() -> bytes:
    layout = build_layout(kit.specs(0))
    image = kit.images_of(layout, (1, STEP, 0))["model"]
    entry = layout.entries[W]
    return bytes(image[entry.offset : entry.offset + entry.nbytes])


def commit(
    root: Path, held: bytes, numbers: tuple[int, int] = (0, 0), policy: str = "warn"
) -> tuple[list[Vote], Manifest | Abort]:
    """Rank 0 stores the replicated tensor, rank 1 says what it holds of it."""

    async def go() -> tuple[list[Vote], Manifest | Abort]:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        asks = [
            asked(stored=[W], live=[], digests=[], equal=False),
            asked(stored=[], live=[W], digests=[digest(held)], equal=False),
        ]
        votes = []
        for rank in range(2):
            about = meta(rank, asks[rank], number=numbers[rank], on_disagreement=policy)
            votes.append(await kit.flush(backend, STEP, rank, pinned=kit.snapshot(STEP, rank, meta=about)))
        decision = await try_commit(backend, STEP, 1, 1, kit.WORLD)
        await backend.close()
        assert decision is not None
        return votes, decision

    return asyncio.run(go())


def test_the_agent_hashes_the_stored_bytes(tmp_path: Path) -> None:
    votes, decision = commit(tmp_path, stored_bytes())
    assert votes[0].entry_hashes == {"model/w": digest(stored_bytes()).hex()} == votes[1].entry_hashes
    assert all(HASHES not in vote.meta for vote in votes)
    assert isinstance(decision, Manifest) and decision.facts == {"audit": {"number": 0, "entries": 1}}
    assert findings(decision, "t") == []


def test_warned_of_in_the_manifest(tmp_path: Path) -> None:
    _, decision = commit(tmp_path, b"other")
    assert isinstance(decision, Manifest)
    assert decision.facts["disagreements"]["entries"][0]["stored"] == 0
    ((stage, error),) = findings(decision, "t")
    assert stage == "disagreement" and isinstance(error, ReplicasDiffer)
    assert "rank 0 and rank 1 (stored is that of rank 0)" in str(error)


def test_refused_as_an_abort_record_that_every_rank_reads_alike(tmp_path: Path) -> None:
    _, decision = commit(tmp_path, b"other", policy="refuse")
    assert isinstance(decision, Abort) and decision.reason.startswith(REFUSED) and decision.rank is None
    error = error_of(decision, "t")
    assert isinstance(error, ReplicasDiffer) and isinstance(error, SaveFailed)
    assert stage_of(error) == "failed" and type(from_wire(error.to_wire())) is ReplicasDiffer


def test_ranks_that_count_apart_are_noticed(tmp_path: Path) -> None:
    _, decision = commit(tmp_path, stored_bytes(), numbers=(4, 5))
    assert isinstance(decision, Manifest) and decision.facts["audit"]["apart"] == [4, 5]
    ((stage, error),) = findings(decision, "t")
    assert stage == "noticed" and "apart" in str(error)


@pytest.mark.parametrize(
    "hashes",
    [
        asked(stored=[99], live=[], digests=[], equal=False),
        asked(stored=[], live=[-1], digests=[b"\0" * 16], equal=False),
        asked(stored=[], live=[0], digests=[], equal=False),
        asked(stored=[], live=[], digests=[], equal=False) | {"stored": "0"},
        asked(stored=[], live=[], digests=[], equal=False) | {"stored": [0]},
    ],
)
def test_a_request_that_cannot_be_is_damage(tmp_path: Path, hashes: dict[str, Any]) -> None:
    async def go() -> None:
        backend = LocalBackend(tmp_path)
        await kit.start_run(backend)
        with pytest.raises(Damaged, match="hashes that cannot be"):
            await kit.flush(backend, STEP, 0, pinned=kit.snapshot(STEP, 0, meta=meta(0, hashes)))
        await backend.close()

    asyncio.run(go())


def test_a_finding_is_told_once_and_hides_no_failure() -> None:
    outcomes = Outcomes(Policy(on_failure="raise"), 1)
    outcomes.expect(5, 1)
    for step in (5, 6):
        error = EverstepError("all is equal").to_wire()
        outcomes.note(Progress(step, 1, 1, "t", "equal", error))
    outcomes.note(Progress(5, 1, 1, "t", "failed", SaveFailed("no").to_wire()))
    with pytest.warns(RuntimeWarning, match="all is equal") as caught, pytest.raises(SaveFailed, match="no"):
        outcomes.tell()
    assert len(caught) == 1
    outcomes.note(Progress(7, 1, 1, "t", "equal", error))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcomes.tell()


@pytest.mark.parametrize(
    "bad", [{"audit_every": -1}, {"audit_every": 1.5}, {"audit_every": True}, {"on_disagreement": "no"}]
)
def test_options_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=next(iter(bad))):
        Policy(**bad)
