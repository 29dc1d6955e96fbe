"""What ranks hold of real sharded tensors, against the value that was sharded: every piece is the slice of the
whole that its box says, and all ranks together have every element, as often as there are holders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from everstep import Shards, flat_range
from everstep.errors import UnsupportedValue
from everstep.state.sharded import held_by
from torch import nn

from .launch import launch

RANKS = 6
Case = Callable[[int], Any]


def known(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """With values that say where they lie."""
    made = nn.Linear(inputs, outputs)
    with torch.no_grad():
        made.weight.copy_(known(outputs, inputs))
        made.bias.copy_(known(outputs))
    return made


def mesh(shape: Sequence[int], names: Sequence[str] | None = None, ranks: Sequence[int] | None = None) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    count = torch.Size(shape).numel()
    members = torch.tensor(list(range(count) if ranks is None else ranks)).reshape(*shape)
    return DeviceMesh("cpu", members, mesh_dim_names=tuple(names) if names else None)


def shard(placements: Sequence[Any], value: torch.Tensor, on: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    # Without talking: every rank has the value, and torch cannot send strided shards of unequal sizes.
    return distribute_tensor(value, on, placements, src_data_rank=None)


def fully_sharded(rank: int) -> dict[str, Any]:
    """Even, uneven and empty shards; two replicas of each shard; a mesh of some ranks only."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    meshes = {"6": mesh([6]), "4": mesh([4]), "2x3": mesh([2, 3], ["rep", "shard"])}
    for name, on in meshes.items():
        for outputs in (12, 7, 1):
            if on.get_coordinate() is not None:
                module = fully_shard(linear(3, outputs), mesh=on)
                found[f"fsdp {name} {outputs}"] = module.state_dict()
    return found


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Alone and below FSDP, by rows and by columns, sizes that no mesh axis divides."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found: dict[str, Any] = {}
    both = mesh([3, 2], ["dp", "tp"])
    for outputs, inputs in ((7, 4), (5, 3), (12, 6), (11, 2)):
        for style in (ColwiseParallel, RowwiseParallel):
            module = parallelize_module(nn.Sequential(linear(inputs, outputs)), both["tp"], {"0": style()})
            name = f"{style.__name__} {outputs}x{inputs}"
            if both["dp"].get_local_rank() == 0:
                # A copy: sharding over it replaces the parameters in place.
                found[f"tp {name}"] = {k: v.detach().clone() for k, v in module.state_dict().items()}
            if inputs % 2 == 0 or style is ColwiseParallel:
                found[f"fsdp x {name}"] = fully_shard(module, mesh=both["dp"]).state_dict()
    return found


def distributed(rank: int) -> dict[str, Any]:
    """DTensors in every placement, among them strided ones that have several regions."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    one, two, some = mesh([6]), mesh([3, 2]), mesh([2], ranks=[1, 3])
    found: dict[str, Any] = {}
    for size in range(10):
        found[f"rows {size}"] = shard([Shard(0)], known(size, 2), one)
        found[f"columns {size}"] = shard([Shard(1)], known(2, size), one)
        found[f"both {size}"] = shard([Shard(0), Shard(1)], known(size, size), two)
        found[f"twice {size}"] = shard([Shard(0), Shard(0)], known(size), two)
        found[f"strided {size}"] = shard([Shard(0), _StridedShard(0, split_factor=2)], known(size), two)
        found[f"strided alone {size}"] = shard(
            [Replicate(), _StridedShard(0, split_factor=3)], known(size), two
        )
    found["axes apart"] = shard(
        [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)], known(12, 8), two
    )
    found["scalar"] = shard([Replicate()], known()[()], one)
    found["whole"] = shard([Replicate(), Replicate()], known(3), two)
    found["some ranks"] = shard([Shard(0)], known(5, 2), some)
    return found


def otherwise_laid_out(rank: int) -> dict[str, Any]:
    """Local tensors that are not contiguous, or still on their way."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DTensor, Replicate, Shard

    on = mesh([6])
    whole, images = known(12, 4), known(6, 2, 3, 4)
    rows = slice(2 * rank, 2 * rank + 2)
    transposed = whole[rows].t().contiguous().t()
    last = images[rank : rank + 1].to(memory_format=torch.channels_last)
    assert not transposed.is_contiguous() and not last.is_contiguous()
    late = functional.all_gather_tensor(known(12)[rows], 0, on)
    assert type(late) is not torch.Tensor
    return {
        "transposed": DTensor.from_local(transposed, on, [Shard(0)], run_check=False),
        "channels last": DTensor.from_local(last, on, [Shard(0)], run_check=False),
        "conjugate": DTensor.from_local(
            torch.view_as_complex(known(12, 2))[rows].conj(), on, [Shard(0)], run_check=False
        ),
        "late": DTensor.from_local(late, on, [Replicate()], run_check=False),
    }


