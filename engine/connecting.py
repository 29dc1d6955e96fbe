"""How a rank reaches its node's agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .agent.client import AgentClient
from .agent.spawn import Standby
from .agent.values import AgentSettings, Hello, storage_environment
from .format.records import IncarnationRecord, RunRecord
from .memory.process import Process
from .memorytier import Key, MemoryTier
from .places import Place
from .policy import Policy
from .ranks import Ranks


def connect(
    place: Place,
    policy: Policy,
    ranks: Ranks,
    tier: MemoryTier,
    run: RunRecord,
    record: IncarnationRecord,
    *,
    agent: Literal["process", "inline"],
    nodes: Sequence[str],
    standby: Standby | None,
) -> AgentClient:
    """This rank, registered as a writer of ``record`` whose snapshots lie in the tier's arena. Raises what
    :meth:`.AgentClient.connect` does."""
    arena = tier.arena
    hello = Hello(
        run_id=run.run_id,
        rank=ranks.rank,
        world=ranks.world,
        incarnation=record.number,
        adopted=adopted_of(record),
        process=Process.current(),
        arena=arena.info.path or arena.fileno(),
    )
    settings = agent_settings(place, policy, run.run_id, run.chunk_bytes)
    patient = nodes.index(nodes[ranks.rank]) != ranks.rank
    return AgentClient.connect(settings, hello, mode=agent, standby=standby, patient=patient)


def agent_settings(place: Place, policy: Policy, run_id: str, chunk_bytes: int) -> AgentSettings:
    """What this run tells its agent. A run that was made anew at the same root has another agent."""
    return AgentSettings(
        root=place.url,
        run_key=place.run_key,
        node=place.node,
        runtime_dir=place.agent_dir(run_id),
        rate_bytes_per_s=policy.rate_bytes_per_s,
        retention=policy.retention,
        linger_s=policy.linger_s,
        heartbeat_s=policy.heartbeat_s,
        heartbeat_timeout_s=policy.heartbeat_timeout_s or 4 * policy.heartbeat_s,
        commit_timeout_s=policy.commit_timeout_s,
        chunk_bytes=chunk_bytes,
        deltas=policy.delta_every is not None,
        compress=policy.compress,
        options=place.options,
        environment=storage_environment(place.url, *[tier.url for tier in place.tiers]),
        tiers=place.tiers,
    )


def adopted_of(record: IncarnationRecord) -> Key | None:
    """(incarnation, step) that the incarnation started from; None for a fresh start."""
    incarnation, step = record.adopted_incarnation, record.adopted_step
    return None if incarnation is None or step is None else (incarnation, step)
