"""What a backend does on an S3 server, each call as a story that a fault may strike anywhere, and what must hold after.

A :class:`Story` is prepared past the network, acted through it, and then looked at past it again. ``places_of`` a clean
run are the requests at which faults can strike; a :class:`Kind` is one sort of fault with what may be told of it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from everstep.backends import s3client
from everstep.backends.conformance import content
from everstep.backends.errors import BackendError, Conflict, NotFound, Permanent, Retryable, ShortRead
from everstep.backends.open import open_backend
from everstep.backends.s3 import PROBE_NAME, RANGE_BYTES, S3Backend
from everstep.backends.s3options import READ_S
from everstep.backends.s3writer import PART_BYTES

from . import proxy as network
from .proxy import Fault, S3Proxy, What
from .server import S3Server
from .wire import Answer, Request

FOREVER = 1 << 30

TRIES = 3
HASTY_S = 1.0
"""Of each request, by a hasty client, and how long it bears a server's silence."""

SMALL = content(40_000)
OLD = b"what was there before"
BIG_BYTES = 2 * PART_BYTES + 4321
"""Three parts."""

BIG = random.Random(3).randbytes(BIG_BYTES)
PIECE = 1 << 20
RANGE = ((1 << 20) + 17, RANGE_BYTES + (1 << 20))
"""Offset and bytes of the ranged read: two requests."""


class Truth:
    """The server past the network: objects and uploads below one prefix, by their names there."""

    def __init__(self, server: S3Server, url: str) -> None:
        self.url = url
        self._client = server.client()
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = prefix.rstrip("/") + "/"

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def get(self, name: str) -> bytes | None:
        try:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
            return body
        except self._client.exceptions.NoSuchKey:
            return None

    def names(self) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        keys = {item["Key"][len(self._prefix) :] for page in pages for item in page.get("Contents", ())}
        return keys - {PROBE_NAME}

    def start_upload(self, name: str) -> None:
        """Leave an upload with a part behind, as a killed client would."""
        where = {"Bucket": self._bucket, "Key": self._prefix + name}
        upload = self._client.create_multipart_upload(**where)["UploadId"]
        self._client.upload_part(**where, UploadId=upload, PartNumber=1, Body=SMALL)

    def uploads(self) -> list[str]:
        """Keys of unfinished uploads."""
        told = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix)
        assert not told.get("IsTruncated")
        return [upload["Key"] for upload in told.get("Uploads", ()) if upload["Key"].startswith(self._prefix)]


class Story:
    """One call of a backend."""

    name = ""

    def prepare(self, truth: Truth) -> None:
        """Before each run, on a prefix of its own."""

    async def act(self, backend: S3Backend) -> object:
        """Through the network. What it returns counts as told."""
        raise NotImplementedError

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        """What must hold whatever happened; ``told`` counts if ``error`` is None."""
        raise NotImplementedError


def whole_or(former: bytes | None, data: bytes, found: bytes | None, told: bool) -> None:
    """The object is as before, or whole; and whole if that was told."""
    assert found == data or (not told and found == former), (
        f"told: {told}, found {'nothing' if found is None else f'{len(found)} other bytes'}"
    )


class Put(Story):
    name = "put"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/small", OLD)

    async def act(self, backend: S3Backend) -> object:
        return await backend.write("d/small", SMALL)

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        whole_or(OLD, SMALL, truth.get("d/small"), error is None)
        assert truth.names() == {"d/small"}


class Create(Story):
    """Nobody else creates: a conflict would be a lie."""

    name = "create"

    async def act(self, backend: S3Backend) -> object:
        return await backend.create("d/made", SMALL)

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        whole_or(None, SMALL, truth.get("d/made"), error is None)
        assert not isinstance(error, Conflict)


class CreateTaken(Story):
    """Somebody else was first: what he made stays, and success would be a lie."""

    name = "create-taken"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/made", OLD)

    async def act(self, backend: S3Backend) -> object:
        try:
            await backend.create("d/made", SMALL)
        except Conflict:
            return "conflict"
        return "created"

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert truth.get("d/made") == OLD
        assert error is not None or told == "conflict"


class Upload(Story):
    """An image in several parts."""

    name = "upload"

    async def act(self, backend: S3Backend) -> object:
        writer = await backend.open_writer("d/big", BIG_BYTES)
        try:
            for start in range(0, BIG_BYTES, PIECE):
                await writer.write(memoryview(BIG)[start : start + PIECE])
            await writer.commit()
        finally:
            await writer.abort()
        return None

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        whole_or(None, BIG, truth.get("d/big"), error is None)
        assert truth.names() <= {"d/big"}


