"""HTTP/1.1 as a proxy before an S3 server needs it: requests, answers, bodies, and which call of S3 a request is."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

READ_BYTES = 64 << 10
LINE_BYTES_MAX = 64 << 10
"""Of a request line or header; also the limit that streams are opened with."""

HEADERS_MAX = 200
BODY_BYTES_MAX = 64 << 20
"""Of a body that is kept as a whole, for a fault."""

SECRET_HEADERS = frozenset({"authorization", "x-amz-security-token", "cookie"})
SECRET_QUERIES = frozenset({"x-amz-credential", "x-amz-security-token", "x-amz-signature"})

Headers = list[tuple[str, str]]
"""Names as sent, in order."""


def header(headers: Headers, name: str, default: str = "") -> str:
    return next((value for key, value in headers if key.lower() == name), default)


def without(headers: Headers, *names: str) -> Headers:
    return [(key, value) for key, value in headers if key.lower() not in names]


@dataclass(eq=False)
class Request:
    """One request as the proxy saw it; secrets are left out. ``operation`` is the call's name in S3's own words."""

    number: int
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    operation: str = ""
    at_s: float = field(default_factory=time.monotonic)
    """When it began."""
    nbytes: int = 0
    """Of the body, so far as it came."""
    status: int | None = None
    """What the client was answered; None: nothing."""
    answer_nbytes: int = 0
    """Of the body that the client was to be sent."""
    fault: str = ""
    """What struck it."""
    access_key: str = ""
    """Whose it is; no secret."""

    @property
    def part(self) -> int | None:
        number = self.query.get("partNumber")
        return int(number) if number else None

    @property
    def is_part(self) -> bool:
        """A part of what is stored: not the byte by which a server proves what it checks."""
        return self.operation == "UploadPart" and self.headers.get("content-length") != "1"

    @property
    def upload(self) -> str:
        return self.query.get("uploadId", "")

    def __str__(self) -> str:
        part = f" part {self.part}" if self.part else ""
        return (
            f"{self.number}: {self.operation} {self.key}{part} {self.nbytes} B -> {self.status} {self.fault}"
        )


@dataclass(frozen=True)
class Answer:
    """What a client is told."""

    status: int
    reason: str = ""
    headers: Headers = field(default_factory=list)
    body: bytes = b""


def error_answer(status: int, code: str, *headers: tuple[str, str]) -> Answer:
    """An answer with S3's error document."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>by the proxy</Message></Error>'
    return Answer(status, code, [("Content-Type", "application/xml"), *headers], text.encode())


def operation_of(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """The call's name in S3's own words, of those that a storage backend makes."""
    copies = "x-amz-copy-source" in headers
    if key:
        uploads = {
            "POST": "CompleteMultipartUpload",
            "PUT": "UploadPartCopy" if copies else "UploadPart",
            "DELETE": "AbortMultipartUpload",
            "GET": "ListParts",
        }
        if "uploads" in query:
            return "CreateMultipartUpload"
        if "uploadId" in query:
            return uploads.get(method, method)
        if "attributes" in query:
            return "GetObjectAttributes"
        objects = {"PUT": "CopyObject" if copies else "PutObject", "DELETE": "DeleteObject"}
        return objects.get(method, f"{method.capitalize()}Object")
    if "uploads" in query:
        return "ListMultipartUploads"
    if "delete" in query:
        return "DeleteObjects"
    if method == "GET":
        return "ListObjectsV2" if "list-type" in query else "ListObjects"
    return f"{'Create' if method == 'PUT' else method.capitalize()}Bucket"


@dataclass
class Head:
    """First line and headers."""

    first: str
    headers: Headers

    def request(self, number: int) -> Request:
        method, target, _ = self.first.split(" ", 2)
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path.lstrip("/")).partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers if name.lower() not in SECRET_HEADERS}
        shown = {name: value for name, value in query.items() if name.lower() not in SECRET_QUERIES}
        operation = operation_of(method, key, query, headers)
        signer = re.search(r"Credential=([^/,\s]+)/", header(self.headers, "authorization"))
        access_key = signer[1] if signer else ""
        return Request(number, method, bucket, key, shown, headers, operation, access_key=access_key)

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    @property
    def reason(self) -> str:
        return [*self.first.split(" ", 2), "", ""][2]

    @property
    def is_chunked(self) -> bool:
        return "chunked" in header(self.headers, "transfer-encoding").lower()

    @property
    def nbytes(self) -> int | None:
        """What the length header says."""
        text = header(self.headers, "content-length")
        return int(text) if text else None

    def encode(self) -> bytes:
        return encode_head(self.first, self.headers)


def encode_head(first: str, headers: Headers) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """None where the connection ends before the first line."""
    first = await reader.readline()
    if not first.endswith(b"\n"):
        return None
    headers: Headers = []
    while len(headers) <= HEADERS_MAX:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("ended within the headers")
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            return Head(first.decode("latin-1").rstrip("\r\n"), headers)
        name, _, value = text.partition(":")
        headers.append((name, value.strip()))
    raise ConnectionError("too many headers")


async def pieces_of(reader: asyncio.StreamReader, nbytes: int) -> AsyncIterator[bytes]:
    """``nbytes`` as they come. Raises ConnectionError where they end before."""
    left = nbytes
    while left:
        piece = await reader.read(min(left, READ_BYTES))
        if not piece:
            raise ConnectionError(f"ended {left} bytes before its length")
        left -= len(piece)
        yield piece


async def body_pieces(
    reader: asyncio.StreamReader, head: Head, *, to_the_end: bool = False
) -> AsyncIterator[bytes]:
    """The body, without its framing; ``to_the_end``: of a body without a length all that comes counts."""
    if head.is_chunked:
        while nbytes := int((await reader.readline()).partition(b";")[0], 16):
            async for piece in pieces_of(reader, nbytes):
                yield piece
            await reader.readline()
        while (await reader.readline()).rstrip():
            pass
    elif head.nbytes is not None:
        async for piece in pieces_of(reader, head.nbytes):
            yield piece
    elif to_the_end:
        while piece := await reader.read(READ_BYTES):
            yield piece
