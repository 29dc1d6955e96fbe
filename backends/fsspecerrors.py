"""From what fsspec's file systems raise to the backends' own errors."""

from __future__ import annotations

import asyncio

from .errors import BackendError, Conflict, NotAnObject, NotFound, Permanent, Retryable
from .oserrors import from_os_error

CAUSE_CHARS_MAX = 300

_STATUS: dict[int, type[BackendError]] = {404: NotFound, 408: Retryable, 412: Conflict, 429: Retryable}


def from_fs_error(error: BaseException, name: str) -> BackendError:
    """What a backend raises for ``error``, met at the object ``name``. Only the kind of an error that is not the
    system's is told with its first words: file systems put requests into their texts, at the end."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, FileExistsError):
        return Conflict(name, "exists already")
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NotFound(name)
    if isinstance(error, IsADirectoryError):
        return NotAnObject(name, "a directory")
    if isinstance(error, (asyncio.TimeoutError, TimeoutError, ConnectionError)):
        return Retryable(name, _words(error))
    status = _status(error)
    if status is not None:
        kind = _STATUS.get(status) or (Retryable if status >= 500 else Permanent)
        return kind(name, f"{status}: {_words(error)}")
    if isinstance(error, OSError) and error.errno:
        return from_os_error(error, name)
    return Permanent(name, _words(error))


def _status(error: BaseException) -> int | None:
    """The status of an answer that is at the bottom of ``error``."""
    for found in (error, error.__cause__):
        for attribute in ("status_code", "status", "code"):
            value = getattr(found, attribute, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def _words(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split())[:CAUSE_CHARS_MAX]
