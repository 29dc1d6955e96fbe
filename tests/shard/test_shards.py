"""Shards made by hand and flat ranges: checked before anything is written; and sharded values in the state tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from everstep import Shards, flat_range
from everstep.errors import UnsupportedValue
from everstep.format.layout import Box, Scope, decode
from everstep.planning import LayoutPlanner, expected_slot_bytes
from everstep.state.sharded import held_by
from everstep.state.trainstate import TrainState
from everstep.state.tree import FlatState, ShardedLeaf, flatten

from .launch import launch

WHOLE = torch.arange(24.0).reshape(6, 4)


def block(
    top: int, left: int, height: int, width: int
) -> tuple[tuple[tuple[int, int], tuple[int, int]], Any]:
    return ((top, left), (height, width)), WHOLE[top : top + height, left : left + width]


@pytest.mark.parametrize(
    ("shape", "boxes", "tensors", "options", "said"),
    [
        ((6, 4), [((0, 0, 0), (1, 6, 4))], [WHOLE[None]], {}, r"does not lie.*2 axes"),
        ((6, 4), [((0, 0), (6,))], [WHOLE], {}, r"does not lie.*2 axes"),
        ((6, 4), [((1, 0), (6, 4))], [WHOLE], {}, r"inside shape \[6, 4\]"),
        ((6, 4), [((-1, 0), (6, 4))], [WHOLE], {}, r"offsets \[-1, 0\]"),
        ((6, -4), [], [], {"dtype": torch.float32}, "negative"),
        ((6, 4), [((0, 0), (2, 4)), ((1, 3), (1, 1))], [WHOLE[:2], WHOLE[:1, :1]], {}, "overlap"),
        ((), [((), ()), ((), ())], [torch.tensor(1.0)] * 2, {}, "overlap"),
        ((6, 4), [((0, 0), (2, 4))], [WHOLE[:3]], {}, r"another shape.*\[3, 4\].*\[2, 4\]"),
        ((6, 4), [((0, 0), (2, 4))], [], {"dtype": torch.float32}, "one tensor per box"),
        ((6, 4), [], [], {}, "dtype="),
        ((6, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], [WHOLE[:2], WHOLE[:2].double()], {}, "one dtype"),
        ((6, 4), [((0, 0), (2, 4))], [WHOLE[:2]], {"dtype": torch.int32}, "one dtype"),
        ((6, 4), [((0, 0), (2, 4))], [WHOLE[:2].to_sparse()], {}, "dense"),
        ((6, 4), [((0, 0), (2, 4))], [WHOLE[:2].to("meta")], {}, "memory"),
    ],
)
def test_inconsistent_shards_are_refused(
    shape: Any, boxes: Any, tensors: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedValue, match=said):
        Shards(shape, boxes, tensors, **options)


def test_many_boxes_are_checked_too() -> None:
    rows = [((row, 0), (1, 2)) for row in range(200)]
    Shards((200, 2), rows, [torch.zeros(1, 2)] * 200)
    with pytest.raises(UnsupportedValue, match="overlap"):
        Shards((200, 2), [*rows, ((117, 1), (1, 1))], [torch.zeros(1, 2)] * 200 + [torch.zeros(1, 1)])


def test_flat_ranges_are_views_of_the_flat_tensor() -> None:
    flat = torch.zeros(17)
    shards = flat_range((3, 4, 2), 5, flat)
    for number, tensor in enumerate(shards.tensors):
        tensor.fill_(number + 1)
    assert (flat > 0).all() and flat.tolist() == sorted(flat.tolist())
    whole = torch.zeros(3, 4, 2)
    for box, tensor in zip(shards.boxes, shards.tensors, strict=True):
        whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))] = tensor
    assert torch.equal(whole.reshape(-1)[5:22], flat)
    assert flat_range((3, 4), 0, torch.zeros(0, dtype=torch.int16)).dtype is torch.int16
    for start, tensor in ((5, torch.zeros(20)), (-1, torch.zeros(2)), (0, torch.zeros(2, 2))):
        with pytest.raises(UnsupportedValue, match="flat range"):
            flat_range((3, 4, 2), start, tensor)


def test_boxes_without_elements_are_not_held() -> None:
    held = held_by(Shards((6, 4), [((0, 0), (0, 4)), ((1, 0), (2, 4))], [WHOLE[:0], WHOLE[1:3]]))
    assert held is not None and held.boxes == (Box((1, 0), (2, 4)),)
    held = held_by(Shards((6, 4), [((0, 0), (0, 4))], [WHOLE[:0]], holders=[0, 1]))
    assert held is not None and held.boxes == () and held.holders is None
    held = held_by(Shards((0, 4), [((0, 0), (0, 2))], [WHOLE[:0, :2]]))
    assert held is not None and held.boxes == (Box((0, 0), (0, 4)),) and held.pieces[0].shape == (0, 4)


def test_what_is_no_sharded_tensor() -> None:
    for value in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), 3, None, [WHOLE]):
        assert held_by(value) is None


class Odd(torch.Tensor):
    pass


def test_shards_in_the_tree() -> None:
    one = Shards((6, 4), *zip(*[block(0, 0, 2, 2), block(3, 1, 1, 3)], strict=True))  # type: ignore[arg-type]
    flat = flatten({"p": {"w": one, "plain": WHOLE, "again": one}, "root": one})
    assert [(leaf.part, leaf.key) for leaf in flat.leaves] == [("p", "w"), ("p", "plain")]
    assert flat.sharded == [0]
    leaf = flat.leaves[0]
    assert isinstance(leaf, ShardedLeaf) and leaf.scope is Scope.GLOBAL and leaf.tensor is one
    assert leaf.shape == (6, 4) and leaf.boxes == one.boxes and leaf.nbytes == 7 * 4
    assert flat.leaves[1].pieces == (WHOLE,) and flat.leaves[1].holders is None
    assert flat.sources()[1] is WHOLE and len(flat.sources()[0]) == 2
    layout = LayoutPlanner(0, 1).plan(flat).layout
    assert [entry.nbytes for entry in layout.entries] == [28, 96]
    assert decode(LayoutPlanner(0, 1).plan(flat).encoded) == layout
    with pytest.raises(UnsupportedValue, match="key"):
        flatten({"p": {one: 1}})
    with pytest.raises(UnsupportedValue, match=r"p/\[1\].*subclass"):
        flatten({"p": [one, torch.zeros(2).as_subclass(Odd)]})


def test_conjugate_shards_are_resolved() -> None:
    value = torch.view_as_complex(WHOLE.reshape(12, 2)).conj()
    flat = flatten({"p": Shards((12,), [((0,), (12,))], [value])})
    assert not flat.leaves[0].pieces[0].is_conj() and torch.equal(flat.leaves[0].pieces[0], value)


def owned(rank: int, world: int, shards: Shards) -> Any:
    plan = LayoutPlanner(rank, world).plan(flatten({"p": {"w": shards}}))
    return plan.layout.entries[0].image


def test_holders_share_and_others_store_their_own() -> None:
    boxes, tensors = [block(0, 0, 2, 4)[0]], [WHOLE[:2]]
    assert owned(3, 4, Shards((6, 4), boxes, tensors)) is not None
    pair = [owned(rank, 4, Shards((6, 4), boxes, tensors, holders=[1, 3])) for rank in (1, 3)]
    assert pair == [0, None]
    each = [owned(rank, 4, Shards((6, 4), boxes, tensors, holders=[4 - rank])) for rank in (1, 3)]
    assert each == pair, "whether a rank names itself or not"
    assert owned(1, 4, Shards((6, 4), [], [], dtype=torch.float32)) is None
    assert owned(0, 1, Shards((6, 4), boxes, tensors, holders=[0, 1])) is not None, "alone"
    with pytest.raises(UnsupportedValue, match="p/w"):
        owned(1, 4, Shards((6, 4), boxes, tensors, holders=[1, 4]))


def test_other_holders_make_another_layout() -> None:
    def flat(holders: list[int]) -> FlatState:
        return flatten({"p": Shards((6, 4), [block(0, 0, 2, 4)[0]], [WHOLE[:2]], holders=holders)})

    planner = LayoutPlanner(2, 4)
    assert planner.plan(flat([1, 2])).layout.entries[0].image is None
    assert planner.plan(flat([2, 3])).layout.entries[0].image == 0
    assert list(planner.owners.values()) == [(2,)]


def test_a_guess_that_proves_wrong_leaves_no_trace() -> None:
    """A rank plans ahead for what it has then; owners must not depend on it, for other ranks have planned otherwise."""

    def flat(*sizes: int) -> FlatState:
        shards = {
            str(i): Shards((n,), [((0,), (n,))], [torch.zeros(n)], holders=[0, 1])
            for i, n in enumerate(sizes)
        }
        return flatten({"p": shards})

    for guessed in ([100], [1, 100], [3, 50, 200]):
        guessing, planner = LayoutPlanner(0, 2), LayoutPlanner(0, 2)
        before = guessing.guess(flat(*guessed))
        assert guessing.plan(flat(3, 50, 200)).layout == planner.plan(flat(3, 50, 200)).layout
        assert guessing.owners == planner.owners
        assert (guessing.plan(flat(3, 50, 200)) is before) == (guessed == [3, 50, 200])
        assert guessing.plan(flat(3, 50, 200, 7)).layout == planner.plan(flat(3, 50, 200, 7)).layout


def test_room_for_a_share() -> None:
    """Of what four ranks hold, a rank needs room for a fourth and one tensor more."""
    big = torch.zeros(1 << 18)
    alone = [flat_range((1 << 20,), 0, big) for _ in range(8)]
    shared = [flat_range((1 << 18,), 0, big, holders=range(4)) for _ in range(8)]
    room = [expected_slot_bytes(TrainState(rng=False, x=x), 4) / big.nbytes for x in (alone, shared)]
    assert 8 < room[0] < 9.5 and 3 < room[1] < 4.5


def test_planners_that_saw_other_saves_agree_once_they_forget() -> None:
    """A rank that missed a save found other owners for what is there; after the failure all plan anew."""

    def state(*sizes: int) -> FlatState:
        shards = {
            str(i): Shards((n,), [((0,), (n,))], [torch.zeros(n)], holders=[0, 1])
            for i, n in enumerate(sizes)
        }
        return flatten({"p": shards})

    planners = [LayoutPlanner(rank, 2) for rank in range(2)]

    def stored(flat: FlatState) -> list[int]:
        layouts = [planner.plan(flat).layout for planner in planners]
        return [
            sum(layout.entries[i].image is not None for layout in layouts) for i in range(len(flat.leaves))
        ]

    planners[0].plan(state(1))
    assert stored(state(1, 5)) != [1, 1]
    for planner in planners:
        planner.forget()
    assert stored(state(1, 5)) == [1, 1]


def parts_of_a_mesh(rank: int) -> None:
    """Tensor parallel groups that nothing but the promise of equal parts connects."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = distribute_tensor(WHOLE, both["tp"], [Shard(0)], src_data_rank=None)
    norm = distribute_tensor(torch.ones(3), both["tp"], [Replicate()], src_data_rank=None)
    whole = distribute_tensor(WHOLE, both, [Replicate(), Shard(0)], src_data_rank=None)
    parts = {"model": {"w": value, "norm": norm}, "hand": Shards((3,), [((0,), (3,))], [WHOLE[0, :3]])}
    pair = (0, 1) if rank < 2 else (2, 3)
    mine = (rank % 2, rank % 2 + 2)
    holders = [leaf.holders for leaf in TrainState(rng=False, **parts).flatten().leaves]
    assert holders == [(rank,), pair, None]
    promised = TrainState(rng=False, replicated=["model", "hand"], **parts)
    assert [leaf.holders for leaf in promised.flatten().leaves] == [mine, (0, 1, 2, 3), None]
    # A tensor that is placed on both axes tells that both groups run the same model.
    parts["model"]["whole"] = whole
    told = [leaf.holders for leaf in TrainState(rng=False, **parts).flatten().leaves]
    assert told == [mine, (0, 1, 2, 3), mine, None]


