"""The decision on an attempt: a manifest (it counts), an abort record (it does not) or a tombstone (it is
being removed). All three are created-if-absent at the same kind of name, so exactly one wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import names
from .sealed import seal, unseal_versioned
from .typed import build, decoding, encoding, fields, need, need_hashes, need_number, need_sizes
from .vote import STATE_IMAGE


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank in a manifest: what proves its vote, and how large its images are.

    ``images_nbytes`` is the size of all images but the state's together, ``stored_nbytes`` that of their objects;
    which there are says the layout, and everything else of the rank its vote.
    """

    rank: int
    vote_hash: str
    vote_nbytes: int
    layout_hash: str
    images_nbytes: int
    state_nbytes: int
    stored_nbytes: int

    @property
    def nbytes(self) -> int:
        """Size of all images together."""
        return self.images_nbytes + self.state_nbytes

    @property
    def objects_nbytes(self) -> int:
        """Size of the objects of all images together."""
        return self.stored_nbytes + self.state_nbytes


@dataclass(frozen=True, slots=True)
class _Columns:
    """The records of all ranks as they are stored: one list for each field, by rank. ``rank`` is None where
    they are 0, 1, 2 and so on, ``stored_nbytes`` where it is ``images_nbytes``."""

    rank: list[int] | None
    vote: list[str]
    vote_nbytes: list[int]
    layout: list[str]
    images_nbytes: list[int]
    state_nbytes: list[int]
    stored_nbytes: list[int] | None


@dataclass(frozen=True, slots=True)
class _RankOfVersion1:
    """A rank in a manifest of version 1."""

    rank: int
    vote_hash: str
    vote_nbytes: int
    layout_hash: str
    images: dict[str, int]
    coordinates: dict[str, int]
    data: dict[str, Any] | None
    rng: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Attempt ``attempt`` of ``step`` in ``incarnation`` is complete and counts.

    ``data`` (position in the data) and ``rng`` (kinds of generators stored) are those of the first rank; each
    rank's own are in its vote. ``revision`` is None where the decision has the attempt's number. A revision has a
    higher number, its own, and says again, above a tombstone that was taken back, that the attempt counts.
    ``kind`` is "full", or "delta" where an image is based on one of ``parent``, which names that checkpoint by
    ``incarnation``, ``step`` and ``attempt``.
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
    data: dict[str, Any] | None = None
    rng: tuple[str, ...] = ()

    @property
    def parent_key(self) -> tuple[int, int] | None:
        """(incarnation, step) of the checkpoint that a delta is based on."""
        return None if self.parent is None else (self.parent["incarnation"], self.parent["step"])


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
        body["ranks"] = fields(_columns(decision.ranks))
    return seal(kind, body)


def decode_decision(data: bytes, name: str) -> Decision:
    """The decision in ``data``; step, incarnation and number must be those in ``name``.

    Raises :class:`Damaged` or :class:`UnknownFormat`, naming ``name``.
    """
    kind, version, body = unseal_versioned(data, name, tuple(_CLASSES))

    def make() -> Decision:
        decision: Decision
        if kind == _MANIFEST:
            decision = _manifest(body, version) if version > 1 else _manifest_of_version1(body)
        else:
            decision = build(_CLASSES[kind], body)
        _check(decision)
        parsed = names.parse(name)
        if parsed is not None:
            here = (decision.step, decision.incarnation, decision_number(decision))
            there = (parsed.step, parsed.incarnation, parsed.attempt)
            need(parsed.kind is names.Kind.DECISION, "the name is not that of a decision")
            need(here == there, f"step, incarnation and number are {here}, by the name {there}")
        return decision

    return decoding(name, make)


