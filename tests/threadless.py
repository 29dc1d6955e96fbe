"""Files that are read and written at once. On their threads, which tests/backends and the agents' tests are about, the
way there and back takes longer than what is done: too long for what looks at hundreds of harmed runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from everstep.backends.files import LocalBackend


@pytest.fixture(scope="module", autouse=True)
def threadless() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBackend, "_run", _at_once)
        yield


async def _at_once(backend: LocalBackend, job: Callable[[], Any]) -> Any:
    backend._executor()  # refuses after the end, and in a forked child
    await asyncio.sleep(0)  # others of the loop have their turn, as ever
    return job()
