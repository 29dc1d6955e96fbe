"""The decision on an attempt: a manifest (it counts), an abort record (it does not) or a tombstone (it is
being removed). All three are created-if-absent at the same kind of name, so exactly one wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import names
from .sealed import seal, unseal_any
from .typed import build, decoding, encoding, fields, need, need_hash, need_number, need_size


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank in a manifest: where its vote's bytes are proved, and the sizes of its images."""

    rank: int
    vote_hash: str
    vote_nbytes: int
    layout_hash: str
    images: dict[str, int]
    coordinates: dict[str, int] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    rng: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Attempt ``attempt`` of ``step`` in ``incarnation`` is complete and counts.

    ``revision`` is None where the decision has the attempt's number. A revision has a higher number, its own,
    and says again, above a tombstone that was taken back, that the attempt counts.
    """

    step: int
    incarnation: int
    attempt: int
    kind: str
    world: int
    mesh: dict[str, int]
    ranks: tuple[RankRecord, ...]
    parts: dict[str, dict[str, Any]]
    config_hash: str | None
    libraries: dict[str, str]
    metrics: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    created: str = ""
    scope: str = "shared"
    revision: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """The attempt was given up. ``rank`` is the rank that could not finish, where one is known."""

    step: int
    incarnation: int
    attempt: int
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The checkpoint is being removed. ``number`` is one above the highest decision before. ``created`` (UTC)
    tells how long it has stood: it outlives every commit that may still be under way."""

    step: int
    incarnation: int
    number: int
    reason: str
    created: str = ""


Decision = Manifest | Abort | Tombstone

_MANIFEST = "manifest"
_CLASSES: dict[str, type[Manifest] | type[Abort] | type[Tombstone]] = {
    _MANIFEST: Manifest,
    "abort": Abort,
    "tombstone": Tombstone,
}
_SCOPES = ("shared", "node")


def decision_number(decision: Decision) -> int:
    """The number under which ``decision`` is published: the attempt's, or a tombstone's or revision's own."""
    if isinstance(decision, Abort):
        return decision.attempt
    if isinstance(decision, Tombstone):
        return decision.number
    return decision.attempt if decision.revision is None else decision.revision


def encode_decision(decision: Decision) -> bytes:
    """The bytes of a manifest, abort record or tombstone.

    Raises :class:`UnsupportedValue` (by path) for metrics or facts that are not plain values.
    """
    kind = next(kind for kind, cls in _CLASSES.items() if type(decision) is cls)
    encoding(kind, lambda: _check(decision))
    body = fields(decision)
    if isinstance(decision, Manifest):
        body["ranks"] = [fields(record) for record in decision.ranks]
    return seal(kind, body)


def decode_decision(data: bytes, name: str) -> Decision:
    """The decision in ``data``; step, incarnation and number must be those in ``name``.

    Raises :class:`Damaged` or :class:`UnknownFormat`, naming ``name``.
    """
    kind, body = unseal_any(data, name, tuple(_CLASSES))

    def make() -> Decision:
        decision: Decision = build(_CLASSES[kind], body, {"ranks": RankRecord} if kind == _MANIFEST else None)
        _check(decision)
        parsed = names.parse(name)
        if parsed is not None:
            here = (decision.step, decision.incarnation, decision_number(decision))
            there = (parsed.step, parsed.incarnation, parsed.attempt)
            need(parsed.kind is names.Kind.DECISION, "the name is not that of a decision")
            need(here == there, f"step, incarnation and number are {here}, by the name {there}")
        return decision

    return decoding(name, make)


def _check(decision: Decision) -> None:
    need_number("step", decision.step)
    need_number("incarnation", decision.incarnation)
    need_number("number", decision_number(decision), least=1)
    if isinstance(decision, Abort):
        need_number("rank", decision.rank)
    if isinstance(decision, Manifest):
        _check_manifest(decision)


def _check_manifest(manifest: Manifest) -> None:
    need(bool(manifest.kind), "kind is empty")
    need(manifest.scope in _SCOPES, f"scope is {manifest.scope!r}, not one of {_SCOPES}")
    need_number("world", manifest.world, least=1)
    need_number("attempt", manifest.attempt, least=1)
    need_number("revision", manifest.revision, least=manifest.attempt + 1)
    ranks = [record.rank for record in manifest.ranks]
    need(ranks == sorted(set(ranks)), "ranks are not in order, each once")
    need_number("rank", ranks[-1] if ranks else 0, most=manifest.world - 1)
    need_number("rank", ranks[0] if ranks else 0)
    complete = manifest.scope != "shared" or len(ranks) == manifest.world
    need(complete, f"{len(ranks)} ranks for a world of {manifest.world}")
    for dim, size in manifest.mesh.items():
        need_number(f"mesh.{dim}", size, least=1)
    for record in manifest.ranks:
        need_hash("vote_hash", record.vote_hash)
        need_hash("layout_hash", record.layout_hash)
        need_size("vote_nbytes", record.vote_nbytes)
        for image, nbytes in record.images.items():
            need_size(f"images.{image}", nbytes)
        for dim, index in record.coordinates.items():
            need_number(f"coordinates.{dim}", index)
