"""What a trainer tells its agent and what it hears back: small frozen values, no I/O."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.backends.open import is_local
from everstep.format.constants import CHUNK_BYTES
from everstep.memory.process import Process
from everstep.plan.retention import Retention

LINGER_S = 30.0
COMMIT_TIMEOUT_S = 300.0
QUEUE_MAX = 64
HEARTBEAT_S = 5.0
KEEP_LAST = 10

VERDICTS = frozenset({"committed", "failed", "abandoned", "superseded"})
"""Stages after which nothing more happens to a flush. All ranks hear the same one."""

NO_STEP = -1
"""Progress that speaks of no step in particular."""


STORAGE_VARIABLES = ("AWS_",)
"""Beginnings of the names of what object stores' clients read in the environment: credentials, endpoints, regions."""


def storage_environment(*urls: str) -> dict[str, str]:
    """What of this process's environment the storage at ``urls`` reads."""
    if all(is_local(url) for url in urls):
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith(STORAGE_VARIABLES)}


@dataclass(frozen=True)
class TierSettings:
    """A further place for the run's checkpoints. ``options`` open it, as fsspec knows them: they may hold secrets, and
    are neither shown nor written anywhere. ``node``: it is this node's own; else all nodes see it."""

    name: str
    url: str
    retention: Retention
    rate: float | str | None = None
    node: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_wire(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.url,
            "retention": self.retention.to_wire(),
            "rate": self.rate,
            "node": self.node,
            "options": dict(self.options),
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> TierSettings:
        rest = dict(wire)
        keep = Retention(**rest.pop("retention"))
        return cls(**rest, retention=keep)


@dataclass(frozen=True)
class AgentSettings:
    """``root`` is the canonical url of the run, ``run_key`` names (root, node) in 16 hex digits. ``options`` of its
    storage, and the trainer's ``environment`` as far as its storage reads that, may be secret: they go through pipe and
    socket, and nowhere else."""

    root: str
    run_key: str
    node: str
    runtime_dir: Path
    rate_bytes_per_s: float | str | None = None
    retention: Retention = field(default_factory=lambda: Retention(keep_last=KEEP_LAST, keep_every=None))
    linger_s: float = LINGER_S
    commit_timeout_s: float = COMMIT_TIMEOUT_S
    chunk_bytes: int = CHUNK_BYTES
    queue_max: int = QUEUE_MAX
    heartbeat_s: float = HEARTBEAT_S
    heartbeat_timeout_s: float = 4 * HEARTBEAT_S
    tiers: tuple[TierSettings, ...] = ()
    deltas: bool = False
    compress: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_wire(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "run_key": self.run_key,
            "node": self.node,
            "runtime_dir": str(self.runtime_dir),
            "rate_bytes_per_s": self.rate_bytes_per_s,
            "retention": self.retention.to_wire(),
            "linger_s": self.linger_s,
            "commit_timeout_s": self.commit_timeout_s,
            "chunk_bytes": self.chunk_bytes,
            "queue_max": self.queue_max,
            "heartbeat_s": self.heartbeat_s,
            "heartbeat_timeout_s": self.heartbeat_timeout_s,
            "tiers": [tier.to_wire() for tier in self.tiers],
            "deltas": self.deltas,
            "compress": self.compress,
            "options": dict(self.options),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> AgentSettings:
        """Raises KeyError or TypeError where ``wire`` is not what :meth:`to_wire` gave."""
        rest = dict(wire)
        keep = Retention(**rest.pop("retention"))
        tiers = tuple([TierSettings.from_wire(tier) for tier in rest["tiers"]])
        changed = {"runtime_dir": Path(rest["runtime_dir"]), "retention": keep, "tiers": tiers}
        return cls(**{**rest, **changed})

    def to_json(self) -> str:
        return json.dumps(self.to_wire())

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        return cls.from_wire(json.loads(text))


@dataclass(frozen=True)
class Hello:
    """One trainer rank. ``arena`` is the arena's path, or a descriptor of it where it is a memfd (the agent
    keeps a descriptor of its own). ``adopted`` is the (incarnation, step) that was loaded."""

    run_id: str
    rank: int
    world: int
    incarnation: int
    adopted: tuple[int, int] | None
    process: Process
    arena: Path | int


@dataclass(frozen=True)
class Progress:
    """One piece of news.

    ``stage`` of a rank: queued (accepted, and in the journal), written (its images are durable), voted; of a
    step: committed, failed, abandoned, superseded, and just before the first of these what the ranks' hashes
    say: disagreement (replicas differ), equal (what each rank stores is equal on all), noticed; of no step
    (``NO_STEP``): superseded, rotated, and agent_lost where nothing was unfinished. Of protection against the loss of
    nodes: peer_failed (a snapshot could not be sent; it is tried again), unprotected (training goes on without a node's
    protection), protected (it is back), replicas_differ (a rank here has other bytes of a tensor than another node's).
    Of a further tier, whose url ``tier`` is then: mirrored (the checkpoint is durable there), mirror_failing (it is
    still tried), mirror_dropped (it will not get there). Of the node's own tier, whose url ``tier`` is: staged (of a
    rank: its slot is free; of the step: all shares of this node's ranks are durable there) and unstaged (it failed; the
    step goes straight to the root). upload_failing: the root fails, and is tried again.
    Of deltas: unbased (a rank's share was stored in full, for its base cannot be used), merged (the checkpoint is a
    full now) and unmerged (it stays a delta). ``kind`` and ``base`` (incarnation, step) say what was committed, ""
    where that is not told.
    ``error`` is an error's
    ``to_wire()``; ``seconds`` count from the acceptance of the flush; ``rank`` is the rank that it speaks of
    (-1: the whole step).
    """

    step: int
    incarnation: int
    attempt: int
    tier: str
    stage: str
    error: dict[str, Any] | None = None
    seconds: float = 0.0
    nbytes: int = 0
    rank: int = -1
    kind: str = ""
    base: tuple[int, int] | None = None
