"""Layouts: places, canonical bytes, and images that the safetensors library reads."""

from __future__ import annotations

import dataclasses
import random
import struct
import time
from pathlib import Path

import everstep.format.layout as layouts
import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import images, names
from everstep.format.columns import BadColumn, pack, pack_array, unpack, unpack_array
from everstep.format.constants import FORMAT_VERSION
from everstep.format.dtypes import DTYPES, nbytes
from everstep.format.fields import read_own
from everstep.format.layout import Box, Entry, EntrySpec, Layout, Scope
from everstep.format.table import TableReader
from hypothesis import given, settings
from hypothesis import strategies as st

from .damage import assert_all_found
from .examples import example_layout, image_bytes

NAME = "layouts/0123"


def spec(part: str, key: str, dtype: str, shape: tuple[int, ...], **more: object) -> EntrySpec:
    return EntrySpec(part, key, dtype, shape, (Box.full(shape),), **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- safetensors


def test_safetensors_reads_an_image_of_every_dtype_it_knows(tmp_path: Path) -> None:
    random.seed(7)
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5)]
    entries = []
    for name, row in DTYPES.items():
        for shape in shapes:
            if row.safetensors is not None and not (name == "float4_e2m1fn_x2" and shape == ()):
                entries.append(spec("model", f"{name}/{shape}", name, shape))
    random.shuffle(entries)
    layout = layouts.build_layout(entries)
    (image,) = layout.images
    path = tmp_path / "rank-00000.model.safetensors"
    data = image.header + random.randbytes(image.nbytes - len(image.header))
    path.write_bytes(data)
    assert len(image.header) % 4096 == 0
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {entry.key for entry in entries}
        assert file.metadata() == {"everstep": "1", "format": "pt"}
        for entry in layout.entries:
            tensor = file.get_tensor(entry.key)
            assert tensor.dtype == getattr(torch, entry.dtype)
            assert tuple(tensor.shape) == entry.shape
            stored = data[entry.offset : entry.offset + entry.nbytes]
            raw = tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else b""
            assert bytes(raw) == stored, entry.key
    assert set(safetensors.torch.load_file(path)) == {entry.key for entry in entries}


def test_dtypes_that_safetensors_lacks_travel_as_bytes(tmp_path: Path) -> None:
    lacking = [name for name, row in DTYPES.items() if row.safetensors is None]
    entries = [spec("model", f"{name}-{count}", name, (count,)) for name in lacking for count in (0, 1, 3, 8)]
    layout = layouts.build_layout(entries)
    (image,) = layout.images
    path = tmp_path / "image.safetensors"
    path.write_bytes(image.header + bytes(image.nbytes - len(image.header)))
    with safetensors.safe_open(path, "pt") as file:
        for entry in layout.entries:
            tensor = file.get_tensor(entry.key)
            assert tensor.dtype == torch.uint8
            assert tensor.shape == (nbytes(entry.dtype, entry.shape[0]),) == (entry.nbytes,)


def test_names_of_tensors_never_collide(tmp_path: Path) -> None:
    two = (Box((0,), (1,)), Box((3,), (1,)))
    entries = [
        EntrySpec("model", "w", "float32", (4,), two, Scope.GLOBAL),
        spec("model", "w@0", "float32", ()),
        spec("model", "w@0@", "float32", ()),
        spec("model", "__metadata__", "float32", ()),
        spec("model", "__metadata__@", "float32", ()),
        spec("model", "", "float32", ()),
        spec("model", 'quote " \\ \n é \U0001f600 \u2028', "float32", ()),
    ]
    layout = layouts.build_layout(entries)
    (image,) = layout.images
    path = tmp_path / "image.safetensors"
    path.write_bytes(image.header + bytes(range(4 * 8)))
    with safetensors.safe_open(path, "pt") as file:
        found = set(file.keys())
    assert found == {
        *("w@0@@", "w@3", "w@0", "w@0@", "__metadata__@@", "__metadata__@", ""),
        'quote " \\ \n é \U0001f600 \u2028',
    }


# ---------------------------------------------------------------------------------------------- building