def _columns(ranks: Sequence[RankRecord]) -> _Columns:
    numbers = [record.rank for record in ranks]
    images = [record.images_nbytes for record in ranks]
    stored = [record.stored_nbytes for record in ranks]
    return _Columns(
        rank=None if numbers == list(range(len(ranks))) else numbers,
        vote=[record.vote_hash for record in ranks],
        vote_nbytes=[record.vote_nbytes for record in ranks],
        layout=[record.layout_hash for record in ranks],
        images_nbytes=images,
        state_nbytes=[record.state_nbytes for record in ranks],
        stored_nbytes=None if stored == images else stored,
    )


def _manifest(body: dict[str, Any], version: int) -> Manifest:
    """A manifest from its plain body; its ranks are columns."""
    rows = body.get("ranks")
    need(isinstance(rows, dict), "ranks are no map of columns")
    if version < 4 and rows is not None:
        need("stored_nbytes" not in rows, "column stored_nbytes is of a later version")
        rows = {**rows, "stored_nbytes": None}
    columns = build(_Columns, rows or {}, prefix="ranks.")
    manifest = build(Manifest, {**body, "ranks": []})
    count = len(columns.vote)
    numbers: Sequence[int] = range(count) if columns.rank is None else columns.rank
    others = (
        columns.vote_nbytes,
        columns.layout,
        columns.images_nbytes,
        columns.state_nbytes,
        columns.images_nbytes if columns.stored_nbytes is None else columns.stored_nbytes,
    )
    need(all(len(column) == count for column in (numbers, *others)), "columns of ranks differ in length")
    records = [RankRecord(*row) for row in zip(numbers, columns.vote, *others, strict=True)]
    return replace(manifest, ranks=tuple(records))


def _manifest_of_version1(body: dict[str, Any]) -> Manifest:
    """A manifest of version 1, whose ranks are maps that say more of each."""
    rows = body.get("ranks")
    need(isinstance(rows, list), "ranks are no list")
    found = [build(_RankOfVersion1, row, prefix="ranks.") for row in rows or ()]
    first = found[0] if found else None
    rest = {"data": first.data if first else None, "rng": list(first.rng) if first else []}
    twice = [name for name in rest if name in body]
    need(not twice, f"fields {twice} are of a later version")
    ranks = []
    for row in found:
        state = row.images.get(STATE_IMAGE, 0)
        sizes = sum(row.images.values()) - state, state
        need(all(nbytes >= 0 for nbytes in row.images.values()), "the size of an image is negative")
        ranks.append(RankRecord(row.rank, row.vote_hash, row.vote_nbytes, row.layout_hash, *sizes, sizes[0]))
    return replace(build(Manifest, {**body, **rest, "ranks": []}), ranks=tuple(ranks))


def _check(decision: Decision) -> None:
    need_number("step", decision.step)
    need_number("incarnation", decision.incarnation)
    need_number("number", decision_number(decision), least=1)
    if isinstance(decision, Abort):
        need_number("rank", decision.rank)
    if isinstance(decision, Manifest):
        _check_manifest(decision)


def _check_manifest(manifest: Manifest) -> None:
    need(manifest.kind in ("full", "delta"), f"kind is {manifest.kind!r}")
    _check_parent(manifest)
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
    columns = _columns(manifest.ranks)
    need_hashes("vote_hash", columns.vote)
    need_hashes("layout_hash", columns.layout)
    need_sizes("vote_nbytes", columns.vote_nbytes)
    need_sizes("images_nbytes", columns.images_nbytes)
    need_sizes("state_nbytes", columns.state_nbytes)
    need_sizes("stored_nbytes", columns.stored_nbytes or ())


def _check_parent(manifest: Manifest) -> None:
    parent = manifest.parent
    need((parent is not None) == (manifest.kind == "delta"), f"kind is {manifest.kind!r}, parent {parent}")
    if parent is None:
        return
    need(set(parent) == {"incarnation", "step", "attempt"}, f"parent is {parent}")
    need(all(type(number) is int for number in parent.values()), f"parent is {parent}")
    key = parent["incarnation"], parent["step"]
    need(min(*key, parent["attempt"] - 1) >= 0, f"parent is {parent}")
    need(key < (manifest.incarnation, manifest.step), f"parent {parent} is not older")
