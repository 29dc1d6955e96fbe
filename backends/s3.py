"""Object stores that speak S3."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from .aligned import as_bytes
from .api import Capabilities, Item, Items, Names, Notes, check_name, is_name
from .errors import BackendError, Conflict, NotFound, Permanent, Retryable, ShortRead
from .limit import Gate
from .localfs import check_prefix
from .parallel import each
from .s3body import Body, Flow, receive
from .s3client import Attempt, Line, S3Client
from .s3errors import Denied
from .s3sums import check_etag, checks_crc32, etag_of, header_of, md5
from .s3writer import PART_BYTES, S3Writer

log = logging.getLogger("everstep.backends")

T = TypeVar("T")

RANGE_BYTES = 8 << 20
"""Bytes of one ranged read; larger reads are so many side by side."""

GATED_RANGE_BYTES = 1 << 20
"""The same where there is a gate, which all of a range passes at once, before it is asked for."""

RANGES_IN_FLIGHT = 8
"""Ranged reads of one call at once."""

DELETE_NAMES_MAX = 1000
"""Names of one deletion, by the protocol."""

DELETE_TRIES_MAX = 8
"""Requests to delete the same names, where the server refuses single ones for the moment."""

ABORTS_MAX = 8
"""Abortions of one upload: a part in flight may come in behind an abortion, which then has to be repeated."""

UPLOADS_PARALLEL = 8
"""Uploads that are looked at, or aborted, side by side."""

ABORT_S = 20.0
"""Seconds that a failed upload's abortion may take; what then stays is a leftover."""

PROBE_NAME = ".probe"
"""An object of one byte in each root that is created into: no proper name, so it is never listed. Whether a conditional
put of it is refused tells whether the server knows conditional puts."""

Answers = list[dict[str, Any]]
Parts = list[tuple[int, int, str]]
"""Of an upload's parts: number, bytes, checksum."""

