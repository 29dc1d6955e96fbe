"""The conformance suite on local files, and on each wrapper around them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.backends.api import Backend
from everstep.backends.conformance import BackendConformance
from everstep.backends.count import Counting
from everstep.backends.faults import Faulty
from everstep.backends.files import LocalBackend
from everstep.backends.limit import RateLimited
from everstep.backends.open import open_backend
from everstep.backends.retry import Retrying


class TestLocal(BackendConformance):
    def make(self, place: Path) -> Backend:
        return LocalBackend(place)


class TestOpened(BackendConformance):
    def make(self, place: Path) -> Backend:
        return open_backend(place.as_uri(), threads=1)


class TestMemoryFileSystem(BackendConformance):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made)

    def make(self, place: Path) -> Backend:
        return LocalBackend(place)


class TestWrapped(BackendConformance):
    def make(self, place: Path) -> Backend:
        return Retrying(RateLimited(Counting(Faulty(LocalBackend(place))), 1e9))