def test_places_are_aligned_without_holes() -> None:
    order = ["bool", "float64", "int16", "complex128", "float32", "quint4x2"]
    layout = layouts.build_layout([spec("model", name, name, (3,)) for name in order])
    by_place = sorted(layout.entries, key=lambda entry: entry.offset)
    assert [entry.key for entry in by_place] == [
        "complex128",
        "float64",
        "float32",
        "int16",
        "bool",
        "quint4x2",
    ]
    end = len(layout.images[0].header)
    for entry in by_place:
        assert entry.offset == end
        assert entry.offset % max(1, DTYPES[entry.dtype].bits // 8) == 0
        end += entry.nbytes
    assert end == layout.images[0].nbytes


def test_one_image_for_each_part_that_stores_something() -> None:
    layout = layouts.build_layout(
        [
            spec("b", "x", "float32", (1,)),
            spec("a", "x", "float32", (1,)),
            spec("b", "y", "float32", (1,), scope=Scope.GLOBAL),
            spec("c", "z", "float32", (9,), scope=Scope.GLOBAL, stored=False),
        ]
    )
    assert [(image.name, image.part) for image in layout.images] == [("b", "b"), ("a", "a")]
    assert [entry.image for entry in layout.entries] == [0, 1, 0, None]
    assert layout.entries[3].nbytes == 36 and layout.entries[3].offset == 0
    assert [entry.key for entry in layout.entries] == ["x", "x", "y", "z"]


def test_a_part_called_state_gets_another_image_name() -> None:
    layout = layouts.build_layout([spec("state", "x", "bool", ()), spec("state@", "x", "bool", ())])
    assert [image.name for image in layout.images] == ["state@@", "state@"]
    assert [image.part for image in layout.images] == ["state", "state@"]


def test_a_part_called_like_a_shared_image_gets_another_name() -> None:
    parts = ["m+1", "m+1@", "m+2.1", "m", "+7", "m+01"]
    specs = [spec(part, "x", "bool", (), scope=Scope.GLOBAL) for part in parts]
    specs += [spec("m", "y", "bool", (), scope=Scope.GLOBAL, shared=(1,))]
    layout = layouts.build_layout(specs)
    named = ["m+1@@", "m+1@", "m+2.1", "m", "+7@", "m+01", "m+1"]
    assert [image.name for image in layout.images] == named
    assert [image.part for image in layout.images] == [*parts, "m"]
    assert layouts.decode(layouts.encode(layout)) == layout


def test_who_shares_an_image_gives_its_copy_the_same_bytes() -> None:
    """Whatever else the two ranks hold, in whatever order of their trees."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    for _ in range(60):
        entries = [
            spec(
                rng.choice(["m", "o", "m+1"]),
                f"k{number}" if rng.random() < 0.8 else f"é{number}",
                rng.choice(["int64", "float32", "bfloat16", "bool", "float4_e2m1fn_x2"]),
                rng.choice([(), (0,), (3,), (2, 0), (2, 3)]),
                scope=Scope.GLOBAL,
                shared=(1, 4),
            )
            for number in range(12)
        ]
        two = (Box((0, 0), (1, 2)), Box((3, 0), (1, 2)))
        entries.append(EntrySpec("m", "cut", "float32", (4, 2), two, Scope.GLOBAL, shared=(1, 4)))
        others = [spec("m", f"other{number}", "float32", (2,)) for number in range(4)]
        stored = rng.sample([*entries, *others], 17)
        copied = [dataclasses.replace(one, stored=False, copy_of=0) for one in entries]
        more = dataclasses.replace(entries[0], key="of another", stored=False, copy_of=9)
        copied = rng.sample([*copied, *others, more], len(copied) + 5)
        one, other = layouts.build_layout(stored), layouts.build_layout(copied)
        theirs = {image.name: image for image in other.copies}
        shared = [image for image in one.images if names.shared_with(image.name)]
        assert shared and len(theirs) == len(shared) + 1, seed
        for image in shared:
            copy = theirs[names.copy_name(0, image.name)]
            assert (copy.header, copy.nbytes, copy.part) == (image.header, image.nbytes, image.part), seed
        places = {
            (one.entries[index].part, one.entries[index].key): (one.images[image].name, offset)
            for index, image, offset in one.places()
            if names.shared_with(one.images[image].name)
        }
        for place in other.copied:
            entry, name = other.entries[place.entry], other.copies[place.image].name
            if name.startswith("0/"):
                assert places.pop((entry.part, entry.key)) == (name[2:], place.offset), seed
        assert not places
        for layout in (one, other):
            assert layouts.decode(layouts.encode(layout)) == layout, seed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"images": ["m+2", "m", "5/m+0"]}, ""),
        ({"images": ["n+2", "m", "5/m+0"]}, "no shared image of part"),
        ({"images": ["m+2", "m+1", "5/m+0"]}, "unshared"),
        ({"images": ["m+2", "m", "5/n+0"]}, "no shared image of part"),
        ({"images": ["m+2", "m", "5/m"]}, "no second copy"),
        ({"images": ["m+2", "m", "m+0"]}, "no second copy"),
        ({"images": ["m+2", "m", "0/m+0"]}, "no second copy"),
        ({"images": ["m+2", "m", "05/m+0"]}, "no second copy"),
    ],
)
def test_names_of_shared_images_are_checked(change: dict[str, object], problem: str) -> None:
    layout = layouts.build_layout(
        [
            spec("m", "a", "float32", (2,), scope=Scope.GLOBAL, shared=(2,)),
            spec("m", "b", "float32", (2,)),
            spec("m", "c", "float32", (2,), scope=Scope.GLOBAL, stored=False, shared=(0,), copy_of=5),
        ]
    )
    own = read_own(layouts.encode(layout), "x")
    assert own is not None
    data = msgspec.msgpack.encode({**msgspec.to_builtins(own, builtin_types=(bytes,)), **change})
    if not problem:
        assert layouts.decode(data) == layout
    else:
        with pytest.raises(Damaged, match=problem):
            layouts.decode(data)


def test_version_2_knew_no_shared_images() -> None:
    """There, such a name is that of a part, in the order of the tree; copies are named by their parts."""
    layout = layouts.build_layout([spec("m", "z", "bool", (1,)), spec("m", "a", "bool", (2,))])
    own = read_own(layouts.encode(layout), "x")
    assert own is not None
    plain = msgspec.to_builtins(own, builtin_types=(bytes,))
    schema = msgspec.msgpack.decode(plain["schema"])
    schema["parts"] = ["m+1"]
    changed = {"schema": msgspec.msgpack.encode(schema), "images": ["m+1"], "image_part": ["m+1"]}
    found = layouts.decode(msgspec.msgpack.encode({**plain, **changed, "v": 2}))
    assert [entry.offset - 4096 for entry in found.entries] == [0, 1]
    with pytest.raises(Damaged):
        layouts.decode(msgspec.msgpack.encode({**plain, **changed}))
    schema = msgspec.msgpack.decode(plain["schema"])
    schema["scope"] = pack([1, 1])
    copies = {"schema": msgspec.msgpack.encode(schema), "copies": 1}
    found = layouts.decode(msgspec.msgpack.encode({**plain, **copies, "v": 2}))
    assert [image.name for image in found.copies] == ["m"] and not found.images
    with pytest.raises(Damaged, match="no second copy"):
        layouts.decode(msgspec.msgpack.encode({**plain, **copies}))


BAD: list[tuple[str, EntrySpec]] = [
    ("unshared", spec("m", "k", "bool", (4,), shared=(1,))),
    ("unknown dtype", spec("m", "k", "float3", (1,))),
    ("not possible", spec("m", "k", "bool", (-1,))),
    ("not possible", spec("m", "k", "bool", (1 << 40, 1 << 40))),
    ("not possible", spec("m", "k", "bool", (1,) * 65)),
    ("must be whole", EntrySpec("m", "k", "bool", (4,), (Box((0,), (2,)),))),
    ("must be whole", EntrySpec("m", "k", "bool", (4,), ())),
    ("must be stored", spec("m", "k", "bool", (4,), stored=False)),
    ("has not the axes", EntrySpec("m", "k", "bool", (4,), (Box((0, 0), (2,)),), Scope.GLOBAL)),
    ("has not the axes", EntrySpec("m", "k", "bool", (4,), (Box((0, 0), (2, 1)),), Scope.GLOBAL)),
    ("lies outside", EntrySpec("m", "k", "bool", (4,), (Box((3,), (2,)),), Scope.GLOBAL)),
    ("lies outside", EntrySpec("m", "k", "bool", (4,), (Box((-1,), (2,)),), Scope.GLOBAL)),
    ("twice", EntrySpec("m", "k", "bool", (4,), (Box((0,), (2,)),) * 2, Scope.GLOBAL)),
    ("surrogates", spec("m", "k\ud800", "bool", ())),
    ("surrogates", spec("m\udfff", "k", "bool", ())),
]


@pytest.mark.parametrize(("problem", "bad"), BAD)
def test_impossible_entries_are_refused_by_path(problem: str, bad: EntrySpec) -> None:
    with pytest.raises(UnsupportedValue, match=problem) as caught:
        layouts.build_layout([spec("m", "before", "bool", ()), bad])
    assert "m" in caught.value.path and "k" in caught.value.path


def test_the_same_key_twice_in_a_part_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="m/k: the same key twice"):
        layouts.build_layout(
            [spec("m", "k", "bool", ()), spec("n", "k", "bool", ()), spec("m", "k", "bool", (1,))]
        )


# ------------------------------------------------------------------------------------------------- codec


@st.composite
def random_specs(draw: st.DrawFn) -> list[EntrySpec]:
    """Up to 12 entries of random parts, dtypes, shapes, scopes and boxes."""
    keys = draw(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=5)), unique=True, max_size=12))
    found = []
    for part, key in keys:
        if any("\ud800" <= char <= "\udfff" for char in key):
            continue
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        if draw(st.booleans()):
            found.append(spec(part, key, dtype, shape))
            continue
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            offsets = tuple(draw(st.integers(0, size)) for size in shape)
            lengths = tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True))
            boxes.append(Box(offsets, lengths))
        unique = tuple(dict.fromkeys(boxes))
        found.append(EntrySpec(part, key, dtype, shape, unique, Scope.GLOBAL, draw(st.booleans())))
    return found


@given(random_specs())
@settings(deadline=None)
def test_layouts_come_back_and_are_canonical(specs: list[EntrySpec]) -> None:
    layout = layouts.build_layout(specs)
    encoded = layouts.encode(layout)
    assert layouts.decode(encoded) == layout
    assert layouts.encode(layouts.build_layout(specs)) == encoded
    for entry, given_spec in zip(layout.entries, specs, strict=True):
        size = sum(nbytes(given_spec.dtype, box.volume) for box in given_spec.boxes)
        assert (entry.key, entry.boxes, entry.nbytes) == (given_spec.key, given_spec.boxes, size)
    for index, image in enumerate(layout.images):
        inside = sum(entry.nbytes for entry in layout.entries if entry.image == index)
        assert image.nbytes == len(image.header) + inside
        (length,) = struct.unpack("<Q", image.header[:8])
        assert len(image.header) == 8 + length


def test_every_damage_of_a_stored_layout_is_found() -> None:
    encoded = layouts.encode(example_layout())
    expected = layouts.layout_hash(encoded)
    stored = layouts.compress(encoded)
    assert layouts.open_layout(stored, expected, NAME) == example_layout()
    assert assert_all_found(stored, lambda data: layouts.open_layout(data, expected, NAME), NAME) > 1000


@pytest.mark.long
def test_every_value_of_every_byte_of_a_stored_layout_is_found() -> None:
    encoded = layouts.encode(example_layout())
    expected = layouts.layout_hash(encoded)
    masks = tuple(range(1, 256))
    read = lambda data: layouts.open_layout(data, expected, NAME)  # noqa: E731
    assert_all_found(layouts.compress(encoded), read, NAME, masks)


def test_another_layout_is_not_taken_for_the_one_asked_for() -> None:
    other = layouts.compress(layouts.encode(layouts.build_layout([spec("m", "k", "bool", ())])))
    expected = layouts.layout_hash(layouts.encode(example_layout()))
    with pytest.raises(Damaged, match="not the one asked for") as caught:
        layouts.open_layout(other, expected, NAME)
    assert (caught.value.name, caught.value.expected) == (NAME, expected)


def test_damaged_canonical_bytes_never_decode_to_nonsense() -> None:
    """Without the hash check: whatever still decodes is a proper layout of exactly those bytes."""
    encoded = layouts.encode(example_layout())
    for at in range(len(encoded)):
        for mask in (1, 2, 0x20, 0x80, 0xFF):
            damaged = encoded[:at] + bytes([encoded[at] ^ mask]) + encoded[at + 1 :]
            try:
                found = layouts.decode(damaged, NAME)
            except (Damaged, UnknownFormat) as error:
                assert error.fields["name"] == NAME
            else:
                assert damaged[3] in (FORMAT_VERSION ^ 1, FORMAT_VERSION), (
                    "the version, whose hash would be another"
                )
                assert layouts.encode(found) == damaged[:3] + bytes([FORMAT_VERSION]) + damaged[4:]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_layout(data: bytes) -> None:
    for read in (layouts.decode, layouts.decompress):
        with pytest.raises((Damaged, UnknownFormat)):
            read(data, NAME)


def columns() -> dict[str, object]:
    """The example's columns, to be spoiled."""
    found: dict[str, object] = msgspec.msgpack.decode(layouts.encode(example_layout()))
    return found


COLUMNS = {"part", "dtype", "scope", "axes", "shape", "boxes", "offsets", "lengths", "image", "begin"}
SCHEMA = {"parts", "dtypes", "part", "key", "dtype", "scope", "axes", "shape"}


def spoil(field: str, value: object) -> bytes:
    """The example's canonical bytes with another value of one field; lists of integers are packed."""
    if field in COLUMNS and isinstance(value, list):
        value = pack(value)
    found = columns()
    if field in SCHEMA:
        schema = msgspec.msgpack.decode(found["schema"])  # type: ignore[arg-type]
        field, value = "schema", msgspec.msgpack.encode({**schema, field: value})
    return msgspec.msgpack.encode({**found, field: value})


SPOILED: list[tuple[str, object, type[Exception]]] = [
    ("v", FORMAT_VERSION + 1, UnknownFormat),
    ("v", 1, Damaged),
    ("v", "1", Damaged),
    ("dtypes", ["float32", "int64", "bfloat16", "float7"], UnknownFormat),
    ("new", [], Damaged),
    ("schema", b"", Damaged),
    ("schema", 3, Damaged),
    ("key", ["w"] * 6, Damaged),
    ("key", ["w"], Damaged),
    ("key", [1, 2, 3, 4, 5, 6], Damaged),
    ("part", [0, 0, 0, 0, 7, 0], Damaged),
    ("part", [0, 0, 0, 0, 1], Damaged),
    ("part", b"\3\0\0\0", Damaged),
    ("part", b"\1", Damaged),
    ("part", b"\2" + bytes(12), Damaged),
    ("part", b"\2" + bytes(11), Damaged),
    ("part", b"\x08" + bytes(48), Damaged),
    ("image", [1, 1, 1, 0, 9, 1], Damaged),
    ("image", [1, 1, 1, 0, 1, 1], Damaged),
    ("image", [0, 1, 1, 0, 2, 1], Damaged),
    ("image", [1, 1, 0, 0, 2, 1], Damaged),
    ("image", [1, 1, 1, 0, 2, 0], Damaged),
    ("image", [1, 1, 1, 0, 2], Damaged),
    ("begin", [8, 0, 40, 0, 0, 32], Damaged),
    ("begin", [8, 0, 40, 0, 4, 32], Damaged),
    ("begin", [8, 8, 40, 0, 0, 32], Damaged),
    ("begin", [8, 0, 44, 0, 0, 32], Damaged),
    ("begin", [8, 0, 40, 1, 0, 32], Damaged),
    ("begin", [8, 0, 40, 0, 2**64 - 1, 32], Damaged),
    ("begin", [], Damaged),
    ("scope", [0, 0, 3, 1, 0, 2], Damaged),
    ("scope", [0, 0, 0, 1, 0, 2], Damaged),
    ("scope", [0, 0, 2, 1, 0, 2], Damaged),
    ("axes", [2, 0, 2, 1, 1], Damaged),
    ("axes", [2, 0, 2, 1, 1, 2], Damaged),
    ("axes", [200, 0, 2, 1, 1, 1], Damaged),
    ("shape", [2, 3, 4, 2, 5, 2**64 - 1, 2], Damaged),
    ("shape", [2, 3, 4, 2, 5, 2, 2], Damaged),
    ("shape", [2, 3, 4, 2, 5, 1, 2, 7], Damaged),
    ("boxes", [0, 0, 3, 0, 0], Damaged),
    ("boxes", [0, 0, 2, 0, 0, 0], Damaged),
    ("boxes", [0, 2, 3, 0, 0, 0], Damaged),
    ("boxes", [0, 2**64 - 1, 3, 0, 0, 0], Damaged),
    ("boxes", [0, 0, 2**62, 0, 0, 0], Damaged),
    ("boxes", [1, 0, 3, 0, 0, 0], Damaged),
    ("offsets", [0, 0, 3], Damaged),
    ("offsets", [0, 0, 4, 0], Damaged),
    ("offsets", [0, 0, 0, 0], Damaged),
    ("offsets", [0, 0, 3, 2**64 - 1], Damaged),
    ("lengths", [1, 2, 2, 2], Damaged),
    ("lengths", [1, 2, 1, 2, 1, 2], Damaged),
    ("lengths", [], Damaged),
    ("images", ["model", "state"], Damaged),
    ("images", ["model", "model"], Damaged),
    ("images", ["model", "optimizer", "more"], Damaged),
    ("image_bytes", [48, 17], Damaged),
    ("image_bytes", [2**63, 16], Damaged),
    ("parts", ["model", "optimizer", "unused"], Damaged),
]


@pytest.mark.parametrize(("field", "value", "error"), SPOILED)
def test_hostile_columns_are_refused_by_name(field: str, value: object, error: type[Exception]) -> None:
    spoiled = spoil(field, value)
    started = time.monotonic()
    with pytest.raises(error) as caught:
        layouts.decode(spoiled, NAME)
    assert caught.value.name == NAME  # type: ignore[attr-defined]
    assert time.monotonic() - started < 5


def test_the_spoiler_of_these_tests_spoils_nothing_else() -> None:
    schema = msgspec.msgpack.decode(columns()["schema"])  # type: ignore[arg-type]
    encoded = layouts.encode(example_layout())
    assert spoil("scope", schema["scope"]) == spoil("key", schema["key"]) == encoded
    assert spoil("image", [1, 1, 1, 0, 2, 1]) == spoil("offsets", [0, 0, 3, 0]) == encoded


def test_unusual_places_are_kept() -> None:
    """A layout whose entries lie in another order than writers choose."""
    usual = layouts.build_layout([spec("m", "a", "float32", (2,)), spec("m", "b", "float32", (3,))])
    a, b = usual.entries
    begin = len(usual.images[0].header)
    header = images.header([images.Tensor("b", "F32", (3,), 0, 12), images.Tensor("a", "F32", (2,), 12, 20)])
    other = Layout(
        (msgspec.structs.replace(a, offset=begin + 12), msgspec.structs.replace(b, offset=begin)),
        (dataclasses.replace(usual.images[0], header=header),),
    )
    encoded = layouts.encode(other)
    assert layouts.decode(encoded) == other
    assert msgspec.msgpack.decode(encoded)["begin"] == pack([12, 0])
    assert msgspec.msgpack.decode(layouts.encode(usual))["begin"] is None


@given(random_specs())
@settings(deadline=None)
def test_a_table_says_what_the_layout_says(specs: list[EntrySpec]) -> None:
    layout = layouts.build_layout(specs)
    reader = TableReader()
    table = reader.of(layout)
    assert reader.of(layout).schema is table.schema
    assert table.schema.names == [(entry.part, entry.key) for entry in layout.entries]
    assert table.schema.shapes == [entry.shape for entry in layout.entries]
    assert table.schema.dtypes == [entry.dtype for entry in layout.entries]
    assert table.schema.has_global == any(entry.scope is Scope.GLOBAL for entry in layout.entries)
    assert table.stored().tolist() == [entry.image is not None for entry in layout.entries]
    counts, whole = table.counts()
    assert counts.tolist() == [len(entry.boxes) for entry in layout.entries]
    cut = [box for entry, full in zip(layout.entries, whole, strict=True) if not full for box in entry.boxes]
    offsets, lengths = table.cuts(sum(len(box.offsets) for box in cut))
    assert offsets.tolist() == [offset for box in cut for offset in box.offsets]
    assert lengths.tolist() == [length for box in cut for length in box.lengths]


@pytest.mark.parametrize(("field", "value", "error"), SPOILED)
def test_hostile_columns_never_make_a_table_of_nonsense(
    field: str, value: object, error: type[Exception]
) -> None:
    """A table proves less than the whole layout; what it gives still has one value for each entry."""
    started = time.monotonic()
    try:
        table = TableReader().read(spoil(field, value), NAME)
        counts, whole = table.counts()
        assert len(counts) == len(whole) == len(table.stored()) == len(table.schema.names)
    except (Damaged, UnknownFormat) as caught:
        assert caught.fields["name"] == NAME
    assert time.monotonic() - started < 5


def test_an_image_without_entries_is_refused() -> None:
    more = {
        "images": ["model", "optimizer", "x"],
        "image_part": ["model", "optimizer", "x"],
        "image_bytes": [48, 16, 0],
    }
    with pytest.raises(Damaged, match="without entries"):
        layouts.decode(msgspec.msgpack.encode({**columns(), **more}), NAME)


def test_a_frame_that_claims_too_much_is_not_unpacked() -> None:
    import everstep.format.zstd as zstd
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    with pytest.raises(Damaged, match="wrong size"):
        zstd.inflate(bomb, 1 << 20, 1 << 30, NAME)
    with pytest.raises(Damaged, match="wrong size"):
        zstd.inflate(bomb, 64 << 20, 1 << 20, NAME)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    with pytest.raises(Damaged):
        zstd.inflate(unsized, 100, 1 << 20, NAME)
    with pytest.raises(Damaged):
        zstd.inflate(zstandard.ZstdCompressor().compress(b"x" * 100) + b"tail", 100, 1 << 20, NAME)


def test_ten_thousand_entries() -> None:
    dtypes = ["float32", "bfloat16", "int64"]
    specs = [
        spec(
            ["model", "optimizer"][i % 2],
            f"layers.{i // 12}.attention.weight_{i % 12}",
            dtypes[i % 3],
            (64, 64),
        )
        for i in range(10_000)
    ]
    layout = layouts.build_layout(specs)
    encoded = layouts.encode(layout)
    assert layouts.decode(encoded) == layout
    assert len(layouts.compress(encoded)) < 100_000


@given(st.lists(st.integers(0, 2**64 - 1), max_size=9) | st.lists(st.integers(0, 300), max_size=9))
def test_columns_come_back(values: list[int]) -> None:
    packed = pack(values)
    assert unpack(packed) == values == unpack_array(packed).tolist()
    assert pack_array(np.array(values, np.uint64)) == packed
    assert len(packed) in ([0] if not values else [1 + width * len(values) for width in (1, 2, 4, 8)])


@pytest.mark.parametrize("data", [b"\1", b"\0\0", b"\3abc", b"\2\1", b"\2\1\0", b"\xff" * 9])
def test_what_is_no_column(data: bytes) -> None:
    with pytest.raises(BadColumn):
        unpack(data)


def test_example_images_are_full_size() -> None:
    layout = example_layout()
    assert {name: len(data) for name, data in image_bytes(layout).items()} == {
        image.name: image.nbytes for image in layout.images
    }
    assert isinstance(layout, Layout) and isinstance(layout.entries[0], Entry)
