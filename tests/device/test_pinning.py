"""Arenas are pinned once where CUDA is used, and given back before they are unmapped; CUDA is stood in for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import everstep
import pytest
import torch
from everstep.memory import mapping
from everstep.memory.arena import Arena
from everstep.snapshot import pinning

from tests.facade.kit import opened


class Cuda:
    """A runtime that notes what it is asked, and answers ``code``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert nbytes % mapping.PAGE_BYTES == 0 and address in mapping._mappings
        self.asked.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert address in mapping._mappings, "unmapped before it was given back"
        self.asked.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Callable[[], Arena]]:
    made: list[Arena] = []

    def create() -> Arena:
        given: dict[str, Any] = {"run_key": "key", "node": "node", "rank": 0, "world": 1}
        made.append(Arena.create(tmp_path, **given, slot_bytes=1 << 16, chunk_bytes=1 << 16))
        return made[-1]

    yield create
    for one in made:
        one.close()


def test_once_per_mapping_and_given_back_before_it_goes(cuda: Cuda, arena: Callable[[], Arena]) -> None:
    one, other = arena(), arena()
    addresses = [one.mapped[0], other.mapped[0]]
    for _ in range(2):
        assert pinning.pin(one) and pinning.pin(other)
    assert cuda.asked == [("register", address) for address in addresses]
    one.close()
    gc.collect()
    assert cuda.asked[2:] == [("unregister", addresses[0])]
    other.close()
    gc.collect()
    assert cuda.asked[3:] == [("unregister", addresses[1])]
    assert not set(addresses) & set(pinning._tried)


def test_a_view_keeps_it_pinned(cuda: Cuda, arena: Callable[[], Arena]) -> None:
    one = arena()
    pinning.pin(one)
    view = one._control.mapping.view[:10]
    one.close()
    gc.collect()
    assert [what for what, _ in cuda.asked] == ["register"]
    del view
    gc.collect()
    assert [what for what, _ in cuda.asked] == ["register", "unregister"]


def test_a_refusal_is_a_warning_that_says_what_it_costs(cuda: Cuda, arena: Callable[[], Arena]) -> None:
    cuda.code = 2
    one = arena()
    with pytest.warns(RuntimeWarning, match=r"CUDA error 2.*slower.*ulimit"):
        assert not pinning.pin(one)
    assert not pinning.pin(one)  # told and tried once
    one.close()
    gc.collect()
    assert [what for what, _ in cuda.asked] == ["register"] and not pinning._tried


def test_without_cuda_nothing_is_asked(arena: Callable[[], Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("asked for CUDA's runtime")

    monkeypatch.setattr(torch.cuda, "cudart", refuse)
    assert not pinning.pin(arena())


def test_states_on_the_host_pin_nothing(cuda: Cuda, root: Path) -> None:
    """CUDA is used for something else in this process."""
    ckpt = opened(root, memory=everstep.Memory(device_slots=1))
    state = everstep.TrainState(rng=False, own={"x": torch.zeros(4)})
    ckpt.load(state)
    ckpt.step(1, state)
    ckpt.close(flush=False)
    assert cuda.asked == []


def test_leaves_on_a_device_have_the_arena_pinned_before_the_first_step(
    cuda: Cuda, arena: Callable[[], Arena]
) -> None:
    from everstep.rollback import Rollbacks

    state: Any = SimpleNamespace(pieces=lambda: [SimpleNamespace(is_cuda=True)])
    Rollbacks(device=False).reserve(state, arena())
    assert [what for what, _ in cuda.asked] == ["register"]
