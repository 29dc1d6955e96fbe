"""Opening the protection of a job's snapshots against the loss of nodes: all ranks agree on the node map, and every
node's agent has the memory that it needs, before the first step; or all ranks hear why not."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .agent.client import AgentClient
from .agent.protocol import Guarding
from .errors import BadOption, PeerLost
from .memorytier import MemoryTier
from .peers.address import own_address, split_address
from .peers.duties import SPARE_PAUSE_S, SPARE_S
from .peers.link import connect
from .peers.nodemap import NodeMap, PeerNode, encode_map
from .peers.secret import SECRET, SECRET_BYTES, SECRET_FILE, run_secret
from .plan.placement import Node, holders, node_map
from .policy import Memory, Policy
from .ranks import Ranks

DOMAIN = "EVERSTEP_DOMAIN"
SHARE = 0.5
"""The part of the wait for a slot that protection may take: training must go on without it before that ends."""


@dataclass(frozen=True)
class Protection:
    """What is to be done for this job. ``nodes`` are those of all ranks, ``copies`` how many lost nodes are to be
    survived, as far as there are nodes; ``domains`` by node what it shares the fate of; ``unreached`` spare nodes that
    are not there, and why."""

    memory: Memory
    nodes: Sequence[str]
    copies: int
    domains: Mapping[str, str]
    unreached: Sequence[tuple[str, str]] = ()

    @property
    def wanted(self) -> bool:
        return self.copies > 0

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By node, in the order of their first ranks, those that keep whole snapshots of it; spare ones come last."""
        spares = [Node(name, spare=True) for name in self.memory.spares]
        copies = 0 if self.memory.parity is not None else self.copies
        return holders([*node_map(self.nodes, self.domains), *spares], copies)

    def timeout_s(self, policy: Policy) -> float:
        """How long training waits for protection that makes no progress."""
        return min(self.memory.replica_timeout_s, SHARE * policy.slot_timeout_s)

    def check_agent(self, agent: str) -> None:
        """An inline agent sees its own rank only."""
        if self.wanted and agent == "inline" and len(set(self.nodes)) < len(self.nodes):
            raise BadOption(
                "snapshots of nodes with several ranks are protected by an agent of the whole node",
                found='agent="inline"',
                expected='agent="process"',
            )


WISHES = ("replicas", "parity", "spares")


def compare_wishes(told: Sequence[Sequence[Any]]) -> None:
    """``told``: by rank what it wants of WISHES. Raises BadOption that names all that differs."""
    differing = [at for at in range(len(WISHES)) if any(one[at] != told[0][at] for one in told)]
    if differing:
        names = " and ".join(f"Memory({WISHES[at]}=)" for at in differing)
        raise BadOption(
            f"{names} {'differs' if len(differing) == 1 else 'differ'} between the ranks",
            found={
                rank: one[differing[0]] if len(differing) == 1 else {WISHES[at]: one[at] for at in differing}
                for rank, one in enumerate(told)
            },
            expected="the same on all ranks",
        )


def reachable(spares: Sequence[str], run_id: str, me: str) -> list[tuple[str, str]]:
    """The spare nodes' addresses at which no spare node of this run answers within ``SPARE_S``, and why. One that is
    down, or has another secret, must not keep a job from starting again; one that is just being started is waited for.
    Where there is no secret, none is looked for. BadOption if the secret cannot be read."""
    secret = run_secret()
    if secret is None:
        return []
    until = time.monotonic() + SPARE_S
    waiting = list(spares)
    problems: dict[str, str] = {}
    while waiting:
        for spare in list(waiting):
            try:
                connect(*split_address(spare), secret, run_id, me=me, timeout_s=SPARE_S).close()
                problems.pop(spare, None)
                waiting.remove(spare)
            except PeerLost as error:
                problems[spare] = str(error)
                if error.fields.get("stranger"):
                    waiting.remove(spare)
        if time.monotonic() >= until:
            break
        time.sleep(SPARE_PAUSE_S if waiting else 0.0)
    return [(spare, problems[spare]) for spare in spares if spare in problems]


def elsewhere(spares: Sequence[str], here: Collection[str]) -> list[str]:
    """The spare nodes' addresses without those at which agents of nodes that have ranks listen: ranks were started on a
    spare node, which is none any more."""
    taken = {_resolved(address) for address in here}
    return [spare for spare in spares if _resolved(spare) not in taken]


def _resolved(address: str) -> tuple[str, int]:
    host, port = split_address(address)
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return host, port


