from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.facade.conftest import forked, node

from .server import S3Server, running_server

__all__ = ["forked", "node"]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of a session; each test takes a ``url()`` of its own."""
    with running_server(tmp_path_factory.mktemp("s3-server")) as server:
        yield server
