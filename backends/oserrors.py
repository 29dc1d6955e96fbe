"""From the operating system's errors to the backends' own."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BackendError, NoSpace, NotAnObject, NotFound, Permanent, Retryable

_CLASSES: dict[int, type[BackendError]] = {
    errno.ENOENT: NotFound,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EISDIR: NotAnObject,
    # Moments of a busy machine or a network file system; everything that is not named here is permanent.
    errno.EAGAIN: Retryable,
    errno.EINTR: Retryable,
    errno.EBUSY: Retryable,
    errno.ENOMEM: Retryable,
    errno.EMFILE: Retryable,
    errno.ENFILE: Retryable,
    errno.ESTALE: Retryable,
    errno.ETIMEDOUT: Retryable,
    errno.ECONNRESET: Retryable,
    errno.ECONNREFUSED: Retryable,
    errno.EHOSTDOWN: Retryable,
    errno.EHOSTUNREACH: Retryable,
    errno.ENETDOWN: Retryable,
    errno.ENETUNREACH: Retryable,
    errno.EREMOTEIO: Retryable,
}


def from_os_error(error: OSError, name: str) -> BackendError:
    """What a backend raises for ``error`` met at the object ``name``. The cause names the error and, where
    the system told it, the path."""
    number = error.errno or 0
    label = errno.errorcode.get(number, type(error).__name__)
    text = os.strerror(number) if number else str(error)
    where = f" ({_shown(error.filename)})" if error.filename else ""
    return _CLASSES.get(number, Permanent)(name, f"{label}: {text}{where}{_limit(number)}")


def _limit(number: int) -> str:
    """The limit of this process that is behind the error, if one is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if number != errno.EFBIG or limit == resource.RLIM_INFINITY:
        return ""
    return f"; this process's files may have {limit:,} bytes at most (RLIMIT_FSIZE; ulimit -f)"


def _shown(path: object) -> str:
    """The path as a person finds it: a directory that is held open has a name, or had one."""
    held = re.match(r"/proc/self/fd/\d+", str(path))
    if held is None:
        return str(path)
    try:
        return os.readlink(held[0]) + str(path)[held.end() :]
    except OSError:
        return str(path)


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Within it no OSError escapes."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, name) from error


@contextmanager
def publishing(name: str) -> Iterator[None]:
    """As :func:`translated`, where what is missing (a temporary, a directory) was taken away."""
    try:
        yield
    except FileNotFoundError as error:
        raise Permanent(name, f"removed by others while it was written ({_shown(error.filename)})") from error
    except OSError as error:
        raise from_os_error(error, name) from error
