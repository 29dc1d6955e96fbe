"""FORMAT.md says what the code does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from everstep.codec import constants
from everstep.codec.chunk import decode_chunk
from everstep.format import layout, packed, vote
from everstep.format.constants import FORMAT_VERSION
from everstep.format.gather import decode_gather
from everstep.format.vote import _HEADER, decode_header, decode_vote
from everstep.plan.boxes import CUT_AXES_MAX
from everstep.state.codec import decode_state
from everstep.state.wire import (
    DEPTH_MAX,
    INLINE_BYTES_MAX,
    MUTABLE,
    NODE_DEPTH_MAX,
    STATE_BYTES_MAX,
    STATE_VERSION,
    Tag,
)

from .examples import (
    GATHER_NAME,
    VOTE_NAME,
    classes,
    example_layout,
    example_vote,
    layout_with_copies,
    payload,
)
from .spec import PAGE, blocks, dtype_rows, from_hex_dump, worked

EXACT = [name for name in worked() if name not in ("vote", "gather", "manifest")]


@pytest.mark.parametrize("name", EXACT)
def test_worked_bytes_are_the_code_s(name: str) -> None:
    assert blocks()[name] == worked()[name]


def test_the_page_is_of_this_version() -> None:
    text = PAGE.read_text()
    assert text.startswith(f"# everstep: the stored format, version {FORMAT_VERSION}\n")
    assert re.search(rf"^\| {FORMAT_VERSION} \| \w", text, re.M), "the history says what changed"


def test_every_named_block_is_checked() -> None:
    assert set(blocks()) == set(worked())


def test_the_worked_layout_decodes() -> None:
    data = from_hex_dump(blocks()["layout"])
    assert layout.decode(data) == example_layout()
    assert f"Its hash: `{layout.layout_hash(data)}`" in PAGE.read_text()


def test_the_worked_layout_with_copies_decodes() -> None:
    found = layout.decode(from_hex_dump(blocks()["copies"]))
    assert found == layout_with_copies() and (len(found.images), len(found.copies)) == (2, 1)


def test_the_worked_vote_decodes() -> None:
    data = from_hex_dump(blocks()["vote"])
    assert decode_vote(data, VOTE_NAME) == example_vote()
    text = PAGE.read_text()
    assert f"a header of {vote.HEADER_BYTES} bytes" in text
    assert f"hash of the {_HEADER.size} bytes before" in text
    assert vote.vote_hash(data) in blocks()["manifest"]


@pytest.mark.parametrize(("block", "worked_out"), [("payload", payload), ("classes", classes)])
def test_the_worked_payloads_decode(block: str, worked_out: Callable[[], tuple[bytes, bytes, bytes]]) -> None:
    data, base, chunk = worked_out()
    assert from_hex_dump(blocks()[block]) == data
    out = bytearray(len(chunk))
    decode_chunk(packed.DIFFERENCE, memoryview(data), memoryview(base), memoryview(out))
    assert out == chunk


def test_the_numbers_of_the_codec_are_those_of_the_page() -> None:
    ours = (packed.REFERENCE, packed.PLAIN, packed.ZSTD, packed.PLANES, packed.XOR, packed.DIFFERENCE)
    theirs = (constants.REFERENCE, constants.PLAIN, constants.ZSTD, constants.PLANES)
    assert ours == (*theirs, constants.XOR_PLANES, constants.DIFFERENCE_PLANES) == packed.ENCODINGS
    page = PAGE.read_text().split("### 6.2 Payloads")[1].split("### 6.3")[0]
    rows = re.findall(r"^\| (\d) \|", page, re.M)
    transforms: tuple[int, ...] = (
        constants.NONE,
        constants.XOR,
        constants.FLOAT_DIFFERENCE,
        constants.INT_DIFFERENCE,
    )
    streams = (constants.STREAM_PLAIN, constants.STREAM_ZSTD, constants.STREAM_EQUAL, constants.STREAM_SPARSE)
    transforms += (constants.SAME, constants.FLOAT_CLASSES, constants.INT_CLASSES)
    assert [int(row) for row in rows] == [*transforms, *streams]


def test_the_worked_gather_decodes() -> None:
    header = decode_header(from_hex_dump(blocks()["vote"]), VOTE_NAME)
    assert decode_gather(from_hex_dump(blocks()["gather"]), GATHER_NAME) == [header]


def test_the_worked_manifest_names_the_worked_vote() -> None:
    from everstep.format.manifest import decode_decision

    from .examples import MANIFEST_NAME, example_manifest

    data = blocks()["manifest"].encode() + b"\n"
    assert decode_decision(data, MANIFEST_NAME) == example_manifest(from_hex_dump(blocks()["vote"]))


def test_the_table_of_dtypes_is_complete() -> None:
    assert dtype_rows() in PAGE.read_text()


def test_limits_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"| axes along which a tensor is cut | {CUT_AXES_MAX} |" in text


def test_the_table_of_tags_is_complete() -> None:
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", PAGE.read_text().split("## 8. The state image")[1], re.M)
    assert [int(tag) for row in rows for tag in row.split(", ")] == [tag.value for tag in Tag]


def test_the_numbered_containers_are_those_of_the_code() -> None:
    found = re.search(r"\(maps and the tags ([^)]+)\)", PAGE.read_text().replace("\n", " "))
    assert found is not None
    numbers = set[int]()
    for part in found.group(1).split(", "):
        first, _, last = part.partition(" to ")
        numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(MUTABLE)


def test_the_worked_state_image_decodes() -> None:
    data = from_hex_dump(blocks()["state"])
    found = decode_state(data, lambda index: f"entry {index}")
    assert found["model"] == {"w": "entry 0", "tied": "entry 0"}
    assert found["extra"]["names"] == ["a", "b"] and found["extra"]["again"] is found["extra"]["names"]


def test_limits_of_the_state_image() -> None:
    text = PAGE.read_text()
    assert STATE_BYTES_MAX == 1 << 30 and "| a state image | 1 GiB |" in text
    assert f"Containers lie at most {DEPTH_MAX} deep" in text and f"at most {NODE_DEPTH_MAX}." in text
    assert f"numpy array of up to {INLINE_BYTES_MAX >> 10} KiB" in text
    assert STATE_VERSION == 1
