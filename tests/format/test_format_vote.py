"""Votes: every change is found; what they say is checked against itself and against their name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest
import zstandard
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import hashing, names
from everstep.format.constants import FORMAT_VERSION
from everstep.format.gather import decode_gather, encode_gather
from everstep.format.vote import (
    _HEADER,
    HEADER_BYTES,
    ImageRecord,
    Vote,
    agreement_of,
    decode_header,
    decode_vote,
    encode_vote,
    header_of,
    vote_hash,
)
from hypothesis import given
from hypothesis import strategies as st

from .damage import assert_all_found
from .examples import (
    ATTEMPT,
    DELTA_VOTE_NAME,
    INCARNATION,
    STEP,
    VOTE_NAME,
    delta_vote,
    example_vote,
    record_of,
)

DATA = encode_vote(example_vote())
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def test_a_vote_comes_back() -> None:
    assert decode_vote(DATA, VOTE_NAME) == example_vote()
    assert decode_vote(DATA, "a copy outside the run") == example_vote()
    assert vote_hash(DATA) == hashing.hexdigest(DATA[: HEADER_BYTES - 16])
    assert encode_vote(decode_vote(DATA, VOTE_NAME)) == DATA


def test_every_damage_is_found() -> None:
    assert assert_all_found(DATA, lambda damaged: decode_vote(damaged, VOTE_NAME), VOTE_NAME) > 2000


@pytest.mark.long
def test_every_value_of_every_byte_is_found() -> None:
    assert_all_found(DATA, lambda damaged: decode_vote(damaged, VOTE_NAME), VOTE_NAME, tuple(range(1, 256)))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_vote(data: bytes) -> None:
    for candidate in (data, b"EVSTVOTE" + data):
        with pytest.raises(Damaged) as caught:
            decode_vote(candidate, VOTE_NAME)
        assert caught.value.name == VOTE_NAME


@given(
    st.lists(
        st.tuples(st.text(max_size=5), st.binary(max_size=50)), max_size=4, unique_by=lambda pair: pair[0]
    ),
    st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False) | st.integers() | st.text(), max_size=4),
    st.tuples(*[st.integers(0, 10**18 - 2)] * 3),
)
def test_random_votes_come_back(
    images: list[tuple[str, bytes]], meta: dict[str, Any], numbers: tuple[int, int, int]
) -> None:
    records = tuple(record_of(name, data) for name, data in images)
    step, incarnation, rank = numbers
    vote = Vote(
        *(step, incarnation, 1, rank, rank + 1, "full"),
        layout_hash="0" * 32,
        root=hashing.rank_root(records),
        images=records,
        entry_hashes={"model/w": "1" * 32},
        meta=meta,
    )
    assert decode_vote(encode_vote(vote), names.vote(step, incarnation, 1, rank)) == vote


@pytest.mark.parametrize(
    "name",
    [
        names.vote(12001, 3, 1, 0),
        names.vote(12000, 4, 1, 0),
        names.vote(12000, 3, 2, 0),
        names.vote(12000, 3, 1, 1),
        names.decision(12000, 3, 1),
    ],
)
def test_a_vote_under_another_name_is_refused(name: str) -> None:
    with pytest.raises(Damaged, match=r"by the name|not that of a vote") as caught:
        decode_vote(DATA, name)
    assert caught.value.name == name


IMAGE = record_of("model", b"x" * 5000)


def with_images(*images: ImageRecord, **changes: Any) -> Vote:
    vote = dataclasses.replace(example_vote(), images=images, root=hashing.rank_root(images))
    return dataclasses.replace(vote, **changes)


STATE = record_of("state", b"x")


def with_base(**changes: Any) -> Vote:
    """The example of a delta, whose second image has another base."""
    vote = delta_vote()
    first, second, state = vote.images
    second = dataclasses.replace(second, base={**(second.base or {}), **changes})
    return dataclasses.replace(vote, images=(first, second, state))


WRONG: dict[str, Vote] = {
    "root": dataclasses.replace(example_vote(), root=b"\0" * 16),
    "root of model": with_images(dataclasses.replace(IMAGE, root=b"\0" * 16)),
    "cut": with_images(dataclasses.replace(IMAGE, chunks=IMAGE.chunks[:-1])),
    "size": with_images(dataclasses.replace(IMAGE, chunks=b"", root=hashing.image_root(5000, b""))),
    "an image twice": with_images(IMAGE, IMAGE),
    "base is for deltas": with_images(dataclasses.replace(IMAGE, base={"step": 1})),
    "an object is for packed": with_images(dataclasses.replace(IMAGE, encoding="packed")),
    "kind is 'full'": dataclasses.replace(delta_vote(), kind="full"),
    "kind is 'delta'": with_images(IMAGE, kind="delta"),
    "is not older": with_base(step=STEP + 10),
    "another base": with_base(attempt=2),
    "base of optimizer is": with_base(more=1),
    "base.attempt": with_base(attempt=0),
    "step of the base": with_base(step=1.0),
    "root is": with_base(root="00"),
    "cannot be packed": with_images(
        dataclasses.replace(STATE, encoding="packed", stored=delta_vote().images[0].stored)
    ),
    "encoding": with_images(dataclasses.replace(IMAGE, encoding="rle")),
    "rank": with_images(IMAGE, rank=1, world=1),
    "world": with_images(IMAGE, world=0),
    "attempt": with_images(IMAGE, attempt=0),
    "step": with_images(IMAGE, step=-1),
    "kind": with_images(IMAGE, kind="FULL"),
    "kind ": with_images(IMAGE, kind="much too long"),
    "layout_hash": with_images(IMAGE, layout_hash="x" * 32),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_vote_that_contradicts_itself_is_not_written(rule: str) -> None:
    with pytest.raises(UnsupportedValue, match=rule.strip()):
        encode_vote(WRONG[rule])


def test_meta_that_is_not_plain_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedValue) as caught:
        encode_vote(dataclasses.replace(example_vote(), meta={"metrics": {"loss": object()}}))
    assert caught.value.path == "meta.metrics.loss"


def test_meta_holds_what_json_cannot() -> None:
    vote = dataclasses.replace(example_vote(), meta={"inf": math.inf, "big": 10**30, "text": "~x"})
    assert decode_vote(encode_vote(vote), VOTE_NAME).meta == vote.meta


def rebuilt(index: Any = None, frame: bytes | None = None, **header: Any) -> bytes:
    """The example's vote with another index or header, all hashes made right again."""
    fields = list(_HEADER.unpack(DATA[: _HEADER.size]))
    slots = [
        "magic",
        "version",
        "flags",
        "step",
        "incarnation",
        "attempt",
        "rank",
        "world",
        "kind",
        "layout",
    ]
    slots += [
        "root",
        "agreement",
        "images_nbytes",
        "state_nbytes",
        "stored_nbytes",
        "base_incarnation",
        "base_step",
        "base_attempt",
        "index_bytes",
        "plain_bytes",
        "index_hash",
    ]
    plain = zstandard.ZstdDecompressor().decompress(DATA[HEADER_BYTES:]) if index is None else index
    frame = zstandard.ZstdCompressor().compress(plain) if frame is None else frame
    values: dict[str, Any] = {
        **dict(zip(slots, fields, strict=True)),
        "index_bytes": len(frame),
        "plain_bytes": len(plain),
        "index_hash": hashing.digest(frame),
        **header,
    }
    packed = _HEADER.pack(*(values[slot] for slot in slots))
    return packed + hashing.digest(packed) + frame


