"""The decision on an attempt: a manifest (it counts), an abort record (it does not) or a tombstone (it is
being removed). All three are created-if-absent at the same kind of name, so exactly one wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    """Attempt ``attempt`` of ``step`` in ``incarnation`` is complete and counts."""

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
    """The checkpoint is being removed. ``number`` is one above the highest decision before."""

    step: int
    incarnation: int
    number: int
    reason: str


Decision = Manifest | Abort | Tombstone
