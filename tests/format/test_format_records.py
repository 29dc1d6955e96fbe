"""Run, incarnation and decision records."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION
from everstep.format.manifest import Manifest, decode_decision, encode_decision
from everstep.format.records import decode_incarnation, decode_run, encode_incarnation, encode_run
from everstep.format.sealed import seal, unseal
from everstep.format.vote import encode_vote

from .damage import assert_all_found
from .examples import (
    ABORT,
    DELTA_MANIFEST_NAME,
    INCARNATION,
    MANIFEST_NAME,
    RECORD,
    RUN,
    STEP,
    TOMBSTONE,
    delta_manifest,
    delta_vote,
    example_manifest,
    example_vote,
)

MANIFEST = example_manifest(encode_vote(example_vote()))
RECORD_NAME = names.incarnation(3)
NAMES = {
    "manifest": (MANIFEST, MANIFEST_NAME),
    "abort": (ABORT, names.decision(12000, 3, 2)),
    "tombstone": (TOMBSTONE, names.decision(12000, 3, 3)),
}


def test_records_come_back() -> None:
    assert decode_run(encode_run(RUN)) == RUN
    assert decode_incarnation(encode_incarnation(RECORD), RECORD_NAME) == RECORD
    for decision, name in NAMES.values():
        assert decode_decision(encode_decision(decision), name) == decision
        assert decode_decision(encode_decision(decision), "copied/elsewhere") == decision


def test_every_damage_of_every_record_is_found() -> None:
    masks = (0x01, 0x20)
    assert_all_found(encode_run(RUN), decode_run, names.RUN, masks)
    data = encode_incarnation(RECORD)
    assert_all_found(data, lambda damaged: decode_incarnation(damaged, RECORD_NAME), RECORD_NAME, masks)
    for decision, name in NAMES.values():
        assert_all_found(encode_decision(decision), lambda d, n=name: decode_decision(d, n), name, masks)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    "other",
    [names.decision(12001, 3, 1), names.decision(12000, 2, 1), names.decision(12000, 3, 9), RECORD_NAME],
)
def test_a_decision_under_another_name_is_refused(kind: str, other: str) -> None:
    with pytest.raises(Damaged) as caught:
        decode_decision(encode_decision(NAMES[kind][0]), other)
    assert caught.value.name == other


def test_an_incarnation_under_another_number_is_refused() -> None:
    with pytest.raises(Damaged, match="incarnation 3"):
        decode_incarnation(encode_incarnation(RECORD), names.incarnation(4))


def test_one_record_is_not_taken_for_another() -> None:
    with pytest.raises(Damaged, match="another kind"):
        decode_run(encode_incarnation(RECORD))
    with pytest.raises(Damaged, match="another kind"):
        decode_decision(encode_run(RUN), MANIFEST_NAME)


def body_of(data: bytes) -> dict[str, Any]:
    return unseal(data, None, "x")


def manifest_with(**changes: Any) -> bytes:
    return seal("manifest", {**body_of(encode_decision(MANIFEST)), **changes})


def ranks_with(**changes: Any) -> dict[str, Any]:
    """The manifest's columns, some of them changed."""
    return {**body_of(encode_decision(MANIFEST))["ranks"], **changes}


def delta_with(**parent: Any) -> bytes:
    return manifest_with(kind="delta", parent={"incarnation": INCARNATION, "step": 1, "attempt": 1, **parent})


