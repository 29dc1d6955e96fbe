"""What a load asks a store for: nothing twice, and side by side what does not hang on one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import everstep
import torch
from everstep.backends.api import Names
from everstep.backends.open import open_backend
from everstep.backends.wrap import Wrapper
from everstep.discovery import Proposals
from everstep.format import names
from everstep.loading import Loader
from everstep.ranks import Ranks
from everstep.reading import as_values
from everstep.store.blocking import run_blocking

TIMEOUT_S = 20.0
MANIFEST = names.decision(2, 2, 1)


class Asked(Wrapper):
    """Notes what is read and listed. With ``meet``, a listing is answered once so many have been asked for."""

    def __init__(self, root: Path, *, meet: int = 1) -> None:
        super().__init__(open_backend(str(root)))
        self.reads: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self._meet = meet
        self._met = asyncio.Event()

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        self.reads[name] += 1
        return await self.inner.read(name, nbytes_max)

    async def list_names(self, prefix: str = "") -> Names:
        self.lists[prefix] += 1
        if len(self.lists) >= self._meet:
            self._met.set()
        await asyncio.wait_for(self._met.wait(), TIMEOUT_S)
        return await self.inner.list_names(prefix)


def _run(directory: Path) -> Path:
    for step in (1, 2):
        everstep.save(directory / "run", step, {"w": torch.full((1000,), float(step))})
    return directory / "run"


def test_nothing_is_read_or_listed_twice(tmp_path: Path) -> None:
    backend = Asked(_run(tmp_path))
    found = Loader(backend, Ranks.alone(), [], timeout_s=TIMEOUT_S).load(as_values(0, None), step=None)
    assert found is not None and found[1].values["w"][0] == 2
    assert backend.reads[MANIFEST] == 1
    assert set(backend.reads.values()) == {1}, backend.reads
    assert set(backend.lists.values()) == {1}, backend.lists


def test_records_and_steps_are_listed_side_by_side(tmp_path: Path) -> None:
    root, tier = Asked(_run(tmp_path / "root"), meet=2), Asked(_run(tmp_path / "tier"))
    found = Proposals([root, tier], {}, step=None, writes=False).next()
    assert found is not None and found.key == (2, 2) and found.places == (0, 1)
    assert set(root.lists) >= {names.INCARNATIONS, names.CHECKPOINTS}


def test_a_manifest_is_believed_once(tmp_path: Path) -> None:
    """Whoever opens the checkpoint again looks again: meanwhile it may have been removed."""
    backend = Asked(_run(tmp_path))
    loader = Loader(backend, Ranks.alone(), [], timeout_s=TIMEOUT_S)
    opened = []

    def read(sources, phases):  # type: ignore[no-untyped-def]
        opened.append(backend.reads[MANIFEST])
        sources()
        opened.append(backend.reads[MANIFEST])
        return as_values(0, None)(sources, phases)

    assert loader.load(read, step=None) is not None
    assert opened == [1, 1] and backend.reads[MANIFEST] == 2
    run_blocking(backend.close())
