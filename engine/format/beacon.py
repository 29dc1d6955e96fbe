"""What a node says of itself while it trains: one small sealed record, replaced again and again. No part of any
checkpoint; nothing that is loaded depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from .sealed import seal, unseal
from .typed import build, decoding, encoding, fields, need, need_number

_BEACON = "beacon"

BEACON_BYTES_MAX = 4 << 20
"""No beacon is larger: some hundred bytes for each rank of one node."""


@dataclass(frozen=True, slots=True)
class BeaconRank:
    """One rank of the node. ``alive`` is what the kernel says of its process. ``step`` is the newest one that its
    trainer finished, ``step_s`` how long one takes; ages are in seconds, as of the moment at which the beacon was made;
    ``snapshot`` is the newest step in its memory, ``protected`` the newest there that survives the loss of the node."""

    rank: int
    pid: int
    start_time: int
    alive: bool
    step: int | None
    step_age_s: float | None
    step_s: float | None
    beat_age_s: float | None
    snapshot: int | None
    protected: int | None


@dataclass(frozen=True, slots=True)
class Beacon:
    """One node's agent, or one rank's where that is its own agent.

    ``agent_pid``, ``agent_start`` and ``boot`` name the agent's process; its ``count`` goes up with each beacon, about
    every ``interval_s``. ``ranks`` are those of ``incarnation`` that have not said goodbye; of ``world`` in all.
    ``complete`` is W over all nodes, None where snapshots are not protected; ``durable`` the newest step that the agent
    saw become durable, ``queue`` how many flushes, and deltas that are made fulls, are unfinished, ``timeout_s`` after
    how long without a beat a rank is late. ``address`` is where it listens to the agents of other nodes (host:port), if
    it does.
    """

    node: str
    host: str
    boot: str
    agent_pid: int
    agent_start: int
    count: int
    interval_s: float
    timeout_s: float
    incarnation: int
    world: int
    ranks: tuple[BeaconRank, ...]
    complete: int | None
    durable: int | None
    durable_age_s: float | None
    queue: int
    address: str | None = None

    @property
    def agent(self) -> tuple[int, int, str]:
        """Tells the agent's process from any other."""
        return self.agent_pid, self.agent_start, self.boot

    @property
    def living(self) -> tuple[BeaconRank, ...]:
        return tuple(rank for rank in self.ranks if rank.alive)


def encode_beacon(beacon: Beacon) -> bytes:
    """The bytes of a beacon."""
    encoding(_BEACON, lambda: _check(beacon))
    body = {**fields(beacon), "ranks": [fields(rank) for rank in beacon.ranks]}
    if beacon.address is None:  # as it was before there was one
        del body["address"]
    return seal(_BEACON, body)


def decode_beacon(data: bytes, name: str) -> Beacon:
    """The beacon in ``data``. Raises Damaged or UnknownFormat."""
    body = {"address": None, **unseal(data, _BEACON, name)}

    def make() -> Beacon:
        beacon = build(Beacon, body, {"ranks": BeaconRank})
        _check(beacon)
        return beacon

    return decoding(name, make)


def _check(beacon: Beacon) -> None:
    for name in ("agent_pid", "agent_start", "count", "incarnation", "world", "queue"):
        need_number(name, getattr(beacon, name))
    need(0 < beacon.interval_s < float("inf"), f"interval_s is {beacon.interval_s}")
    need(0 < beacon.timeout_s < float("inf"), f"timeout_s is {beacon.timeout_s}")
    for rank in beacon.ranks:
        need_number("rank", rank.rank, most=beacon.world - 1)
        for name in ("pid", "start_time", "step", "snapshot", "protected"):
            need_number(name, getattr(rank, name))
