"""Repair of a run in a directory, beside others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everstep.backends.files import LocalBackend
from everstep.store.repair_run import Mended, check_and_mend


def mend(root: Path, *others: Path) -> Mended:
    async def go() -> Mended:
        backend, beside = LocalBackend(root), [LocalBackend(other) for other in others]
        try:
            return await check_and_mend(backend, others=beside)
        finally:
            for one in (backend, *beside):
                await one.close()

    return asyncio.run(go())
