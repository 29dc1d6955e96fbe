"""Who has a checkpoint's images in memory, as mending sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from everstep.format.manifest import Manifest
from everstep.format.vote import ImageRecord


class Images(Protocol):
    """One holder's images of ``ranks``. Whoever reads them proves what they give; each may raise EverstepError."""

    label: str
    ranks: frozenset[int]

    def has(self, rank: int, image: str) -> bool: ...

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None: ...


class Snapshot(Images, Protocol):
    """One holder's snapshots, with what else lies in a slot."""

    async def records(self, rank: int) -> Mapping[str, ImageRecord]: ...

    async def meta(self, rank: int) -> dict[str, Any]: ...

    async def layout_bytes(self, rank: int) -> bytes:
        """The layout, not compressed."""
        ...


class Memory(Protocol):
    """Asked again and again; looks once. Never raises EverstepError: who cannot be asked has nothing."""

    async def here(self, manifest: Manifest) -> Sequence[Snapshot]:
        """What this node's memory has of the checkpoint."""
        ...

    async def elsewhere(self, manifest: Manifest) -> Sequence[Snapshot]:
        """What other nodes' memory has of it, nearest first. Asked where nobody nearer has it right."""
        ...


class _NoMemory:
    async def here(self, manifest: Manifest) -> Sequence[Snapshot]:
        return ()

    async def elsewhere(self, manifest: Manifest) -> Sequence[Snapshot]:
        return ()


NO_MEMORY: Memory = _NoMemory()
