"""What the memory of all nodes holds together, and reading it: from this node's own arenas, from what it keeps for
other nodes, else from a node that has it, whose first rank serves it while the others load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .discovery import Candidate
from .errors import EverstepError
from .exchange.client import CONNECTIONS, PeerSource
from .exchange.errors import PeerLost
from .exchange.protocol import IO_S, TOKEN_BYTES, Offer, Proof, encode_records
from .exchange.server import Server, Shelf
from .format.constants import HASH_BYTES
from .format.hashing import rank_root
from .format.vote import STATE_IMAGE
from .memory.arena import Arena
from .memory.header import Kind
from .memory.process import boot_id
from .parities import Found as Parity
from .parities import ParityStanding, Place, look_for_parity, pin_parity, prove_parity, worth_telling
from .peers.address import own_address
from .peers.described import PARITY_RANK
from .ranks import Ranks
from .rebuilding import RebuiltSource
from .store.blocking import run_blocking
from .store.flush import IMAGE_REGION, LAYOUT_REGION, META_REGION
from .store.holdings import Copies, Found, Key, look_in_memory, pin_copies
from .store.sources import HELD, OWN, ArenaSource, Source

CONNECTIONS_MAX = 4096
"""Of all readers to one node."""

LABELS = {Kind.OWN: ("memory", OWN), Kind.HELD: ("memory held for another node", HELD)}
"""How sources of this node's arenas are called, and of which kind they are."""

_MARK = "\0"


def node_of(name: str, directory: Path) -> str:
    """What is the same for all ranks that share the arenas in ``directory``, and differs between others even where
    two nodes have one name."""
    found = os.stat(directory)
    return _MARK.join((name, boot_id(), f"{found.st_dev}:{found.st_ino}"))


class Copy(NamedTuple):
    """One snapshot of a rank on a node, as the node's first rank tells of it: which of the rank's it is there, its
    kind, and the images that it lacks."""

    number: int
    kind: Kind
    lacks: frozenset[str]


class PeerPart(NamedTuple):
    """What a reader takes from another node: of each of ``ranks`` that node's snapshot ``copy``."""

    node: str
    copy: int
    ranks: frozenset[int]


class Standing:
    """Who has what, the same on all ranks: by node, (incarnation, step) and saved rank its snapshots, own ones
    first."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[Key, dict[int, list[Copy]]]] = {}

    def add(self, node: str, told: Sequence[Sequence[Any]]) -> None:
        """``told`` is :func:`told_of` of what was found there."""
        here = self._nodes.setdefault(node, defaultdict(lambda: defaultdict(list)))
        for incarnation, step, rank, kind, lacks in told:
            some = here[incarnation, step][rank]
            some.append(Copy(len(some), Kind(kind), frozenset(lacks)))

    @property
    def nodes(self) -> list[str]:
        return list(self._nodes)

    def keys(self) -> set[Key]:
        return {key for here in self._nodes.values() for key in here}

    def of(self, node: str, key: Key) -> Mapping[int, Sequence[Copy]]:
        """By saved rank what the node has."""
        return self._nodes[node].get(key, {})

    def lacking(self, key: Key) -> dict[int, frozenset[str]]:
        """By saved rank of which any node knows, the images that no node has."""
        found: dict[int, frozenset[str]] = {}
        for node in self._nodes:
            for rank, copies in self.of(node, key).items():
                for copy in copies:
                    found[rank] = found.get(rank, copy.lacks) & copy.lacks
        return found

    def complete(self, key: Key) -> set[int]:
        """The saved ranks of which all nodes together have every image."""
        return {rank for rank, lacks in self.lacking(key).items() if not lacks}

    def parts(self, reader: str, key: Key, world: int) -> list[PeerPart]:
        """From whom the ranks on node ``reader`` take what is not in its own memory, best first: of each rank that it
        has not whole, a node that has; of several, readers take different ones. Then whatever else other nodes
        have, for the case that the former fail."""
        whole: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for node in self._nodes:
            for rank, copies in self.of(node, key).items():
                whole[rank] += [(node, copy.number) for copy in copies if not copy.lacks][:1]
        first = self.nodes.index(reader)
        taken: dict[tuple[str, int], set[int]] = defaultdict(set)
        for rank, holders in whole.items():
            if rank < world and holders and all(node != reader for node, _ in holders):
                taken[holders[(first + rank) % len(holders)]].add(rank)
        found = [PeerPart(*place, frozenset(ranks)) for place, ranks in taken.items()]
        for node in self.nodes[first + 1 :] + self.nodes[:first]:
            spare: dict[int, set[int]] = defaultdict(set)
            for rank, copies in self.of(node, key).items():
                for copy in copies:
                    if rank < world and rank not in taken.get((node, copy.number), ()):
                        spare[copy.number].add(rank)
            found += [PeerPart(node, number, frozenset(ranks)) for number, ranks in sorted(spare.items())]
        return found


def told_of(found: Sequence[Found]) -> list[list[Any]]:
    """What a node's first rank tells of its memory, as plain values."""
    return [[one.incarnation, one.step, one.rank, one.kind.value, sorted(one.lacks)] for one in found]


