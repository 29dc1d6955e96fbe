from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from everstep.errors import MemoryTooSmall, StateMismatch
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.directory import mapped_by
from everstep.snapshot import moving
from everstep.snapshot.copier import Copier, Plan

from .plans import HEADER_BYTES, leaves_of, logical_bytes, plan_of

ArenaFor = Callable[..., Arena]
Parts = Mapping[str, Mapping[str, Any]]

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},  # quantised: refused earlier
    key=str,
)


def snapshot(arena: Arena, copier: Copier, plan: Plan, leaves: list[Any], step: int, **options: Any) -> Any:
    """Copy and publish; the late copy, if one was asked for, is waited for first."""
    slot = arena.begin(1, step, complete=(1, step - 1))
    assert slot is not None
    late = copier.copy(
        slot, plan, leaves, state=options.pop("state", b"state"), meta=b"meta", late=options.pop("late", ())
    )
    if late is not None:
        assert late.wait(10) == []
    slot.publish(plan.layout_hash)
    return slot


def stored(arena: Arena, plan: Plan, step: int) -> list[bytes | None]:
    """Bytes of each entry as they lie in the snapshot of ``step``."""
    [info] = [found for found in arena.snapshots() if found.step == step]
    with arena.pin(info.index, info.generation) as pinned:
        images = [bytes(pinned.view(f"image:{image.name}")) for image in plan.layout.images]
        assert bytes(pinned.view("layout")) == plan.encoded
        assert bytes(pinned.view("meta")) == b"meta"
        for image, data in zip(plan.layout.images, images, strict=True):
            assert data[:HEADER_BYTES] == image.header
    return [
        None if entry.image is None else images[entry.image][entry.offset : entry.offset + entry.nbytes]
        for entry in plan.layout.entries
    ]


def check(arena_for: ArenaFor, parts: Parts, **options: Any) -> None:
    plan = plan_of(parts)
    arena, copier, leaves = arena_for(plan), Copier(), leaves_of(parts)
    expected = [logical_bytes(leaf) for leaf in leaves]
    for step in range(1, 6):
        snapshot(arena, copier, plan, leaves, step, **options)
        assert stored(arena, plan, step) == expected
        assert [logical_bytes(leaf) for leaf in leaves] == expected, "a source was changed"


