"""The worked parts of FORMAT.md, as the code says they are."""

from __future__ import annotations

import collections
import datetime
import pathlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from everstep.format import layout, names
from everstep.format.dtypes import DTYPES
from everstep.format.gather import encode_gather
from everstep.format.manifest import encode_decision
from everstep.format.records import encode_incarnation, encode_run
from everstep.format.vote import encode_vote
from everstep.state.codec import encode_plain
from everstep.state.encode import Encoder
from everstep.state.registry import Unknown
from everstep.state.wire import Tag

from .examples import (
    RECORD,
    RUN,
    TOMBSTONE,
    classes,
    delta_images,
    example_layout,
    example_manifest,
    example_vote,
    layout_with_copies,
    payload,
)

PAGE = Path(__file__).parents[2] / "engine" / "FORMAT.md"
ESCAPED = ("model", "val/loss", "..", "", "Zoë", "a%b", "x" * 121)


def blocks() -> dict[str, str]:
    """The fenced blocks of FORMAT.md that have a name, by name."""
    return dict(re.findall(r"```(?:text|json|hex) (\w+)\n(.*?)\n```", PAGE.read_text(), re.S))


def hex_dump(data: bytes) -> str:
    return "\n".join(f"{at:04x}  {data[at : at + 16].hex(' ')}" for at in range(0, len(data), 16))


def from_hex_dump(text: str) -> bytes:
    return bytes.fromhex("".join(line[6:] for line in text.splitlines()))


def example_names() -> str:
    found = [
        names.RUN,
        names.incarnation(3),
        names.layout(layout.layout_hash(layout.encode(example_layout()))),
        names.decision(12000, 3, 1),
        names.vote(12000, 3, 1, 0),
        names.gather(12000, 3, 1, 0),
        names.image(12000, 3, 1, 0, "model"),
        names.packed(12010, 3, 1, 0, "model"),
        names.state(12000, 3, 1, 0),
        names.events("node-a.4242"),
        names.beacon("0123456789abcdef"),
        names.pin(names.pin_id(12000, 3, "5f0c9a1e")),
        names.aside(names.decision(12000, 3, 1), 1),
    ]
    return "\n".join(found)


class Point(NamedTuple):
    x: int
    y: int


Point.__module__ = "shapes"

VALUES: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0.5": 0.5,
    '"a"': "a",
    'b"a"': b"a",
    '{"a": 1}': {"a": 1},
    "{1: 2}": {1: 2},
    "[1]": [1],
    "(1, None)": (1, None),
    "{2, 1}": {2, 1},
    "1 << 64": 1 << 64,
    "1 + 2j": 1 + 2j,
    'bytearray(b"a")': bytearray(b"a"),
    "range(3)": range(3),
    "collections.OrderedDict(a=1)": collections.OrderedDict(a=1),
    'collections.Counter("aa")': collections.Counter("aa"),
    "datetime.date(2026, 1, 31)": datetime.date(2026, 1, 31),
    "datetime.timedelta(days=-1)": datetime.timedelta(days=-1),
    'pathlib.PurePosixPath("a/b")': pathlib.PurePosixPath("a/b"),
    "Point(1, 2)": Point(1, 2),
}


def example_nodes() -> str:
    nodes = {label: Encoder().node(value, "", ()) for label, value in VALUES.items()}
    return "\n".join(f"{label:33} {msgspec.msgpack.encode(node).hex(' ')}" for label, node in nodes.items())


def example_state() -> bytes:
    """As a state with tensors would be, whose nodes are these references: no torch is needed to say so."""
    names = ["a", "b"]
    tensor = Unknown("", "wire", [Tag.REF.value, 0])
    return encode_plain({"model": {"w": tensor, "tied": tensor}, "extra": {"names": names, "again": names}})


def worked() -> dict[str, str]:
    """What each named block says. Those of votes may differ by release of zstandard, but must mean the same."""
    encoded = layout.encode(example_layout())
    vote = encode_vote(example_vote())
    return {
        "names": example_names(),
        "escapes": "\n".join(f"{text!r:20.20} {names.escape(text)}" for text in ESCAPED),
        "run": encode_run(RUN).decode().rstrip(),
        "incarnation": encode_incarnation(RECORD).decode().rstrip(),
        "manifest": encode_decision(example_manifest(vote)).decode().rstrip(),
        "tombstone": encode_decision(TOMBSTONE).decode().rstrip(),
        "layout": hex_dump(encoded),
        "copies": hex_dump(layout.encode(layout_with_copies())),
        "headers": "\n".join(image.header[8:].decode().rstrip() for image in example_layout().images),
        "vote": hex_dump(vote),
        "gather": hex_dump(encode_gather([vote])),
        "packed": hex_dump(delta_images()["model"][1]),
        "payload": hex_dump(payload()[0]),
        "classes": hex_dump(classes()[0]),
        "nodes": example_nodes(),
        "state": hex_dump(example_state()),
    }


def dtype_rows() -> str:
    return "\n".join(f"| `{row.name}` | {row.bits} | {row.safetensors or ''} |" for row in DTYPES.values())
