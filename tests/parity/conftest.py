"""A private directory in shared memory; simulated nodes as in the tests of the exchange."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exchange.conftest import job, nodes, nothing_left, root

__all__ = ["job", "nodes", "nothing_left", "root"]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-parity-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