@pytest.mark.parametrize("compiled", [True, False], ids=["bytes", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(
    arena_for: ArenaFor, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "COMPILED", compiled and moving.COMPILED)
    raw = torch.randint(0, 256, (6 * 8 * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    whole = raw.view(dtype).view(6, 8)
    leaves = {
        "whole": whole,
        "first": whole[0, 0],
        "rows": whole[1:3],
        "none": whole[:0],
        "columns": whole[:, ::2],
    }
    check(arena_for, {"model": leaves})
    check(arena_for, {"model": leaves}, late=range(5))


def test_odd_layouts(arena_for: ArenaFor) -> None:
    image = torch.randn(2, 3, 4, 5)
    wave = torch.randn(4, 4, dtype=torch.complex64)
    leaves = {
        "transposed": torch.randn(40, 30).t(),
        "channels last": image.to(memory_format=torch.channels_last),
        "expanded": torch.randn(4, 1).expand(4, 7),
        "flipped": torch.randn(9).flip(0)[::2],
        "overlapping": torch.randn(10).as_strided((4, 4), (2, 1)),
        "conjugate": wave.conj(),
        "negated": torch.imag(wave.conj()),
        "both": wave.t().conj(),
        "scalar": torch.tensor(3.5),
        "one": torch.ones(1),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(5, 5)),
        "part of a graph": torch.randn(3, requires_grad=True) * 2,
        "inference": _inference(),
        "large transposed": torch.randn(300, 400).t(),
    }
    check(arena_for, {"model": leaves})
    check(arena_for, {"model": leaves}, late=range(len(leaves)))


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4)


def test_large_tensors_are_cut_and_shared(arena_for: ArenaFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "BATCH_BYTES", 100_000)
    leaves = {f"l{n}": torch.randn(n * 17_000 + 3) for n in range(6)}
    leaves["t"] = torch.randn(400, 300).t()
    leaves["bytes"] = torch.randint(0, 256, (350_001,), dtype=torch.uint8)
    before = torch.get_num_threads()
    check(arena_for, {"model": leaves})
    check(arena_for, {"model": leaves}, late=range(8))
    assert torch.get_num_threads() == before


def test_arrays(arena_for: ArenaFor) -> None:
    source = np.random.default_rng(0)
    leaves = {
        "plain": source.random((100, 90)),
        "strided": source.random((100, 90)).T[::2],
        "tensor": torch.randn(7),
        "bools": source.random((70_000,)) > 0.5,
        "frozen": source.random((100,)).astype(np.float32),
        "empty": np.empty((0, 4)),
    }
    leaves["frozen"].setflags(write=False)
    check(arena_for, {"extra": leaves})
    check(arena_for, {"extra": leaves}, late=range(6))


def test_several_parts_and_entries_of_other_ranks(arena_for: ArenaFor) -> None:
    parts = {
        "model": {"a": torch.randn(5), "b": torch.randn(6).double(), "theirs": torch.randn(9)},
        "optimizer": {"step": torch.tensor(1.0)},
        "empty": {},
    }
    plan = plan_of(parts, stored_elsewhere=["theirs"])
    arena, copier = arena_for(plan), Copier()
    leaves = leaves_of(parts)
    for theirs in (leaves[2], None):
        given = [leaf if leaf is not leaves[2] else theirs for leaf in leaves]
        snapshot(arena, copier, plan, given, 1 + (theirs is None))
    found = stored(arena, plan, 2)
    assert found == [logical_bytes(leaf) if i != 2 else None for i, leaf in enumerate(leaves)]


class TestWhatIsKept:
    def test_each_step_reads_the_tensors_it_is_given(self, arena_for: ArenaFor) -> None:
        """New objects, or bytes changed behind the version counter: a cache knows only layout."""
        tensor = torch.zeros(100)
        plan = plan_of({"model": {"w": tensor}})
        arena, copier = arena_for(plan), Copier()
        for step in range(1, 8):
            if step % 2:
                tensor = torch.full((100,), float(step))
            else:
                tensor.data.numpy()[:] = step
            snapshot(arena, copier, plan, [tensor], step)
            assert stored(arena, plan, step) == [logical_bytes(torch.full((100,), float(step)))]

    def test_no_source_is_held(self, arena_for: ArenaFor) -> None:
        tensors = [torch.randn(10), torch.randn(50_000), torch.nn.Parameter(torch.randn(3))]
        plan = plan_of({"model": {str(n): tensor for n, tensor in enumerate(tensors)}})
        arena, copier = arena_for(plan), Copier()
        snapshot(arena, copier, plan, tensors, 1)
        snapshot(arena, copier, plan, tensors, 2, late=[0, 1])
        alive = [weakref.ref(tensor) for tensor in tensors]
        tensors.clear()
        gc.collect()
        assert [found() for found in alive] == [None] * 3

    def test_a_later_change_does_not_reach_the_slot(self, arena_for: ArenaFor) -> None:
        tensor = torch.randn(100_000)
        plan = plan_of({"model": {"w": tensor}})
        arena, copier = arena_for(plan), Copier()
        before = logical_bytes(tensor)
        snapshot(arena, copier, plan, [tensor], 1)
        tensor.zero_()
        assert stored(arena, plan, 1) == [before]

    def test_views_let_go_of_the_arena(self, arena_for: ArenaFor) -> None:
        plan = plan_of({"model": {"w": torch.randn(10)}})
        arena, copier = arena_for(plan), Copier()
        path = arena.info.path
        assert path is not None
        snapshot(arena, copier, plan, [torch.randn(10)], 1)
        arena.close()
        assert mapped_by(path)
        copier.forget()
        gc.collect()
        assert not mapped_by(path)

    def test_headers_follow_the_layout(self, arena_for: ArenaFor) -> None:
        """Slots that go from one layout to another and back, and plain values that grow."""
        parts = [{"model": {"a": torch.randn(n), "b": torch.randn(n).double()}} for n in (1000, 10)]
        plans = [plan_of(part) for part in parts]
        arena, copier = arena_for(plans[0]), Copier()
        for step in range(1, 12):
            which = step // 4 % 2
            state = b"s" * (step * 997)
            snapshot(arena, copier, plans[which], leaves_of(parts[which]), step, state=state)
            assert stored(arena, plans[which], step) == [
                logical_bytes(leaf) for leaf in leaves_of(parts[which])
            ]

    def test_a_copy_that_failed_leaves_no_wrong_header(self, arena_for: ArenaFor) -> None:
        parts = {"model": {"a": torch.randn(1000)}}
        plan = plan_of(parts)
        arena, copier = arena_for(plan, slots=1), Copier()
        snapshot(arena, copier, plan, leaves_of(parts), 1)
        slot = arena.begin(1, 2, complete=(1, 2))
        assert slot is not None
        slot.place(plan.regions(5, 4))["image:model"][:] = bytes(plan.layout.images[0].nbytes)
        slot.abandon()
        snapshot(arena, copier, plan, leaves_of(parts), 3)
        assert stored(arena, plan, 3) == [logical_bytes(parts["model"]["a"])]


class TestMismatch:
    @pytest.mark.parametrize(
        ("leaf", "why"),
        [
            (torch.zeros(4, 3), "shape"),
            (torch.zeros(1), "would broadcast"),
            (torch.zeros(3, 4, dtype=torch.float64), "wider"),
            (torch.zeros(3, 4, dtype=torch.int32), "would convert"),
            (np.zeros((3, 4)), "array"),
            ([0.0] * 12, "no tensor"),
            (None, "nothing"),
        ],
    )
    def test_a_leaf_that_is_not_what_the_layout_says(self, arena_for: ArenaFor, leaf: Any, why: str) -> None:
        plan = plan_of({"model": {"other": torch.zeros(2), "w": torch.zeros(3, 4)}})
        arena, copier = arena_for(plan), Copier()
        slot = arena.begin(1, 1, complete=None)
        assert slot is not None
        with pytest.raises(StateMismatch, match="model/w") as caught:
            copier.copy(slot, plan, [torch.zeros(2), leaf], state=b"", meta=b"")
        assert caught.value.key == "w", why

    def test_another_number_of_leaves(self, arena_for: ArenaFor) -> None:
        plan = plan_of({"model": {"w": torch.zeros(3)}})
        slot = arena_for(plan).begin(1, 1, complete=None)
        assert slot is not None
        with pytest.raises(StateMismatch, match="number of leaves"):
            Copier().copy(slot, plan, [], state=b"", meta=b"")

    def test_a_slot_that_is_too_small(self, arena_for: ArenaFor) -> None:
        arena = arena_for(plan_of({"model": {"w": torch.zeros(3)}}))
        plan = plan_of({"model": {"w": torch.zeros(1 << 20)}})
        slot = arena.begin(1, 1, complete=None)
        assert slot is not None
        with pytest.raises(MemoryTooSmall):
            Copier().copy(slot, plan, [torch.zeros(1 << 20)], state=b"", meta=b"")


@pytest.mark.parametrize("compiled", [True, False])
def test_an_error_in_a_copying_thread_is_raised(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("bus error")

    monkeypatch.setattr(moving, "COMPILED", compiled)
    monkeypatch.setattr(moving, "copy_range" if compiled else "_copy_pairs", fail)
    with pytest.raises(RuntimeError, match="bus error"):
        moving.move([torch.zeros(1 << 23)], [torch.zeros(1 << 23)], threads=2)


def test_ten_thousand_small_tensors(arena_for: ArenaFor) -> None:
    parts = {"model": {f"layers.{n}.weight": torch.randn(64) for n in range(10_000)}}
    plan = plan_of(parts)
    arena, copier, leaves = arena_for(plan), Copier(), leaves_of(parts)
    for step in range(1, 10):
        snapshot(arena, copier, plan, leaves, step)
    assert stored(arena, plan, 9) == [logical_bytes(leaf) for leaf in leaves]


def test_a_default_device_has_no_say(arena_for: ArenaFor) -> None:
    with torch.device("meta"):
        check(arena_for, {"model": {"w": torch.randn(5, device="cpu"), "s": torch.ones((), device="cpu")}})


def test_points_are_reached(arena_for: ArenaFor) -> None:
    parts = {"model": {"a": torch.ones(4), "b": torch.ones(4)}}
    plan = plan_of(parts)
    arena = arena_for(plan)
    seen: list[str] = []
    points.hook = lambda name, detail: seen.append(name)
    snapshot(arena, Copier(), plan, leaves_of(parts), 1)
    assert [name for name in seen if name.startswith("slot.")] == [
        "slot.begin",
        "slot.mid_copy",
        "slot.copied",
        "slot.publish.before",
        "slot.publish.locked",
        "slot.publish.after",
    ]


@pytest.mark.parametrize("late", [[], [0, 2], range(6)])
def test_addresses_change_nothing_but_how_it_is_copied(arena_for: ArenaFor, late: Sequence[int]) -> None:
    """One that is not a run of bytes, or made for inference, is copied too."""
    with torch.inference_mode():
        still = torch.randn(300)
    parts = {
        "model": {
            "w": torch.nn.Parameter(torch.randn(70, 90)),
            "turned": torch.randn(40, 30).t(),
            "half": torch.randn(9, 5).bfloat16(),
            "still": still,
        },
        "more": {"n": torch.tensor(3), "flags": torch.rand(33) > 0.5},
    }
    for wanted in (parts, {**parts, "model": {**parts["model"], "turned": torch.randn(30, 40)}}):
        plan = plan_of(wanted)
        arena, copier, leaves = arena_for(plan), Copier(), leaves_of(wanted)
        for step in range(1, 5):
            slot = arena.begin(1, step, complete=(1, step - 1))
            assert slot is not None
            addresses = [leaf.data_ptr() for leaf in leaves]
            begun = copier.copy(
                slot, plan, leaves, state=b"state", meta=b"meta", late=late, addresses=addresses
            )
            assert begun is None or begun.wait(10) == []
            slot.publish(plan.layout_hash)
            assert stored(arena, plan, step) == [logical_bytes(leaf) for leaf in leaves]
            leaves[0].data.add_(1)
