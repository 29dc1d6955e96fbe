"""A private directory in shared memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-parity-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
