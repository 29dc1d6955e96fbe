"""What lies in a range of an image: no gaps, no cut items, one kind of number each."""

from __future__ import annotations

import random

import pytest
from everstep.codec.segments import SEGMENT_BYTES_MIN, Segment, item_of, segments_of
from everstep.errors import UsageError
from everstep.format.dtypes import DTYPES
from everstep.format.layout import Box, EntrySpec, Layout, build_layout


def layout_of(*tensors: tuple[str, int], part: str = "model") -> Layout:
    """A layout of one image with a tensor of each dtype and number of elements."""
    return build_layout(
        [
            EntrySpec(part, f"t{at}", dtype, (count,), (Box.full((count,)),))
            for at, (dtype, count) in enumerate(tensors)
        ]
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", (4, "float")),
        ("bfloat16", (2, "float")),
        ("float64", (8, "float")),
        ("float8_e4m3fn", (1, "float")),
        ("float4_e2m1fn_x2", (1, "int")),
        ("complex32", (2, "float")),
        ("complex64", (4, "float")),
        ("complex128", (8, "float")),
        ("bool", (1, "int")),
        ("int64", (8, "int")),
        ("uint16", (2, "int")),
        ("qint32", (4, "int")),
        ("quint2x4", (1, "int")),
    ],
)
def test_what_the_numbers_of_a_dtype_are(dtype: str, expected: tuple[int, str]) -> None:
    assert item_of(dtype) == expected


def test_every_dtype_has_items_the_codec_knows() -> None:
    assert {item_of(dtype)[0] for dtype in DTYPES} == {1, 2, 4, 8}


def test_header_tensors_and_the_end() -> None:
    layout = layout_of(("float32", 1 << 20), ("bool", 5), ("bfloat16", 1 << 20))
    (image,) = layout.images
    header = len(image.header)
    assert segments_of(layout, "model", 0, image.nbytes)[:4] == [
        Segment(header, 1, "bytes"),
        Segment(4 << 20, 4, "float"),
        Segment(2 << 20, 2, "float"),
        Segment(5, 1, "int"),
    ]
    assert segments_of(layout, "model", header + 8, header + 4096) == [Segment(4088, 4, "float")]
    assert segments_of(layout, "model", header, header) == []


def test_a_range_that_begins_within_an_item() -> None:
    layout = layout_of(("float64", 10_000))
    header = len(layout.images[0].header)
    assert segments_of(layout, "model", header + 3, header + 30) == [
        Segment(5, 1, "bytes"),
        Segment(22, 8, "float"),
    ]
    assert segments_of(layout, "model", header + 3, header + 6) == [Segment(3, 1, "bytes")]


def test_small_neighbours_are_one_and_large_ones_are_not() -> None:
    large = SEGMENT_BYTES_MIN // 4
    layout = layout_of(*[("float32", 100)] * 10, ("float32", large), ("float32", large), ("int32", 1))
    found = segments_of(layout, "model", len(layout.images[0].header), layout.images[0].nbytes)
    assert found[:3] == [
        Segment(4000 + 4 * large, 4, "float"),
        Segment(4 * large, 4, "float"),
        Segment(4, 4, "int"),
    ]


def test_any_two_neighbouring_ranges_hold_what_their_union_holds() -> None:
    """Item by item: of what kind a byte is does not depend on the range it is asked for with."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    names = sorted(DTYPES)
    layout = layout_of(*[(rng.choice(names), rng.choice([0, 1, 7, 300])) for _ in range(60)])
    (image,) = layout.images
    whole = [kind for size, item, kind in segments_of(layout, "model", 0, image.nbytes) for _ in range(size)]
    assert len(whole) == image.nbytes
    for _ in range(300):
        start, end = sorted(rng.randrange(image.nbytes + 1) for _ in range(2))
        found = segments_of(layout, "model", start, end)
        assert sum(segment.nbytes for segment in found) == end - start
        at = start
        for nbytes, item, kind in found:
            assert nbytes > 0
            assert kind == "bytes" or set(whole[at : at + nbytes]) == {kind}
            assert nbytes % item == 0 or at + nbytes == end
            at += nbytes


def test_each_image_has_its_own() -> None:
    def one(part: str, dtype: str) -> EntrySpec:
        return EntrySpec(part, "x", dtype, (3,), (Box.full((3,)),))

    layout = build_layout([one("model", "float32"), one("optimizer", "int64")])
    for part, expected in (("model", (4, "float")), ("optimizer", (8, "int"))):
        image = next(image for image in layout.images if image.name == part)
        start = len(image.header)
        assert segments_of(layout, part, start, start + 8)[0] == Segment(8, *expected)  # type: ignore[arg-type]


def test_what_is_not_there_is_named() -> None:
    layout = layout_of(("float32", 3))
    with pytest.raises(UsageError, match="optimizer"):
        segments_of(layout, "optimizer", 0, 1)
    with pytest.raises(UsageError, match="outside"):
        segments_of(layout, "model", 0, layout.images[0].nbytes + 1)
