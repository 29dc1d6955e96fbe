"""Runs whose flushes are deltas, through the public face: what is written and loaded, and how chains stay short."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from click.testing import CliRunner
from everstep.agent import pipeline
from everstep.cli.main import main
from everstep.errors import Damaged, SaveFailed, StorageFull
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.sources import DurableSource

from tests.facade.kit import forget_memory, steps_on_disk, until

from .runs_kit import FROZEN, Adapter, chain, deltas, events, is_bit_equal, merged, stands, train


def test_deltas_are_flushed_by_the_schedule_and_loaded_bit_by_bit(root: Path) -> None:
    work = Adapter()
    ckpt = deltas(root, full_every=10, delta_every=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 15))
    ckpt.close()
    found = stands(root)
    fulls = [step for step, one in found.items() if one.kind == "full"]
    assert fulls[:2] == [1, 10] and all(found[step].kind == "delta" for step in (2, 4, 6, 8, 12))
    assert [found[step].base for step in (2, 8, 14)] == [1, 1, 10]
    for step in found:
        assert is_bit_equal(root, step, work), step
    forget_memory(root)
    again = Adapter()
    again.at(0)
    with deltas(root) as other:
        state = again.at(0)
        assert other.load(state) == 14 and work.is_at(14, state)


def test_after_one_full_all_are_deltas(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are asked for before it is durable: they are written behind it."""
    calm: list[bool] = []

    async def commit(*args: Any, **options: Any) -> Any:
        while not calm:
            await asyncio.sleep(0.01)
        return await try_commit(*args, **options)

    monkeypatch.setattr("everstep.agent.pipeline.try_commit", commit)
    work = Adapter()
    ckpt = deltas(root, full_every=None, memory=everstep.Memory(slots=6))
    ckpt.load(work.at(0))
    handles = [ckpt.step(step, work.at(step)) for step in range(1, 5)]
    assert [one.kind for one in handles if one] == ["full", "delta", "delta", "delta"]
    assert repr(handles[1]) == "SaveHandle(step=2, delta, on its way)"
    until(lambda: list(root.glob("checkpoints/*/*/a1/*.vote")), "the full is written")
    assert not stands(root) and ckpt.status()["unfinished"] == [1, 2, 3, 4]
    calm.append(True)
    train(ckpt, work, range(5, 8))
    ckpt.close()
    found = stands(root)
    assert [found[step].base for step in range(1, 8)] == [None, 1, 1, 1, 1, 1, 1]
    assert all(is_bit_equal(root, step, work) for step in found)


