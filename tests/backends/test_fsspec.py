"""Other file systems through fsspec: the conformance suite, and what it cannot see."""

from __future__ import annotations

import asyncio
import os
import traceback
from pathlib import Path

import pytest
from everstep.backends.api import Backend
from everstep.backends.conformance import BackendConformance, content
from everstep.backends.errors import BackendError, Conflict, NotFound, Permanent, Retryable
from everstep.backends.fsspecerrors import from_fs_error
from everstep.backends.fsspecfs import FsspecBackend
from everstep.backends.open import open_backend


class TestMemory(BackendConformance):
    def make(self, place: Path) -> Backend:
        return open_backend(f"memory:/{place}")


class TestLocal(BackendConformance):
    def make(self, place: Path) -> Backend:
        return FsspecBackend(f"local://{place}")


class _Answered(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("words of the server")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("a"), NotFound),
        (FileExistsError("a"), Conflict),
        (PermissionError(13, "denied"), Permanent),
        (NotImplementedError(), Permanent),
        (ConnectionResetError(), Retryable),
        (asyncio.TimeoutError(), Retryable),
        (_Answered(503), Retryable),
        (_Answered(429), Retryable),
        (_Answered(403), Permanent),
        (_Answered(412), Conflict),
        (ValueError("odd"), Permanent),
    ],
)
def test_errors(error: Exception, kind: type[BackendError]) -> None:
    assert type(from_fs_error(error, "a")) is kind


def test_a_gate_and_a_forked_child(tmp_path: Path) -> None:
    class Counter:
        taken = 0

        async def take(self, nbytes: int) -> None:
            self.taken += nbytes

    gate = Counter()
    backend = FsspecBackend(f"local://{tmp_path}", gate=gate)
    data = content(200_000)
    asyncio.run(backend.write("a/b", data))
    assert asyncio.run(backend.read("a/b")) == data
    assert gate.taken == 2 * len(data)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            asyncio.run(backend.write("a/c", asyncio.run(backend.read("a/b"))))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert asyncio.run(backend.read("a/c")) == data
    asyncio.run(backend.close())
    with pytest.raises(Permanent, match="closed"):
        asyncio.run(backend.read("a/b"))