class Abort(Story):
    """An image that is given up after two parts."""

    name = "abort"

    async def act(self, backend: S3Backend) -> object:
        writer = await backend.open_writer("d/big", BIG_BYTES)
        try:
            await writer.write(memoryview(BIG)[: 2 * PART_BYTES + 1])
            while writer.parts_sent < 2:
                await asyncio.sleep(0.001)
                await writer.write(memoryview(b""))  # raises what a part has met
        finally:
            await writer.abort()
        return None

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert truth.names() == set()


class Read(Story):
    name = "read"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/small", SMALL)

    async def act(self, backend: S3Backend) -> object:
        return await backend.read("d/small")

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert error is not None or told == SMALL
        assert not isinstance(error, NotFound)


class ReadInto(Story):
    name = "ranged-read"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/big", BIG)

    async def act(self, backend: S3Backend) -> object:
        offset, nbytes = RANGE
        room = bytearray(nbytes)
        await backend.read_into("d/big", offset, memoryview(room))
        return room

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert error is not None or told == BIG[RANGE[0] : RANGE[0] + RANGE[1]]
        assert not isinstance(error, NotFound)


class Size(Story):
    name = "size"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/small", SMALL)

    async def act(self, backend: S3Backend) -> object:
        return await backend.size("d/small")

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert error is not None or told == len(SMALL)
        assert not isinstance(error, NotFound)


class List(Story):
    name = "list"
    objects = {f"d/{index % 3}/{index}": index for index in range(20)}

    def prepare(self, truth: Truth) -> None:
        for name, nbytes in self.objects.items():
            truth.put(name, bytes(nbytes))

    async def act(self, backend: S3Backend) -> object:
        found = {item.name: item.nbytes async for item in backend.list("d")}
        return found, sorted(await backend.list_names("d"))

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert error is not None or told == (self.objects, ["0", "1", "2"])


class Delete(Story):
    name = "delete"
    doomed = tuple(f"d/{index}" for index in range(5))

    def prepare(self, truth: Truth) -> None:
        for name in (*self.doomed, "d/keep"):
            truth.put(name, SMALL)

    async def act(self, backend: S3Backend) -> object:
        return await backend.delete([*self.doomed, "d/absent"])

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        left = truth.names() - {"d/keep"}
        assert truth.get("d/keep") == SMALL
        assert left <= set(self.doomed) and (error is not None or not left), left


class Leftovers(Story):
    """What a killed client left behind is found and removed; finished objects stay."""

    name = "leftovers"

    def prepare(self, truth: Truth) -> None:
        truth.put("d/done", SMALL)
        truth.start_upload("d/a")
        truth.start_upload("d/b")

    async def act(self, backend: S3Backend) -> object:
        await backend.discard_leftovers(await backend.leftovers("d"))
        return None

    def check(self, truth: Truth, told: object, error: BaseException | None) -> None:
        assert truth.get("d/done") == SMALL
        assert error is not None or truth.uploads() == []


STORIES: dict[str, Story] = {
    story.name: story
    for story in (
        *(Put(), Create(), CreateTaken(), Upload(), Abort()),
        *(Read(), ReadInto(), Size(), List(), Delete(), Leftovers()),
    )
}


@dataclass(frozen=True)
class Place:
    """One request of a story: the ``nth`` of its operation, at its key or listed prefix below the root, and part."""

    operation: str
    where: str
    part: int | None
    nth: int
    nbytes: int
    answer_nbytes: int

    def matches(self, request: Request) -> bool:
        found = request.key or request.query.get("prefix", "")
        return (request.operation, request.part) == (self.operation, self.part) and found.endswith(self.where)

    @property
    def shape(self) -> tuple[str, str]:
        """Equal for requests of the same sort."""
        return self.operation, re.sub(r"[0-9a-f]{32}|\d+", "0", self.where)

    def __str__(self) -> str:
        return f"{self.operation} {self.where}{f' part {self.part}' if self.part else ''} #{self.nth}"


def places_of(requests: list[Request], url: str) -> list[Place]:
    """The places of a clean run at ``url``, in order."""
    root = url.removeprefix("s3://").partition("/")[2]
    met: Counter[tuple[str, str, int | None]] = Counter()
    places = []
    for request in requests:
        where = (request.key or request.query.get("prefix", "")).removeprefix(root)
        which = request.operation, where, request.part
        met[which] += 1
        places.append(Place(*which, met[which], request.nbytes, request.answer_nbytes))
    return places


