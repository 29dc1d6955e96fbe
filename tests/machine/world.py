"""What a trainer holds, in plain dicts, and the snapshots that it hands to the store."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

import numpy as np
from everstep.errors import EverstepError, StateMismatch
from everstep.format.layout import Box, EntrySpec, Layout, Scope, build_layout, encode, layout_hash
from everstep.format.vote import STATE_IMAGE
from everstep.plan.reads import plan_reads
from everstep.store.fill import fill
from everstep.store.flush import write_meta
from everstep.store.sources import DurableSource

from tests.store import store_kit as kit

WORLD = kit.WORLD
COLUMNS = 33

Key = tuple[int, int]
"""(incarnation, step)"""


class Clock:
    """The time, which the story moves: in seconds since the epoch. It stands in for the class datetime where records
    are given their times."""

    def __init__(self) -> None:
        self.at_s = 1_900_000_000
        self.skew_s = 0
        """How far the clock of whoever makes a record is off."""

    def time(self) -> float:
        return self.at_s

    def now(self, zone: timezone) -> datetime:
        return datetime.fromtimestamp(self.at_s + self.skew_s, zone)


def seconds_of(text: str) -> int:
    """Seconds since the epoch of a record's time."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


@dataclass(frozen=True)
class Pinned:
    """A pin, and until when it says that it holds."""

    key: Key
    until_s: int | None


@dataclass(frozen=True)
class Shape:
    """What the entries are: everything that a layout depends on."""

    rows: int = 200
    flags: bool = True
    moment: str = "exp_avg"

    def specs(self, rank: int) -> list[EntrySpec]:
        per = self.rows // WORLD
        box = Box((rank * per, 0), (per, COLUMNS))
        long = 1500 + rank
        found = [
            EntrySpec("model", "w", "float32", (31, 17), (Box.full((31, 17)),), Scope.GLOBAL, rank == 0),
            EntrySpec("model", "sharded", "float32", (self.rows, COLUMNS), (box,), Scope.GLOBAL),
            EntrySpec("optimizer", self.moment, "float64", (long,), (Box.full((long,)),)),
        ]
        if self.flags:
            found.append(EntrySpec("optimizer", "flags", "uint8", (7,), (Box.full((7,)),)))
        return found

    def changed(self, how: str) -> Shape:
        """``how``: "grow", "drop" or "rename" of an entry; "" for none."""
        if how == "grow":
            return Shape(self.rows % 300 + 40, self.flags, self.moment)
        if how == "drop":
            return Shape(self.rows, not self.flags, self.moment)
        if how == "rename":
            return Shape(self.rows, self.flags, "momentum" if self.moment == "exp_avg" else "exp_avg")
        return self


DTYPES = {"float32": np.float32, "float64": np.float64, "uint8": np.uint8}

Values = dict[tuple[int, str], bytes]
"""The bytes of each entry, by rank and key."""


@dataclass
class Held:
    """What one checkpoint must hold."""

    shape: Shape
    values: Values
    note: str
    """What its state images say."""
    loss: float = 1.0

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss}

    def state(self, rank: int) -> bytes:
        return f"{self.note} of rank {rank} ".encode() * 300


@dataclass
class Trainer:
    """The state as it is now."""

    shape: Shape = field(default_factory=Shape)
    values: Values = field(default_factory=dict)

    def train(self, change: str, layout: str, seed: int) -> None:
        """Change some of it: "dense" all floats a little, "sparse" a few bytes, "none" nothing. What is new gets
        values."""
        numbers = np.random.default_rng(seed)
        self.shape = self.shape.changed(layout)
        new: Values = {}
        for rank in range(WORLD):
            for spec in self.shape.specs(rank):
                nbytes = sum(box.volume for box in spec.boxes) * np.dtype(DTYPES[spec.dtype]).itemsize
                name = rank, spec.key
                old = self.values.get(name)
                if old is None or len(old) != nbytes:
                    new[name] = _fresh(spec.dtype, nbytes, numbers)
                else:
                    new[name] = _changed(spec.dtype, old, change, numbers)
        for rank in range(1, WORLD):
            new[rank, "w"] = new[0, "w"]
        self.values = new

    def held(self, note: str, loss: float) -> Held:
        return Held(self.shape, dict(self.values), note, loss)

    def take(self, held: Held) -> None:
        """What a load does."""
        self.shape, self.values = held.shape, dict(held.values)


