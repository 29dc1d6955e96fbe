"""The agent dies while it makes a delta a full, at each point: another one goes on, and no half one ever counts."""

from __future__ import annotations

import os
from pathlib import Path

import everstep
import pytest
from everstep.memory.process import Process

from tests.facade.kit import forget_memory, until

from .runs_kit import Adapter, deltas, is_bit_equal, merged, stands, train

POINTS = ["merge.begun", "merge.voted", "merge.told"]
MORE_POINTS = [
    "merge.image.done",
    "merge.vote.before",
    "merge.decided",
    "merge.settled",
    "manifest.before:/a",
]


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(p, marks=pytest.mark.long) for p in MORE_POINTS)])
def test_agent_killed_while_merging(root: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    work = Adapter()
    if point.startswith("manifest"):
        point = "manifest.before:manifest-2"
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", f"kill:{point}")
    ckpt = deltas(root, full_every=None, max_chain=2, agent="process")
    ckpt.load(work.at(0))
    ckpt.step(1, work.at(1))
    monkeypatch.delenv("EVERSTEP_AGENT_POINTS")
    first = Process.of(ckpt.agent_pid or 0)
    assert first is not None
    with pytest.warns(RuntimeWarning, match="agent died"):
        for step in range(2, 10):
            ckpt.step(step, work.at(step)).wait()
        until(lambda: not first.alive(), f"the agent's death at {point}")
        ckpt.save(10, work.at(10)).wait()
    until(lambda: any(one.attempt == 2 for one in stands(root).values()), "a delta is made a full")
    until(lambda: not ckpt.status()["agent"]["merging"], "all merges are over")
    full = next(step for step, one in stands(root).items() if one.attempt == 2)
    merged(root, full)
    ckpt.save(11, work.at(11)).wait()
    until(lambda: not list(root.glob(f"checkpoints/{full:09d}/*/a1/*")), "the delta's objects go")
    assert all(is_bit_equal(root, step, work) for step in range(1, 11))
    ckpt.close()


def test_trainer_and_agent_killed(root: Path, script: object) -> None:
    """What a restart finds are deltas; it goes on from them, with deltas, and with a merge where one was due."""
    body = """
    from tests.delta.runs_kit import *
    work = Adapter()
    ckpt = deltas(root, full_every=None, max_chain=6, agent="process")
    ckpt.load(work.at(0))
    for step in range(1, 8):
        ckpt.step(step, work.at(step)).wait()
    say(ckpt.agent_pid)
    time.sleep(100)
    """
    run = script(body, root, env={"EVERSTEP_AGENT_POINTS": "stall:merge.begun"})  # type: ignore[operator]
    agent = int(run.line())
    run.stop()
    os.kill(agent, 9)
    before = stands(root)
    assert before[7].kind == "delta" and all(one.attempt == 1 for one in before.values())
    forget_memory(root)
    work = Adapter()
    with deltas(root, full_every=None, max_chain=6, agent="process") as ckpt:
        assert ckpt.load(work.at(0)) == 7
        train(ckpt, work, range(8, 12))
        assert stands(root)[8].kind == "delta"
        until(lambda: any(one.attempt == 2 for one in stands(root).values()), "a delta is made a full")
    assert all(is_bit_equal(root, step, work) for step in (*before, 8, 11))


def test_no_merge_while_a_trainer_loads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm)
    calm: list[bool] = []
    work = Adapter()
    ckpt = deltas(root, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 9))
    assert ckpt.status()["agent"]["merging"]
    assert all(one.attempt == 1 for one in stands(root).values())
    assert not list((root / "checkpoints").glob("*/*/a2"))
    calm.append(True)
    until(lambda: any(one.attempt == 2 for one in stands(root).values()), "a delta is made a full")
    ckpt.close()
    assert everstep.load(root)["model"]["count"] == 8


def test_what_is_damaged_is_not_merged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta stays what it is, the trainer hears of it, and later ones are merged."""
    calm: list[bool] = []
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm)
    work = Adapter()
    ckpt = deltas(root, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 9))
    (merging, *_) = ckpt.status()["agent"]["merging"]
    base = stands(root)[merging].base
    (image,) = (root / "checkpoints" / f"{base:09d}").glob("*/a1/*.safetensors")
    whole = image.read_bytes()
    image.write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    calm.append(True)
    until(lambda: not ckpt.status()["agent"]["merging"], "all merges are over")
    with pytest.warns(RuntimeWarning, match=f"step {merging}.*{base:09d}"):
        ckpt.step(9, work.at(9))
    assert stands(root)[merging][:3] == ("delta", base, 1)
    assert not list((root / "checkpoints" / f"{merging:09d}").glob("*/a2/*.vote"))
    image.write_bytes(whole)
    for step in range(10, 16):
        ckpt.step(step, work.at(step)).wait()
    until(lambda: any(one.attempt == 2 for one in stands(root).values()), "a delta is made a full")
    ckpt.close()
    assert all(is_bit_equal(root, step, work) for step in (merging, 15))