Errors = tuple[type[BackendError], ...]
Told = Answer | Callable[[Request, bytes], Answer]


@dataclass(frozen=True)
class Kind:
    """One sort of fault: ``once`` lists what may be told if it happens once (beside success), ``always`` what must be
    told if it goes on (empty: success is right). ``fits`` says at which places it can strike; ``harms``: it cannot go
    on without being told of."""

    name: str
    what: What
    answer: Told = network.INTERNAL_ERROR
    once: Errors = (Retryable,)
    always: Errors = (Retryable,)
    fits: Callable[[Place], bool] = lambda place: True
    harms: bool = True

    def fault(self, place: Place, *, goes_on: bool = False) -> Fault:
        times = FOREVER if goes_on else 1
        return Fault(self.what, place.matches, place.nth, times, self.answer)


COMPLETES = ("CompleteMultipartUpload", "CopyObject", "UploadPartCopy")


def _sends(place: Place) -> bool:
    return place.nbytes > 1


def _is_told(place: Place) -> bool:
    return place.answer_nbytes > 1


def _has_code(place: Place) -> bool:
    """An answer to HEAD has no body that could say what went wrong."""
    return not place.operation.startswith("Head")


def _completes(place: Place) -> bool:
    return place.operation in COMPLETES


def _flips_down(place: Place) -> bool:
    """Not where data passes: what comes down is proved by hashes of chunks, a layer above."""
    return _is_told(place) and place.operation not in ("GetObject", "ListObjectsV2", "ListMultipartUploads")


_PERMANENT: Errors = (Permanent,)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("reset", "reset"),
        Kind("cut-up", "cut_up", fits=_sends),
        Kind("lost", "lose"),
        Kind("stall", "stall"),
        Kind("stall-answer", "stall_answer"),
        Kind("stall-body", "stall_body", fits=_is_told),
        Kind(
            "cut-down", "cut_down", once=(Retryable, ShortRead), always=(Retryable, ShortRead), fits=_is_told
        ),
        Kind("500", "answer"),
        Kind("503", "answer", network.SLOW_DOWN),
        Kind("500-done", "replace"),
        Kind("403", "answer", network.ACCESS_DENIED, _PERMANENT, _PERMANENT),
        Kind("no-bucket", "answer", network.NO_SUCH_BUCKET, _PERMANENT, _PERMANENT, _has_code),
        Kind("expired", "answer", network.EXPIRED_TOKEN, (), _PERMANENT, _has_code),
        Kind("200-error", "answer", network.OK_WITH_ERROR, fits=_completes),
        Kind("200-error-done", "replace", network.OK_WITH_ERROR, fits=_completes),
        Kind(
            "200-deletes",
            "answer",
            network.deletes_refused,
            fits=lambda place: place.operation == "DeleteObjects",
        ),
        Kind("twice", "twice", always=(), harms=False),
        Kind("flip-up", "flip_up", always=(Retryable, Permanent), fits=_sends, harms=False),
        Kind("flip-down", "flip_down", always=(Retryable, Permanent), fits=_flips_down, harms=False),
    )
}


async def outcome(act: Callable[[], Awaitable[object]]) -> tuple[object, BackendError | None]:
    """What was told. Whatever is no backend's error passes."""
    try:
        return await act(), None
    except BackendError as error:
        return None, error


class Siblings:
    """Backends of many roots that share one client, so that its making, which takes longer than most stories, is paid
    for once, and so that what a fault leaves behind in a client is met by the next story."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._first: S3Backend | None = None

    def at(self, url: str, patience_s: float = READ_S) -> S3Backend:
        """``patience_s``: after so many seconds of silence the client gives a request up. A short one is for a network
        with a fault: else a server that is slow, for others are at work beside it, gets requests twice."""
        made = open_backend(url, shared=True, options=self._options)
        assert isinstance(made, S3Backend)
        self._first = self._first or made
        made.client = self._first.client
        made.client.stall_s = patience_s
        return made

    async def close(self) -> None:
        if self._first is not None:
            await self._first.close()


def patience_s(proxy: S3Proxy) -> float:
    """That suits its network."""
    return HASTY_S if proxy.faults else READ_S


def hasty(patch: pytest.MonkeyPatch) -> None:
    """Clients come back at once, and give up earlier, than they do in earnest."""
    patch.setattr(s3client, "WAIT_S_FIRST", 0.01)
    patch.setattr(s3client, "WAIT_S_MAX", 0.05)
    patch.setattr(s3client, "RENEW_S", 0.0)
    patch.setitem(s3client.S3Client.do.__kwdefaults__, "tries_max", TRIES)