def test_a_first_full_that_comes_to_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to stand on it is stored in full, and what comes then stands on that."""

    async def commit(backend: Any, step: int, *args: Any, **options: Any) -> Any:
        if step == 1:
            return await abort_attempt(backend, step, *args[:2], reason="no luck")
        return await try_commit(backend, step, *args, **options)

    monkeypatch.setattr("everstep.agent.pipeline.try_commit", commit)
    work = Adapter()
    ckpt = deltas(root, full_every=None, memory=everstep.Memory(slots=6))
    ckpt.load(work.at(0))
    with pytest.warns(RuntimeWarning, match="no luck"):
        ckpt.step(1, work.at(1))
        for handle in [ckpt.step(step, work.at(step)) for step in (2, 3)]:
            handle.wait()
        train(ckpt, work, range(4, 9))
    ckpt.close()
    found = stands(root)
    assert 1 not in found and found[2].kind == "full" and found[8].kind == "delta"
    assert all(is_bit_equal(root, step, work) for step in found)


def test_what_does_not_change_costs_nothing(root: Path) -> None:
    work = Adapter(frozen=8 * FROZEN)
    with deltas(root, full_every=None) as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 8))
    found = stands(root)
    full, last = found[1].nbytes, found[6]
    assert full > 32 * FROZEN
    assert last.kind == "delta" and last.nbytes < 40_000  # 12 kB of adapter, the table, the state


def test_chains_are_bounded_and_become_fulls_without_the_trainer(root: Path) -> None:
    work = Adapter()
    ckpt = deltas(root, full_every=None, max_chain=3)
    ckpt.load(work.at(0))
    for step in range(1, 16):
        ckpt.step(step, work.at(step)).wait()
        until(lambda: not ckpt.status()["agent"]["merging"], "nothing is being merged")
    ckpt.close()
    there = stands(root)
    fulls = [step for step, one in there.items() if one.attempt == 2]
    assert len(fulls) > 1 and all(there[step][:2] == ("full", None) for step in fulls)
    step, base = 15, there[15].base
    assert base in fulls
    on_one = [[one.base for one in there.values()].count(full) for full in fulls]
    assert max(on_one) <= 3 + 2  # what was decided ahead
    asked = [event["step"] for event in events(root) if event["kind"] == "merged"]
    assert base in asked
    assert all(len(chain(root, one)) <= 2 for one in there)
    assert is_bit_equal(root, base, work) and is_bit_equal(root, step, work)


def test_chains_of_previous_ones_are_no_longer_than_allowed(root: Path) -> None:
    work = Adapter()
    ckpt = deltas(root, full_every=None, delta_base="previous", max_chain=4)
    ckpt.load(work.at(0))
    longest = 0
    for step in range(1, 25):
        ckpt.step(step, work.at(step)).wait()
        longest = max(longest, len(chain(root, step)))
    assert 3 < longest <= 5  # of a full and four deltas
    assert is_bit_equal(root, 24, work) and is_bit_equal(root, 17, work)
    ckpt.close()


@pytest.mark.parametrize("base", ["full", "previous"])
def test_chains_are_short_though_no_merge_comes_to_its_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: True)
    work = Adapter()
    ckpt = deltas(root, full_every=None, delta_base=base, max_chain=3, memory=everstep.Memory(slots=5))
    ckpt.load(work.at(0))
    for step in range(1, 25):  # the next ones are always queued
        ckpt.step(step, work.at(step))
    ckpt.step(25, work.at(25)).wait()
    found = stands(root)
    assert len(found) == 25 and all(one.attempt == 1 for one in found.values())
    assert max(len(chain(root, step)) for step in found) <= 1 + 3
    roots = [chain(root, step)[-1] for step in found]
    assert max(map(roots.count, roots)) <= 1 + 2 * 3 + 3  # commits are told in any order
    assert all(is_bit_equal(root, step, work) for step in (7, 14, 25))
    ckpt.close(flush=False)


@pytest.mark.parametrize(
    ("base", "every", "slots", "kept"),
    [("full", 1, 3, False), ("full", 1, 4, True), ("previous", 4, 4, True), ("previous", 1, 6, True)],
)
def test_bases_are_read_from_memory_where_there_is_room(
    root: Path, base: str, every: int, slots: int, kept: bool
) -> None:
    """With three slots those that happen to be there; with more of them one is kept."""
    work = Adapter(frozen=1000)  # each chunk changes
    memory = everstep.Memory(slots=slots)
    ckpt = deltas(root, full_every=None, delta_base=base, delta_every=every, memory=memory)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 10 * every))
    read = ckpt.status()["agent"]["bases"]
    assert ckpt.status()["agent"]["merging"] == []
    assert [one.kind for one in stands(root).values()] == ["full"] + ["delta"] * (10 - (every == 1) - 1)
    if kept:
        assert read["storage"] == 0 and read["memory"] > 8 * 12000
    else:
        assert read["storage"] > 4 * 12000  # the full's slot was needed
    assert is_bit_equal(root, 9 * every, work)
    ckpt.close()


def test_what_is_wrong_in_memory_is_read_from_storage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(target: memoryview, source: memoryview) -> None:
        target[:] = source
        target[0] ^= 1

    monkeypatch.setattr("everstep.agent.basing.copy_bytes", damaged)
    work = Adapter(frozen=1000)
    with deltas(root, full_every=None, delta_base="previous") as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 5))
        read = ckpt.status()["agent"]["bases"]
    assert read["memory"] == 0 and read["storage"] > 3 * 12000
    assert all(is_bit_equal(root, step, work) for step in range(1, 5))
    assert stands(root)[4].kind == "delta" and stands(root)[4].nbytes < stands(root)[1].nbytes


def test_a_resumed_run_goes_on_with_deltas(root: Path) -> None:
    work = Adapter()
    with deltas(root, full_every="1h") as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 6))
    forget_memory(root)
    before = stands(root)
    newest = max(step for step, one in before.items() if one.kind == "full")
    with deltas(root, full_every="1h") as ckpt:
        assert ckpt.load(work.at(0)) == 5
        train(ckpt, work, range(6, 8))
    found = stands(root)
    assert [(found[step].kind, found[step].base) for step in (6, 7)] == [("delta", newest)] * 2
    assert is_bit_equal(root, 7, work)


def test_another_layout_makes_a_full(root: Path) -> None:
    work = Adapter()
    with deltas(root, full_every=None) as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 6))
        work.state["more"] = torch.ones(5)
        handle = ckpt.step(6, work.at(6))
        assert handle is not None and handle.kind == "delta"
        handle.wait()
        assert handle.kind == "full"
        train(ckpt, work, range(7, 11))
    found = stands(root)
    assert found[5].kind == "delta" and found[6].kind == "full"
    later = found[10]
    assert later.kind == "delta" and later.base is not None and later.base >= 6
    assert torch.equal(everstep.load(root)["model"]["more"], torch.ones(5))
    assert any(event["kind"] == "unbased" for event in events(root))


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_base_makes_a_full(root: Path, how: str) -> None:
    work = Adapter()
    with deltas(root, full_every=None) as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 9))
        base = stands(root)[8].base
        (image,) = (root / "checkpoints" / f"{base:09d}").glob("*/a1/*.safetensors")
        if how == "gone":
            image.unlink()
        else:
            with image.open("r+b") as file:
                file.truncate(4096)
        train(ckpt, work, range(9, 14))
    found = stands(root)
    assert found[9].kind == "full" and found[13].kind == "delta" and found[13].base != base
    assert is_bit_equal(root, 9, work) and is_bit_equal(root, 13, work)
    with pytest.raises(Damaged, match=f"{base:09d}"):
        everstep.load(root, step=8)


def test_an_explicit_save_is_a_full(root: Path) -> None:
    """Also of a step that was just flushed as a delta, on its way or durable: that is made a full."""
    work = Adapter()
    ckpt = deltas(root, full_every=None, delta_every=4)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 10))
    ckpt.save(11, work.at(11)).wait()
    for step in (12, 16):
        handle = ckpt.step(step, work.at(step))
        if step == 16:
            handle.wait()
        again = ckpt.save(step, work.at(step))
        again.wait()
        merged(root, step)
        until(lambda one=again: one.done() and one.kind == "full", "it is heard")  # type: ignore[misc]
    ckpt.step(20, work.at(20))
    ckpt.step(21, work.at(21))
    ckpt.close()
    found = stands(root)
    assert [found[step].kind for step in (8, 11, 20)] == ["delta", "full", "delta"]
    assert (found[11].attempt, found[21].kind) == (1, "full")  # the last one, at close
    assert all(is_bit_equal(root, step, work) for step in (12, 16, 20, 21))


def test_fulls_may_be_compressed(root: Path) -> None:
    state = {"model": {"zeros": torch.zeros(1 << 20)}}
    with deltas(root, delta_every=None, full_every=1, compress="zstd") as ckpt:
        ckpt.load(state)
        ckpt.step(1, state).wait()
    assert stands(root)[1].kind == "full" and stands(root)[1].nbytes < 100_000
    assert torch.equal(everstep.load(root)["model"]["zeros"], state["model"]["zeros"])


def test_what_deltas_stand_on_stays(root: Path) -> None:
    work = Adapter()
    with deltas(root, full_every=None, keep_last=2) as ckpt:
        ckpt.load(work.at(0))
        train(ckpt, work, range(1, 12))
    until(lambda: len(steps_on_disk(root)) <= 3, "the rest is removed")
    there = stands(root)
    assert {10, 11} < set(there)
    assert is_bit_equal(root, 10, work) and is_bit_equal(root, 11, work)


@pytest.mark.parametrize("ends", ["merged", "given up"])
def test_when_the_job_and_its_merges_are_over_nothing_stays_that_no_rule_keeps(
    root: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Whatever comes last: the trainer's end, or that of a merge."""
    work, calm = Adapter(), [False]
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm[0])
    monkeypatch.setattr("everstep.agent.service.Service._linger_s", 60.0)
    if ends == "given up":
        monkeypatch.setattr("everstep.agent.merging.merge_rank", _cannot_merge)
    ckpt = deltas(root, full_every=None, keep_last=1, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 6))
    assert ckpt.status()["agent"]["merging"]
    ckpt.save(6, work.at(6)).wait()
    calm[0] = True
    ckpt.close()
    until(lambda: steps_on_disk(root) == [6], "the rest is removed")
    assert is_bit_equal(root, 6, work)


