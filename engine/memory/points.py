"""Named points of the slot protocol that tests can hold on to: ``reach(name, detail)`` does nothing unless a
hook is set.

``EVERSTEP_POINTS="kill:slot.publish.before"`` in the environment of a process makes it SIGKILL itself the
first time that the point is reached with a detail that contains the text after a further colon; ``stall:...``
stops it there (SIGSTOP). A count may follow: ``kill:slot.mid_copy::3`` is the third such point.

The backends have a module of the same shape; the layers may not import each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

Hook = Callable[[str, str], None]

hook: Hook | None = None
"""Called at every point; set by tests in their own process."""


def reach(name: str, detail: str = "") -> None:
    """Tell the hook, if there is one, that ``name`` was reached."""
    if hook is not None:
        hook(name, detail)


def hook_from(text: str) -> Hook:
    """The hook that ``EVERSTEP_POINTS`` describes."""
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
    hook = hook_from(os.environ["EVERSTEP_POINTS"])
