"""How much memory slots and arenas take, said before there are any. Pure."""

from __future__ import annotations

from .header import Fixed, aligned

ENTRY_BYTES = 320
"""Room per tensor for its line in an image's header and in the layout."""
PARTS_BYTES = 64 * 4096
"""Room for the parts' padding to 4 KiB, and for plain values."""
SLACK = 0.02

SHARED_BYTES = 128 << 20
"""Memory that the ranks of a node share while they load, in two halves: one is copied from while the other is read
into. More would cost more to be mapped for the first time than the fewer rounds save."""

AGENT_BYTES = 96 << 20
"""What an agent takes besides arenas, at most about: itself (some 30 MiB), the tables of a commit, pieces on their
way to other agents."""


def around_bytes(tensors: int, plain_bytes: int) -> int:
    """Room for what stands around the tensors of a snapshot: headers, layout, plain values."""
    return tensors * ENTRY_BYTES + PARTS_BYTES + 2 * plain_bytes


def estimated_slot_bytes(tensor_bytes: int, tensors: int, plain_bytes: int, *, slack: float = SLACK) -> int:
    """The slot that is reserved for a snapshot of so many bytes in so many tensors, and plain values besides."""
    return aligned(tensor_bytes + around_bytes(tensors, plain_bytes) + int(slack * tensor_bytes))


def arena_bytes(slots: int, slot_bytes: int, chunk_bytes: int) -> int:
    """The file of an arena. BadOption for what no arena can have."""
    return Fixed("key", "", 0, slots, aligned(slot_bytes), chunk_bytes, 0, 0).nbytes
