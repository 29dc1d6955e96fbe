"""The run's record and the incarnations' records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UnknownFormat
from . import names
from .constants import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    FORMAT_VERSION,
    HASH_ID,
    READABLE_VERSIONS,
    SUPPORTED_FEATURES,
)
from .sealed import UPGRADE_HINT, seal, unseal_versioned
from .typed import build, decoding, encoding, fields, need, need_number

_RUN = "run"
_INCARNATION = "incarnation"
_REASON_SINCE = 3
"""Format version that brought :attr:`IncarnationRecord.reason`."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: immutable, created if absent by whoever comes first. ``format`` is the version of the release
    that did; later ones may have written objects of theirs, which say so themselves."""

    run_id: str
    format: int
    required: tuple[str, ...]
    hash_id: str
    chunk_bytes: int
    created: str


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes: the process is named by its id and its start time (clock ticks since boot) on ``host``
    (``boot`` tells one boot of it from another)."""

    host: str
    boot: str
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """incarnations/NNNN.json: one opening of a run for writing.

    ``parent`` is None for the first, and for a fresh start (``fresh`` says why). ``adopted_step`` is the step
    of ``adopted_incarnation`` that was really loaded. ``config_changes`` maps a key to [before, now]. ``reason``:
    why a running job began it (it went back to an earlier step, say); None for an ordinary start.
    """

    number: int
    id: str
    parent: int | None
    adopted_incarnation: int | None
    adopted_step: int | None
    fresh: str | None
    world: int
    mesh: dict[str, int]
    config_hash: str | None
    config: dict[str, Any] | None
    config_changes: dict[str, Any]
    config_reason: str | None
    loosened: tuple[str, ...]
    writer: Writer
    created: str
    reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def encode_run(record: RunRecord) -> bytes:
    """The bytes of ``run.json``. ``record.format`` must be this release's version."""
    encoding(names.RUN, lambda: _check_run(record))
    ours = record.format == FORMAT_VERSION
    encoding(names.RUN, lambda: need(ours, f"format is {record.format}, not {FORMAT_VERSION}"))
    body = fields(record)
    del body["format"]  # the seal writes it
    return seal(_RUN, body)


def decode_run(data: bytes, name: str = names.RUN) -> RunRecord:
    """The record in ``data``. Raises :class:`Damaged`; :class:`UnknownFormat` for another format version, a
    required feature or a hash that this release does not have (found, supported and what to do)."""
    _, version, body = unseal_versioned(data, name, (_RUN,))
    body["format"] = version

    def make() -> RunRecord:
        record = build(RunRecord, body)
        unknown = sorted(set(record.required) - SUPPORTED_FEATURES)
        if unknown:
            raise UnknownFormat(
                "the run needs features that this release does not know",
                found=unknown,
                expected=sorted(SUPPORTED_FEATURES) or "none",
                hint=UPGRADE_HINT,
            )
        if record.hash_id != HASH_ID:
            raise UnknownFormat(
                "the run uses another hash", found=record.hash_id, expected=HASH_ID, hint=UPGRADE_HINT
            )
        _check_run(record)
        return record

    return decoding(name, make)


def _check_run(record: RunRecord) -> None:
    need(record.format in READABLE_VERSIONS, f"format is {record.format}, not {FORMAT_VERSION}")
    need(bool(record.run_id), "run_id is empty")
    need(record.hash_id == HASH_ID, f"hash_id is {record.hash_id}, not {HASH_ID}")
    need_number("chunk_bytes", record.chunk_bytes, CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    need(record.chunk_bytes & (record.chunk_bytes - 1) == 0, "chunk_bytes is no power of two")


def encode_incarnation(record: IncarnationRecord) -> bytes:
    """The bytes of an incarnation's record."""
    encoding(names.INCARNATIONS, lambda: _check_incarnation(record))
    return seal(_INCARNATION, {**fields(record), "writer": fields(record.writer)})


def decode_incarnation(data: bytes, name: str) -> IncarnationRecord:
    """The record in ``data``; its number must be the one in ``name``. Raises Damaged or UnknownFormat."""
    _, version, body = unseal_versioned(data, name, (_INCARNATION,))

    def make() -> IncarnationRecord:
        if version < _REASON_SINCE:
            need("reason" not in body, "the field reason is of a later version")
            body["reason"] = None
        record = build(IncarnationRecord, body, {"writer": Writer})
        _check_incarnation(record)
        parsed = names.parse(name)
        if parsed is not None:
            need(parsed.kind is names.Kind.INCARNATION, "the name is not that of an incarnation")
            need(parsed.incarnation == record.number, f"the record is of incarnation {record.number}")
        return record

    return decoding(name, make)


def _check_incarnation(record: IncarnationRecord) -> None:
    need_number("number", record.number)
    need(bool(record.id), "id is empty")
    need_number("parent", record.parent, most=record.number - 1)
    need_number("adopted_incarnation", record.adopted_incarnation, most=record.number - 1)
    need_number("adopted_step", record.adopted_step)
    adopted = (record.adopted_incarnation is None, record.adopted_step is None)
    need(adopted[0] == adopted[1], "adopted_incarnation and adopted_step go together")
    need(record.fresh is None or all(adopted), "a fresh start adopts nothing")
    need_number("world", record.world, least=1)
    for dim, size in record.mesh.items():
        need_number(f"mesh.{dim}", size, least=1)
    need_number("writer.pid", record.writer.pid)
    need_number("writer.start_time", record.writer.start_time)
