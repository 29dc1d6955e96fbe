"""Nodes that are gone, fresh or behind: which step counts, and whence it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch
from everstep.loading import Recovery
from everstep.memory.arena import Arena
from everstep.memory.control import COPY_PREFIX, SlotState
from everstep.memory.header import Kind
from everstep.reading import into_state

from tests.exchange.kit import WAIT_S, Job, directory_of, erase, load_on, manifests

from .kit import contents, damage, hold, load, pins, regions, save, state_with, update

Say = Callable[..., None]


def test_the_newest_step_that_all_ranks_have_over_own_and_held_counts(
    root: Path, nodes: list[str], job: Job
) -> None:
    """The lost node's rank had got to step 3 alone, and the other rank too, but what is held is of step 2."""
    a, b, fresh = nodes[:3]
    save(job, [a, b], [1, 2, 3])
    hold(root, a, b, steps=[1, 2])
    erase(root, a)
    loads = load(root, [fresh, b]).check(2)
    assert loads.skipped() == "", "a step that was not protected yet is no loss to tell"
    assert manifests(root) == []


def test_holders_that_are_a_step_ahead_have_the_older_step_still(
    root: Path, nodes: list[str], job: Job
) -> None:
    """Rank 1 is at step 3 alone; what it holds of rank 0 is of step 2."""
    a, b, c = nodes[:3]
    save(job, [a, b, c], {1: [0, 1, 2], 2: [0, 1, 2], 3: [1]})
    hold(root, a, b)
    erase(root, a)
    assert load(root, [c, b, c]).check(2).kinds() == [{"peer"}, {"own"}, {"own"}]


def test_an_own_arena_of_a_former_life_is_older_than_what_is_held(
    root: Path, nodes: list[str], job: Job
) -> None:
    """Rank 0 moved from a to c; a keeps what it had of the first incarnation."""
    a, b, c = nodes[:3]
    save(job, [a, b], [1, 2])
    save(job, [c, b], [3, 4])
    hold(root, c, b)
    erase(root, c)
    loads = load(root, [a, b]).check(4)
    assert loads.kinds() == [{"peer"}, {"own"}]
    damage(root, b, Kind.HELD, 0, 4)
    loads = load(root, [a, b]).check(3)
    assert "step 4" in loads.skipped()


def test_a_held_snapshot_that_the_lineage_has_cut_off_is_never_taken(
    root: Path, nodes: list[str], job: Job
) -> None:
    """The job went on from step 1 while what was held of step 3 was out of reach."""
    a, b = nodes[:2]
    save(job, [a, b], [1, 2, 3], durable=[1])
    hold(root, a, b)
    hold(root, b, a)
    for node in (a, b):
        for path in _arenas(root, node, Kind.OWN):
            path.unlink()
        for path in _arenas(root, node, Kind.HELD):
            path.rename(path.with_suffix(".away"))

    def resume(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        say(ckpt.load(state))
        update(values, contents(rank, 2))
        ckpt.save(2, state).wait()
        say("saved")
        threading.Event().wait(WAIT_S)

    for rank in job.start([a, b], resume):
        assert (rank.line(), rank.line()) == ("1", "saved")
    job.kill()
    for node in (a, b):
        for path in _arenas(root, node, Kind.OWN):
            path.unlink()
        for path in directory_of(root, node).glob("*.away"):
            path.rename(path.with_suffix(".arena"))
    loads = load(root, [a, b]).check(2, "disk")
    assert loads.skipped() == "", "the old step 3, and the old step 2, are of no consequence"
    for result in loads.results:
        assert result.recovery is not None and result.recovery.incarnation == 2


def _arenas(root: Path, node: str, kind: Kind) -> list[Path]:
    return sorted(directory_of(root, node).glob(f"{kind.value}-*.arena"))


# -- images that are not sent


KEYS = 6
SHARED = everstep.Memory(replicas=1)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((200,), float(100 * step + i)) for i in range(KEYS)}


def replicated(model: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> everstep.TrainState:
    return everstep.TrainState(rng=False, replicated=("model",), model=model, own=own)


@pytest.fixture
def shared(root: Path, nodes: list[str], job: Job) -> list[str]:
    """Two nodes with a rank each, of a state that is replicated but for a small part; each holds of the other what is
    not. Steps 1 and 2; nothing on disk."""
    a, b = nodes[:2]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        model, own = tensors(0), {"o": torch.zeros(4)}
        state = replicated(model, own)
        ckpt.load(state)
        for step in (1, 2):
            for key, tensor in tensors(step).items():
                model[key].copy_(tensor)
            own["o"].fill_(10 * step + rank)
            ckpt.step(step, state)
        say("saved")
        threading.Event().wait(WAIT_S)

    for rank in job.start([a, b], body, memory=SHARED):
        assert rank.line() == "saved"
    job.kill()
    for node in (a, b):
        for path in _arenas(root, node, Kind.HELD):
            path.unlink()
    hold(root, a, b)
    hold(root, b, a)
    return nodes


def load_shared(root: Path, places: list[str], step: int) -> list[Recovery]:
    models = [tensors(0) for _ in places]
    owns = [{"o": torch.zeros(4)} for _ in places]
    results = load_on(root, places, lambda rank: into_state(replicated(models[rank], owns[rank])))
    for rank, result in enumerate(results):
        assert result.error is None, result.error
        assert result.recovery is not None and result.recovery.step == step
        assert all(torch.equal(models[rank][key], tensor) for key, tensor in tensors(step).items())
        assert owns[rank]["o"].eq(10 * step + rank).all()
    return [result.recovery for result in results if result.recovery is not None]


def copies(root: Path, node: str, rank: int) -> list[str]:
    return [name for name in regions(root, node, Kind.OWN, rank, 2) if name.startswith(COPY_PREFIX)]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_node_copied_itself_completes_what_it_was_sent(
    root: Path, shared: list[str], lost: int
) -> None:
    a, b, fresh = shared[:3]
    gone, left = (a, b) if lost == 0 else (b, a)
    of_lost = regions(root, left, Kind.HELD, lost, 2)
    assert not [name for name in of_lost if "+" in name] and copies(root, left, 1 - lost)
    erase(root, gone)
    places = [fresh if node == gone else left for node in (a, b)]
    loads = load_shared(root, places, 2)
    assert set(loads[lost].sources) == {"peer"}, "all of it from the node that is left"
    assert manifests(root) == []


def test_a_damaged_copy_of_a_lost_rank_sends_all_to_the_older_step(root: Path, shared: list[str]) -> None:
    a, b, fresh = shared[:3]
    [region] = copies(root, b, 1)
    damage(root, b, Kind.OWN, 1, 2, region)
    assert "peer" in load_shared(root, [b, a], 2)[0].sources, "the owner's node has it right"
    erase(root, a)
    recoveries = load_shared(root, [fresh, b], 1)
    assert "step 2" in recoveries[1].skipped[0]


def test_a_snapshot_whose_copies_are_of_another_step_is_not_whole(root: Path, shared: list[str]) -> None:
    """The rank that is left was a step behind: it has no copies of the lost rank's newest."""
    a, b, fresh = shared[:3]
    erase(root, a)
    with pins(root, b, Kind.OWN) as found:
        places = [(arena.info.path, pin.info) for arena, pin in found if pin.info.step == 2]
    for path, info in places:
        assert path is not None
        with Arena.attach(path) as arena, arena._lock:
            arena._control.store_word(info.index, info.generation, SlotState.FREE)
    load_shared(root, [fresh, b], 1)
