"""Mirroring as an agent does it, and looking at what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everstep.backends.api import Backend, Capabilities
from everstep.backends.errors import Permanent
from everstep.backends.files import LocalBackend
from everstep.backends.wrap import Wrapper
from everstep.format.manifest import Abort, Manifest
from everstep.store.findings import Finding, Kind
from everstep.store.fsck import check
from everstep.store.mirror import conclude, copy_records, mirror_rank

from tests.store import store_kit

POOL = ThreadPoolExecutor(2)
OURS = ("run.json", "incarnations", "layouts", "checkpoints")


def on_two(tmp_path: Path, work: Callable[[LocalBackend, LocalBackend], Awaitable[None]]) -> None:
    """``work`` with a run without checkpoints at the first backend, and nothing at the second."""

    async def go() -> None:
        source, target = LocalBackend(tmp_path / "source"), LocalBackend(tmp_path / "target", shared=True)
        try:
            await store_kit.start_run(source)
            await work(source, target)
        finally:
            await source.close()
            await target.close()

    asyncio.run(go())


async def send(
    source: Backend, target: Backend, manifest: Manifest, ranks: Sequence[int] | None = None
) -> int:
    """The ranks' shares, but no decision; the bytes sent."""
    run = await copy_records(source, target)
    return sum(
        [
            await mirror_rank(source, target, manifest, rank, run=run, pool=POOL)
            for rank in (range(manifest.world) if ranks is None else ranks)
        ]
    )


async def mirror(source: Backend, target: Backend, manifest: Manifest) -> Manifest | Abort | None:
    await send(source, target, manifest)
    return await conclude(source, target, manifest)


def objects(root: Path) -> dict[str, bytes]:
    """The bytes of all objects of a run, by name; temporaries left out."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.relative_to(root).parts[0] in OURS
    }


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".tmp-*") if path.is_file()]


async def findings(backend: Backend) -> list[Finding]:
    """What fsck says, but for temporaries."""
    found = [finding async for finding in check(backend, decision_wait_s=0)]
    return [finding for finding in found if finding.kind is not Kind.TEMPORARY]


class WithoutCreate(Wrapper):
    """A store that cannot create atomically, and finds that out when it is asked to."""

    tried = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(atomic_create=not self.tried, shared=True)

    async def create(self, name: str, data: bytes) -> None:
        self.tried = True
        raise Permanent(name, "no atomic create here")
