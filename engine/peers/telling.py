"""What a guard says of itself: plain values for people who look, and how often a failure is logged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from everstep.errors import EverstepError
from everstep.memory.arena import Arena

from .messages import Wire
from .nodemap import NodeMap


def step_or_none(step: int) -> int | None:
    return step if step >= 0 else None


def text_of(error: Wire | None) -> str | None:
    if error is None:
        return None
    found = error.get("found")
    return f"{error.get('message')}{f'; found: {found}' if found else ''}"


def newest_in(arena: Arena) -> list[int] | None:
    """The key of the newest snapshot there."""
    with contextlib.suppress(EverstepError):
        return next((list(one.key) for one in reversed(arena.snapshots())), None)
    return None


def spares_of(nodes: NodeMap, me: str, holders: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The job's spare nodes. ``reached`` is None for one that keeps nothing of this node, which then does not talk to
    it; ``step`` is what it keeps of this node; ``error`` why it is not reached."""
    found: list[dict[str, Any]] = []
    for node in nodes.nodes:
        if node.spare and node.name != me:
            kept = holders.get(node.name)
            reached = None if kept is None else kept["error"] is None
            found.append({"spare": node.name, "reached": reached, **(kept or {"step": None, "error": None})})
    for name, why in nodes.unreached:
        found.append({"spare": name, "reached": False, "step": None, "error": why})
    return found


def is_logged(times: int) -> bool:
    """Of what is repeated again and again: the first time, and each time that it has happened twice as often."""
    return times & (times - 1) == 0
