"""What a backend may raise; no foreign exception escapes one.

::

    BackendError
    ├── NotFound      no object of that name
    ├── Conflict      the name exists already (create-if-absent)
    ├── Permanent     trying again cannot help: denied, not a directory, unsupported
    │   ├── NoSpace   full disk or quota
    │   ├── NotAnObject  a directory, or another thing that is no object, has that name
    │   └── UnknownOption  a storage option that nobody knows
    ├── Retryable     may succeed when tried again: timeouts, resets, 5xx
    └── ShortRead     an object ends before the bytes asked for

``name`` is the object, ``cause`` a short text of what the store said. All survive pickling.
"""

from __future__ import annotations

from typing import Any


class BackendError(Exception):
    """Base of the backends' errors."""

    def __init__(self, name: str, cause: str = "") -> None:
        self.name = name
        self.cause = cause
        super().__init__(name, cause)

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}" if self.cause else self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.cause)


class NotFound(BackendError):
    """No object of that name."""


class Conflict(BackendError):
    """The name exists already."""


class Permanent(BackendError):
    """Trying again cannot help."""


class NoSpace(Permanent):
    """A full disk or quota."""


class NotAnObject(Permanent):
    """Something else than an object has that name: a directory, as a rule."""


class UnknownOption(Permanent):
    """A storage option (``cause`` names it) that is not among ``known``."""

    def __init__(self, name: str, cause: str = "", known: str = "") -> None:
        super().__init__(name, cause)
        self.known = known

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.cause, self.known)


class Retryable(BackendError):
    """May succeed when tried again; where the store said so, not before ``after_s`` seconds have passed."""

    def __init__(self, name: str, cause: str = "", after_s: float | None = None) -> None:
        super().__init__(name, cause)
        self.after_s = after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.cause, self.after_s)


class ShortRead(BackendError):
    """The object ends before the bytes asked for."""
