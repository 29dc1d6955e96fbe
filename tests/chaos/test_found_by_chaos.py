"""What seeds have found, each as small as it can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.format import names
from everstep.memory.directory import arena_dir
from everstep.places import locate
from everstep.ranks import Ranks

from .disk import findings, standing
from .runner import SHM


def opened(root: Path, **policy: Any) -> everstep.Checkpointer:
    return everstep.Checkpointer(root, policy=everstep.Policy(full_every=None, **policy), agent="inline")


def lose_memory(root: Path) -> None:
    for path in arena_dir(SHM, locate(root).run_key).iterdir():
        path.unlink()


def test_a_job_started_again_at_its_last_step_makes_it_durable(root: Path) -> None:
    """Its last life ended before the last flush did. Nothing is left to train, and nothing else would write it."""
    state = {"n": 3, "rng": torch.get_rng_state()}
    first = opened(root)
    first.step(3, state)
    first.close(flush=False)
    assert standing(root) == []
    again = {"n": 0, "rng": torch.zeros_like(torch.get_rng_state())}
    with opened(root) as ckpt:
        assert ckpt.load(again) == 3
    assert [step for _, step in standing(root)] == [3]
    assert not list(arena_dir(SHM, locate(root).run_key).iterdir())
    found = everstep.load(root)
    assert found["n"] == 3 and torch.equal(found["rng"], state["rng"])
    with opened(root) as ckpt:
        assert ckpt.load(again) == 3
        ckpt.step(4, {"n": 4})
    assert everstep.load(root)["n"] == 4


def test_a_load_of_what_is_durable_writes_nothing_at_close(root: Path) -> None:
    first = opened(root)
    first.save(3, {"n": 3}).wait()
    first.close(flush=False)
    before = sorted(path for path in root.rglob("*") if "events" not in str(path))
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 3
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 3
    assert sorted(path for path in root.rglob("*") if "events" not in str(path)) == before


class LostStore:
    """A store whose host is gone."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def wait(self, keys: list[str], timeout: object) -> None:
        raise ConnectionError("connection reset by peer")


def test_a_lost_store_is_not_told_as_a_time_out() -> None:
    """Rank 0 hosted it and was killed: nobody waited for the whole bound."""
    ranks = Ranks(1, 2, LostStore(), prefix="x")
    with pytest.raises(everstep.errors.RankError, match="store was lost") as told:
        ranks.agree("choosing a step", None, timeout_s=60)
    assert "reset by peer" in str(told.value) and "60" not in str(told.value)


def test_a_complete_attempt_without_a_decision_is_decided_when_a_newer_step_is_in_memory(root: Path) -> None:
    """A crash between the last vote and the manifest, the journal lost, the arenas not: it lay there for ever."""
    first = opened(root)
    first.save(3, {"n": 3}).wait()
    first.step(5, {"n": 5})
    first.close(flush=False)
    (root / names.decision(3, 1, 1)).unlink()
    assert [found.step for found in findings(root)] == [3]
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 5
        assert findings(root) == [] and standing(root) == [(1, 3)]
        assert ckpt.recovery is not None and ckpt.recovery.skipped == ()
