"""Storage of which only the root fails or is slow, and what lies in a node's tier."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import everstep
import everstep.agent.inline
import pytest
from everstep.agent.inline import InlineAgent
from everstep.backends.api import Backend
from everstep.backends.errors import Permanent
from everstep.backends.faults import Fault, Faulty
from everstep.backends.open import open_backend
from everstep.places import locate

from tests.facade.kit import opened

DENIED = 10**6


def denied(op: str, name: str = "") -> Fault:
    return Fault(op, name, times=DENIED, error=lambda found: Permanent(found, "denied"))


class Places:
    """What inline agents write through: scripted faults by place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scripts: dict[str, list[Fault]] = {}
        self.made: list[Faulty] = []
        monkeypatch.setattr(
            everstep.agent.inline, "InlineAgent", functools.partial(InlineAgent, open_backend=self._open)
        )
        monkeypatch.setattr("everstep.agent.uploads.PAUSE_FIRST_S", 0.01)

    def _open(self, url: str, options: Any = None) -> Backend:
        backend = Faulty(open_backend(url, shared=True))
        backend.script = self._scripts.setdefault(url, [])
        self.made.append(backend)
        return backend

    def fail(self, place: Path, *faults: Fault) -> None:
        self._scripts.setdefault(locate(place).url, [])[:] = faults

    def heal(self, place: Path) -> None:
        self.fail(place)


def near(path: Path, **options: Any) -> everstep.Tier:
    return everstep.Tier(path, scope="node", **options)


def staged(path: Path) -> list[int]:
    """Steps of which the node's tier has a vote."""
    return sorted({int(vote.parents[2].name) for vote in path.glob("checkpoints/*/*/*/*.vote")})


def voted(root: Path, step: int) -> list[str]:
    return sorted(vote.name for vote in (root / "checkpoints" / f"{step:09d}").glob("*/*/*.vote"))


__all__ = ["DENIED", "Places", "denied", "near", "opened", "staged", "voted"]