def by_hand(rank: int) -> dict[str, Any]:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    whole = known(12, 3)
    pieces = [
        LocalShard.from_tensor_and_offsets(whole[row : row + 1].clone(), [row, 0], rank)
        for row in (rank, rank + 6)
    ]
    flat = known(5, 3, 2).reshape(-1)
    cut = flat[5 * rank : 5 * rank + 5]
    columns = [((0, rank), (12, 1))] if rank < 3 else []
    return {
        "sharded tensor": init_from_local_shards(pieces, 12, 3),
        "flat": flat_range((5, 3, 2), 5 * rank, cut),
        "replicas": flat_range(
            (10,), 5 * (rank % 2), known(10)[5 * (rank % 2) :][:5], holders=range(rank % 2, 6, 2)
        ),
        "columns": Shards((12, 3), columns, [whole[:, rank : rank + 1]] * len(columns), dtype=whole.dtype),
    }


CASES: tuple[Case, ...] = (fully_sharded, tensor_parallel, distributed, otherwise_laid_out, by_hand)


def described(value: Any) -> dict[str, Any]:
    held = held_by(value)
    assert held is not None
    assert all(type(piece) is torch.Tensor and not piece.requires_grad for piece in held.pieces)
    assert [tuple(piece.shape) for piece in held.pieces] == [box.lengths for box in held.boxes]
    _check_writable(value, held.pieces)
    return {
        "shape": held.shape,
        "boxes": [[box.offsets, box.lengths] for box in held.boxes],
        "data": [
            torch.view_as_real(p.resolve_conj()).tolist() if p.is_complex() else p.tolist()
            for p in held.pieces
        ],
        "holders": held.holders,
    }


def _check_writable(value: Any, pieces: Sequence[torch.Tensor]) -> None:
    """What is written to a piece is in the live value."""
    for number, piece in enumerate(pieces):
        if piece.numel():
            before = piece.clone()
            piece.fill_(-7)
            again = held_by(value)
            assert again is not None and bool((again.pieces[number] == -7).all())
            piece.copy_(before)


def flattened(found: Any, name: str) -> dict[str, Any]:
    if isinstance(found, dict):
        return {k: v for key, item in found.items() for k, v in flattened(item, f"{name}/{key}").items()}
    return {name: found}


def rank_body(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        found |= {name: described(value) for name, value in flattened(case(rank), case.__name__).items()}
    _check_refusals(rank)
    return found


def _check_refusals(rank: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    on, two = mesh([6]), mesh([3, 2])
    with pytest.raises(UnsupportedValue, match=r"model/w.*summands.*Redistribute"):
        held_by(DTensor.from_local(torch.ones(2), on, [Partial()], run_check=False), "model/w")
    short = DTensor.from_local(
        torch.ones(2 + (rank == 4)), on, [Shard(0)], run_check=False, shape=(12,), stride=(1,)
    )
    if rank == 4:
        with pytest.raises(UnsupportedValue, match=r"model/w.*local shape \[3\].*expected: \[2\]") as refused:
            held_by(short, "model/w")
        assert refused.value.path == "model/w"
    meta = DTensor.from_local(torch.ones(2, device="meta"), on, [Replicate()], run_check=False)
    with pytest.raises(UnsupportedValue, match="Materialise"):
        held_by(meta, "model/w")
    # Distributed the other way round, where sizes do not divide: the data wins.
    strided = shard([_StridedShard(0, split_factor=2), Shard(0)], known(7), two)
    held = held_by(strided)
    assert held is not None
    if rank == 4:
        assert [box.offsets for box in held.boxes] == [(6,)] and held.pieces[0].tolist() == [7.0]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(rank_body, RANKS, tmp_path_factory.mktemp("held"))


def test_every_piece_is_what_its_box_says(held: list[dict[str, Any]]) -> None:
    assert len(set(itertools.chain(*held))) > 100
    for rank, found in enumerate(held):
        for name, one in found.items():
            whole = known(*one["shape"])
            if "conjugate" in name:
                whole = torch.view_as_complex(known(*one["shape"], 2)).conj()
            for (offsets, lengths), data in zip(one["boxes"], one["data"], strict=True):
                expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
                if expected.is_complex():
                    expected = torch.view_as_real(expected.resolve_conj())
                assert data == expected.tolist(), (rank, name, offsets, lengths)


def test_the_ranks_together_hold_everything(held: list[dict[str, Any]]) -> None:
    """Counting each group of holders once, every element is there once."""
    for name in set(itertools.chain(*held)):
        count: Counter[tuple[int, ...]] = Counter()
        shape: list[int] = []
        for rank, found in enumerate(held):
            if name not in found:
                continue
            shape, holders = found[name]["shape"], found[name]["holders"] or [rank]
            if rank != min(holders):
                continue
            for offsets, lengths in found[name]["boxes"]:
                count.update(
                    itertools.product(*(range(o, o + n) for o, n in zip(offsets, lengths, strict=True)))
                )
        expected = Counter(itertools.product(*map(range, shape)))
        assert count == expected, (name, count, expected)


def test_holders_are_those_with_equal_boxes(held: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(held):
        for name, one in found.items():
            same = [r for r, other in enumerate(held) if other.get(name, {}).get("boxes") == one["boxes"]]
            if one["boxes"]:
                assert (one["holders"] or [rank]) == same, (rank, name)
            else:
                assert one["holders"] is None
