"""Named points that tests can hold on to: ``reach(name, detail)`` does nothing unless a hook is set.

Production code calls :func:`reach` at the places where a crash matters ("fsync.before", "link.after", ...).
``EVERSTEP_POINTS="kill:link.after:manifest"`` in the environment of a process makes it SIGKILL itself the
first time that a point of that name is reached with a detail that contains the text; ``stall:...`` stops it
there (SIGSTOP). A count may follow: ``kill:fsync.before::3`` is the third such point.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

Hook = Callable[[str, str], None]

hook: Hook | None = None
"""Called at every point; set by tests in their own process."""


def reach(name: str, detail: str = "") -> None:
    """Tell the hook, if there is one, that ``name`` was reached at ``detail`` (mostly an object's name)."""
    if hook is not None:
        hook(name, detail)


def _hook_from(text: str) -> Hook:
    action, name, *rest = text.split(":")
    wanted = rest[0] if rest else ""
    left = int(rest[1]) if len(rest) > 1 else 1
    sent = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}[action]

    def fire(reached: str, detail: str) -> None:
        nonlocal left
        if reached == name and wanted in detail:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), sent)

    return fire


if os.environ.get("EVERSTEP_POINTS"):
    hook = _hook_from(os.environ["EVERSTEP_POINTS"])
