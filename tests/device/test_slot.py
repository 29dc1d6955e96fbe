"""A snapshot beside the tensors: the slot gets the very bytes that were live when it was taken, whatever happens since;
and back into live tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import pytest
import torch
from everstep.errors import MemoryTooSmall, StateMismatch
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.planning import LayoutPlanner
from everstep.snapshot import device as device_module
from everstep.snapshot import late as late_module
from everstep.snapshot.copier import Copier, Plan
from everstep.snapshot.device import DeviceSlot, arrange
from everstep.snapshot.estimate import device_bytes
from everstep.snapshot.late import Drain
from everstep.snapshot.moving import After
from everstep.state.codec import StateImage
from everstep.state.merge import Saved, Skeleton
from everstep.state.restore import plan_restore
from everstep.state.trainstate import TrainState
from everstep.state.tree import FlatState

from tests.device.kit import plain_bytes

WAIT_S = 20.0


class Gate:
    """Holds drains up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, real = Gate(), After.move

    def move(self: After, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        gate.open.wait(WAIT_S)
        real(self, sources, into)

    monkeypatch.setattr(After, "move", move)
    yield gate
    gate.open.set()


def odd_tensors(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    base = torch.randn(30, 40)
    return {
        "turned": base.t(),
        "stepped": base[::2, 1::3],
        "half": torch.randn(1001).to(torch.bfloat16),
        "eight": torch.randn(17).to(torch.float8_e4m3fn),
        "mask": torch.rand(77) > 0.5,
        "complex": torch.randn(9, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(float(seed), dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "words": torch.randint(0, 1 << 15, (33,), dtype=torch.int16),
        "array": np.arange(60, dtype=np.float64).reshape(6, 10) + seed,
        "tied": base,
        "number": seed,
    }


@dataclass
class Taken:
    arena: Arena
    flat: FlatState
    plan: Plan
    device: DeviceSlot
    drain: Drain


TakeOf = Callable[..., Taken]


@pytest.fixture
def take(tmp_path: Path) -> Iterator[TakeOf]:
    """Takes a state's snapshot on the device and begins to drain it."""
    made: list[Arena] = []

    def act(state: TrainState, *, step: int = 1, planner: LayoutPlanner | None = None) -> Taken:
        flat = state.flatten()
        plan = (planner or LayoutPlanner(0, 1)).plan(flat)
        arena = arena_for(plan, flat)
        made.append(arena)
        slot = arena.begin(1, step, complete=None)
        assert slot is not None
        device = DeviceSlot()
        device.take((1, step), plan, flat.leaves, flat.state)
        places = Copier().lay_around(slot, plan, state=flat.state, meta=b"m")
        return Taken(arena, flat, plan, device, device.drain(slot, plan, places))

    def arena_for(plan: Plan, flat: FlatState) -> Arena:
        room = sum(-(-size // 4096) * 4096 for _, size in plan.regions(len(flat.state), 64))
        given: dict[str, Any] = {"run_key": "key", "node": "node", "rank": 0, "world": 1}
        arena = Arena.create(tmp_path, **given, slot_bytes=room, chunk_bytes=1 << 16)
        arena.take(Process.current(), run_id="run", incarnation=1, world=1)
        return arena

    yield act
    for arena in made:
        arena.close()


def regions(arena: Arena) -> dict[str, bytes]:
    [info] = arena.snapshots()
    with arena.pin(info.index, info.generation) as pinned:
        return {name: bytes(pinned.view(name)) for name in pinned.regions}


def copied_plainly(taken: Taken, directory: Path) -> dict[str, bytes]:
    """What the copier makes of the same state."""
    arena = Arena.create(
        directory,
        run_key="plain",
        node="node",
        rank=0,
        world=1,
        slot_bytes=taken.arena.info.slot_bytes,
        chunk_bytes=1 << 16,
    )
    with arena:
        arena.take(Process.current(), run_id="run", incarnation=1, world=1)
        slot = arena.begin(1, 1, complete=None)
        assert slot is not None
        Copier().copy(slot, taken.plan, taken.flat.sources(), state=taken.flat.state, meta=b"m")
        slot.publish(taken.plan.layout_hash)
        return regions(arena)


def test_the_slot_is_what_the_copier_makes(take: TakeOf, tmp_path: Path) -> None:
    taken = take(TrainState(rng=False, odd=odd_tensors(), more={"x": torch.arange(9)}))
    assert taken.drain.wait(WAIT_S) == []
    assert regions(taken.arena) == copied_plainly(taken, tmp_path)


def test_what_changes_after_the_call_does_not_reach_the_slot(take: TakeOf, gate: Gate) -> None:
    values = odd_tensors()
    wanted = plain_bytes(values)
    taken = take(TrainState(rng=False, odd=values))
    values["tied"].zero_()
    values["mask"].logical_not_()
    values["array"][:] = -1
    gate.open.set()
    taken.drain.wait(WAIT_S)
    target = odd_tensors(seed=5)
    restore(taken, target)
    assert plain_bytes(target) == wanted


def test_it_is_published_when_the_drain_is_done_and_not_before(take: TakeOf, gate: Gate) -> None:
    taken = take(TrainState(rng=False, odd=odd_tensors()))
    assert not taken.drain.done() and taken.arena.snapshots() == []
    gate.open.set()
    taken.drain.wait(WAIT_S)
    [info] = taken.arena.snapshots()
    assert (info.incarnation, info.step, info.layout_hash) == (1, 1, taken.plan.layout_hash)


def test_a_cancelled_drain_publishes_nothing(
    take: TakeOf, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "DRAIN_BYTES", 1000)
    monkeypatch.setattr(late_module, "PIECE_BYTES", 1000)
    taken = take(TrainState(rng=False, odd={"x": torch.randn(50_000)}))
    opener = threading.Timer(0.05, gate.open.set)
    opener.start()
    taken.drain.cancel()
    opener.join()
    assert taken.arena.snapshots() == []


def test_an_error_of_the_drain_is_raised_where_it_is_waited_for(
    take: TakeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(After, "move", fail)
    taken = take(TrainState(rng=False, odd=odd_tensors()))
    with pytest.raises(RuntimeError, match="device lost"):
        taken.drain.wait(WAIT_S)
    assert taken.arena.snapshots() == []


# -- back into live tensors


def restore(taken: Taken, target: dict[str, Any]) -> int:
    image = StateImage(taken.device.state, name="state")
    skeleton = Skeleton.of(Saved(0, image, taken.device.plan.layout.entries))
    plan = plan_restore(TrainState(rng=False, odd=target), skeleton, anywhere=True)
    plan.settle()
    plan.raise_mismatches()
    taken.device.check(plan.slots)
    nbytes = taken.device.restore(plan.slots)
    plan.finish()
    return nbytes


def test_restored_are_the_same_tensors_in_place(take: TakeOf) -> None:
    values = odd_tensors()
    taken = take(TrainState(rng=False, odd=values))
    target = odd_tensors(seed=9)
    held = {name: value for name, value in target.items() if isinstance(value, torch.Tensor)}
    held.pop("conjugate")
    restore(taken, target)
    assert plain_bytes(target) == plain_bytes(values) and target["number"] == 0
    assert all(target[name] is value for name, value in held.items())
    taken.drain.wait(WAIT_S)


def test_restoring_leaves_the_snapshot_as_it_is(take: TakeOf) -> None:
    """What was restored is trained on, and gone back from again."""
    values = odd_tensors()
    wanted = plain_bytes(values)
    taken = take(TrainState(rng=False, odd=values))
    for seed in (3, 4):
        values["tied"].add_(seed)
        restore(taken, values)
        assert plain_bytes(values) == wanted


def test_new_optimizer_state_is_no_view_of_the_buffer(take: TakeOf) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    taken = take(TrainState(model=model, optimizer=optimizer, rng=False))
    fresh = torch.nn.Linear(8, 8)
    other = torch.optim.AdamW(fresh.parameters())
    image = StateImage(taken.device.state, name="state")
    skeleton = Skeleton.of(Saved(0, image, taken.device.plan.layout.entries))
    plan = plan_restore(TrainState(model=fresh, optimizer=other, rng=False), skeleton, anywhere=True)
    taken.device.restore(plan.slots)
    plan.finish()
    buffers = taken.device._buffers.values()
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            found = other.state[theirs][name]
            assert torch.equal(value, found)
            assert not any(overlap(found, buffer) for buffer in buffers)


def overlap(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    begin = buffer.data_ptr()
    return begin <= tensor.data_ptr() < begin + buffer.nbytes


def test_another_shape_is_refused_before_anything_is_written(take: TakeOf) -> None:
    taken = take(TrainState(rng=False, odd=odd_tensors()))
    target = odd_tensors(seed=2) | {"half": torch.zeros(4, dtype=torch.bfloat16)}
    before = plain_bytes(target)
    with pytest.raises(StateMismatch, match="odd/half"):
        restore(taken, target)
    assert plain_bytes(target) == before


# -- where it lies


def test_what_other_ranks_store_is_held_too(take: TakeOf) -> None:
    """Of tensors that are equal on all ranks each stores a part; to go back it needs all of them."""
    values = {f"t{n}": torch.full((100,), float(n)) for n in range(6)}
    state = TrainState(rng=False, replicated=["odd"], odd=values)
    taken = take(state, planner=LayoutPlanner(0, 2))
    stored = [entry for entry in taken.plan.layout.entries if entry.image is not None]
    assert 0 < len(stored) < len(values)
    wanted = plain_bytes(values)
    for value in values.values():
        value.zero_()
    restore(taken, values)
    assert plain_bytes(values) == wanted


def test_an_image_on_one_device_drains_in_one_run() -> None:
    state = TrainState(rng=False, odd=odd_tensors(), more={"x": torch.arange(9)})
    flat = state.flatten()
    plan = LayoutPlanner(0, 1).plan(flat)
    runs = arrange(plan, flat.leaves).runs
    assert [run.region for run in runs] == ["image:odd", "image:more"]
    headers = {f"image:{image.name}": len(image.header) for image in plan.layout.images}
    sizes = {f"image:{image.name}": image.nbytes for image in plan.layout.images}
    assert all(run.offset == headers[run.region] for run in runs)
    assert all(run.offset + run.nbytes == sizes[run.region] for run in runs)


class Elsewhere:
    """Looks like a tensor of another device."""

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        self.device = torch.device(device)
        self.numel, self.element_size = tensor.numel, tensor.element_size


def test_each_device_has_its_own_buffer_and_runs() -> None:
    flat = TrainState(rng=False, odd={f"t{n}": torch.zeros(10 + n) for n in range(7)}).flatten()
    plan = LayoutPlanner(0, 1).plan(flat)
    on = ["cuda:0", "cuda:0", "cpu", "cuda:1", "cuda:0", "cpu", "cpu"]
    leaves: list[Any] = [
        type("L", (), {"pieces": (Elsewhere(leaf.tensor, device),)})()
        for leaf, device in zip(flat.leaves, on, strict=True)
    ]
    found = arrange(plan, leaves)
    assert [(str(run.device), run.nbytes // 4) for run in found.runs] == [
        ("cuda:0", 21),
        ("cpu", 12),
        ("cuda:1", 13),
        ("cuda:0", 14),
        ("cpu", 31),
    ]
    _check_disjoint(found.begins, leaves)
    for run in found.runs:  # the run's bytes are those of its entries, in order
        covered = [
            (begins[0], entry.offset)
            for begins, entry, leaf in zip(found.begins, plan.layout.entries, leaves, strict=True)
            if leaf.pieces[0].device == run.device and run.begin <= begins[0] < run.begin + run.nbytes
        ]
        assert all(begin - run.begin == offset - run.offset for begin, offset in covered)


def _check_disjoint(begins: list[list[int]], leaves: list[Any]) -> None:
    taken: dict[torch.device, set[int]] = {}
    for some, leaf in zip(begins, leaves, strict=True):
        for begin, piece in zip(some, leaf.pieces, strict=True):
            mine = set(range(begin, begin + piece.numel() * piece.element_size()))
            assert not mine & taken.setdefault(piece.device, set())
            taken[piece.device] |= mine


# -- room


def test_what_is_reserved_before_the_first_step_suffices_after_it() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    device = DeviceSlot()
    device.reserve(device_bytes(state.pieces(), state.optimizers()))
    reserved = device.nbytes
    model(torch.randn(2, 33)).sum().backward()
    optimizer.step()
    flat = state.flatten()
    device.take((1, 1), LayoutPlanner(0, 1).plan(flat), flat.leaves, flat.state)
    assert device.nbytes == reserved


def test_a_state_that_grows_gets_larger_buffers(take: TakeOf) -> None:
    values: dict[str, Any] = {"x": torch.randn(100)}
    device, planner = DeviceSlot(), LayoutPlanner(0, 1)
    for size in (100, 50_000, 70):
        values[f"y{size}"] = torch.randn(size)
        flat = TrainState(rng=False, odd=values).flatten()
        device.take((1, size), planner.plan(flat), flat.leaves, flat.state)
        assert device.key == (1, size)
        assert device.nbytes["cpu"] >= sum(leaf.nbytes for leaf in flat.leaves)


def test_too_little_room_names_the_device_and_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceSlot()
    device.reserve({torch.device("cpu"): 100})
    with pytest.raises(MemoryTooSmall, match="device_slots") as caught:
        device.reserve({torch.device("cpu"): 1 << 50})
    assert "cpu" in str(caught.value) and f"{1 << 50:,} bytes" in str(caught.value)
    assert device.nbytes == {} and device.key is None


def test_too_little_room_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "check_room", _no_room)
    ckpt = everstep.Checkpointer(tmp_path / "run", memory=everstep.Memory(device_slots=1), agent="inline")
    with pytest.raises(MemoryTooSmall, match="device_slots"):
        ckpt.load({"x": torch.zeros(100)})
    ckpt.close(flush=False)


def _no_room(nbytes: int, directory: Path | None) -> None:
    raise MemoryTooSmall("no room", free=10)
