"""Entries of several boxes: each is copied from a tensor of its own."""

from __future__ import annotations

import pytest
import torch
from everstep.errors import StateMismatch
from everstep.format.layout import Box, EntrySpec, Scope, build_layout, encode, layout_hash
from everstep.snapshot.copier import Copier, Plan

from .plans import logical_bytes
from .test_copier import ArenaFor, snapshot, stored


def boxed_plan(dtype: torch.dtype, shape: tuple[int, ...], boxes: list[Box]) -> Plan:
    layout = build_layout(
        [
            EntrySpec("p", "plain", "uint8", (3,), (Box.full((3,)),)),
            EntrySpec("p", "w", str(dtype).removeprefix("torch."), shape, tuple(boxes), Scope.GLOBAL),
            EntrySpec("p", "none", "float32", (4,), (), Scope.GLOBAL),
        ]
    )
    encoded = encode(layout)
    return Plan(layout, encoded, layout_hash(encoded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_entries_of_several_boxes(arena_for: ArenaFor, dtype: torch.dtype, late: bool) -> None:
    """Each box comes from a tensor of its own, whatever its strides; a rank may hold none."""
    whole = torch.arange(1.0, 25.0).reshape(4, 6).to(dtype)
    boxes = [Box((0, 1), (2, 3)), Box((3, 0), (1, 6)), Box((2, 5), (1, 1))]
    plan = boxed_plan(dtype, (4, 6), boxes)
    bits = whole.view(torch.uint8) if dtype.itemsize == 1 else whole
    pieces = [bits[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.lengths, strict=True))] for b in boxes]
    pieces = [piece.view(dtype) for piece in pieces]
    assert not pieces[0].is_contiguous()
    arena, copier = arena_for(plan), Copier()
    plain = torch.tensor([7, 8, 9], dtype=torch.uint8)
    for step in (1, 2):  # in the end with views from before
        snapshot(arena, copier, plan, [plain, tuple(pieces), ()], step, late=[1] if late else [])
        expected = b"".join(map(logical_bytes, pieces))
        assert stored(arena, plan, step) == [bytes([7, 8, 9]), expected, None]
    for wrong in (tuple(pieces[:2]), (*pieces, pieces[0]), pieces[0], (pieces[1], pieces[0], pieces[2])):
        slot = arena.begin(1, 3, complete=(1, 2))
        assert slot is not None
        with pytest.raises(StateMismatch, match="p/w is not what the layout says"):
            copier.copy(slot, plan, [plain, wrong, ()], state=b"", meta=b"")
        slot.abandon()
    copier.forget()


def test_a_tensor_of_several_pieces_that_moved_is_named_once(arena_for: ArenaFor) -> None:
    whole = torch.zeros(4, 6)
    plan = boxed_plan(whole.dtype, (4, 6), [Box((0, 0), (1, 6)), Box((2, 0), (1, 6))])
    slot = arena_for(plan).begin(1, 1, complete=None)
    assert slot is not None
    copier = Copier()
    leaves = [torch.zeros(3, dtype=torch.uint8), (whole[:1], whole[2:3]), ()]
    copying = copier.copy(slot, plan, leaves, state=b"", meta=b"", late=[1])
    assert copying is not None
    whole.add_(1)
    assert copying.wait(30) == ["p/w"]
    slot.abandon()
    copier.forget()
