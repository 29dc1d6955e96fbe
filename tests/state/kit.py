"""Shared by the tests of the state tree: round trips without storage, sample classes, random state trees."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
import typing
import zoneinfo
from typing import Any

import numpy as np
import torch
from everstep.format.layout import Entry
from everstep.state.codec import StateImage
from everstep.state.merge import Saved, Skeleton
from everstep.state.restore import RestorePlan, fill_from, plan_restore, values
from everstep.state.tensors import DTYPES, empty
from everstep.state.trainstate import TrainState
from everstep.state.tree import FlatState, flatten
from hypothesis import strategies as st


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"
    PAIR = (1, 2)
    FUNCTION = len


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(typing.NamedTuple):
    x: Any
    y: Any = 0


class Empty(typing.NamedTuple):
    pass


@dataclasses.dataclass
class Config:
    rate: Any
    name: Any = "adam"
    seen: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    late: Any = dataclasses.field(init=False)


class Attributes(dict):  # type: ignore[type-arg]
    """A dict subclass that counts the runs of its constructor."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).made += 1
        super().__init__(*args, **kwargs)


class Ordered(collections.OrderedDict):  # type: ignore[type-arg]
    pass


class Names(list):  # type: ignore[type-arg]
    pass


class Text(str):
    pass


def entries_of(flat: FlatState) -> list[Entry]:
    return [
        Entry(leaf.part, leaf.key, leaf.dtype, leaf.shape, leaf.boxes, leaf.scope, 0, 0, leaf.nbytes)
        for leaf in flat.leaves
    ]


def flat_of(state: Any) -> FlatState:
    return TrainState.of(state).flatten()


def round_trip(value: Any) -> Any:
    """``value`` through leaves and state image and back, without a template."""
    flat = flatten({"part": value})
    return values(StateImage(flat.state), entries_of(flat), fill_from(flat.leaves))["part"]


def restore(target: Any, flat: FlatState, **options: Any) -> list[str]:
    """``flat`` into live objects."""
    plan = planned(target, flat, **options)
    fill_from(flat.leaves)(plan.wanted())
    return plan.finish()


def skeleton_of(flat: FlatState) -> Skeleton:
    return Skeleton.of(Saved(0, StateImage(flat.state), entries_of(flat)))


def planned(target: Any, flat: FlatState, **options: Any) -> RestorePlan:
    """Compared, with all differences raised."""
    plan = plan_restore(target, skeleton_of(flat), **options)
    plan.settle()
    plan.raise_mismatches()
    return plan


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of any dtype (a valid bool where it must be)."""
    made = empty(shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    flat = made.reshape(-1)
    raw = (
        flat.view(torch.uint8)
        if dtype is not torch.complex128
        else torch.view_as_real(flat).view(torch.uint8)
    )
    top = 2 if dtype is torch.bool else 256
    raw.copy_(torch.randint(0, top, raw.shape, dtype=torch.uint8, generator=generator))
    return made


def _odd_view(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if how == "strided" and tensor.dim() >= 1:
        return tensor[::2]
    if how == "expanded" and tensor.dim() >= 1:
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "row" and tensor.dim() >= 1 and tensor.shape[0] > 0:
        return tensor[0]
    if how == "conj" and tensor.is_complex():
        return tensor.conj()
    if how == "neg" and tensor.is_complex():
        return tensor.conj().imag
    return tensor


_no_kernels = {torch.complex32}
tensors = st.builds(
    lambda shape, name, seed, how: _odd_view(
        random_tensor(tuple(shape), DTYPES[name], seed), how if DTYPES[name] not in _no_kernels else ""
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 1 << 30),
    st.sampled_from(["", "", "transposed", "strided", "expanded", "row", "conj", "neg"]),
)
parameters = st.builds(
    lambda shape, grad: torch.nn.Parameter(torch.rand(tuple(shape)), requires_grad=grad),
    st.lists(st.integers(0, 3), max_size=2),
    st.booleans(),
)
floats = st.floats(allow_nan=True) | st.sampled_from([float("nan"), -float("nan"), -0.0, float("inf")])
zones = st.sampled_from(
    [
        None,
        datetime.timezone.utc,
        datetime.timezone(datetime.timedelta(hours=-3, minutes=7)),
        datetime.timezone(datetime.timedelta(hours=1), "MEZ"),
        zoneinfo.ZoneInfo("UTC"),
    ]
)
texts = (
    st.text()
    | st.text(st.characters(categories=["Cs", "Ll", "Po"]))
    | st.sampled_from(["", "a.b", "a/b", "~0", "#1", "[0]"])
)
arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 100, tuple(shape)).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["<f4", ">f8", "<i2", ">u4", "?", "<c8", "<f2", "<M8[ns]", "<m8[D]", "<U3", "S4"]),
    st.integers(0, 1 << 30),
)
hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | texts
    | st.binary(max_size=40)
    | st.complex_numbers()
    | st.dates()
    | st.timedeltas()
    | st.builds(datetime.datetime.combine, st.dates(), st.times(), zones)
    | st.times()
    | st.sampled_from([*Colour, *Level, *Access, Access.READ | Access.WRITE])
    | st.sampled_from(
        [
            torch.float8_e5m2,
            torch.device("cuda:1"),
            torch.Size([2, 0]),
            np.float32(2.5),
            np.str_("a"),
            np.int64(-3),
        ]
    )
    | st.sampled_from(
        [pathlib.PurePosixPath("a/b"), pathlib.Path("/x"), range(3, 9, 2), Empty(), Text("sub")]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=5,
)
plain_leaves = (
    hashables | st.binary(max_size=20).map(bytearray) | arrays | st.builds(slice, st.integers(), st.none())
)
leaves = plain_leaves | tensors | parameters


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(hashables, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return (
        dicts
        | lists
        | st.dictionaries(texts, inner, max_size=4)
        | lists.map(tuple)
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda items: collections.defaultdict(list, items))
        | dicts.map(Attributes)
        | st.dictionaries(texts, inner, max_size=3).map(Ordered)
        | lists.map(Names)
        | st.builds(collections.deque, lists, st.sampled_from([None, 9]))
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, st.integers(), max_size=3).map(collections.Counter)
        | st.builds(Point, inner, inner)
        | st.builds(Config, inner, inner)
        | st.builds(Frozen, inner)
        | st.builds(Slotted, inner)
    )


trees = st.recursive(leaves, containers, max_leaves=12)
