"""The run's root, as the agent has it: opened anew where a trainer comes with other options or credentials."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.backends.open import open_backend
from everstep.backends.wrap import Wrapper

from .values import AgentSettings, storage_environment

log = logging.getLogger("everstep.agent")

OpenBackend = Callable[[str, Mapping[str, Any]], Backend]
"""By url and options of the storage."""

FORMER_MAX = 1
"""Backends that were replaced, and may still be at work; older ones are closed."""


def open_root(url: str, options: Mapping[str, Any]) -> Backend:
    """The run's root: every node sees the same files there. If it is deleted under the agent, what the agent writes
    late must not appear in a run that is made anew at the same place."""
    return open_backend(url, shared=True, bound=True, options=options)


class Root(Wrapper):
    """The backend of ``settings``. Whatever has this object uses the newest credentials."""

    def __init__(self, settings: AgentSettings, open_backend: OpenBackend) -> None:
        super().__init__(open_backend(settings.root, settings.options))
        self._open = open_backend
        self._settings = settings
        self._former: list[Backend] = []

    async def renew(self, settings: AgentSettings) -> None:
        """Go on with the options and the environment of ``settings``, whose root is the same. Work that is under way
        ends with the old ones."""
        same_environment = not settings.environment or settings.environment == storage_environment(
            settings.root
        )
        if settings.options == self._settings.options and same_environment:
            return
        log.info("other options for the storage; opening it anew")
        for name in storage_environment(settings.root):
            if name not in settings.environment:
                del os.environ[name]
        os.environ.update(settings.environment)
        fresh = self._open(settings.root, settings.options)
        self._former.append(self.inner)
        self.inner, self._settings = fresh, settings
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