def index_with(**changes: Any) -> bytes:
    fields = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(DATA[HEADER_BYTES:]))
    return msgspec.msgpack.encode({**fields, **changes})


def with_stored() -> bytes:
    fields = msgspec.msgpack.decode(index_with())
    fields["images"][0]["stored"] = {key: fields["images"][0][key] for key in ("nbytes", "root", "chunks")}
    return msgspec.msgpack.encode(fields)


HOSTILE: dict[str, tuple[bytes, type[Exception]]] = {
    "newer version": (rebuilt(version=FORMAT_VERSION + 1), UnknownFormat),
    "older version": (rebuilt(version=0), UnknownFormat),
    "version of another header": (rebuilt(version=1), Damaged),
    "unknown flag": (rebuilt(flags=2), UnknownFormat),
    "flag without hashes": (rebuilt(flags=1), Damaged),
    "other agreement": (rebuilt(agreement=b"\1" * 16), Damaged),
    "other size of images": (rebuilt(images_nbytes=1), Damaged),
    "other size of the state": (rebuilt(state_nbytes=2**63), Damaged),
    "other size of objects": (rebuilt(stored_nbytes=1), Damaged),
    "a parent that no image has": (rebuilt(base_incarnation=1, base_step=2, base_attempt=1), Damaged),
    "a parent without attempt": (rebuilt(base_step=2), Damaged),
    "an object of a plain image": (rebuilt(index=with_stored()), Damaged),
    "attempt 0": (rebuilt(attempt=0), Damaged),
    "rank beyond world": (rebuilt(rank=7), Damaged),
    "huge step": (rebuilt(step=2**64 - 1), Damaged),
    "kind of bytes": (rebuilt(kind=b"\xff" * 8), Damaged),
    "other root": (rebuilt(root=b"\1" * 16), Damaged),
    "index too long": (rebuilt(index_bytes=2**63), Damaged),
    "index claims much": (rebuilt(plain_bytes=2**63), Damaged),
    "index claims little": (rebuilt(plain_bytes=3), Damaged),
    "no frame": (rebuilt(frame=b"not a frame"), Damaged),
    "empty frame": (rebuilt(frame=b""), Damaged),
    "no map": (rebuilt(index=b"\x93\x01\x02\x03"), Damaged),
    "unknown field": (rebuilt(index=index_with(more=1)), Damaged),
    "wrong type": (rebuilt(index=index_with(images=3)), Damaged),
    "extension": (rebuilt(index=index_with(meta={"x": msgspec.msgpack.Ext(5, b"abc")})), Damaged),
    "unknown tag": (rebuilt(index=index_with(meta={"x": "~what"})), Damaged),
    "deep": (rebuilt(index=index_with()[:-1] + b"\x91" * 100000 + b"\x01"), Damaged),
    "no images": (rebuilt(index=index_with(images=[])), Damaged),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_votes_with_good_hashes_are_refused(what: str) -> None:
    data, error = HOSTILE[what]
    with pytest.raises(error) as caught:
        decode_vote(data, VOTE_NAME)
    assert caught.value.name == VOTE_NAME  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- headers


def test_a_header_says_what_a_commit_needs() -> None:
    vote = example_vote()
    for data in (DATA, DATA[:HEADER_BYTES], DATA[:HEADER_BYTES] + b"whatever"):
        header = decode_header(data, VOTE_NAME)
        assert header == header_of(vote, DATA)
    assert header.hash == vote_hash(DATA) and header.nbytes == len(DATA)
    assert header.images_nbytes + header.state_nbytes == sum(image.nbytes for image in vote.images)
    assert header.state_nbytes == vote.images[-1].nbytes and not header.has_entry_hashes
    told = encode_vote(dataclasses.replace(vote, entry_hashes={"model/w": "1" * 32}))
    assert decode_header(told, VOTE_NAME).has_entry_hashes


def test_a_vote_of_a_delta_comes_back_and_its_header_names_the_base() -> None:
    vote = delta_vote()
    data = encode_vote(vote)
    assert decode_vote(data, DELTA_VOTE_NAME) == vote
    header = decode_header(data, DELTA_VOTE_NAME)
    assert header == header_of(vote, data) and header.kind == "delta"
    assert header.parent == vote.parent == (INCARNATION, STEP, ATTEMPT)
    assert header.stored_nbytes == sum(image.object.nbytes for image in vote.images[:-1])
    assert header.stored_nbytes < header.images_nbytes
    assert vote.images[0].object_name(1, 2, 3, 4) == names.packed(1, 2, 3, 4, "model")
    assert vote.images[0].plain().object_name(1, 2, 3, 4) == names.image(1, 2, 3, 4, "model")
    assert vote.images[0].base_key == (INCARNATION, STEP)


def test_every_damage_of_a_vote_of_a_delta_is_found() -> None:
    name = DELTA_VOTE_NAME
    assert_all_found(encode_vote(delta_vote()), lambda data: decode_vote(data, name), name, (0x01, 0x80))


def test_every_damage_of_a_header_is_found() -> None:
    header = DATA[:HEADER_BYTES]
    for at in range(HEADER_BYTES):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            damaged = header[:at] + bytes([header[at] ^ mask]) + header[at + 1 :]
            with pytest.raises((Damaged, UnknownFormat)):
                decode_header(damaged, VOTE_NAME)
        with pytest.raises(Damaged):
            decode_header(header[:at], VOTE_NAME)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"mesh": {"dp": 2}}, False),
        ({"config_hash": None}, False),
        ({"parts": {"model": {}}}, False),
        ({"parts": {"optimizer": {"class": "other"}, "model": {}}}, True),
        ({"coordinates": {"dp": 7}}, True),
        ({"metrics": {}}, True),
    ],
)
def test_the_agreement_binds_what_ranks_must_say_alike(change: dict[str, Any], same: bool) -> None:
    meta = example_vote().meta
    assert (agreement_of({**meta, **change}) == agreement_of(meta)) is same
    assert agreement_of({}) == agreement_of({"mesh": None, "config_hash": None, "parts": None})
    assert agreement_of({"mesh": {"a": 1, "b": 2}}) == agreement_of({"mesh": {"b": 2, "a": 1}})