class Nodes:
    """One rank's view of all nodes' memory. All ranks make the same calls; ``arenas`` are this node's."""

    def __init__(self, ranks: Ranks, arenas: Sequence[Arena], node: str, *, timeout_s: float) -> None:
        self._ranks = ranks
        self._arenas = arenas
        self._node = node
        self._timeout_s = timeout_s
        self._found: list[Found] = []
        self._parity: list[Parity] = []
        self._groups = ParityStanding()
        self._places: list[str] = []
        self._standing = Standing()
        self._offers: dict[str, Offer | str] = {}

    def look(self, run_id: str, places: list[str]) -> dict[Key, set[int]]:
        """By (incarnation, step) the saved ranks whose snapshots all nodes together have, or can rebuild. Every rank
        gets the same. ``places`` are the nodes of all ranks."""
        self._found, self._places = look_in_memory(self._arenas, run_id), places
        self._parity = look_for_parity(self._arenas, run_id)
        mine = told_of(self._found) if self._is_first else []
        if self._is_first:
            mine += [[*one.key, PARITY_RANK, Kind.PARITY.value, []] for one in self._parity]
        told = self._ranks.agree("looking into memory", mine, timeout_s=self._timeout_s)
        self._standing = Standing()
        for rank, place in enumerate(self._places):
            if self._places.index(place) == rank:
                self._standing.add(place, [one for one in told[rank] if one[2] != PARITY_RANK])
        self._groups = ParityStanding()
        if any(one[2] == PARITY_RANK for some in told for one in some):
            self._look_for_parity()
        known = self._standing.keys()
        return {key: {rank for rank, lacks in self._lacking(key).items() if not lacks} for key in known}

    def _look_for_parity(self) -> None:
        standing = self._standing
        mine = worth_telling(self._parity, len(standing.nodes), standing.lacking)
        told = self._ranks.agree("comparing parity", mine, timeout_s=self._timeout_s)
        for rank, place in enumerate(self._places):
            if self._places.index(place) == rank:
                self._groups.add(place, told[rank])

    def _lacking(self, key: Key) -> dict[int, frozenset[str]]:
        """By saved rank the images that no node has, and that cannot be rebuilt."""
        return self._groups.lacking(key, self._standing.lacking(key))

    def why(self, key: Key) -> str:
        """Why not all of ``key`` could be rebuilt; empty where there is no parity of it."""
        return self._groups.told(key, self._standing.lacking(key))

    @property
    def _is_first(self) -> bool:
        return self._places.index(self._node) == self._ranks.rank

    # -- serving

    @contextlib.contextmanager
    def serving(self, candidate: Candidate, chunk_bytes: int) -> Iterator[None]:
        """While inside, what other nodes need of the candidate's snapshots can be read by them. All ranks enter
        together, and leave only after they agreed on what became of it."""
        self._offers = {}
        if not candidate.in_memory or len(self._standing.nodes) == 1:
            yield
            return
        with ExitStack() as stack:
            mine: Any = None
            some = self._is_first and any(one.key == candidate.key for one in self._parity)
            if some or (self._is_first and self._standing.of(self._node, candidate.key)):
                try:
                    mine = msgspec.to_builtins(
                        self._offer(candidate, chunk_bytes, stack), builtin_types=(bytes,)
                    )
                except (EverstepError, OSError) as error:
                    mine = f"{type(error).__name__}: {error}"
            told = self._ranks.agree("offering memory", mine, timeout_s=self._timeout_s)
            for rank, offer in enumerate(told):
                if offer is not None:
                    told_as = offer if isinstance(offer, str) else msgspec.convert(offer, Offer)
                    self._offers[self._places[rank]] = told_as
            yield

    def _offer(self, candidate: Candidate, chunk_bytes: int, stack: ExitStack) -> Offer:
        """Pin and seal the slots, and serve them until ``stack`` ends. What cannot be proved is left out."""
        copies = pin_copies(self._found, candidate.key, stack, range(candidate.world))
        parity = pin_parity(self._parity, candidate.key, stack, chunk_bytes)
        problems: list[str] = []

        async def prove() -> list[tuple[Proof, Shelf] | None]:
            proving = [prove_parity(source, number, problems) for number, source in parity.items()]
            for some in copies:
                source = self._source(some, candidate, chunk_bytes)
                proving += [_prove(source, some, rank, problems) for rank in some.pins]
            return list(await asyncio.gather(*proving))

        proved = [one for one in run_blocking(prove()) if one is not None]
        token = secrets.token_bytes(TOKEN_BYTES)
        server = Server(
            {(proof.rank, proof.copy): shelf for proof, shelf in proved},
            token,
            host=own_address(),
            connections_max=min(CONNECTIONS * self._ranks.world, CONNECTIONS_MAX),
            idle_s=self._timeout_s,
        )
        stack.callback(server.close)
        return Offer(server.host, server.port, token, [proof for proof, _ in proved], problems)

    # -- reading

    def open(self, candidate: Candidate, chunk_bytes: int, stack: ExitStack) -> list[Source]:
        """Who has the candidate in memory, nearest first, open until ``stack`` ends: this node's arenas, what it holds
        for others, other nodes. Where a part of it cannot be had, and it is not on disk either, PeerLost. Pruned if
        this node's slots were reused."""
        sources: list[Source] = []
        lacking: dict[int, frozenset[str]] = {}

        def add(source: Source, lacks: Mapping[int, frozenset[str]]) -> None:
            sources.append(source)
            for rank, images in lacks.items():
                lacking[rank] = lacking.get(rank, images) & images

        for some in pin_copies(self._found, candidate.key, stack, range(candidate.world)):
            add(self._source(some, candidate, chunk_bytes), some.lacks)
        problems: dict[str, None] = {}
        for part in self._standing.parts(self._node, candidate.key, candidate.world):
            lacks = self._offered(part, problems)
            if lacks:
                add(self._peer(part, frozenset(lacks), candidate, chunk_bytes, stack), lacks)
        for rebuilt in self._rebuilt(candidate, chunk_bytes, stack, sources, problems):
            add(rebuilt, {rank: rebuilt.lacks(rank, images) for rank, images in lacking.items()})
        missing = [rank for rank in range(candidate.world) if lacking.get(rank, {""})]
        if missing and not candidate.places:
            raise PeerLost(
                f"step {candidate.step} cannot be read from memory",
                found="; ".join(problems) or "out of this process's sight",
                expected=f"the snapshots of all ranks; rank(s) {missing} are missing",
                name="memory",
            )
        for problem in problems:
            warnings.warn(f"everstep: step {candidate.step}: {problem}", RuntimeWarning, stacklevel=4)
        return sources

    def _rebuilt(
        self,
        candidate: Candidate,
        chunk_bytes: int,
        stack: ExitStack,
        data: Sequence[Source],
        problems: dict[str, None],
    ) -> list[RebuiltSource]:
        """What parity gives, together with ``data``."""
        own = pin_parity(self._parity, candidate.key, stack, chunk_bytes)

        def read(place: Place) -> Source | None:
            node, number = place
            if node == self._node and number in own:
                return own[number]
            part = PeerPart(node, number, frozenset({PARITY_RANK}))
            ranks = frozenset(self._offered(part, problems))
            return self._peer(part, ranks, candidate, chunk_bytes, stack) if ranks else None

        return self._groups.sources(candidate.key, list(data), read)

    def _source(self, some: Copies, candidate: Candidate, chunk_bytes: int) -> ArenaSource:
        label, kind = LABELS[some.kind]
        return ArenaSource(some.pins, chunk_bytes, label, world=candidate.world, kind=kind, lacks=some.lacks)

    def _offered(self, part: PeerPart, problems: dict[str, None]) -> dict[int, frozenset[str]]:
        """What of ``part`` is really offered: by rank the images that are missing in it."""
        offer, name = self._offers.get(part.node, "no offer"), part.node.split(_MARK)[0]
        if isinstance(offer, str):
            problems[f"memory of node {name}: {offer}"] = None
            return {}
        problems.update(dict.fromkeys(f"memory of node {name}: {problem}" for problem in offer.problems))
        return {
            proof.rank: frozenset(proof.lacks)
            for proof in offer.proofs
            if proof.copy == part.copy and proof.rank in part.ranks
        }

    def _peer(
        self,
        part: PeerPart,
        ranks: frozenset[int],
        candidate: Candidate,
        chunk_bytes: int,
        stack: ExitStack,
    ) -> PeerSource:
        offer = self._offers[part.node]
        assert isinstance(offer, Offer)
        peer = PeerSource(
            offer,
            ranks,
            key=candidate.key,
            world=candidate.world,
            chunk_bytes=chunk_bytes,
            node=part.node.split(_MARK)[0],
            copy=part.copy,
            io_s=IO_S,
        )
        stack.callback(_close, peer)
        return peer


def _close(peer: PeerSource) -> None:
    run_blocking(peer.close())


async def _prove(
    source: ArenaSource, some: Copies, rank: int, problems: list[str]
) -> tuple[Proof, Shelf] | None:
    """What is offered of one snapshot, all of it checked here once; None, and a problem, where that fails."""
    pin = some.pins[rank]
    try:
        records = await source.records(rank)
        await source.layout(rank)
        await source.meta(rank)
    except EverstepError as error:
        problems.append(f"{source.label}, rank {rank}: {error}")
        return None
    present = [name for name in records if source.has(rank, name)]
    images: Mapping[str, memoryview] = {
        name: pin.view(name if name == STATE_IMAGE else IMAGE_REGION + name) for name in present
    }
    meta, ordered = pin.view(META_REGION), list(records.values())
    proof = Proof(
        rank,
        pin.info.generation,
        pin.info.layout_hash,
        rank_root(ordered),
        bytes(meta[:HASH_BYTES]),
        some.numbers[rank],
        sorted(some.lacks[rank]),
    )
    return proof, Shelf(meta, pin.view(LAYOUT_REGION), memoryview(encode_records(ordered)), images)
