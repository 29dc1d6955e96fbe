"""Asking a running agent something, without being one of its trainers. Starts none, and keeps none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from everstep.memory.process import Process

from .link import Link, State
from .protocol import Loading, Noted, Reply, Request, StatusAnswer, StatusRequest
from .values import AgentSettings

ASK_S = 5.0
TELL_S = 2.0
"""A load waits no longer for an agent to stand back."""

Answer = TypeVar("Answer", bound=Reply)
Found = TypeVar("Found")


def ask_status(settings: AgentSettings, *, timeout_s: float = ASK_S) -> dict[str, Any] | None:
    """What the agent of ``settings.runtime_dir`` says of itself; None if none answers in time."""
    if not Path(settings.runtime_dir).is_dir():
        return None
    return ask(
        settings, StatusRequest(1), StatusAnswer, lambda link, answer: answer.status, timeout_s=timeout_s
    )


@contextmanager
def loading(settings: AgentSettings | None) -> Iterator[None]:
    """While this process loads, the agent of ``settings.runtime_dir``, if one runs there, stands back."""
    _tell_loading(settings, ended=False)
    try:
        yield
    finally:
        _tell_loading(settings, ended=True)


def _tell_loading(settings: AgentSettings | None, *, ended: bool) -> None:
    if settings is not None:
        me = Process.current()
        request = Loading(1, me.pid, me.start_time, me.boot, ended)
        ask(settings, request, Noted, lambda link, answer: None, timeout_s=TELL_S)


def ask(
    settings: AgentSettings,
    request: Request,
    kind: type[Answer],
    take: Callable[[Link, Answer], Found],
    *,
    timeout_s: float,
) -> Found | None:
    """What ``take`` makes of the agent's answer of ``kind``, while the link is open; None if none comes in time."""
    link = Link(settings, None, up=lambda: None, lost=lambda why: None)
    deadline = time.monotonic() + timeout_s
    asked = False
    try:
        while time.monotonic() < deadline:
            link.advance()
            if link.state is State.DOWN:
                break
            if link.state is State.UP and not asked:
                link.send(request)
                asked = True
            for reply in link.replies:
                if isinstance(reply, kind):
                    return take(link, reply)
            link.wait(deadline - time.monotonic())
        return None
    finally:
        link.close()
