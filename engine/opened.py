"""The checkpointers of this process: one per run at a time, and none is forgotten when the interpreter ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from typing import Protocol

from .errors import Closed, EverstepError


class Opened(Protocol):
    """A checkpointer, as far as it is looked after here. Ending one that was closed, or that is another process's,
    does nothing."""

    def _close(self, *, flush: bool, keep: bool) -> None: ...


_newest: weakref.WeakValueDictionary[str, Opened] = weakref.WeakValueDictionary()
"""By root the one that was opened last. Guarded by _lock, as what follows."""
_writing: dict[Opened, tuple[str, int]] = {}
"""Those with a session, with root and process: held until they are closed, or one that a function forgot would not be
drained at exit."""
_lock = threading.Lock()


def add(url: str, new: Opened) -> None:
    """A second opening of a run in one process closes the first. What is never closed is drained at exit."""
    with _lock:
        former = _newest.get(url)
        _newest[url] = new
    if former is not None:
        try:
            former._close(flush=True, keep=False)
        except EverstepError as error:
            warnings.warn(
                f"everstep: closing the former checkpointer of this run: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
    _at_exit(weakref.ref(new))


def writes(url: str, one: Opened) -> None:
    """It has a session now."""
    with _lock:
        _writing[one] = url, os.getpid()


def remove(url: str, one: Opened) -> None:
    """It is closed."""
    with _lock:
        if _newest.get(url) is one:
            del _newest[url]
        _writing.pop(one, None)


def why_closed(url: str, one: Opened) -> Closed:
    """What is told to whoever goes on using ``one``, which is closed: that another took its place, if it is so."""
    with _lock:
        newer = _newest.get(url)
    if newer is None or newer is one:
        return Closed("this checkpointer was closed", hint="Make a new one.")
    return Closed(
        "this checkpointer was closed, and another was made for its run in this process",
        found=f"two for {url}",
        expected="one checkpointer per run and process",
        hint="Use the newer one, or give the two runs of their own.",
    )


def is_open_here(url: str) -> bool:
    """Whether this process writes to the run at ``url`` now."""
    with _lock:
        return (url, os.getpid()) in _writing.values()


def _at_exit(ref: weakref.ref[Opened]) -> None:
    """Have it drained when the interpreter ends: while threads can still be started, so before atexit's handlers,
    where the interpreter offers that."""
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_drain, ref)
    except RuntimeError:  # the interpreter is ending already
        atexit.register(_drain, ref)


def _drain(ref: weakref.ref[Opened]) -> None:
    """At interpreter exit: what a script that never called close() owes, within the policy's bound."""
    one = ref()
    if one is None:
        return
    try:
        # An unhandled exception was printed before exit handlers run: such a script is likely to be started again.
        one._close(flush=True, keep=getattr(sys, "last_value", None) is not None)
    except EverstepError as error:
        print(f"everstep: the last snapshot did not become durable: {error}", file=sys.stderr)
