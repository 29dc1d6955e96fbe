"""Which bytes of which nodes a parity block is made of, and what can be rebuilt from what is left. Pure.

A group of n = k + m nodes has n *stripes*. Of stripe j the nodes j .. j+m-1 (mod n, positions in the group) each hold
a parity block, the others each give a data block: the data of every node are cut into k blocks, one for each stripe in
which it holds no parity. So every node keeps m parity blocks, each about a k-th of one node's data, and whichever m
nodes are lost, no stripe loses more than m of its k + m blocks.

The data of a node are the images of its ranks, one behind the other, each padded with zeros to whole chunks. Blocks
are whole chunks, so that whoever receives one proves it chunk by chunk with the owner's hashes. Nodes need not have
equally much: shorter blocks count as padded with zeros.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from everstep.errors import BadOption

from .placement import Group, Node, groups


@dataclass(frozen=True, slots=True)
class Code:
    """``k`` data and ``m`` parity blocks in each stripe of a group of ``n`` nodes."""

    k: int
    m: int

    @property
    def n(self) -> int:
        return self.k + self.m

    def holders(self, stripe: int) -> Group:
        """The positions of the nodes that hold parity 0, 1, ... m-1 of the stripe."""
        return tuple((stripe + row) % self.n for row in range(self.m))

    def givers(self, stripe: int) -> Group:
        """The positions of the nodes that give data block 0, 1, ... k-1 of the stripe."""
        return tuple((stripe + self.m + column) % self.n for column in range(self.k))

    def held(self, position: int) -> tuple[tuple[int, int], ...]:
        """(stripe, row) of the parity blocks that a node holds, by stripe."""
        return tuple(sorted(((position - row) % self.n, row) for row in range(self.m)))

    def given(self, position: int) -> tuple[tuple[int, int], ...]:
        """(stripe, column) of the blocks into which a node's data are cut, in their order: by stripe."""
        found = [(stripe, (position - stripe - self.m) % self.n) for stripe in range(self.n)]
        return tuple((stripe, column) for stripe, column in found if column < self.k)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a job's nodes share parity: ``groups`` of positions in the node map, each with a code of its own;
    ``warning`` where it is not what was asked for."""

    groups: tuple[Group, ...]
    codes: tuple[Code, ...]
    warning: str | None = None


def fit(nodes: Sequence[Node], k: int, m: int) -> Fit:
    """Groups of ``k + m`` nodes, or a little more, each of which survives the loss of any ``m``. With fewer nodes than
    that, one group with less data per parity, and a warning; BadOption where there are not more than ``m``."""
    active = sum(1 for node in nodes if not node.spare)
    if active <= m:
        raise BadOption(
            f"Memory(parity=({k}, {m})) needs more than {m} nodes",
            found=f"{active} node{'s' if active != 1 else ''}",
            expected=f"at least {m + 1}; {k + m} or more for the overhead of {m}/{k}",
            hint="Lower the number of lost nodes to survive, or use Memory(replicas=)",
        )
    found = groups(nodes, k + m)
    warning = None
    if active < k + m:
        warning = (
            f"Memory(parity=({k}, {m})) is meant for groups of {k + m} nodes, and there are {active}: parity takes "
            f"{m}/{active - m} of a snapshot's memory per node instead of {m}/{k}. Any {m} may still be lost."
        )
    return Fit(found, tuple(Code(len(group) - m, m) for group in found), warning)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``offset`` .. ``offset + nbytes`` of an image, which lie ``at`` bytes behind the begin of what was asked
    for."""

    rank: int
    image: str
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``offset`` .. ``offset + nbytes`` of the block that a node gives to ``stripe`` as data ``column``; they lie
    ``at`` bytes behind the begin of what was asked for."""

    stripe: int
    column: int
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class Member:
    """What one node of a group protects: ``images`` are (rank, name, bytes), in the order in which they lie behind one
    another. ``name`` is for people."""

    name: str
    ranks: tuple[int, ...]
    images: tuple[tuple[int, str, int], ...]

    def starts(self, chunk_bytes: int) -> tuple[int, ...]:
        """By image the chunk of the node's data with which it begins, and at the end their number."""
        return _starts(tuple(nbytes for _, _, nbytes in self.images), chunk_bytes)

    def chunks(self, chunk_bytes: int) -> int:
        """The node's data in chunks."""
        return self.starts(chunk_bytes)[-1]

    def block(self, number: int, k: int, chunk_bytes: int) -> range:
        """The chunks of block ``number`` of ``k``; no two blocks differ by more than one."""
        chunks = self.chunks(chunk_bytes)
        return range(number * chunks // k, (number + 1) * chunks // k)

    def parts(self, chunks: range, chunk_bytes: int) -> Iterator[Part]:
        """What ``chunks`` of the node's data consist of; between the parts there are zeros."""
        starts = self.starts(chunk_bytes)
        first = max(0, bisect_right(starts, chunks.start) - 1)
        for index in range(first, len(self.images)):
            rank, image, nbytes = self.images[index]
            begin = max(chunks.start, starts[index])
            end = min(chunks.stop, starts[index + 1])
            if starts[index] >= chunks.stop:
                return
            if begin < end:
                offset = (begin - starts[index]) * chunk_bytes
                until = min(nbytes, (end - starts[index]) * chunk_bytes)
                yield Part(rank, image, offset, until - offset, (begin - chunks.start) * chunk_bytes)


@functools.lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...], chunk_bytes: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate((-(-nbytes // chunk_bytes) for nbytes in sizes), initial=0))


@dataclass(frozen=True)
class ParityGroup:
    """The nodes that share parity over one snapshot, by position, and the code that they use."""

    code: Code
    chunk_bytes: int
    members: tuple[Member, ...]

    def block(self, position: int, stripe: int) -> range:
        """The chunks of a node's data that it gives to the stripe; none if it holds parity of it."""
        given = [of for of, _ in self.code.given(position)]
        if stripe not in given:
            return range(0)
        return self.members[position].block(given.index(stripe), self.code.k, self.chunk_bytes)

    def parity_chunks(self, stripe: int) -> int:
        """Length of the stripe's parity blocks: of the longest data block in it."""
        return max(len(self.block(position, stripe)) for position in self.code.givers(stripe))

    def position_of(self, rank: int) -> int | None:
        """The node that ran ``rank``."""
        return next((at for at, member in enumerate(self.members) if rank in member.ranks), None)

    def spans(self, rank: int, image: str, offset: int, nbytes: int) -> list[Span]:
        """Where bytes of an image lie in the stripes. KeyError for an image that is not protected by parity."""
        position = self.position_of(rank)
        if position is None:
            raise KeyError(rank)
        member, chunk_bytes = self.members[position], self.chunk_bytes
        index = next(
            (at for at, (of, name, _) in enumerate(member.images) if (of, name) == (rank, image)), None
        )
        if index is None:
            raise KeyError(image)
        begin = member.starts(chunk_bytes)[index] * chunk_bytes + offset
        found: list[Span] = []
        for number, (stripe, column) in enumerate(self.code.given(position)):
            block = member.block(number, self.code.k, chunk_bytes)
            first = max(begin, block.start * chunk_bytes)
            until = min(begin + nbytes, block.stop * chunk_bytes)
            if first < until:
                found.append(
                    Span(stripe, column, first - block.start * chunk_bytes, until - first, first - begin)
                )
        return found

    def parts(self, stripe: int, column: int, chunks: range) -> list[Part]:
        """What ``chunks`` of a data block consist of; what no part covers is zeros, behind the block's end too."""
        position = self.code.givers(stripe)[column]
        block = self.block(position, stripe)
        begin = min(block.start + chunks.start, block.stop)
        until = min(block.start + chunks.stop, block.stop)
        return list(self.members[position].parts(range(begin, until), self.chunk_bytes))

    def rebuildable(self, lost: Collection[int], parity: Collection[tuple[int, int]]) -> set[int]:
        """Those of the ``lost`` nodes (positions) whose data follow from what the others have and from the ``parity``
        blocks (stripe, row) that are there."""
        return {
            position
            for position in lost
            if all(
                self._short(stripe, lost, parity) <= 0 or not self.block(position, stripe)
                for stripe, _ in self.code.given(position)
            )
        }

    def _short(self, stripe: int, lost: Collection[int], parity: Collection[tuple[int, int]]) -> int:
        """How many blocks of the stripe are missing for solving it. A block without a byte is never missing."""
        missing = sum(
            1 for position in self.code.givers(stripe) if position in lost and self.block(position, stripe)
        )
        return missing - sum(1 for row in range(self.code.m) if (stripe, row) in parity)


def parity_bytes_max(code: Code, chunks: Sequence[int], chunk_bytes: int) -> int:
    """Upper bound of the parity that any node of a group holds of one snapshot, if no node has more than the most of
    ``chunks``. For reserving memory."""
    return code.m * -(-max(chunks, default=0) // code.k) * chunk_bytes
