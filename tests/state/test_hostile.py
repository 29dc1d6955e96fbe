"""Bytes that the encoder did not write give Damaged or UnknownFormat, in bounded time, and run nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
import torch
from everstep.errors import Damaged, UnknownFormat
from everstep.state.codec import StateImage, decode_state, encode_plain, walk
from everstep.state.merge import Saved, Skeleton
from everstep.state.restore import plan_values
from everstep.state.tree import flatten
from everstep.state.wire import NODE_DEPTH_MAX, Tag, tag_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Colour, Config, Ordered, Point, trees


def _image(node: Any, **top: Any) -> bytes:
    return msgspec.msgpack.encode({"v": 1, "parts": {"p": node}, **top})


def _nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [Tag.TUPLE.value, [node]]
    return node


HOSTILE = {
    "unknown tag": [99, 1],
    "no tag": [],
    "text tag": ["list", []],
    "bool tag": [True, []],
    "negative tag": [-1],
    "alias nowhere": [Tag.ALIAS.value, 7],
    "alias of itself": [Tag.LIST.value, [[Tag.ALIAS.value, 0]]],
    "alias text": [Tag.ALIAS.value, "0"],
    "odd items": [Tag.DICT.value, [1]],
    "unhashable key": [Tag.DICT.value, [[Tag.LIST.value, []], 1]],
    "key twice": [Tag.DICT.value, [1, 2, 1, 3]],
    "unhashable element": [Tag.SET.value, [{"a": 1}]],
    "deep": _nested(NODE_DEPTH_MAX + 5),
    "array too large": [Tag.ARRAY.value, "<f8", [1 << 60, 1 << 60], b""],
    "array short": [Tag.ARRAY.value, "<f8", [2], b"1234"],
    "object array": [Tag.ARRAY.value, "|O", [1], b"12345678"],
    "structured": [Tag.ARRAY.value, "i4,i4", [1], b"12345678"],
    "subarray": [Tag.ARRAY.value, "(2,)i4", [1], b"12345678"],
    "negative shape": [Tag.ARRAY.value, "<f8", [-1], b""],
    "bad dtype": [Tag.ARRAY.value, 3, [1], b"1"],
    "torch attribute": [Tag.TORCH.value, "dtype", "save"],
    "torch kind": [Tag.TORCH.value, "hub", "load"],
    "date": [Tag.DATE.value, 1, 99, 1],
    "path class": [Tag.PATH.value, "Popen", "x"],
    "factory": [Tag.DEFAULTDICT.value, {}, "eval"],
    "bytearray of a number": [Tag.BYTEARRAY.value, 1 << 40],
    "short": [Tag.COMPLEX.value, 1],
    "long": [Tag.LIST.value, [], 1, 2],
    "base": [Tag.SUBVALUE.value, "a:B", "eval", 1],
    "base type": [Tag.SUBVALUE.value, "a:B", "str", 1],
    "dataclass fields": [Tag.DATACLASS.value, "a:B", [1], []],
    "type name": [Tag.SUBLIST.value, 3, []],
    "negative entry": [Tag.REF.value, -1],
    "entry flags": [Tag.REF.value, 0, 64],
    "range step": [Tag.RANGE.value, 0, 1, 0],
    "slice": [Tag.SLICE.value, [Tag.LIST.value, []], None, None],
    "text": [Tag.TEXT.value, b"\xff\xff"],
    "extension": msgspec.msgpack.Ext(5, b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_nodes(name: str) -> None:
    with pytest.raises(Damaged) as caught:
        decode_state(_image(HOSTILE[name]), lambda index: index, name="r0.state")
    assert "r0.state" in str(caught.value)


def test_long_lists_of_the_tagged_kind_are_checked_too() -> None:
    with pytest.raises(Damaged):
        decode_state(_image([Tag.SIZE.value, ["a"]]), int)


def _refs_by_walk(image: StateImage, node: Any) -> set[int]:
    """What ``node`` refers to, found the slow way: aliases in it are not followed."""
    return {inner[1] for inner in walk(node) if tag_of(inner) in (Tag.REF, Tag.ARRAY_REF)}


@settings(max_examples=60, deadline=None)
@given(trees)
def test_references_are_found_wherever_they_are(tree: Any) -> None:
    flat = flatten({"p": tree, "more": [torch.ones(1), {"x": (torch.ones(2), [torch.ones(3)])}]})
    image = StateImage(flat.state)
    assert image.refs("p") | image.refs("more") == set(range(len(flat.leaves)))
    assert image.refs("more") == _refs_by_walk(image, image.parts["more"])


@pytest.mark.parametrize("name", ["alias nowhere", "alias text", "odd items", "short"])
def test_references_in_malformed_nodes(name: str) -> None:
    image = StateImage(_image(HOSTILE[name]), name="r0.state")
    if "alias" in name:
        with pytest.raises(Damaged, match=r"r0\.state"):
            image.refs("p")
    else:
        assert image.refs("p") == set()


@pytest.mark.parametrize(
    "node", [[Tag.REF.value], [Tag.REF.value, "1"], [Tag.LIST.value], [Tag.LIST.value, 3]]
)
def test_references_that_say_nothing(node: Any) -> None:
    with pytest.raises(Damaged, match="a malformed node"):
        StateImage(_image([Tag.TUPLE.value, [node]])).refs("p")


def test_references_lie_no_deeper_than_nodes_may() -> None:
    assert StateImage(_image(_nested(NODE_DEPTH_MAX))).refs("p") == set()
    with pytest.raises(Damaged, match="too deep"):
        StateImage(_image(_nested(NODE_DEPTH_MAX + 1))).refs("p")
    with pytest.raises(Damaged, match="too deep"):
        list(walk(_nested(NODE_DEPTH_MAX + 1)))


def test_references_by_way_of_aliases() -> None:
    shared = [torch.ones(1)]
    flat = flatten({"p": shared, "again": (shared, 1)})
    image = StateImage(flat.state)
    assert image.refs("p") == image.refs("again") == {0}
    itself = [Tag.LIST.value, [[Tag.REF.value, 3], [Tag.ALIAS.value, 0]]]
    assert StateImage(_image(itself)).refs("p") == {3}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1v",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"parts": {}}),
        msgspec.msgpack.encode({"v": 1}),
        msgspec.msgpack.encode({"v": 1, "parts": []}),
        msgspec.msgpack.encode({"v": 1, "parts": {1: 2}}),
        msgspec.msgpack.encode({"v": 1, "parts": {}, "more": 1}),
        _image(1) + b"x",
    ],
)
def test_what_is_no_state_image(data: bytes) -> None:
    with pytest.raises(Damaged):
        StateImage(data)


def test_a_newer_version_is_named() -> None:
    with pytest.raises(UnknownFormat, match="found: 2"):
        StateImage(msgspec.msgpack.encode({"v": 2, "parts": {}}))


def test_entries_that_the_layout_lacks() -> None:
    flat = flatten({"p": [torch.ones(1), torch.ones(1)]})
    with pytest.raises(Damaged, match="not in the layout"):
        plan_values(Skeleton.of(Saved(0, StateImage(flat.state), [])))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_changed_byte_gives_a_value_or_a_clear_error(data: st.DataObject) -> None:
    tree = {
        "a": [1, 2.5, None],
        "c": Colour.RED,
        "d": Config(1),
        "p": Point(1, [2]),
        "o": Ordered(a=1),
        5: {"x": b"ab"},
    }
    image = bytearray(encode_plain({"p": tree}))
    for _ in range(data.draw(st.integers(1, 3))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Damaged, UnknownFormat):
        decode_state(bytes(image), lambda index: index)


@settings(max_examples=60, deadline=None)
@given(trees, st.data())
def test_any_truncation_is_found(tree: Any, data: st.DataObject) -> None:
    image = flatten({"p": tree}).state
    with pytest.raises(Damaged):
        StateImage(image[: data.draw(st.integers(0, len(image) - 1))])
