"""Asking a backend: its errors in everstep's words, and bounded concurrency.

"Not there" is an answer, so :class:`~everstep.backends.errors.NotFound` passes through :func:`reading`;
whatever else a read raises means that the storage did not answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from everstep.backends import parallel
from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, Conflict, NoSpace, NotAnObject, NotFound
from everstep.errors import CannotTell, Damaged, SaveFailed, StorageFull

PARALLEL_MAX = 16
"""Requests for small objects that one call has in flight."""

SMALL_BYTES_MAX = 64 << 20
"""No record, manifest or layout is larger; a larger object of such a name is not one of ours."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def reading(backend: Backend, name: str) -> Iterator[None]:
    """Turn what a read of ``name`` raises into :class:`CannotTell`, but for NotFound; into :class:`Damaged` where what
    has that name is no object."""
    try:
        yield
    except NotFound:
        raise
    except NotAnObject as error:
        raise no_object(error, name) from error
    except BackendError as error:
        raise CannotTell(
            f"{backend.url}: cannot read {name or 'the listing'}",
            found=f"{type(error).__name__}: {error.cause or error.name}",
            hint="Try again when the storage answers; nothing was decided from this",
            name=name,
        ) from error


def no_object(error: NotAnObject, name: str) -> Damaged:
    """The error where something else has the name of an object."""
    return Damaged(
        f"{name}: something else has the name of an object",
        found=error.cause or "a directory",
        expected="a file of everstep's",
        hint="Nobody removes it; move it away, as everstep fsck --repair does where it can have the object",
        name=name,
    )


@contextmanager
def writing(backend: Backend, name: str, **fields: object) -> Iterator[None]:
    """Turn what a write of ``name`` raises into :class:`StorageFull` or :class:`SaveFailed`, but for
    Conflict."""
    try:
        yield
    except Conflict:
        raise
    except NoSpace as error:
        raise StorageFull(
            f"{backend.url}: no room for {name}",
            found=error.cause or "a full disk or quota",
            hint="Free space, or keep fewer checkpoints; earlier ones are untouched",
            name=name,
            tier=backend.url,
            **fields,
        ) from error
    except BackendError as error:
        raise SaveFailed(
            f"{backend.url}: cannot write {name}",
            found=f"{type(error).__name__}: {error.cause or error.name}",
            hint="Earlier checkpoints are untouched",
            name=name,
            tier=backend.url,
            **fields,
        ) from error


async def each(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], *, limit: int = PARALLEL_MAX
) -> list[R]:
    """``work`` of every item, at most ``limit`` at a time; results in the items' order.

    The first error stops the rest and is raised; no work is under way any more when this returns.
    """
    return await parallel.each(items, work, limit=limit)
