"""The run's record and the incarnations' records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: immutable, created if absent by whoever comes first."""

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
    of ``adopted_incarnation`` that was really loaded. ``config_changes`` maps a key to [before, now].
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
    extra: dict[str, Any] = field(default_factory=dict)
