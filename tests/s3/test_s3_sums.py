"""Which checksum parts are sent with, and how the server proves that it checks it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from everstep.backends import s3writer
from everstep.backends.conformance import content, put
from everstep.backends.errors import Retryable
from everstep.backends.s3 import S3Backend
from everstep.backends.s3sums import (
    check_crc,
    check_etag,
    check_whole_crc,
    crc32,
    header_of,
    md5,
    whole_etag,
)

from .kit import Trouble, answer, opened, trouble
from .proxy import Fault, S3Proxy
from .server import S3Server
from .wire import Request

PART = 5 << 20
BYTES = 2 * PART + 12345
DATA = content(BYTES)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3writer, "PART_BYTES", PART)
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_FIRST", 0.01)


class Seen:
    """The parts that are sent: bytes, and which checksums they have when they leave."""

    def __init__(self, ignoring: bool = False) -> None:
        self.ignoring = ignoring
        self.parts: list[tuple[int, set[str]]] = []

    def __call__(self, request: Any) -> None:
        if self.ignoring:
            del request.headers["x-amz-checksum-crc32"]
        names = {name.lower() for name in request.headers}
        self.parts.append((len(request.data), names & {"content-md5", "x-amz-checksum-crc32"}))

    @property
    def probes(self) -> int:
        return sum(nbytes == 1 for nbytes, _ in self.parts)

    @property
    def kinds(self) -> set[str]:
        """Of what is sent in earnest."""
        return {name for nbytes, names in self.parts if nbytes > 1 for name in names}


def run(server: S3Server, story: Callable[[S3Backend], Awaitable[None]], *troubles: Trouble) -> None:
    async def main() -> None:
        backend = opened(server)
        trouble(backend, *troubles)
        try:
            await story(backend)
            assert await backend.leftovers() == []
        finally:
            await backend.close()

    asyncio.run(main())


async def two_uploads(backend: S3Backend) -> None:
    await asyncio.gather(put(backend, "a", DATA), put(backend, "b", DATA))
    assert await backend.read("a") == DATA and await backend.read("b") == DATA


def kinds_of(checks_crc32: bool) -> set[str]:
    """What parts have at a server that does so, or not."""
    return {"x-amz-checksum-crc32" if checks_crc32 else "content-md5"}


def test_a_server_proves_once_that_it_checks(s3_server: S3Server, checks_crc32: bool) -> None:
    seen = Seen()
    run(s3_server, two_uploads, Trouble("UploadPart", times=1000, changed=seen))
    assert seen.probes == 1 and seen.kinds == kinds_of(checks_crc32)


def test_a_server_that_looks_at_no_crc32_gets_an_md5(s3_server: S3Server) -> None:
    seen = Seen(ignoring=True)
    run(s3_server, two_uploads, Trouble("UploadPart", times=1000, changed=seen))
    assert seen.probes == 1 and seen.kinds == {"content-md5"}


@pytest.mark.parametrize(
    ("operation", "status", "code"),
    [
        ("CreateMultipartUpload", 501, "NotImplemented"),
        ("UploadPart", 400, "InvalidRequest"),
        ("UploadPart", 403, "AccessDenied"),
    ],
)
def test_other_refusals_prove_nothing(s3_server: S3Server, operation: str, status: int, code: str) -> None:
    seen = Seen()
    refused = Trouble(operation, given=lambda: answer(status, code))
    run(s3_server, two_uploads, refused, Trouble("UploadPart", times=1000, changed=seen))
    assert refused.met > 1 and seen.kinds == {"content-md5"}


@pytest.mark.parametrize(
    "wrong",
    [
        Trouble("CreateMultipartUpload", given=lambda: answer(503, "SlowDown")),
        Trouble("UploadPart", given=lambda: answer(500, "InternalError")),
        Trouble("UploadPart", lost=True),
        Trouble("AbortMultipartUpload", lost=True),
    ],
    ids=["slow", "error", "lost", "abort"],
)
def test_a_proof_is_repeated(s3_server: S3Server, wrong: Trouble, checks_crc32: bool) -> None:
    seen = Seen()
    run(s3_server, two_uploads, wrong, Trouble("UploadPart", times=1000, changed=seen))
    assert wrong.met > 1 and seen.kinds == kinds_of(checks_crc32)


@pytest.mark.parametrize("ignoring", [False, True], ids=["crc32", "md5"])
def test_a_bit_that_flips_is_refused(s3_server: S3Server, ignoring: bool, checks_crc32: bool) -> None:
    """Behind the client, on the way: the server says so, and gets that part once more."""

    def is_second(request: Request) -> bool:
        return request.operation == "UploadPart" and request.part == 2

    with S3Proxy(s3_server.endpoint, [Fault("flip_up", is_second)]) as proxy:

        async def main() -> None:
            backend = opened(s3_server, endpoint_url=proxy.endpoint)
            trouble(backend, Trouble("UploadPart", times=1000, changed=Seen(ignoring)))
            await put(backend, "a", DATA)
            assert await backend.read("a") == DATA
            await backend.close()

        asyncio.run(main())
        told = [one.status for one in proxy.requests if is_second(one)]
        sent = {name for one in proxy.requests if is_second(one) for name in one.headers}
    assert told == [400, 200]
    kinds = kinds_of(checks_crc32 and not ignoring)
    assert sent & {"content-md5", "x-amz-checksum-crc32"} == kinds


def test_an_object_of_other_parts_is_seen_by_its_crc32(s3_server: S3Server, checks_crc32: bool) -> None:
    """Its ETag is right (with encryption it says nothing)."""
    if not checks_crc32:
        pytest.skip("this server checks no crc32: parts have an MD5")
    parts = [DATA[start : start + PART] for start in range(0, BYTES, PART)]
    etag = whole_etag([md5(part).hex() for part in parts], f"{'0' * 32}-3")
    crc = f"{header_of(crc32(b''.join(map(crc32, reversed(parts)))))}-3"

    def told() -> Any:
        headers = {"content-length": str(BYTES), "etag": f'"{etag}"', "x-amz-checksum-crc32": crc}
        return answer(200, **headers)

    async def story(backend: S3Backend) -> None:
        with pytest.raises(Retryable, match="with crc32"):
            await put(backend, "a", DATA)
        await put(backend, "a", DATA)

    run(s3_server, story, Trouble("HeadObject", given=told))


def test_what_answers_say() -> None:
    data, other = b"data", b"other"
    etag = {"ETag": f'"{md5(data).hex()}"'}
    assert check_etag("a", etag, md5(data)) and check_etag("a", etag, None)
    for digest in (md5(data), None):
        with pytest.raises(Retryable, match=r"none|no checksum"):
            check_etag("a", {}, digest)
        assert not check_etag("a", {"ETag": '"of-another-kind"'}, digest)
    with pytest.raises(Retryable, match="for bytes with"):
        check_etag("a", etag, md5(other))
    encrypted = {**etag, "ServerSideEncryption": "aws:kms"}
    assert not check_etag("a", encrypted, md5(other)) and not check_etag("a", encrypted, None)

    sent = {"ChecksumCRC32": header_of(crc32(data))}
    check_crc("a", {}, sent)
    check_crc("a", sent, sent)
    check_crc("a", sent, {"ContentMD5": "..."})
    with pytest.raises(Retryable, match="for bytes with"):
        check_crc("a", {"ChecksumCRC32": header_of(crc32(other))}, sent)

    crcs = [crc32(data), crc32(other)]
    whole = {"ChecksumCRC32": f"{header_of(crc32(b''.join(crcs)))}-2"}
    for told in (
        whole,
        {},
        {"ChecksumCRC32": header_of(crc32(data + other))},
    ):  # of the bytes, on some servers
        check_whole_crc("a", told, crcs)
    for parts in (crcs[:1], crcs[::-1], [*crcs, crc32(b"")]):
        with pytest.raises(Retryable, match="not the one sent"):
            check_whole_crc("a", whole, parts)

    etags = [md5(data).hex(), md5(other).hex()]
    assert whole_etag(etags, f"{'0' * 32}-2") == f"{md5(md5(data) + md5(other)).hex()}-2"
    assert whole_etag(etags, "of-another-kind") is None