SPOILED: dict[str, bytes] = {
    "step is text": manifest_with(step="12000"),
    "step is a float": manifest_with(step=12000.0),
    "step is a flag": manifest_with(step=True),
    "step is negative": manifest_with(step=-1),
    "attempt is zero": manifest_with(attempt=0),
    "world is zero": manifest_with(world=0, ranks=[]),
    "world is another": manifest_with(world=2),
    "kind is empty": manifest_with(kind=""),
    "kind is unknown": manifest_with(kind="synthetic"),
    "a delta without parent": manifest_with(kind="delta"),
    "a parent of a full": manifest_with(parent={"incarnation": 1, "step": 2, "attempt": 1}),
    "a parent that is not older": delta_with(step=STEP),
    "a parent without attempt": delta_with(attempt=0),
    "a parent that says more": delta_with(root="0" * 32),
    "a parent of texts": delta_with(step="1"),
    "size of the objects is negative": manifest_with(ranks=ranks_with(stored_nbytes=[-1])),
    "scope is unknown": manifest_with(scope="galaxy"),
    "ranks is a list": manifest_with(ranks=[]),
    "ranks is a list of maps": manifest_with(ranks=[ranks_with()]),
    "ranks is a text": manifest_with(ranks="0"),
    "ranks is empty": manifest_with(ranks={}),
    "rank twice": manifest_with(
        ranks={
            key: [0, 0] if key == "rank" else column and 2 * column
            for key, column in ranks_with(rank=[0]).items()
        },
        world=2,
    ),
    "a column is short": manifest_with(ranks=ranks_with(state_nbytes=[])),
    "a column is long": manifest_with(ranks=ranks_with(layout=["0" * 32] * 2)),
    "numbers are too many": manifest_with(ranks=ranks_with(rank=[0, 1])),
    "rank is another": manifest_with(ranks=ranks_with(rank=[1])),
    "rank is negative": manifest_with(ranks=ranks_with(rank=[-1])),
    "vote hash is short": manifest_with(ranks=ranks_with(vote=["00"])),
    "vote hash is upper": manifest_with(ranks=ranks_with(vote=["A" * 32])),
    "vote hash has another digit": manifest_with(ranks=ranks_with(vote=["0" * 15 + "x" + "0" * 16])),
    "layout hash is none": manifest_with(ranks=ranks_with(layout=[None])),
    "size is negative": manifest_with(ranks=ranks_with(images_nbytes=[-1])),
    "size of the state is negative": manifest_with(ranks=ranks_with(state_nbytes=[-1])),
    "size is huge": manifest_with(ranks=ranks_with(vote_nbytes=[2**63 - 1])),
    "rng is a text": manifest_with(rng="torch"),
    "mesh": manifest_with(mesh={"dp": 0}),
    "metrics is a list": manifest_with(metrics=[]),
}


@pytest.mark.parametrize("what", SPOILED)
def test_records_that_break_a_rule_are_refused_by_name(what: str) -> None:
    with pytest.raises(Damaged) as caught:
        decode_decision(SPOILED[what], MANIFEST_NAME)
    assert caught.value.name == MANIFEST_NAME


def test_a_missing_field_is_damage_and_an_unknown_one_another_format() -> None:
    body = body_of(encode_decision(MANIFEST))
    del body["metrics"]
    with pytest.raises(Damaged, match="metrics"):
        decode_decision(seal("manifest", body), MANIFEST_NAME)
    for data in (manifest_with(quorum=3), manifest_with(ranks=ranks_with(quorum=[3]))):
        with pytest.raises(UnknownFormat, match="quorum") as caught:
            decode_decision(data, MANIFEST_NAME)
        assert caught.value.name == MANIFEST_NAME


def test_impossible_records_are_not_written() -> None:
    for change in ({"world": 2}, {"step": -1}, {"mesh": {"dp": 0}}, {"scope": "x"}):
        with pytest.raises(UnsupportedValue):
            encode_decision(dataclasses.replace(MANIFEST, **change))  # type: ignore[arg-type]
    for change in (
        {"parent": 3},
        {"adopted_step": None},
        {"fresh": "why"},
        {"world": 0},
        {"adopted_incarnation": 5},
    ):
        with pytest.raises(UnsupportedValue):
            encode_incarnation(dataclasses.replace(RECORD, **change))  # type: ignore[arg-type]
    others = ({"format": 1}, {"format": FORMAT_VERSION + 1})
    for change in ({"chunk_bytes": 5000}, {"chunk_bytes": 512}, {"run_id": ""}, *others):
        with pytest.raises(UnsupportedValue):
            encode_run(dataclasses.replace(RUN, **change))  # type: ignore[arg-type]


def test_metrics_that_are_not_plain_are_refused_by_path() -> None:
    with pytest.raises(UnsupportedValue) as caught:
        encode_decision(dataclasses.replace(MANIFEST, metrics={"loss": object()}))
    assert caught.value.path.lstrip(".") == "metrics.loss"


