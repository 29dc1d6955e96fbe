"""The conformance suite on a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.backends.api import Backend
from everstep.backends.conformance import BackendConformance
from everstep.backends.fsspecfs import FsspecBackend
from everstep.backends.open import open_backend

from .server import S3Server


class TestS3(BackendConformance):
    @pytest.fixture(autouse=True)
    def server(self, s3_server: S3Server) -> None:
        self.s3 = s3_server

    def make(self, place: Path) -> Backend:
        return open_backend(self.s3.url("/".join(place.parts[-2:])), options=self.s3.storage_options)


class TestThroughFsspec(TestS3):
    """The adapter around a file system that does things asynchronously."""

    def make(self, place: Path) -> Backend:
        url = self.s3.url("/".join(("fsspec", *place.parts[-2:])))
        return FsspecBackend(url, self.s3.storage_options)


class TestOddRoot(TestS3):
    """Any characters in the prefix."""

    def make(self, place: Path) -> Backend:
        url = self.s3.url("/".join(place.parts[-2:])) + "/a b+c%20d=\u00e9\u4e2d&;'()!"
        return open_backend(url, options=self.s3.storage_options)
