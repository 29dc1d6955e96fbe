"""The protocol that every backend implements, and its small value types.

Names are relative, ``/``-separated, of printable ASCII without ``..``, empty or dot-only parts; a backend
checks them on the way in and on the way out (:func:`check_name`). All methods may be called concurrently from
one event loop. A backend object belongs to one process and one loop: it is not used after a fork.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .errors import Permanent

NAME_MAX = 1024
"""Characters of a name."""

_PART = re.compile(r"[A-Za-z0-9_%=+,@~-][A-Za-z0-9._%=+,@~-]*")


def is_name(name: str) -> bool:
    """Whether ``name`` is a proper object name."""
    return 0 < len(name) <= NAME_MAX and all(_PART.fullmatch(part) for part in name.split("/"))


def check_name(name: str) -> str:
    """``name`` itself if it is a proper object name, else :class:`Permanent`."""
    if not is_name(name):
        raise Permanent(name, "not a proper object name")
    return name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can promise. A tier that commits needs ``atomic_create``."""

    atomic_create: bool
    """:meth:`Backend.create` publishes whole objects, at most once per name, on every client alike."""
    shared: bool
    """Every node sees the same objects (False: node-local)."""
    flat: bool = False
    """Names lie in no directories: listing all below a prefix costs a request per thousand objects, listing the
    children of each directory costs at least one each."""
    direct_io: bool = False
    """Reads and writes of 4 KiB-aligned memory bypass the page cache where the file system can."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a listing."""

    name: str
    nbytes: int
    modified: float | None = field(default=None, compare=False)
    """When it was last written (an upload: begun), in seconds since the epoch by the store's own clock; None where the
    store does not say."""


Items = list[Item]
Names = list[str]
"""These two for signatures within classes that have a method ``list``."""


class Writer(Protocol):
    """One object being written. Nothing is visible under the final name before :meth:`commit` returns, and
    then the object is durable, contents and name. :meth:`abort` (also safe after an error or a commit, where
    it does nothing) leaves no trace. Used by one task at a time; views are taken in order."""

    async def write(self, view: memoryview) -> None:
        """Append ``view``; it may be reused when this returns."""
        ...

    async def commit(self) -> None:
        """Check the length against the size given at the start (unless it may be less), make durable, publish. After
        an error the object may have been published or not, never in part; writing it again is always right."""
        ...

    async def abort(self) -> None: ...


class Notes(Protocol):
    """What a writer wants to know again after a crash: a few hundred bytes, kept by the caller for one object."""

    def load(self) -> bytes | None:
        """What was saved last, by whichever process."""
        ...

    async def save(self, data: bytes) -> None:
        """Keep ``data`` in place of what was saved before; durable when it returns. Empty: nothing to know."""
        ...


class Backend(Protocol):
    """A place that holds named, immutable objects."""

    @property
    def url(self) -> str:
        """Names the place; :func:`.open.open_backend` understands it."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        """The whole object. Raises NotFound, or Permanent if it is larger than ``nbytes_max``."""
        ...

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the object's bytes from ``offset`` on. Raises NotFound, ShortRead."""
        ...

    async def size(self, name: str) -> int:
        """Size in bytes. Raises NotFound."""
        ...

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        """Start writing an object of ``nbytes``, or, with ``at_most``, of as many as are written until the commit, and
        ``nbytes`` at most. An existing object of that name is replaced at commit.

        With ``notes`` the writer may go on where one that was killed stopped: the caller writes all bytes again, and
        what is there already, with the same checksum, is not sent. Notes belong to one object of one place; a
        backend that has no use for them ignores them."""
        ...

    async def write(self, name: str, data: bytes) -> None:
        """Durably put a small object; replaces."""
        ...

    async def create(self, name: str, data: bytes) -> None:
        """Durably put a small object if its name is free, atomically; raises Conflict if it is not, and then
        the object that holds the name is durable. A lost answer is settled by reading back: equal bytes count
        as created."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[Item]:
        """All objects whose name starts with ``prefix`` + "/" (all, for ""), in no promised order, uncached.
        A prefix that does not exist lists nothing. Unfinished temporaries are not listed."""
        ...

    async def list_names(self, prefix: str = "") -> Names:
        """The direct children of ``prefix``: object names' next parts, directories included, uncached."""
        ...

    async def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error. Durable when it returns. Containers that
        become empty may be removed too."""
        ...

    async def displace(self, name: str, to: str) -> None:
        """Give what has an object's ``name`` and is none (a directory) the name ``to``, durably. Raises NotFound,
        Conflict if ``to`` is not free, and Permanent where it is an object, or where nothing can be moved."""
        ...

    async def leftovers(self, prefix: str = "") -> Items:
        """Unfinished temporaries (and uploads) that lie below ``prefix``."""
        ...

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        """Remove what :meth:`leftovers` named."""
        ...

    async def close(self) -> None: ...
