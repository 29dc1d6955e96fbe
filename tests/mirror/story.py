"""The story that the crash tests interrupt: two checkpoints are mirrored, the second one an attempt after a failed one.

On its own so that a child process can run it: ``python -m tests.mirror.story SOURCE TARGET``.
"""

from __future__ import annotations

import asyncio
import sys

from everstep.backends.api import Backend
from everstep.backends.files import LocalBackend
from everstep.store.catalog import list_steps, read_decision
from everstep.store.commit import abort_attempt
from everstep.store.copying import CopyReport, copy_run

from tests.store import store_kit

KEYS = frozenset({(1, 1), (2, 2)})
STATES = (frozenset[tuple[int, int]](), frozenset({(1, 1)}), KEYS)
"""What may be loaded at the target, at any moment."""


async def before(source: Backend) -> None:
    await store_kit.start_run(source)
    await store_kit.save(source, 1)
    await store_kit.adopt(source, 1, 1)
    await store_kit.flush(source, 2, 0, incarnation=2)
    await abort_attempt(source, 2, 2, 1, reason="rank 1 failed")
    await store_kit.save(source, 2, incarnation=2)
    assert {
        found.key for found in await list_steps(source) if await read_decision(source, found) is not None
    } == set(KEYS)


async def run(source: str, target: str) -> CopyReport:
    here, there = LocalBackend(source), LocalBackend(target)
    try:
        return await copy_run(here, there)
    finally:
        await here.close()
        await there.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2]))
    print("finished")