def begin_protection(
    wish: Protection,
    ranks: Ranks,
    client: AgentClient,
    tier: MemoryTier,
    policy: Policy,
    *,
    incarnation: int,
    chunk_bytes: int,
) -> None:
    """Called by all ranks. Raises BadOption, MemoryTooSmall, AgentError, PeerLost; RankError for others'."""
    timeout_s = policy.rank_timeout_s
    first = wish.nodes.index(wish.nodes[ranks.rank]) == ranks.rank
    secret = _agree_on_secret(ranks, wish.memory, timeout_s)

    def listen() -> tuple[str, int] | None:
        return client.listen_for_peers(own_address(), secret, timeout_s=timeout_s) if first else None

    address = ranks.together("opening the agents' ports", listen, timeout_s=timeout_s)
    mine = [address, tier.arena.info.slot_bytes]
    told = ranks.agree("comparing the agents' addresses", mine, timeout_s=timeout_s)
    nodes = addressed(wish, told)

    def guard() -> None:
        if first:
            here = list(dict.fromkeys(wish.nodes)).index(wish.nodes[ranks.rank])
            request = Guarding(
                number=0,
                nodes=encode_map(nodes),
                me=here,
                incarnation=incarnation,
                arenas=str(tier.directory),
                chunk_bytes=chunk_bytes,
                rate_bytes_per_s=wish.memory.replica_rate_bytes_per_s,
                timeout_s=wish.timeout_s(policy),
                limit_s=SHARE * policy.slot_timeout_s,
            )
            client.guard(request, timeout_s=timeout_s)

    ranks.together("reserving memory for other nodes' snapshots", guard, timeout_s=timeout_s)
    tier.guarded = True


def domain_of(memory: Memory) -> str:
    return memory.domain or os.environ.get(DOMAIN) or ""


def addressed(wish: Protection, told: Sequence[Any]) -> NodeMap:
    """``told``: what each rank said, its node's address (the first rank there) and the bytes of its slots."""
    found = []
    places = node_map(wish.nodes, wish.domains)
    names = [place.name for place in places]
    for place in places:
        host, port = told[place.ranks[0]][0]
        rooms = tuple(told[rank][1] for rank in place.ranks)
        found.append(PeerNode(_text(place.name, names), host, port, place.domain, place.ranks, rooms))
    for spare in wish.memory.spares:
        found.append(PeerNode(spare, *split_address(spare), spare=True))
    return NodeMap(tuple(found), wish.copies, wish.memory.parity, tuple(wish.unreached))


def _text(name: str, names: Sequence[str]) -> str:
    """A node's name as people know it; numbered where two have the same."""
    short = name.split("\0")[0]
    same = [other for other in names if other.split("\0")[0] == short]
    return short if len(same) == 1 else f"{short}#{same.index(name)}"


def _agree_on_secret(ranks: Ranks, memory: Memory, timeout_s: float) -> bytes:
    """The environment's on all ranks, or one that rank 0 makes for this incarnation."""
    given = ranks.together("reading the agents' secret", run_secret, timeout_s=timeout_s)
    # Where the user gave one, what rank 0 tells is a nonce, and each rank proves by it which secret it has.
    told = bytes(
        ranks.from_first(
            "agreeing on the agents' secret", lambda: secrets.token_bytes(SECRET_BYTES), timeout_s=timeout_s
        )
    )
    proof = hmac.digest(given, told, "sha256") if given is not None else b""
    proofs = ranks.agree("comparing secrets", proof, timeout_s=timeout_s)
    missing = [rank for rank, one in enumerate(proofs) if not one]
    if missing and len(missing) < ranks.world:
        raise BadOption(
            f"{SECRET} is set on some ranks only",
            found=f"not on rank(s) {missing}",
            expected=f"{SECRET} or {SECRET_FILE} on all ranks, or on none",
        )
    others = [rank for rank, one in enumerate(proofs) if one != proofs[0]]
    if others:
        raise BadOption(
            f"{SECRET} differs between the ranks",
            found=f"another one on rank(s) {others} than on rank 0",
            expected=f"the same {SECRET} (or {SECRET_FILE}) on all ranks",
        )
    if given is None and memory.spares:
        raise BadOption(
            "spare nodes and trainers know each other by a secret of yours",
            found="no secret",
            expected=f"the same {SECRET} (or {SECRET_FILE}) for all trainers and everstep spare",
        )
    return given if given is not None else told