def _fresh(dtype: str, nbytes: int, numbers: np.random.Generator) -> bytes:
    if dtype == "uint8":
        return numbers.bytes(nbytes)
    kind = DTYPES[dtype]
    return numbers.standard_normal(nbytes // np.dtype(kind).itemsize).astype(kind).tobytes()


def _changed(dtype: str, old: bytes, change: str, numbers: np.random.Generator) -> bytes:
    if change == "none":
        return old
    if change == "sparse" or dtype == "uint8":
        data = bytearray(old)
        for _ in range(3):
            data[int(numbers.integers(len(data)))] ^= 1 + int(numbers.integers(255))
        return bytes(data)
    kind = DTYPES[dtype]
    values = np.frombuffer(old, kind)
    return (values * (1 + 0.001 * numbers.standard_normal(len(values)))).astype(kind).tobytes()


def same_metrics(found: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """NaN is NaN here."""
    return repr(dict(found)) == repr(dict(wanted))


_layouts: dict[tuple[Shape, int], Layout] = {}


def layout_of(shape: Shape, rank: int) -> Layout:
    key = shape, rank
    if key not in _layouts:
        _layouts[key] = build_layout(shape.specs(rank))
    return _layouts[key]


def snapshot(key: Key, rank: int, held: Held) -> kit.MemoryPinned:
    """The rank's slot."""
    layout = layout_of(held.shape, rank)
    images = [bytearray(spec.header + bytes(spec.nbytes - len(spec.header))) for spec in layout.images]
    for entry in layout.entries:
        if entry.image is not None:
            images[entry.image][entry.offset : entry.offset + entry.nbytes] = held.values[rank, entry.key]
    encoded = encode(layout)
    data = {f"image:{spec.name}": image for spec, image in zip(layout.images, images, strict=True)}
    data[STATE_IMAGE] = bytearray(held.state(rank))
    data["meta"] = bytearray(write_meta({**kit.meta_of(rank, WORLD), "metrics": held.metrics}))
    data["layout"] = bytearray(encoded)
    info = kit.Info(0, key[1], 2, key[0], key[1], layout_hash(encoded))
    return kit.MemoryPinned(info, data, kit.CHUNK)


async def compare(sources: list[DurableSource], held: Held) -> None:
    """Load all ranks from ``sources``, nearest first, and compare every byte. Raises what loads do."""
    layouts = [layout_of(held.shape, rank) for rank in range(WORLD)]
    for rank, layout in enumerate(layouts):
        await _compare(sources, held, layouts, rank, layout)
        assert await _state(sources, rank) == held.state(rank)
    await _by_name(sources, held, layouts)


async def _compare(
    sources: list[DurableSource], held: Held, layouts: list[Layout], rank: int, wanted: Layout
) -> None:
    reads = plan_reads(wanted.entries, layouts, rank)
    found = [bytearray(len(held.values[rank, entry.key])) for entry in wanted.entries]
    await fill(sources, reads, {index: memoryview(data) for index, data in enumerate(found)})  # type: ignore[arg-type]
    for entry, data in zip(wanted.entries, found, strict=True):
        assert data == held.values[rank, entry.key], f"step {sources[0].step} rank {rank} {entry.key}"


async def _by_name(sources: list[DurableSource], held: Held, layouts: list[Layout]) -> None:
    """By who has one tensor less, or calls one otherwise: each gets what is his by its name, or hears that it is not
    there."""
    if held.shape.flags:
        await _compare(sources, held, layouts, 0, layout_of(held.shape.changed("drop"), 0))
    renamed = held.shape.changed("rename")
    try:
        plan_reads(layout_of(renamed, 0).entries, layouts, 0)
    except StateMismatch as error:
        assert renamed.moment in str(error), error
    else:
        raise AssertionError(f"{renamed.moment} was found, which was {held.shape.moment}")


async def _state(sources: list[DurableSource], rank: int) -> bytes:
    errors: list[Exception] = []
    for source in sources:
        try:
            return await source.state(rank)
        except EverstepError as error:
            errors.append(error)
    raise errors[0]