_UPLOAD = "?uploadId="
"""Between an object's name and an upload's id, in the name of a leftover."""

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Backend:
    """Objects of ``bucket`` whose keys begin with ``prefix`` and "/" (with nothing, for "").

    Every call may be repeated within, so wrapping it to be repeated is needless. A name that is created twice
    is refused by the server (``If-None-Match``), which is proved before the first :meth:`create`: on a server that
    does not know that, ``create`` raises Permanent and ``capabilities.atomic_create`` becomes False.
    It may be used from several event loops, and in forked children, which make connections of their own."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        url: str | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.url = url or f"s3://{bucket}/{prefix}".rstrip("/")
        self.capabilities = Capabilities(atomic_create=True, shared=True, flat=True)
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self.client = S3Client(self.url, options or {}, gate)
        self._proved = False
        self._crc32: bool | None = None

    # -- reading ---------------------------------------------------------------------------------------

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        key = self._key(name)

        async def attempt(line: Line, flow: Flow) -> bytes:
            answer = await line.call("get_object", Bucket=self._bucket, Key=key)
            nbytes = int(answer["ContentLength"])
            if nbytes > nbytes_max:
                answer["Body"].close()
                raise Permanent(name, f"{nbytes} bytes, which is more than the {nbytes_max} expected at most")
            data = bytearray(nbytes)
            await receive(name, answer["Body"], memoryview(data), flow)
            return bytes(data)

        return await self._get(name, attempt)

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        key = self._key(name)
        data = as_bytes(view, name)
        if data.readonly:
            raise Permanent(name, "cannot be read into read-only memory")
        if offset < 0:
            raise Permanent(name, f"offset {offset}")
        if not len(data):
            await self.size(name)
            return

        step = RANGE_BYTES if self.client.gate is None else GATED_RANGE_BYTES

        async def one(start: int) -> None:
            await self._read_range(name, key, offset + start, data[start : start + step])

        await each(range(0, len(data), step), one, limit=RANGES_IN_FLIGHT)

    async def _read_range(self, name: str, key: str, offset: int, data: memoryview) -> None:
        wanted = f"bytes={offset}-{offset + len(data) - 1}"

        async def attempt(line: Line, flow: Flow) -> None:
            await flow.ask_ahead(len(data))
            answer = await line.call("get_object", Bucket=self._bucket, Key=key, Range=wanted)
            try:
                _check_range(name, answer, offset, len(data))
            except BackendError:
                answer["Body"].close()
                raise
            await receive(name, answer["Body"], data, flow)

        await self._get(name, attempt)

    async def _get(self, name: str, attempt: Attempt[T]) -> T:
        """Do ``attempt``, which gets an object. To whom may not list the whole bucket a server denies what is not there
        instead of telling so; to list the name alone he may have the right."""
        try:
            return await self.client.do(name, attempt)
        except Denied:
            key = self._root + name
            page = await self.client.call(name, "list_objects_v2", Bucket=self._bucket, Prefix=key, MaxKeys=1)
            if all(found["Key"] != key for found in page.get("Contents", ())):
                raise NotFound(name, "denied, and not in the listing either") from None
            raise

    async def size(self, name: str) -> int:
        check_name(name)
        return int((await self.head(name))["ContentLength"])

    async def head(self, name: str, *, sums: bool = False) -> dict[str, Any]:
        """What the server says of the object; its checksums other than the ETag only with ``sums``. NotFound, or
        Permanent where there is no bucket."""
        target = self.target(name)
        wanted = {**target, **({"ChecksumMode": "ENABLED"} if sums else {})}
        try:
            return await self.client.call(name, "head_object", **wanted)
        except (NotFound, Permanent):
            # An answer without a body does not say what is the matter (which object or bucket is missing, whether
            # it is rights or time that is up); this one does, and mends what can be mended.
            with suppress(ShortRead):
                answer = await self._get(
                    name, lambda line, flow: line.call("get_object", **target, Range="bytes=0-0")
                )
                answer["Body"].close()
            return await self.client.call(name, "head_object", **wanted)

    # -- writing ---------------------------------------------------------------------------------------

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> S3Writer:
        check_name(name)
        if nbytes < 0:
            raise Permanent(name, f"a size of {nbytes} bytes")
        return S3Writer(self, name, nbytes, notes, at_most)

    def target(self, name: str) -> dict[str, str]:
        """The arguments by which a request names an object."""
        return {"Bucket": self._bucket, "Key": self._root + name}

    async def write(self, name: str, data: bytes) -> None:
        check_name(name)
        if len(data) <= PART_BYTES:
            await self.put(name, memoryview(data))
            return
        writer = await self.open_writer(name, len(data))
        try:
            await writer.write(memoryview(data))
            await writer.commit()
        finally:
            await writer.abort()

    async def create(self, name: str, data: bytes) -> None:
        self._key(name)
        if not self._proved:
            await self._prove()
        try:
            await self.put(name, memoryview(data), IfNoneMatch="*")
        except Conflict:
            # The name is taken; by us, if an answer was lost: then its bytes are these.
            try:
                if await self.size(name) == len(data) and await self.read(name, len(data)) == data:
                    return
            except NotFound as error:
                raise Retryable(name, "the name was taken, and was free again a moment later") from error
            raise Conflict(name, "exists already, with other bytes") from None

    async def put(self, name: str, data: memoryview, **arguments: Any) -> None:
        """One put with a checksum that the server checks. What it says that it has must be what was sent."""
        digest = await self.client.hashed(md5, data)
        wanted = {**self.target(name), "ContentMD5": header_of(digest), **arguments}

        async def attempt(line: Line, flow: Flow) -> str | None:
            answer = await line.call("put_object", Body=Body(data, flow) if len(data) else b"", **wanted)
            return None if check_etag(name, answer, digest) else etag_of(answer)

        told = await self.client.do(name, attempt)
        if told is not None:
            found = await self.head(name)
            if int(found["ContentLength"]) != len(data) or etag_of(found) != told:
                raise Retryable(name, f"{found['ContentLength']} bytes are there after {len(data)} were put")

    async def _prove(self) -> None:
        """Find out whether the server refuses to create a name twice."""
        for _ in range(2):
            try:
                await self.put(PROBE_NAME, memoryview(b"1"), IfNoneMatch="*")
            except Conflict:
                self._proved = True
                return
        self.capabilities = Capabilities(atomic_create=False, shared=True, flat=True)
        raise Permanent(
            self.url, "this server puts an object over another in spite of If-None-Match: no atomic create"
        )

    async def checks_crc32(self, name: str) -> bool:
        """Whether the server is known to check the crc32 of parts; found out once, with an upload of ``name``."""
        async with self.client.room().proving:
            if self._crc32 is None:
                self._crc32 = await checks_crc32(self, name)
            return self._crc32

    # -- names -----------------------------------------------------------------------------------------

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        start = self._root + (check_prefix(prefix) + "/" if prefix else "")
        async for page in self._pages(prefix, Prefix=start):
            for found in page.get("Contents", ()):
                name = self._name(found["Key"])
                if name is not None:
                    yield Item(name, int(found["Size"]), _moment(found.get("LastModified")))

    async def list_names(self, prefix: str = "") -> Names:
        start = self._root + (check_prefix(prefix) + "/" if prefix else "")
        names: dict[str, None] = {}
        async for page in self._pages(prefix, Prefix=start, Delimiter="/"):
            keys = [found["Key"] for found in page.get("Contents", ())]
            keys += [found["Prefix"].removesuffix("/") for found in page.get("CommonPrefixes", ())]
            names.update((key[len(start) :], None) for key in keys if key.startswith(start))
        return [name for name in names if is_name(name) and "/" not in name]

    async def _pages(self, name: str, **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        """All pages of a listing; each is a request of its own, and none is kept."""
        more: dict[str, Any] = {}
        while True:
            try:
                page = await self.client.call(
                    name, "list_objects_v2", Bucket=self._bucket, **arguments, **more
                )
            except NotFound as error:  # an empty listing is an answer, too; this is none of an S3 server
                raise Permanent(name, f"no S3 server answers there: {error.cause}") from error
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == more.get("ContinuationToken"):
                raise Retryable(name, "a listing that does not go on")
            more = {"ContinuationToken": token}

    async def delete(self, names: Iterable[str]) -> None:
        keys = iter([self._key(name) for name in names])
        first: BackendError | None = None
        while lot := list(islice(keys, DELETE_NAMES_MAX)):
            try:
                await self._delete(lot)
            except BackendError as error:
                first = first or error
        if first is not None:
            raise first

    async def _delete(self, keys: Names) -> None:
        name = self._name(keys[0]) or keys[0]

        async def attempt(line: Line, flow: Flow) -> None:
            wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            answer = await line.call("delete_objects", Bucket=self._bucket, Delete=wanted)
            self._check_deleted(keys, answer.get("Errors") or [])

        await self.client.do(name, attempt, tries_max=DELETE_TRIES_MAX)

    def _check_deleted(self, keys: Names, errors: Answers) -> None:
        """Raises what the server said of single names; ``keys`` keeps those that it will be asked for again."""
        again: dict[str, str] = {}
        for error in errors:
            code, key = str(error.get("Code", "")), str(error.get("Key", ""))
            cause = f"{code}: {error.get('Message', '')}"
            if code in ("NoSuchKey", "NoSuchVersion"):
                continue
            if code not in _DELETED_LATER:
                raise Permanent(self._name(key) or key, cause)
            again[key] = cause
        if again:
            keys[:] = [key for key in keys if key in again] or keys
            key = keys[0]
            raise Retryable(self._name(key) or key, again.get(key, "not deleted"))

    # -- unfinished uploads ----------------------------------------------------------------------------

    async def displace(self, name: str, to: str) -> None:
        raise Permanent(name, "nothing is moved here; move it away by hand")

    async def leftovers(self, prefix: str = "") -> Items:
        start = self._root + (check_prefix(prefix) + "/" if prefix else "")
        uploads = [upload async for upload in self._uploads(start)]

        async def look(found: tuple[str, str, object]) -> Item | None:
            key, upload, begun = found
            name = self._name(key)
            if name is None:
                return None
            try:
                parts = await self.parts(name, upload)
            except NotFound:  # ended meanwhile
                return None
            return Item(f"{name}{_UPLOAD}{upload}", sum(size for _, size, _ in parts), _moment(begun))

        items = await each(uploads, look, limit=UPLOADS_PARALLEL)
        return [item for item in items if item is not None]

    async def _uploads(self, start: str) -> AsyncIterator[tuple[str, str, object]]:
        """Key, id and beginning of the uploads whose keys begin with ``start``."""
        more: dict[str, Any] = {}
        while True:
            page = await self.client.call(
                start, "list_multipart_uploads", Bucket=self._bucket, Prefix=start, **more
            )
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(start):
                    yield upload["Key"], upload["UploadId"], upload.get("Initiated")
            if not page.get("IsTruncated"):
                return
            former = more
            more = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            more = {name: value for name, value in more.items() if value}
            if not more or more == former:
                raise Retryable(start, "a listing of uploads that does not go on")

    async def parts(self, name: str, upload: str) -> Parts:
        """The parts that the server has; NotFound if it has no such upload."""
        found: Parts = []
        marker = 0
        while True:
            page = await self.client.call(
                name,
                "list_parts",
                **self.target(name),
                UploadId=upload,
                PartNumberMarker=marker,
            )
            for part in page.get("Parts", ()):
                found.append((int(part["PartNumber"]), int(part["Size"]), etag_of(part)))
            after = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or after <= marker:
                return found
            marker = after

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        wanted: list[tuple[str, str]] = []
        for item in items:
            name, mark, upload = item.name.partition(_UPLOAD)
            if not mark or not upload:
                raise Permanent(item.name, "not an unfinished upload")
            wanted.append((check_name(name), upload))
        await each(wanted, lambda upload: self.abort_upload(*upload), limit=UPLOADS_PARALLEL)

    async def abort_upload(self, name: str, upload: str) -> None:
        """Abort until the server has no part of it any more."""
        for _ in range(ABORTS_MAX):
            try:
                await self.client.call(name, "abort_multipart_upload", **self.target(name), UploadId=upload)
                if not await self.parts(name, upload):
                    return
            except NotFound:
                return
        raise Retryable(name, f"an upload still has parts after it was aborted {ABORTS_MAX} times")

    async def drop_upload(self, name: str, upload: str) -> bool:
        """Abort within ``ABORT_S`` seconds; False where that could not be done, and it is left over."""
        try:
            await asyncio.wait_for(self.abort_upload(name, upload), ABORT_S)
        except (BackendError, asyncio.TimeoutError) as error:
            log.warning("%s: an upload could not be aborted, and is left over: %s", name, error)
            return False
        return True

    async def close(self) -> None:
        await self.client.close()

    def _key(self, name: str) -> str:
        return self._root + check_name(name)

    def _name(self, key: str) -> str | None:
        """The name of a key below the root; None for what is none of our objects."""
        name = key[len(self._root) :] if key.startswith(self._root) else ""
        return name if is_name(name) else None


_DELETED_LATER = frozenset(
    {
        "InternalError",
        "SlowDown",
        "ServiceUnavailable",
        "OperationAborted",
        "RequestTimeout",
        "503",
        "500",
        "",
    }
)


def _check_range(name: str, answer: dict[str, Any], offset: int, nbytes: int) -> None:
    """Whether the answer has exactly the bytes that were asked for."""
    length = int(answer["ContentLength"])
    told = _RANGE.fullmatch(str(answer.get("ContentRange", "")))
    if told is None:
        if offset == 0 and length == nbytes:  # all of the object was asked for, and came as that
            return
        raise Permanent(name, f"{length} bytes came where {nbytes} from {offset} on were asked for")
    first, last, total = (int(text) for text in told.groups())
    if total < offset + nbytes:
        raise ShortRead(name, f"ends at {total}, {nbytes} bytes were wanted from {offset} on")
    if first != offset or last != offset + nbytes - 1 or length != nbytes:
        raise Retryable(name, f"bytes {first} to {last} came where {nbytes} from {offset} on were asked for")


def _moment(when: object) -> float | None:
    moment = getattr(when, "timestamp", None)
    return float(moment()) if moment is not None else None