@pytest.mark.filterwarnings("ignore:everstep. step:RuntimeWarning")
@pytest.mark.parametrize("busy", [True, False])
def test_on_a_full_disk_merges_make_way(root: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """What is held for them goes, and the next flush has its room."""
    work, full, calm = Adapter(), [False], [busy]
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm[0])
    if busy:  # else it has not begun
        monkeypatch.setattr("everstep.agent.merging.merge_rank", _is_slow)
    flush_rank = pipeline.flush_rank

    async def flush(*given: Any, **more: Any) -> Any:
        if full[0]:
            raise StorageFull("no room")
        return await flush_rank(*given, **more)

    monkeypatch.setattr(pipeline, "flush_rank", flush)
    ckpt = deltas(root, full_every=None, keep_last=1, max_chain=2, failures_max=None)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 7))
    held = ckpt.status()["agent"]["merging"]
    assert held and set(held) <= set(steps_on_disk(root))
    full[0] = True
    with pytest.raises(SaveFailed, match="no room"):
        ckpt.save(7, work.at(7)).wait()
    calm[0] = True
    until(lambda: not ckpt.status()["agent"]["merging"], "they are given up")
    assert all(one.kind == "delta" for step, one in stands(root).items() if step in held)
    full[0] = False
    ckpt.save(8, work.at(8)).wait()
    ckpt.save(9, work.at(9)).wait()
    until(lambda: steps_on_disk(root) == [8, 9], "what was held is removed")
    ckpt.close()
    assert is_bit_equal(root, 9, work)


