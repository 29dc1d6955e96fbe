"""Restoring: the order of objects, generators of absent devices, selections of parts, whose tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everstep.errors import StateMismatch
from everstep.format.layout import Scope
from everstep.state.compare import equal_states
from everstep.state.restore import fill_from, plan_values
from everstep.state.trainstate import TrainState
from everstep.state.tree import flatten
from kit import restore, skeleton_of
from test_restore import Hooked, Loader, trainer


def test_objects_are_loaded_in_the_order_in_which_they_depend() -> None:
    """A scheduler finds its optimizer restored; what an object draws while loading changes nothing."""
    seen: list[str] = []

    class Scheduler(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state: Any) -> None:
            seen.append(f"scheduler {self.optimizer.param_groups[0]['lr']}")
            super().load_state_dict(state)

    class Drawing(Loader):
        def load_state_dict(self, state: Any) -> None:
            seen.append(f"loader {torch.rand(1).numel()}")

    def make(rate: float) -> TrainState:
        model = Hooked()
        model.register_load_state_dict_post_hook(lambda module, keys: seen.append("model"))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = Scheduler(optimizer, 3)
        optimizer.param_groups[0]["lr"] = rate
        return TrainState(loader=Drawing(), scheduler=schedule, optimizer=optimizer, model=model)

    torch.manual_seed(3)
    flat = make(0.25).flatten()
    expected = torch.rand(3)
    target = make(0.5)
    restore(target, flat)
    assert seen == ["model", "scheduler 0.25", "loader 1"]
    assert torch.equal(torch.rand(3), expected)


def test_generators_of_absent_devices_are_a_difference() -> None:
    state = TrainState()
    parts = state.parts()
    parts["rng"].value["cuda"] = [b"\0" * 16] * (torch.cuda.device_count() + 2)
    flat = flatten(parts)
    with pytest.raises(StateMismatch, match="rng: rng/cuda"):
        restore(TrainState(), flat)
    assert len(restore(TrainState(), flat, allow={"rng"})) == 1


def test_only_the_wanted_parts_are_allocated() -> None:
    source = trainer(1)
    flat = source.flatten()
    plan = plan_values(skeleton_of(flat), parts=["model"])
    assert {flat.leaves[index].part for index in plan.targets} == {"model"}
    fill_from(flat.leaves)(plan.wanted())
    assert equal_states(plan.finish(), {"model": source.model.state_dict()}) == []


def test_scope_default_is_this_rank() -> None:
    assert {leaf.scope for leaf in trainer(1).flatten().leaves} == {Scope.RANK}
    state = trainer(1, replicated="model")
    assert {leaf.part for leaf in state.flatten().leaves if leaf.scope == Scope.GLOBAL} == {"model"}
