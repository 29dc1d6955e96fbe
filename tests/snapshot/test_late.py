"""Late copies: made beside the caller, and void when a source moved."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from everstep.errors import SaveFailed
from everstep.memory.arena import Arena
from everstep.memory.slots import WriteSlot
from everstep.snapshot import late as late_module
from everstep.snapshot.copier import Copier
from everstep.snapshot.late import LateCopy, LateCopyTimeout
from everstep.snapshot.moving import COMPILED, After, Runs

from .plans import plan_of

ArenaFor = Callable[..., Arena]


class Gate:
    """Holds late copies up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    real = After.move

    def move(self: After, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        gate.reached.set()
        gate.open.wait(30)
        real(self, sources, into)

    monkeypatch.setattr(After, "move", move)
    yield gate
    gate.open.set()


def begin(
    arena_for: ArenaFor,
    tensors: dict[str, torch.Tensor],
    late: Any,
    addresses: Sequence[int] | None = None,
) -> tuple[Arena, WriteSlot, LateCopy]:
    plan = plan_of({"model": tensors})
    arena = arena_for(plan)
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    started = Copier().copy(
        slot, plan, list(tensors.values()), state=b"s", meta=b"m", late=late, addresses=addresses
    )
    assert started is not None
    return arena, slot, started


def image(arena: Arena) -> bytes:
    [info] = arena.snapshots()
    with arena.pin(info.index, info.generation) as pinned:
        return bytes(pinned.view("image:model"))


def test_the_call_returns_before_late_ones_are_copied_and_after_the_others(
    arena_for: ArenaFor, gate: Gate
) -> None:
    early, late = torch.ones(50_000), torch.ones(50_000)
    arena, slot, started = begin(arena_for, {"early": early, "late": late}, [1])
    early.zero_()
    assert not started.done()
    gate.open.set()
    assert started.wait(10) == []
    slot.publish("x")
    assert image(arena)[4096:] == torch.ones(100_000).numpy().tobytes()


def test_what_moved_is_named(arena_for: ArenaFor, gate: Gate) -> None:
    tensors = {name: torch.ones(3) for name in "abcd"}
    _, slot, started = begin(arena_for, tensors, range(4))
    assert gate.reached.wait(10)
    with torch.no_grad():
        tensors["b"].add_(1)
        tensors["d"][1:].zero_()
    gate.open.set()
    assert started.wait(10) == ["model/b", "model/d"]
    assert started.wait(10) == ["model/b", "model/d"]
    slot.abandon()


def test_a_change_after_the_verdict_is_no_matter(arena_for: ArenaFor) -> None:
    tensor = torch.ones(3)
    _, _, started = begin(arena_for, {"a": tensor}, [0])
    assert started.wait(10) == []
    tensor.zero_()
    assert started.wait(10) == []


def test_waiting_is_bounded(arena_for: ArenaFor, gate: Gate) -> None:
    _, slot, started = begin(arena_for, {"a": torch.ones(3)}, [0])
    start = time.monotonic()
    with pytest.raises(LateCopyTimeout, match=r"0\.05 s") as caught:
        started.wait(0.05)
    assert time.monotonic() - start < 5
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), SaveFailed)  # noqa: S301
    gate.open.set()
    assert started.wait(10) == []
    slot.publish("x")