def test_a_node_manifest_may_hold_some_ranks_only() -> None:
    node = dataclasses.replace(MANIFEST, world=4, scope="node")
    assert decode_decision(encode_decision(node), MANIFEST_NAME) == node
    some = tuple(dataclasses.replace(MANIFEST.ranks[0], rank=rank) for rank in (1, 3))
    node = dataclasses.replace(node, ranks=some)
    assert decode_decision(encode_decision(node), MANIFEST_NAME) == node


def test_a_manifest_of_many_ranks_is_small_and_still_readable() -> None:
    first = MANIFEST.ranks[0]
    ranks = tuple(
        dataclasses.replace(first, rank=rank, layout_hash=f"{rank:032x}", images_nbytes=10**11 + rank)
        for rank in range(4096)
    )
    many = dataclasses.replace(MANIFEST, world=4096, mesh={"dp": 4096}, ranks=ranks)
    data = encode_decision(many)
    assert decode_decision(data, MANIFEST_NAME) == many
    assert len(data) < 4096 * 128
    assert max(map(len, data.decode().splitlines())) <= 100


def test_a_manifest_of_a_delta_comes_back() -> None:
    delta = delta_manifest(encode_vote(delta_vote()))
    found = decode_decision(encode_decision(delta), DELTA_MANIFEST_NAME)
    assert found == delta and delta.parent_key == (INCARNATION, STEP)
    assert delta.ranks[0].objects_nbytes < delta.ranks[0].nbytes


def test_a_manifest_of_version_3_has_no_size_of_objects() -> None:
    body = body_of(encode_decision(MANIFEST))
    del body["ranks"]["stored_nbytes"]
    found = decode_decision(seal("manifest", body, format=3), MANIFEST_NAME)
    assert found == MANIFEST
    with pytest.raises(Damaged, match="stored_nbytes"):
        decode_decision(seal("manifest", body), MANIFEST_NAME)
    body["ranks"]["stored_nbytes"] = [1]
    with pytest.raises(Damaged, match="later version"):
        decode_decision(seal("manifest", body, format=3), MANIFEST_NAME)


def test_a_manifest_of_version_1_has_rows_and_nothing_that_came_later() -> None:
    body = body_of(encode_decision(MANIFEST))
    first = MANIFEST.ranks[0]
    row = {
        **{"rank": 0, "vote_hash": first.vote_hash, "vote_nbytes": first.vote_nbytes},
        **{"layout_hash": first.layout_hash, "images": {"model": 7, "state": 4}, "coordinates": {"dp": 0}},
        **{"data": {"kind": "stream", "position": 3}, "rng": ["python"]},
    }
    del body["data"], body["rng"]
    found = decode_decision(seal("manifest", {**body, "ranks": [row]}, format=1), MANIFEST_NAME)
    assert isinstance(found, Manifest)
    assert (found.ranks[0].images_nbytes, found.ranks[0].state_nbytes) == (7, 4)
    assert (found.data, found.rng) == ({"kind": "stream", "position": 3}, ("python",))
    for wrong in (
        {**body, "ranks": ranks_with()},
        {**body, "ranks": [{**row, "images": {"model": -1, "state": 9}}]},
        {**body, "ranks": [{**row, "rng": "python"}]},
        {**body, "ranks": [row], "data": None},
    ):
        with pytest.raises(Damaged):
            decode_decision(seal("manifest", wrong, format=1), MANIFEST_NAME)


# ------------------------------------------------------------------------------------- unknown formats


def run_with(**changes: Any) -> bytes:
    return seal("run", {**body_of(encode_run(RUN)), **changes})


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (run_with(required=["parity"]), ["parity"]),
        (run_with(hash_id="blake3-256"), "blake3-256"),
        (run_with(quorum=1), ["quorum"]),
        (seal("run", {"anything": 1}, format=FORMAT_VERSION + 1), FORMAT_VERSION + 1),
        (seal("run", {"anything": 1}, format=0), 0),
    ],
)
def test_runs_of_other_formats_say_found_and_supported(data: bytes, found: object) -> None:
    with pytest.raises(UnknownFormat) as caught:
        decode_run(data)
    error = caught.value
    assert (error.found, error.name) == (found, "run.json")
    assert error.expected is not None
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.name) == (str(error), "run.json")


def test_manifests_have_a_type_of_their_own() -> None:
    assert isinstance(decode_decision(encode_decision(MANIFEST), MANIFEST_NAME), Manifest)
