"""What the golden runs hold, as functions of nothing but names and numbers. Never changed: the files of
all versions were made from it."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
import struct
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import torch
from everstep.format.dtypes import DTYPES as STORED
from everstep.state.tensors import DTYPES, empty

CHUNK_BYTES = 4096
FULL_STEP, SMALL_STEP, BARE_STEP = 3, 12, 20
PAIR_STEP = 4
PAIR_WORLD = 2
CONFIG = {"lr": 0.1, "layers": [1, 2], "name": "golden"}
METRICS = {"loss": 0.5, "worst": float("inf"), "seen": 1 << 70}


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Config:
    rate: Any
    name: str = "adam"


class Table(dict):  # type: ignore[type-arg]
    pass


class Names(list):  # type: ignore[type-arg]
    pass


class Text(str):
    pass


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor whose bytes count up from ``seed`` in steps of 7."""
    made = empty(shape, dtype)
    flat = made.reshape(-1)
    raw = torch.view_as_real(flat).view(torch.uint8) if dtype is torch.complex128 else flat.view(torch.uint8)
    top = 2 if dtype is torch.bool else 251
    counted = torch.arange(raw.numel(), dtype=torch.int64) * 7 + seed
    raw.copy_((counted % top).to(torch.uint8).reshape(raw.shape))
    return made


def nan(bits: int) -> float:
    """The NaN with these bits."""
    found: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return found


def plain() -> dict[str, Any]:
    """Every kind of plain value."""
    shared = [1, 2]
    return {
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 200)],
        "floats": [0.1, -0.0, float("inf"), float("-inf"), nan(0x7FF8000000000000), nan(0xFFF80000DEADBEEF)],
        "complex": complex(-0.0, float("inf")),
        "texts": ["", "a/b", "Zoë", "\ud800 alone", "~#[@"],
        "bytes": [b"", b"\x00\xff", bytearray(b"mutable")],
        "tuple": (1, (2, ())),
        "sets": [{3, 1, "a"}, frozenset({(1, 2), None})],
        "ranges": [range(3, 9, 2), slice(None, 4, None)],
        "keys": {1: "int", 1.5: "float", None: "none", b"k": "bytes", (1, "a"): "tuple", "": "empty"},
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter({"x": 3}),
        "deque": collections.deque([1, 2], maxlen=5),
        "aliases": {"one": shared, "other": shared},
        "dates": [
            datetime.date(2026, 1, 31),
            datetime.time(12, 30, 0, 7, fold=1),
            datetime.datetime(2026, 1, 31, 12, tzinfo=zoneinfo.ZoneInfo("UTC")),
            datetime.timedelta(days=-1, seconds=3, microseconds=5),
            datetime.timezone(datetime.timedelta(hours=-3, minutes=7), "here"),
            datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc),
        ],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\d")],
        "enums": [Colour.RED, Colour.BLUE, Access.READ | Access.WRITE],
        "user": [Point(1, [2]), Config(0.5), Table({"a": 1, 2: 3}), Names(["n"]), Text("sub")],
        "numpy": [
            np.arange(6, dtype=">i2").reshape(2, 3),
            np.float32(2.5),
            np.array(["ab", "c"]),
            np.dtype("<f8"),
            np.datetime64("2026-01-31"),
        ],
        "torch": [
            torch.bfloat16,
            torch.device("cuda:1"),
            torch.Size([2, 0]),
            torch.strided,
            torch.channels_last,
        ],
        "generator": torch.Generator().manual_seed(1234),
    }


def full() -> dict[str, Any]:
    """All dtypes, shapes and kinds of values, in parts with odd names."""
    tied = tensor(torch.float32, (4, 3), 11)
    weights = {
        "tied": [tied, tied],
        "parameter": torch.nn.Parameter(tensor(torch.float32, (5,), 3)),
        "frozen": torch.nn.Parameter(tensor(torch.float32, (2,), 4), requires_grad=False),
        "scalar": tensor(torch.float64, (), 5),
        "empty": tensor(torch.float32, (0, 3), 0),
        "transposed": tensor(torch.int32, (3, 2), 6).t(),
        "strided": tensor(torch.int16, (6,), 7)[::2],
        "expanded": tensor(torch.int8, (2, 1), 8).expand(2, 3),
        "channels": tensor(torch.float16, (1, 2, 2, 2), 9).to(memory_format=torch.channels_last),
        "conj": tensor(torch.complex64, (3,), 10).conj(),
        "odd/key~": {1: tensor(torch.uint8, (3,), 12), "__metadata__": tensor(torch.uint8, (2,), 13)},
    }
    return {
        "model": weights,
        "dtypes": {
            name: tensor(DTYPES[name], (2, 3), at) for at, name in enumerate(STORED) if name in DTYPES
        },
        "state": {"w": tensor(torch.float32, (2,), 20)},
        "val/loss": tensor(torch.float64, (3,), 21),
        "Zoë": [tensor(torch.bool, (5,), 22)],
        "..": {"big": np.arange(8500, dtype=">i8").reshape(85, 100)},
        "plain": plain(),
    }


def small() -> dict[str, Any]:
    return {"w": tensor(torch.float32, (3,), SMALL_STEP), "epoch": 2}


def bare() -> torch.Tensor:
    return tensor(torch.bfloat16, (2, 2), BARE_STEP)


def of_rank(rank: int) -> dict[str, Any]:
    """What differs between the ranks of the pair."""
    return {"rank": rank, "seen": tensor(torch.int64, (rank + 2,), 50 + rank)}


def settle(state: dict[str, Any], seed: int) -> None:
    """Give every tensor inside of ``state``, in place, counted values: nothing computed is stored, since that
    may differ by release."""
    for number, found in enumerate(tensors_of(state)):
        found.data.copy_(counted(found, seed + number))


def counted(like: torch.Tensor, seed: int) -> torch.Tensor:
    count = torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape)
    return (count * 0.5 + seed).to(like.dtype)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a state dict, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for item in inner for found in tensors_of(item)]