def test_an_error_in_the_thread_is_raised_where_it_is_waited_for(
    arena_for: ArenaFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(After, "move", fail)
    _, slot, started = begin(arena_for, {"a": torch.ones(3)}, [0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"):
            started.wait(10)
    slot.abandon()


def test_cancelling_stops_between_pieces(
    arena_for: ArenaFor, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_module, "PIECE_BYTES", 100)
    _, slot, started = begin(arena_for, {str(n): torch.ones(50) for n in range(10)}, range(10))
    assert gate.reached.wait(10)
    opener = threading.Timer(0.05, gate.open.set)
    opener.start()
    started.cancel()
    assert started.done()
    with pytest.raises(SaveFailed):
        started.wait(1)
    slot.abandon()
    opener.join()


def test_sources_are_held_until_the_verdict_and_no_longer(arena_for: ArenaFor, gate: Gate) -> None:
    tensors = {"a": torch.ones(3)}
    alive = weakref.ref(tensors["a"])
    _, _, started = begin(arena_for, tensors, [0])
    tensors.clear()
    gc.collect()
    assert alive() is not None
    gate.open.set()
    assert started.wait(10) == []
    gc.collect()
    assert alive() is None


def test_a_slot_being_copied_into_is_not_given_away(arena_for: ArenaFor, gate: Gate) -> None:
    plan = plan_of({"model": {"a": torch.ones(3)}})
    arena = arena_for(plan, slots=1)
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    started = Copier().copy(slot, plan, [torch.ones(3)], state=b"", meta=b"", late=[0])
    assert started is not None
    del slot
    gc.collect()
    assert arena.begin(1, 2, complete=None) is None
    gate.open.set()
    started.wait(10)
    del started
    gc.collect()
    assert arena.begin(1, 2, complete=None) is not None


def test_beside_a_training_step(arena_for: ArenaFor) -> None:
    """Forward and backward run while the copy is made; the optimizer's step waits for it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = plan_of({"model": model.state_dict()})
    arena, copier = arena_for(plan), Copier()
    for step in range(1, 10):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        slot = arena.begin(1, step, complete=(1, step - 1))
        assert slot is not None
        leaves = list(model.state_dict().values())
        started = copier.copy(slot, plan, leaves, state=b"", meta=b"", late=range(4))
        assert started is not None
        model(torch.randn(16, 64)).square().mean().backward()
        assert started.wait(30) == []
        slot.publish(plan.layout_hash)
        optimizer.step()
        optimizer.zero_grad()
        info = arena.snapshots()[-1]
        with arena.pin(info.index, info.generation) as pinned:
            data = pinned.view("image:model")
            for entry, was in zip(plan.layout.entries, before, strict=True):
                assert bytes(data[entry.offset : entry.offset + entry.nbytes]) == was.numpy().tobytes()


def by_address(
    arena_for: ArenaFor, tensors: dict[str, torch.Tensor], late: Any
) -> tuple[Arena, WriteSlot, LateCopy]:
    """As :func:`begin`, of tensors that are known to be as the layout says."""
    return begin(arena_for, tensors, late, [tensor.data_ptr() for tensor in tensors.values()])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds up copies of runs that are late."""
    gate, caller, real = Gate(), threading.get_ident(), Runs.copy

    def copy(self: Runs, begin: int, end: int) -> None:
        if threading.get_ident() != caller:
            gate.reached.set()
            gate.open.wait(30)
        real(self, begin, end)

    monkeypatch.setattr(Runs, "copy", copy)
    monkeypatch.setattr(late_module, "PIECE_BYTES", 100_000)
    yield gate
    gate.open.set()


compiled = pytest.mark.skipif(not COMPILED, reason="there was no compiler")


@compiled
@pytest.mark.parametrize("late", [[0, 1, 2], [1, 2]])
def test_a_tensor_that_gets_other_memory_meanwhile_is_copied_as_it_was(
    arena_for: ArenaFor, held: Gate, late: list[int]
) -> None:
    tensors = {name: torch.nn.Parameter(torch.full((50_000,), float(n))) for n, name in enumerate("abc")}
    arena, slot, started = by_address(arena_for, dict(tensors), late)
    assert held.reached.wait(10)
    for tensor in tensors.values():
        tensor.data = torch.full((50_000,), 9.0)
    gc.collect()
    held.open.set()
    assert started.wait(10) == []
    slot.publish("x")
    expected = torch.arange(3.0).repeat_interleave(50_000)
    assert image(arena)[4096:] == expected.numpy().tobytes()


@compiled
def test_memory_that_is_given_back_meanwhile_is_not_read(arena_for: ArenaFor, held: Gate) -> None:
    a, b = torch.ones(50_000), torch.ones(50_000)
    _, slot, started = by_address(arena_for, {"a": a, "b": b}, [0, 1])
    assert held.reached.wait(10)
    b.untyped_storage().resize_(0)
    held.open.set()
    with pytest.raises(SaveFailed, match="given back"):
        started.wait(10)
    slot.abandon()


@compiled
def test_runs_that_moved_are_named(arena_for: ArenaFor, held: Gate) -> None:
    a, b = torch.ones(50_000), torch.ones(50_000)
    _, slot, started = by_address(arena_for, {"a": a, "b": b}, [0, 1])
    b.add_(1)
    held.open.set()
    assert started.wait(10) == ["model/b"]
    slot.abandon()


@compiled
def test_runs_let_go_of_their_tensors(arena_for: ArenaFor) -> None:
    tensors = {name: torch.ones(50_000) for name in "ab"}
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    _, slot, started = by_address(arena_for, tensors, [0, 1])
    assert started.wait(10) == []
    tensors.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    slot.abandon()
