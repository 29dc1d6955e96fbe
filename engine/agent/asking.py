"""Asking a running agent how it is, without being one of its trainers: for commands. Starts none, and keeps none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .link import Link, State
from .protocol import StatusAnswer, StatusRequest
from .values import AgentSettings

ASK_S = 5.0


def ask_status(settings: AgentSettings, *, timeout_s: float = ASK_S) -> dict[str, Any] | None:
    """What the agent of ``settings.runtime_dir`` says of itself; None if none answers in time."""
    if not Path(settings.runtime_dir).is_dir():
        return None
    link = Link(settings, None, up=lambda: None, lost=lambda why: None)
    deadline = time.monotonic() + timeout_s
    asked = False
    try:
        while time.monotonic() < deadline:
            link.advance()
            if link.state is State.DOWN:
                break
            if link.state is State.UP and not asked:
                link.send(StatusRequest(1))
                asked = True
            for reply in link.replies:
                if isinstance(reply, StatusAnswer):
                    return reply.status
            link.wait(deadline - time.monotonic())
        return None
    finally:
        link.close()
