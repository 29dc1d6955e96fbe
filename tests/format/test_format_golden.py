"""Files that each format version wrote, kept for ever, are read by whatever the code is now."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors
from everstep.errors import Damaged
from everstep.format import hashing, layout, names, packed
from everstep.format.constants import FORMAT_VERSION, READABLE_VERSIONS
from everstep.format.gather import decode_gather
from everstep.format.manifest import Manifest, decode_decision
from everstep.format.names import Kind
from everstep.format.records import decode_incarnation, decode_run, encode_incarnation
from everstep.format.table import TableReader
from everstep.format.vote import STATE_IMAGE, decode_header, decode_vote, vote_hash

from . import examples
from .damage import assert_all_found
from .make_golden import GOLDEN, golden_files

VERSIONS = READABLE_VERSIONS


def files(version: int) -> list[str]:
    top = GOLDEN / f"v{version}"
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


def read(version: int, name: str) -> bytes:
    return (GOLDEN / f"v{version}" / name).read_bytes()


def test_nothing_is_missing_and_every_name_parses() -> None:
    assert set(files(FORMAT_VERSION)) == set(golden_files())
    assert len(files(1)) == len(files(2)) - 1, "the gathered votes are new"
    assert len(files(2)) == len(files(3)) - 1, "and a layout with second copies"
    assert len(files(3)) == len(files(4)) - 5, "and a delta"
    assert len(files(4)) == len(files(5))
    assert all(names.parse(name) is not None for version in VERSIONS for name in files(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_records_are_read(version: int) -> None:
    run = decode_run(read(version, "run.json"))
    assert run == dataclasses.replace(examples.RUN, format=version)
    record = decode_incarnation(read(version, "incarnations/0003.json"), "incarnations/0003.json")
    assert record == examples.RECORD
    vote = read(version, examples.VOTE_NAME)
    assert decode_vote(vote, examples.VOTE_NAME) == examples.example_vote(version)
    name = examples.MANIFEST_NAME
    assert decode_decision(read(version, name), name) == examples.example_manifest(vote, version)
    for number, expected in ((2, examples.ABORT), (3, examples.TOMBSTONE)):
        name = names.decision(examples.STEP, examples.INCARNATION, number)
        assert decode_decision(read(version, name), name) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_the_chain_of_proof_holds_from_manifest_to_bytes(version: int) -> None:
    manifest = decode_decision(read(version, examples.MANIFEST_NAME), examples.MANIFEST_NAME)
    assert isinstance(manifest, Manifest)
    (rank,) = manifest.ranks
    data = read(version, examples.VOTE_NAME)
    assert (vote_hash(data), len(data)) == (rank.vote_hash, rank.vote_nbytes)
    header = decode_header(data, examples.VOTE_NAME)
    assert (header.hash, header.nbytes) == (rank.vote_hash, rank.vote_nbytes)
    assert (header.images_nbytes, header.state_nbytes) == (rank.images_nbytes, rank.state_nbytes)
    vote = decode_vote(data, examples.VOTE_NAME)
    stored = read(version, names.layout(vote.layout_hash))
    of = layout.open_layout(stored, vote.layout_hash, "layout")
    assert of == examples.example_layout(version)
    table = TableReader().open(stored, vote.layout_hash, "layout")
    assert table.schema.names == [(entry.part, entry.key) for entry in of.entries]
    at = (examples.STEP, examples.INCARNATION, examples.ATTEMPT, 0)
    nbytes = 0
    for record in vote.images:
        name = names.state(*at) if record.name == STATE_IMAGE else names.image(*at, record.name)
        image = read(version, name)
        nbytes += len(image)
        assert len(image) == record.nbytes
        assert hashing.chunk_hashes(memoryview(image), examples.CHUNK_BYTES) == record.chunks
    assert nbytes == rank.nbytes


def test_every_damage_of_what_version_1_wrote_is_found() -> None:
    name = examples.VOTE_NAME
    assert_all_found(read(1, name), lambda data: decode_vote(data, name), name, (0x01, 0x20))
    assert_all_found(read(1, name), lambda data: decode_header(data, name), name, (0x01,))
    name = examples.MANIFEST_NAME
    assert_all_found(read(1, name), lambda data: decode_decision(data, name), name, (0x01, 0x20))
    expected = examples.LAYOUTS[1]
    name = names.layout(expected)
    assert_all_found(read(1, name), lambda data: layout.open_layout(data, expected, name), name, (0x01, 0x20))


def test_a_layout_of_version_1_has_no_scope_of_version_2() -> None:
    encoded = layout.decompress(read(1, names.layout(examples.LAYOUTS[1])))
    scopes = bytes.fromhex("a5 73 63 6f 70 65 95 00 00 01 01 00")
    assert encoded.count(scopes) == 1
    with pytest.raises(Damaged, match="scope"):
        layout.decode(encoded.replace(scopes, scopes[:-1] + bytes([2])))


def test_a_layout_of_version_1_has_no_places_of_what_is_not_stored() -> None:
    encoded = layout.decompress(read(1, names.layout(examples.LAYOUTS[1])))
    begins = bytes.fromhex("a5 62 65 67 69 6e 95 08 00 20 00 00")
    assert encoded.count(begins) == 1
    with pytest.raises(Damaged, match="is not stored"):
        layout.decode(encoded.replace(begins, begins[:-2] + bytes([1, 0])))


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_gathered_votes_are_read(version: int) -> None:
    vote = read(version, examples.VOTE_NAME)
    name = examples.GATHER_NAME
    assert decode_gather(read(version, name), name) == [decode_header(vote, examples.VOTE_NAME)]


@pytest.mark.parametrize("version", VERSIONS[3:])
def test_a_delta_is_read(version: int) -> None:
    data = read(version, examples.DELTA_VOTE_NAME)
    vote = decode_vote(data, examples.DELTA_VOTE_NAME)
    name = examples.DELTA_MANIFEST_NAME
    manifest = decode_decision(read(version, name), name)
    assert isinstance(manifest, Manifest) and manifest.ranks[0].vote_hash == vote_hash(data)
    if version == FORMAT_VERSION:
        assert vote == examples.delta_vote() and manifest == examples.delta_manifest(data)
    place = examples.DELTA_STEP, examples.INCARNATION, examples.ATTEMPT, 0
    for record, (image, _) in zip(vote.images, examples.delta_images().values(), strict=False):
        stored = read(version, record.object_name(*place))
        assert record.stored is not None and record.stored.nbytes == len(stored)
        assert hashing.chunk_hashes(memoryview(stored), examples.CHUNK_BYTES) == record.stored.chunks
        size = packed.tail_bytes(len(image), examples.CHUNK_BYTES)
        table = packed.decode_tail(stored[-size:], len(image), examples.CHUNK_BYTES, len(stored), "packed")
        assert list(table.encodings) == [packed.REFERENCE, packed.PLAIN] and table.needs_base
        begin, end = table.span(1, 2)
        assert stored[begin:end] == image[examples.CHUNK_BYTES :] and table.span(0, 1) == (0, 0)


def test_shared_images_are_read() -> None:
    of = examples.layout_with_copies()
    expected = layout.layout_hash(layout.encode(of))
    found = layout.open_layout(read(FORMAT_VERSION, names.layout(expected)), expected, "layout")
    assert found == of
    assert [image.name for image in found.images] == ["model+1", "model"]
    assert [image.name for image in found.copies] == ["1/model+0"]


def test_records_of_former_versions_have_no_reason() -> None:
    from everstep.format.sealed import seal, unseal

    name = "incarnations/0003.json"
    body = unseal(read(2, name), "incarnation", name)
    assert "reason" not in body and decode_incarnation(read(2, name), name).reason is None
    with pytest.raises(Damaged, match="later version"):
        decode_incarnation(seal("incarnation", {**body, "reason": None}, format=2), name)
    with pytest.raises(Damaged, match="missing"):
        decode_incarnation(seal("incarnation", body, format=3), name)
    record = dataclasses.replace(examples.RECORD, reason="loss spike")
    assert decode_incarnation(encode_incarnation(record), name) == record


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in VERSIONS for name in files(version) if name.endswith(".safetensors")],
)
def test_images_open_without_everstep(version: int, name: str) -> None:
    with safetensors.safe_open(Path(GOLDEN, f"v{version}", name), "pt") as file:
        assert file.keys()


def test_the_code_still_writes_the_same_bytes() -> None:
    """But for what zstandard compressed, which its releases may do differently, and what hashes that."""
    hashed = (Kind.VOTE, Kind.GATHER)
    for name, data in golden_files().items():
        parsed = names.parse(name)
        assert parsed is not None
        if parsed.kind is Kind.LAYOUT:
            assert layout.decompress(read(FORMAT_VERSION, name)) == layout.decompress(data)
        elif parsed.kind not in hashed and name != examples.MANIFEST_NAME:
            assert read(FORMAT_VERSION, name) == data, name
