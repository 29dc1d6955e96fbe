"""What all tests have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3.server import S3Server


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: collections that tests ask for, or cause, need not go through a million objects of it
    each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of a session; each test takes a ``url()`` of its own."""
    from tests.s3.server import running_server  # here, since most tests live without it

    with running_server(tmp_path_factory.mktemp("s3-server")) as server:
        yield server
