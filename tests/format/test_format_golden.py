"""Files that format version 1 wrote, kept for ever, are read by whatever the code is now."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
from everstep.format import hashing, layout, names
from everstep.format.manifest import decode_decision
from everstep.format.names import Kind
from everstep.format.records import decode_incarnation, decode_run
from everstep.format.vote import STATE_IMAGE, decode_vote, vote_hash

from . import examples
from .make_golden import GOLDEN, golden_files

FILES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file())


def read(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def test_nothing_is_missing_and_every_name_parses() -> None:
    assert set(FILES) == set(golden_files())
    assert all(names.parse(name) is not None for name in FILES)


def test_records_are_read() -> None:
    assert decode_run(read("run.json")) == examples.RUN
    assert decode_incarnation(read("incarnations/0003.json"), "incarnations/0003.json") == examples.RECORD
    vote = read(examples.VOTE_NAME)
    assert decode_vote(vote, examples.VOTE_NAME) == examples.example_vote()
    name = examples.MANIFEST_NAME
    assert decode_decision(read(name), name) == examples.example_manifest(vote)
    for number, expected in ((2, examples.ABORT), (3, examples.TOMBSTONE)):
        name = names.decision(examples.STEP, examples.INCARNATION, number)
        assert decode_decision(read(name), name) == expected


def test_the_chain_of_proof_holds_from_manifest_to_bytes() -> None:
    manifest = decode_decision(read(examples.MANIFEST_NAME), examples.MANIFEST_NAME)
    (rank,) = manifest.ranks  # type: ignore[union-attr]
    data = read(examples.VOTE_NAME)
    assert (vote_hash(data), len(data)) == (rank.vote_hash, rank.vote_nbytes)
    vote = decode_vote(data, examples.VOTE_NAME)
    of = layout.open_layout(read(names.layout(vote.layout_hash)), vote.layout_hash, "layout")
    assert of == examples.example_layout()
    at = (examples.STEP, examples.INCARNATION, examples.ATTEMPT, 0)
    for record in vote.images:
        name = names.state(*at) if record.name == STATE_IMAGE else names.image(*at, record.name)
        image = read(name)
        assert len(image) == record.nbytes == rank.images[record.name]
        assert hashing.chunk_hashes(memoryview(image), examples.CHUNK_BYTES) == record.chunks


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".safetensors")])
def test_images_open_without_everstep(name: str) -> None:
    with safetensors.safe_open(Path(GOLDEN, name), "pt") as file:
        assert file.keys()


def test_the_code_still_writes_the_same_bytes() -> None:
    """But for what zstandard compressed, which its releases may do differently, and what hashes that."""
    for name, data in golden_files().items():
        parsed = names.parse(name)
        assert parsed is not None
        if parsed.kind is Kind.LAYOUT:
            assert layout.decompress(read(name)) == layout.decompress(data)
        elif parsed.kind is not Kind.VOTE and name != examples.MANIFEST_NAME:
            assert read(name) == data, name
