"""What waits for a late copy: the devices' streams where all of it is on devices, else the host. Devices are stood in
for, as there are none here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import everstep.snapshots
import pytest
import torch
from everstep.errors import StateMismatch, UsageError
from everstep.snapshot import moving
from everstep.snapshot.late import Drain, LateCopy, LateCopyTimeout
from everstep.snapshot.moving import After
from everstep.snapshots import Hooks, Snapshots, Taken

from tests.facade.kit import opened

WAIT_S = 20.0


class Event:
    """A device's event: ``done`` by the test."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.held = 0

    def synchronize(self) -> None:
        self.done.wait(WAIT_S)


class Device:
    """Copies are queued at once, and done when the test says so; current streams that wait are counted."""

    def __init__(self) -> None:
        self.event = Event()
        self.begin = threading.Event()

    def move(self, after: After, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        self.begin.wait(WAIT_S)
        for source, to in zip(sources, into, strict=True):
            to.copy_(source)

    def mark(self, after: After) -> None:
        after._end = {torch.device("cuda", 0): self.event}

    def hold(self, after: After) -> bool:
        self.event.held += 1
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    made.begin.set()
    monkeypatch.setattr(After, "move", lambda self, sources, into: made.move(self, sources, into))
    monkeypatch.setattr(After, "mark", lambda self: made.mark(self))
    monkeypatch.setattr(After, "hold", lambda self: made.hold(self))
    yield made
    made.begin.set()
    made.event.done.set()


class Slot:
    open = True
    step = 1
    index = generation = 0

    def publish(self, layout_hash: str) -> None:
        self.open = False
        self.published = layout_hash

    def abandon(self) -> None:
        self.open = False


class OnDevice(torch.Tensor):
    """Says that it is on a device."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


def on_device(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnDevice)


def late(tensors: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[LateCopy, Any]:
    monkeypatch.setattr(moving, "devices", lambda tensors: set())  # no real events
    slot: Any = Slot()
    into = [torch.zeros(tensor.shape) for tensor in tensors]
    return LateCopy(slot, lambda: [f"t{n}" for n in range(len(tensors))], tensors, into), slot


def test_streams_wait_and_the_host_does_not(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_device([1.0, 2.0])
    copying, _ = late([tensor], monkeypatch)
    assert copying.hold(WAIT_S) and copying.held and device.event.held == 1
    assert not copying.done()  # on its way still, and the host goes on
    with torch.no_grad():
        tensor.add_(1)  # the optimizer's step, which the stream holds back
    device.event.done.set()
    assert copying.wait(WAIT_S) == []


def test_what_moved_before_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_device([1.0, 2.0])
    copying, _ = late([tensor], monkeypatch)
    with torch.no_grad():
        tensor.add_(1)
    assert not copying.hold(WAIT_S) and device.event.held == 0
    device.event.done.set()
    assert copying.wait(WAIT_S) == ["t0"]


def test_where_a_part_is_on_the_host_the_host_waits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, _ = late([on_device([1.0]), torch.ones(3)], monkeypatch)
    assert not copying.hold(WAIT_S)
    device.event.done.set()
    assert copying.wait(WAIT_S) == []


def test_until_all_is_queued_is_waited_for_but_not_for_ever(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.begin.clear()
    copying, _ = late([on_device([1.0])], monkeypatch)
    with pytest.raises(LateCopyTimeout, match=r"0\.05 s"):
        copying.hold(0.05)
    device.begin.set()
    assert copying.hold(WAIT_S)
    device.event.done.set()
    copying.wait(WAIT_S)


def test_a_drain_publishes_when_the_device_says_that_it_is_done(device: Device) -> None:
    """That the copies were queued is not enough."""
    slot: Any = Slot()
    drain = Drain(slot, "layout", [torch.ones(3)], [torch.zeros(3)])
    assert drain._queued.wait(WAIT_S)
    drain._ended.wait(0.05)
    assert slot.open and not drain.done()
    device.event.done.set()
    assert drain.wait(WAIT_S) == [] and slot.published == "layout"


def snapshots_with(copying: LateCopy, slot: Any) -> tuple[Snapshots, Taken, list[str]]:
    """As after ``take`` with a late copy under way."""
    made = Snapshots.__new__(Snapshots)
    told: list[str] = []
    taken = Taken(1, slot)
    made._copying = taken, slot, copying, "layout"
    made._settled = lambda: told.append("settled")
    made._hook_timeout_s = WAIT_S
    made.waited_s = 0.0
    made.newest = taken
    return made, taken, told


def test_the_hook_lets_the_host_go_on_and_the_snapshot_is_published_later(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, slot = late([on_device([1.0])], monkeypatch)
    snapshots, taken, told = snapshots_with(copying, slot)
    snapshots._before_optimizer()
    snapshots.look()
    assert slot.open and not taken.whole and told == []
    device.event.done.set()
    assert copying._ended.wait(WAIT_S)
    snapshots.look()
    assert slot.published == "layout" and taken.whole and told == ["settled"]


def test_the_hook_raises_where_something_moved(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_device([1.0])
    copying, slot = late([tensor], monkeypatch)
    snapshots, taken, _ = snapshots_with(copying, slot)
    with torch.no_grad():
        tensor.add_(1)
    device.event.done.set()
    with pytest.raises(StateMismatch, match="t0"):
        snapshots._before_optimizer()
    assert not slot.open and not taken.whole and snapshots.newest is None


# -- captured graphs


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    on = [False]
    monkeypatch.setattr(everstep.snapshots, "capturing", lambda: on[0])

    def switch(value: bool) -> None:
        on[0] = value

    return switch


def test_an_optimizer_step_that_was_captured_allows_no_late_copies(capture: Callable[[bool], None]) -> None:
    """Its replays call no hook: nothing would wait."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    hooks = Hooks(lambda: None)
    assert not hooks.ready([optimizer])
    optimizer.step()
    assert hooks.ready([optimizer])
    capture(True)
    optimizer.step()
    capture(False)
    assert not hooks.ready([optimizer])
    optimizer.step()
    assert not hooks.ready([optimizer])
    hooks.remove()


@pytest.mark.parametrize("memory", [everstep.Memory(), everstep.Memory(device_slots=1)])
def test_a_snapshot_during_a_capture_is_refused(
    root: Path, capture: Callable[[bool], None], memory: everstep.Memory
) -> None:
    state = {"x": torch.zeros(3)}
    ckpt = opened(root, memory=memory)
    ckpt.load(state)
    capture(True)
    with pytest.raises(UsageError, match="captured"):
        ckpt.step(1, state)
    capture(False)
    ckpt.step(1, state)
    ckpt.close(flush=False)
