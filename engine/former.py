"""What the agent that a former process of this node left behind can still give."""

from __future__ import annotations

import os
from typing import Any

from .agent.asking import ask_status
from .agent.client import fetch_arenas
from .agent.values import AgentSettings
from .memory.arena import Arena


def kept_arenas(settings: AgentSettings) -> list[Arena]:
    """Arenas without a path that it keeps, the caller's to close. Empty where no agent is."""
    if not settings.runtime_dir.is_dir():
        return []
    arenas = []
    for one in fetch_arenas(settings):
        if one.fd is not None:
            arenas.append(Arena.attach_fd(one.fd))
            os.close(one.fd)
    return arenas


def agents_address(settings: AgentSettings) -> str | None:
    """Where the agent that this node has already, a spare node's perhaps, listens to others."""
    said: dict[str, Any] = ask_status(settings) or {}
    return (said.get("guard") or {}).get("address")
