"""A rank's vote: what it stored for one attempt, with every chunk's hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STATE_IMAGE = "state"
"""Name of the image that holds a rank's plain values and the structure of its parts (msgpack)."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One stored image: its size, the hashes of its chunks (16 bytes each, one after the other) and their root.

    ``encoding`` is "plain" for a full image; ``base`` names the base of a delta (None here).
    """

    name: str
    nbytes: int
    root: bytes
    chunks: bytes
    encoding: str = "plain"
    base: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says of one attempt. ``root`` binds all its images; ``meta`` is what the manifest gathers
    from the rank: coordinates, data position, RNG kinds, metrics, parts, library versions."""

    step: int
    incarnation: int
    attempt: int
    rank: int
    world: int
    kind: str
    layout_hash: str
    root: bytes
    images: tuple[ImageRecord, ...]
    entry_hashes: dict[str, str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