# ---------------------------------------------------------------------------------------------- gathers

SEVERAL = [encode_vote(dataclasses.replace(example_vote(), rank=rank, world=9)) for rank in (2, 3, 5)]
GATHER = encode_gather(SEVERAL)
GATHER_NAME = names.gather(STEP, INCARNATION, ATTEMPT, 2)


def test_gathered_votes_come_back() -> None:
    found = decode_gather(GATHER, GATHER_NAME)
    assert found == [decode_header(data, "x") for data in SEVERAL]
    assert found == decode_gather(encode_gather([data[:HEADER_BYTES] for data in SEVERAL]), "elsewhere")


def test_every_damage_of_gathered_votes_is_found() -> None:
    count = assert_all_found(GATHER, lambda data: decode_gather(data, GATHER_NAME), GATHER_NAME)
    assert count > 3000


@pytest.mark.parametrize(
    "name",
    [
        names.gather(STEP, INCARNATION, ATTEMPT, 3),
        names.gather(STEP, INCARNATION, ATTEMPT + 1, 2),
        names.gather(STEP, INCARNATION + 1, ATTEMPT, 2),
        names.gather(STEP + 1, INCARNATION, ATTEMPT, 2),
        names.vote(STEP, INCARNATION, ATTEMPT, 2),
    ],
)
def test_gathered_votes_under_another_name_are_refused(name: str) -> None:
    with pytest.raises(Damaged, match=r"by the name|not that of a gather") as caught:
        decode_gather(GATHER, name)
    assert caught.value.name == name


