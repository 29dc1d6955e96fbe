"""The run's root, as the agent has it: opened anew where a trainer comes with other options or credentials."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.backends.limit import Gate, Limit, RateLimited
from everstep.backends.open import is_local, open_backend
from everstep.backends.wrap import Wrapper

from .values import AgentSettings, storage_environment

log = logging.getLogger("everstep.agent")

OpenBackend = Callable[..., Backend]
"""By url and options of the storage, and the ``gate=`` that its traffic passes, if it has one."""

FORMER_MAX = 1
"""Backends that were replaced, and may still be at work; older ones are closed."""


def open_root(url: str, options: Mapping[str, Any], gate: Gate | None = None) -> Backend:
    """The run's root, or a further tier: every node sees the same files there. If it is deleted under the agent, what
    the agent writes late must not appear in a run that is made anew at the same place."""
    return open_backend(url, shared=True, bound=True, options=options, gate=gate)


def take_environment(settings: AgentSettings) -> bool:
    """Have this process read what the trainers' storage reads in theirs; whether that is something else now."""
    mine = storage_environment(settings.root, *[tier.url for tier in settings.tiers])
    if not settings.environment or settings.environment == mine:
        return False
    for name in mine:
        if name not in settings.environment:
            del os.environ[name]
    os.environ.update(settings.environment)
    return True


def open_gated(open_backend: OpenBackend, url: str, options: Mapping[str, Any], limit: Limit) -> Backend:
    """The backend at ``url``, whose bytes pass ``limit``: on the wire, or as they are written to local files."""
    if is_local(url):
        return RateLimited(open_backend(url, options), limit)
    return open_backend(url, options, gate=limit)


class Root(Wrapper):
    """The backend at ``url``. Whatever has this object uses the newest credentials."""

    def __init__(
        self, url: str, options: Mapping[str, Any], open_backend: OpenBackend, limit: Limit | None = None
    ) -> None:
        if limit is not None:
            open_backend = functools.partial(open_gated, open_backend, limit=limit)
        super().__init__(open_backend(url, options))
        self._open = open_backend
        self._at = url
        self._options = options
        self._former: list[Backend] = []

    async def renew(self, options: Mapping[str, Any], *, anew: bool) -> None:
        """Go on with these options; ``anew``: the environment was changed. Work that is under way ends with the old
        ones."""
        if options == self._options and not anew:
            return
        log.info("other options for the storage; opening it anew")
        fresh = self._open(self._at, options)
        self._former.append(self.inner)
        self.inner, self._options = fresh, options
        while len(self._former) > FORMER_MAX:
            await _close(self._former.pop(0))

    async def close(self) -> None:
        await asyncio.gather(*map(_close, self._former))
        await self.inner.close()


async def _close(backend: Backend) -> None:
    try:
        await backend.close()
    except BackendError as error:
        log.warning("a former backend could not be closed: %s", error)
