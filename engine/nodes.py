"""What the arenas of all nodes hold together, and reading it: from this node's own arenas, else from the node that
has it, whose first rank serves it while the others load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from .discovery import Candidate, Held, Key, look_in_memory, pinned
from .errors import EverstepError
from .exchange.client import CONNECTIONS, PeerSource
from .exchange.errors import PeerLost
from .exchange.protocol import IO_S, TOKEN_BYTES, Offer, Proof, encode_records
from .exchange.server import Server, Shelf
from .format.constants import HASH_BYTES
from .format.hashing import rank_root
from .format.vote import STATE_IMAGE
from .memory.arena import Arena
from .memory.process import boot_id
from .memory.slots import Pinned
from .peers.address import own_address
from .ranks import Ranks
from .store.blocking import run_blocking
from .store.flush import IMAGE_REGION, LAYOUT_REGION, META_REGION
from .store.sources import ArenaSource, Source, UnionSource

CONNECTIONS_MAX = 4096
"""Of all readers to one node."""

_MARK = "\0"


def node_of(name: str, directory: Path) -> str:
    """What is the same for all ranks that share the arenas in ``directory``, and differs between others even where
    two nodes have one name."""
    found = os.stat(directory)
    return _MARK.join((name, boot_id(), f"{found.st_dev}:{found.st_ino}"))


class Nodes:
    """One rank's view of all nodes' memory. All ranks make the same calls; ``arenas`` are this node's."""

    def __init__(self, ranks: Ranks, arenas: Sequence[Arena], node: str, *, timeout_s: float) -> None:
        self._ranks = ranks
        self._arenas = arenas
        self._node = node
        self._timeout_s = timeout_s
        self._held: list[Held] = []
        self._places: list[str] = []
        self._where: dict[str, dict[Key, set[int]]] = {}
        self._offers: dict[str, Offer | str] = {}

    def look(self, run_id: str) -> dict[Key, set[int]]:
        """By (incarnation, step) the saved ranks whose snapshots lie on any node. Every rank gets the same."""
        self._held = look_in_memory(self._arenas, run_id)
        self._places = self._ranks.agree("comparing nodes", self._node, timeout_s=self._timeout_s)
        mine = (
            [[h.incarnation, h.step, h.rank, h.generation, h.layout_hash] for h in self._held]
            if self._is_first
            else []
        )
        told = self._ranks.agree("looking into memory", mine, timeout_s=self._timeout_s)
        self._where = {}
        union: dict[Key, set[int]] = defaultdict(set)
        for rank, place in enumerate(self._places):
            if self._places.index(place) == rank:
                here = self._where[place] = defaultdict(set)
                for incarnation, step, saved, _, _ in told[rank]:
                    here[incarnation, step].add(saved)
                    union[incarnation, step].add(saved)
        return dict(union)

    @property
    def _is_first(self) -> bool:
        return self._places.index(self._node) == self._ranks.rank

    # -- serving

    def _served(self, candidate: Candidate) -> dict[str, set[int]]:
        """By node the saved ranks that another node has to get from it. Of two that have one, the first serves."""
        wanted: dict[str, set[int]] = defaultdict(set)
        for reader in self._where:
            for rank, holder in self._holders(candidate, reader).items():
                if holder != reader:
                    wanted[holder].add(rank)
        return wanted

    def _holders(self, candidate: Candidate, reader: str) -> dict[int, str]:
        """By saved rank the node from whose memory ``reader`` takes it: its own, else the first that has it."""
        key = candidate.key
        nearest = [reader, *(node for node in self._where if node != reader)]
        found: dict[int, str] = {}
        for node in nearest:
            for rank in self._where[node].get(key, ()):
                if rank < candidate.world:
                    found.setdefault(rank, node)
        return found

    @contextlib.contextmanager
    def serving(self, candidate: Candidate, chunk_bytes: int) -> Iterator[None]:
        """While inside, what other nodes need of the candidate's snapshots can be read by them. All ranks enter
        together, and leave only after they agreed on what became of it."""
        self._offers = {}
        served = self._served(candidate) if candidate.in_memory else {}
        if not served:
            yield
            return
        with ExitStack() as stack:
            mine: Any = None
            if self._is_first and self._node in served:
                try:
                    mine = msgspec.to_builtins(
                        self._offer(candidate, served[self._node], chunk_bytes, stack), builtin_types=(bytes,)
                    )
                except (EverstepError, OSError) as error:
                    mine = f"{type(error).__name__}: {error}"
            told = self._ranks.agree("offering memory", mine, timeout_s=self._timeout_s)
            for rank, offer in enumerate(told):
                if offer is not None:
                    told_as = offer if isinstance(offer, str) else msgspec.convert(offer, Offer)
                    self._offers[self._places[rank]] = told_as
            yield

    def _offer(self, candidate: Candidate, ranks: set[int], chunk_bytes: int, stack: ExitStack) -> Offer:
        """Pin and seal the slots, and serve them until ``stack`` ends."""
        pins = stack.enter_context(pinned([h for h in self._held if h.rank in ranks], candidate.key))
        if set(pins) != ranks:
            raise PeerLost("the snapshot left memory", found=sorted(pins), expected=sorted(ranks))
        source = ArenaSource(pins, chunk_bytes, world=candidate.world)

        async def prove() -> list[tuple[int, Proof, Shelf]]:
            return list(await asyncio.gather(*(_prove(source, rank, pin) for rank, pin in pins.items())))

        proved = run_blocking(prove())
        token = secrets.token_bytes(TOKEN_BYTES)
        server = Server(
            {rank: shelf for rank, _, shelf in proved},
            token,
            host=own_address(),
            connections_max=min(CONNECTIONS * self._ranks.world, CONNECTIONS_MAX),
            idle_s=self._timeout_s,
        )
        stack.callback(server.close)
        return Offer(server.host, server.port, token, [proof for _, proof, _ in proved])

    # -- reading

    def open(self, candidate: Candidate, chunk_bytes: int, stack: ExitStack) -> Source | None:
        """The candidate in all nodes' memory as one source, open until ``stack`` ends. Where a part of it cannot be
        had: None if the candidate is on disk too, else PeerLost. Pruned if this node's slots were reused."""
        holders = self._holders(candidate, self._node)
        own = {rank for rank, node in holders.items() if node == self._node}
        parts: list[Source] = []
        problems: list[str] = []
        pins = stack.enter_context(pinned([h for h in self._held if h.rank in own], candidate.key))
        if pins:
            parts.append(ArenaSource(pins, chunk_bytes, world=candidate.world))
        if own - set(pins):
            problems.append(f"rank(s) {sorted(own - set(pins))} are out of this process's sight")
        for node in dict.fromkeys(holders.values()):
            if node == self._node:
                continue
            offer, name = self._offers.get(node, "no offer"), node.split(_MARK)[0]
            if isinstance(offer, str):
                problems.append(f"node {name}: {offer}")
                continue
            ranks = {rank for rank, holder in holders.items() if holder == node}
            peer = PeerSource(
                offer,
                ranks,
                key=candidate.key,
                world=candidate.world,
                chunk_bytes=chunk_bytes,
                node=name,
                io_s=IO_S,
            )
            stack.callback(_close, peer)
            parts.append(peer)
        if problems and not candidate.on_disk:
            raise PeerLost(
                f"step {candidate.step} cannot be read from memory",
                found="; ".join(problems),
                expected="the snapshots of all ranks",
                name="memory",
            )
        return None if problems else UnionSource(parts)


def _close(peer: PeerSource) -> None:
    run_blocking(peer.close())


async def _prove(source: ArenaSource, rank: int, pin: Pinned) -> tuple[int, Proof, Shelf]:
    """What is offered of one saved rank, all of it checked here once."""
    records = await source.records(rank)
    await source.layout(rank)
    await source.meta(rank)
    images: Mapping[str, memoryview] = {
        name: pin.view(name if name == STATE_IMAGE else IMAGE_REGION + name) for name in records
    }
    meta = pin.view(META_REGION)
    ordered = list(records.values())
    proof = Proof(
        rank, pin.info.generation, pin.info.layout_hash, rank_root(ordered), bytes(meta[:HASH_BYTES])
    )
    shelf = Shelf(meta, pin.view(LAYOUT_REGION), memoryview(encode_records(ordered)), images)
    return rank, proof, shelf