def test_votes_that_do_not_belong_together_are_not_gathered() -> None:
    other = encode_vote(dataclasses.replace(example_vote(), rank=6, world=9, step=STEP + 1))
    for wrong in ([], SEVERAL[::-1], SEVERAL[:1] * 2, [*SEVERAL, other]):
        with pytest.raises(UnsupportedValue):
            encode_gather(wrong)


def test_hostile_gathers_with_good_hashes_are_refused() -> None:
    body = GATHER[: -hashing.HASH_BYTES]
    for wrong, error in (
        (body[:8] + bytes([FORMAT_VERSION + 1]) + body[9:], UnknownFormat),
        (body[:8] + b"\1" + body[9:], UnknownFormat),
        (body[:8] + b"\3" + body[9:], Damaged),
        (body[:12] + b"\2" + body[13:], Damaged),
        (body[:12] + b"\xff" * 4 + body[16:], Damaged),
        (body[:16], Damaged),
        (body[:16] + body[16 + HEADER_BYTES :], Damaged),
        (body[:20] + b"\xff" + body[21:], Damaged),
    ):
        with pytest.raises(error):
            decode_gather(wrong + hashing.digest(wrong), GATHER_NAME)


def test_the_rebuilder_of_these_tests_builds_well() -> None:
    assert decode_vote(rebuilt(), VOTE_NAME) == example_vote()
    assert decode_vote(rebuilt(index=index_with()), VOTE_NAME) == example_vote()