def test_a_prune_of_what_is_to_be_merged_is_no_trouble(
    root: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    work, calm = Adapter(), [False]
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm[0])
    ckpt = deltas(root, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 7))
    held = ckpt.status()["agent"]["merging"]
    ckpt.save(7, work.at(7)).wait()
    said = CliRunner().invoke(main, ["prune", str(root), "--keep-last", "1"])
    assert said.exit_code == 0 and held and not set(held) & set(steps_on_disk(root))
    calm[0] = True
    until(lambda: not ckpt.status()["agent"]["merging"], "they are let go of")
    ckpt.step(8, work.at(8)).wait()
    ckpt.close()
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


async def _is_slow(*given: Any, **more: Any) -> None:
    await asyncio.sleep(3600)


async def _cannot_merge(*given: Any, **more: Any) -> None:
    raise StorageFull("no room", step=3)


def test_a_load_of_a_delta_that_becomes_a_full_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whose objects are removed while they are read: the full is loaded instead."""
    work, calm = Adapter(), [False]
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm[0])
    ckpt = deltas(root, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 9))
    (step, *_) = ckpt.status()["agent"]["merging"]  # not in memory any more
    read_object, seen = DurableSource.read_object, list[str]()

    async def read(self: DurableSource, rank: int, image: Any, offset: int, view: memoryview) -> None:
        if self.step == step and not calm[0]:
            calm[0] = True
            gone = root / "checkpoints" / f"{step:09d}" / "0001" / "a1"
            await asyncio.to_thread(until, lambda: not list(gone.glob("*")), "the delta's objects go")
        seen.append(image.name)
        await read_object(self, rank, image, offset, view)

    monkeypatch.setattr(DurableSource, "read_object", read)
    assert is_bit_equal(root, step, work)
    assert calm[0] and seen and stands(root)[step].attempt == 2
    ckpt.close()


def test_merged_by_an_agent_of_its_own(root: Path) -> None:
    work = Adapter()
    ckpt = deltas(root, full_every=None, max_chain=2, agent="process")
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 8))
    ckpt.close()  # the agent goes on with it, and leaves then
    first = min(step for step, one in stands(root).items() if one.kind == "delta")
    until(lambda: any(one.attempt == 2 for one in stands(root).values()), "one is made a full")
    one = next(step for step, one in stands(root).items() if one.attempt == 2)
    merged(root, one)
    assert one > first and is_bit_equal(root, one, work)
