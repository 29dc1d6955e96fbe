"""Other file systems through fsspec: the conformance suite, and what it cannot see."""

from __future__ import annotations

from pathlib import Path

from everstep.backends.api import Backend
from everstep.backends.conformance import BackendConformance
from everstep.backends.fsspecfs import FsspecBackend
from everstep.backends.open import open_backend


class TestMemory(BackendConformance):
    def make(self, place: Path) -> Backend:
        return open_backend(f"memory:/{place}")


class TestLocal(BackendConformance):
    def make(self, place: Path) -> Backend:
        return FsspecBackend(f"local://{place}")