def test_promised_replicas_of_tensor_parallel_groups(tmp_path: Path) -> None:
    launch(parts_of_a_mesh, 4, tmp_path)


def tree_of_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    # Rank 1 holds nothing of it, and yet sees that it is one tensor twice.
    value = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)], src_data_rank=None)
    other = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)], src_data_rank=None)
    whole = distribute_tensor(torch.ones(1, 3), mesh, [Replicate()], src_data_rank=None)
    parameter = torch.nn.Parameter(value)
    frozen = torch.nn.Parameter(other, requires_grad=False)
    state = {"a": value, "b": value.detach(), "c": parameter, "d": frozen, "e": whole, "f": whole.to_local()}
    flat = flatten({"model": state})
    assert [leaf.key for leaf in flat.leaves] == ["a", "d", "e", "f"], [leaf.key for leaf in flat.leaves]
    assert (
        [leaf.holders for leaf in flat.leaves[:3]] == [(0,), (0,), (0, 1)]
        if rank == 0
        else [None, None, (0, 1)]
    )
    flags = [flatten({"model": {k: v}}).state for k, v in state.items()]
    assert len({len(data) for data in flags[:2]}) == 1 and len(flags[2]) > len(flags[0]) < len(flags[3])
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    leaves = flatten({"model": fully_shard(tied, mesh=mesh).state_dict()}).leaves
    assert [leaf.key for leaf in leaves] == ["0.weight"]
    with pytest.raises(UnsupportedValue, match=r"model/moments/w: .*Redistribute"):
        flatten({"model": {"moments": {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}}})
    # Before the first step: room for this rank's half of the moments, and not for much more.
    model = fully_shard(torch.nn.Linear(512, 1024), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train = TrainState(model, optimizer, rng=False)
    before = expected_slot_bytes(train, 2)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    layout = LayoutPlanner(rank, 2).plan(train.flatten()).layout
    assert sum(image.nbytes for image in layout.images) < before < 3.5 * 512 * 512 * 4


def test_dtensors_in_the_tree(tmp_path: Path) -> None:
    launch(tree_of_dtensors, 2, tmp_path)
