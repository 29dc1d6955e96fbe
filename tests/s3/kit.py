"""Backends on the test server, and what goes wrong in their requests on command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from botocore.exceptions import ConnectionClosedError
from everstep.backends.open import open_backend
from everstep.backends.s3 import S3Backend
from everstep.backends.s3client import Line

from .server import S3Server


def opened(server: S3Server, url: str | None = None, **options: Any) -> S3Backend:
    """A backend of a place of its own, or of ``url``."""
    backend = open_backend(url or server.url(), options={**server.storage_options, **options})
    assert isinstance(backend, S3Backend)
    return backend


class Keeping:
    """Notes in memory."""

    def __init__(self, data: bytes | None = None) -> None:
        self.data = data
        self.saved = 0

    def load(self) -> bytes | None:
        return self.data

    async def save(self, data: bytes) -> None:
        self.data = data
        self.saved += 1

    @property
    def upload(self) -> str:
        return str(json.loads(self.data or b"")["upload"])


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self, *_: Any) -> bytes:
        return self._body


def answer(status: int, code: str = "", message: str = "as the test says", **headers: str) -> Any:
    """An answer as a server would give it."""
    body = b""
    if code:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return AioAWSResponse("http://test/", status, {"content-type": "application/xml", **headers}, _Raw(body))


@dataclass
class Trouble:
    """The requests of ``operation`` (botocore's name) number ``nth`` to ``nth + times - 1`` are answered with
    ``given``, without being sent; or are sent, and their answer is lost; or are sent as ``changed`` makes them,
    before they are signed."""

    operation: str
    nth: int = 1
    times: int = 1
    given: Callable[[], Any] | None = None
    lost: bool = False
    changed: Callable[[Any], None] | None = None
    met: int = 0

    def register(self, events: Any) -> None:
        def counted() -> bool:
            self.met += 1
            return self.nth <= self.met < self.nth + self.times

        def only_count(**_: Any) -> None:
            counted()

        def instead(**_: Any) -> Any:
            assert self.given is not None
            return self.given() if counted() else None

        def lose(**_: Any) -> None:
            if counted():
                raise ConnectionClosedError(endpoint_url="http://test/")

        def change(request: Any, **_: Any) -> None:
            assert self.changed is not None
            if counted():
                self.changed(request)

        if self.given is not None:
            events.register(f"before-send.s3.{self.operation}", instead)
        elif self.lost:
            events.register(f"before-parse.s3.{self.operation}", lose)
        elif self.changed is not None:
            events.register(f"before-sign.s3.{self.operation}", change)
        else:
            events.register(f"before-send.s3.{self.operation}", only_count)


def trouble(backend: S3Backend, *troubles: Trouble) -> None:
    """Have all clients that ``backend`` makes from now on meet ``troubles``."""
    made = backend.client._connect

    async def connect() -> Line:
        line = await made()
        for each in troubles:
            each.register(line.client.meta.events)
        return line

    backend.client._connect = connect  # type: ignore[method-assign]
