"""What the queue does with attempts at the root: open them, settle those that were left, sweep what came to nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.format import names
from everstep.format.manifest import Abort, Decision, Manifest
from everstep.store.commit import abort_attempt, next_attempt

from .flushes import Flush
from .staging import Staging
from .verdict import GIVEN_UP

log = logging.getLogger("everstep.agent")


async def open_attempt(backend: Backend, flush: Flush) -> Decision | None:
    """Make ``flush.attempt`` the open one. A decision: the step has one already that settles it."""
    number, manifest = await next_attempt(backend, flush.step, flush.incarnation)
    if manifest is not None:
        return manifest
    if number > flush.attempt:
        return await what_stands(backend, flush.incarnation, flush.step, flush.attempt)
    for earlier in range(number, flush.attempt):
        reason = GIVEN_UP + "a later attempt was asked for"
        decision = await abort_attempt(backend, flush.step, flush.incarnation, earlier, reason=reason)
        if isinstance(decision, Manifest):
            return decision
    return None


async def what_stands(backend: Backend, incarnation: int, step: int, attempt: int) -> Manifest | Abort:
    """What was decided; an attempt that was left undecided is given up now."""
    return await abort_attempt(backend, step, incarnation, attempt, reason=GIVEN_UP + "left unfinished")


async def sweep(backend: Backend, flush: Flush, stagings: Iterable[Staging | None]) -> None:
    """Remove what an aborted attempt of ours has written: after a full disk the room is needed."""
    directory = names.attempt_dir(flush.step, flush.incarnation, flush.attempt)
    for staging in filter(None, set(stagings)):
        await staging.sweep(flush.step, flush.incarnation, flush.attempt)
    try:
        await backend.delete([item.name async for item in backend.list(directory)])
    except BackendError as error:
        log.warning("%s could not be removed: %s", directory, error)
