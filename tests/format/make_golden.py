"""Writes the golden files: ``python -m tests.format.make_golden DIRECTORY``, from the repository's root.

They were written once, by the release that introduced a format version, and are never written again; every
later release must read them. A new format version gets a directory of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everstep.format import layout, names
from everstep.format.gather import encode_gather
from everstep.format.manifest import encode_decision
from everstep.format.records import encode_incarnation, encode_run
from everstep.format.vote import encode_vote

from . import examples
from .examples import ATTEMPT, DELTA_STEP, INCARNATION, STEP

GOLDEN = Path(__file__).parent / "golden"


def golden_files() -> dict[str, bytes]:
    """Every file by name: one checkpoint of one rank, an abort record and a tombstone; a layout of
    another one, with shared images; a delta of the first one."""
    of = examples.example_layout()
    encoded = layout.encode(of)
    copies = layout.encode(examples.layout_with_copies())
    vote = encode_vote(examples.example_vote())
    files = {
        names.RUN: encode_run(examples.RUN),
        names.incarnation(INCARNATION): encode_incarnation(examples.RECORD),
        names.layout(layout.layout_hash(encoded)): layout.compress(encoded),
        names.layout(layout.layout_hash(copies)): layout.compress(copies),
        names.decision(STEP, INCARNATION, ATTEMPT): encode_decision(examples.example_manifest(vote)),
        names.decision(STEP, INCARNATION, 2): encode_decision(examples.ABORT),
        names.decision(STEP, INCARNATION, 3): encode_decision(examples.TOMBSTONE),
        names.vote(STEP, INCARNATION, ATTEMPT, 0): vote,
        examples.GATHER_NAME: encode_gather([vote]),
        names.state(STEP, INCARNATION, ATTEMPT, 0): examples.STATE,
    }
    for name, data in examples.image_bytes(of).items():
        files[names.image(STEP, INCARNATION, ATTEMPT, 0, name)] = data
    delta = encode_vote(examples.delta_vote())
    files[examples.DELTA_VOTE_NAME] = delta
    files[examples.DELTA_MANIFEST_NAME] = encode_decision(examples.delta_manifest(delta))
    files[names.state(DELTA_STEP, INCARNATION, ATTEMPT, 0)] = examples.STATE
    for name, (_, stored) in examples.delta_images().items():
        files[names.packed(DELTA_STEP, INCARNATION, ATTEMPT, 0, name)] = stored
    return files


def main(directory: str) -> None:
    for name, data in golden_files().items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
