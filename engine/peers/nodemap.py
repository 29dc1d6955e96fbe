"""The node map of a job: which nodes there are, where their agents listen, and who keeps what of whom. Pure."""

from __future__ import annotations

import msgspec
from everstep.errors import BadOption
from everstep.plan.parity import Code, fit, parity_bytes_max
from everstep.plan.placement import Group, Node, groups, holders

IMAGES_PER_RANK = 8
"""Images of a rank for whose last, short chunks room is reserved in parity; with more, it is made when they come."""
STATE_BYTES = 64 << 10
"""Room for what a parity slot says of itself."""


class PeerNode(msgspec.Struct, frozen=True):
    """One node and its agent's address. ``slot_bytes`` is the room of one slot of each of ``ranks``, in bytes."""

    name: str
    host: str
    port: int
    domain: str = ""
    ranks: tuple[int, ...] = ()
    slot_bytes: tuple[int, ...] = ()
    spare: bool = False


class NodeMap(msgspec.Struct, frozen=True):
    """``nodes`` in the order of their first ranks, spare ones last: the same on all nodes. ``copies`` is how many lost
    nodes are to be survived; ``parity`` (k, m) says that it is done by parity in groups of k + m; ``unreached`` are
    spare nodes that were not there when the job started, and why: it does without them."""

    nodes: tuple[PeerNode, ...]
    copies: int
    parity: tuple[int, int] | None = None
    unreached: tuple[tuple[str, str], ...] = ()

    def places(self) -> tuple[Node, ...]:
        return tuple(Node(one.name, one.domain, one.ranks, one.spare) for one in self.nodes)

    @property
    def world(self) -> int:
        return sum(len(one.ranks) for one in self.nodes)

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """By node those that keep its snapshots; with parity those that keep what is small of them, the next ones of
        its group."""
        if self.parity is None:
            return holders(self.places(), self.copies)
        found: list[tuple[int, ...]] = [()] * len(self.nodes)
        for group in groups(self.places(), sum(self.parity)):
            for at, node in enumerate(group):
                behind = range(1, min(self.copies, len(group) - 1) + 1)
                found[node] = tuple(group[(at + step) % len(group)] for step in behind)
        return tuple(found)

    def parity_group(self, me: int) -> tuple[Group, Code] | None:
        """The nodes with which ``me`` shares parity, itself among them, and their code; None without parity. Raises
        BadOption where there are too few nodes."""
        if self.parity is None:
            return None
        found = fit(self.places(), *self.parity)
        for group, code in zip(found.groups, found.codes, strict=True):
            if me in group:
                return group, code
        return None

    def parity_bytes(self, me: int, chunk_bytes: int) -> int:
        """Room for one slot of the parity that ``me`` keeps; 0 without."""
        found = self.parity_group(me)
        if found is None:
            return 0
        group, code = found
        chunks = [
            sum(-(-nbytes // chunk_bytes) + IMAGES_PER_RANK for nbytes in self.nodes[at].slot_bytes)
            for at in group
        ]
        return parity_bytes_max(code, chunks, chunk_bytes) + STATE_BYTES

    def held_by(self, me: int) -> list[tuple[int, int]]:
        """(rank, slot_bytes) of all ranks whose snapshots node ``me`` keeps."""
        return [
            (rank, nbytes)
            for node, kept_by in zip(self.nodes, self.holders(), strict=True)
            if me in kept_by
            for rank, nbytes in zip(node.ranks, node.slot_bytes, strict=True)
        ]

    def find(self, name: str) -> int | None:
        """The position of the node of that name."""
        found = [index for index, one in enumerate(self.nodes) if one.name == name]
        return found[0] if found else None


def encode_map(nodes: NodeMap) -> bytes:
    return msgspec.msgpack.encode(nodes)


def decode_map(data: bytes) -> NodeMap:
    """Raises BadOption if it is no node map."""
    try:
        return msgspec.msgpack.decode(data, type=NodeMap)
    except msgspec.MsgspecError as error:
        raise BadOption("what was sent is no node map", found=str(error)) from None
