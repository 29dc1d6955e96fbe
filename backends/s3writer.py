"""Writing one object to an S3 server: a small one by one put, a large one by parts in parallel."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from .aligned import as_bytes
from .api import Notes
from .errors import BackendError, NotFound, Permanent, Retryable
from .parallel import ended, settled
from .points import reach
from .s3body import Body, Flow
from .s3errors import PartLost
from .s3sums import (
    check_crc,
    check_etag,
    check_whole_crc,
    crc32,
    etag_of,
    header_of,
    joined_etag,
    md5,
    whole_etag,
)

if TYPE_CHECKING:
    from .s3 import S3Backend
    from .s3client import Line

PART_BYTES = 8 << 20
"""Bytes of a part, unless that would make more than ``PARTS_MAX`` of them. Objects up to this are put whole."""

PARTS_MAX = 10_000
PART_BYTES_MAX = 5 << 30
"""Parts of one upload, and bytes of one part, by the protocol."""

PART_STEP_BYTES = 1 << 20
"""Larger parts are multiples of this."""

PARTS_IN_FLIGHT = 8
"""Parts under way at once, of all writers of one backend together; besides, each writer has one that is being
filled."""


def part_bytes(nbytes: int, name: str = "") -> int:
    """Bytes of the parts of an object of ``nbytes``; the last one may be shorter. Permanent if it is too large."""
    size = max(PART_BYTES, -(-nbytes // PARTS_MAX))
    size = -(-size // PART_STEP_BYTES) * PART_STEP_BYTES
    if size > PART_BYTES_MAX:
        raise Permanent(name, f"{nbytes} bytes are more than {PARTS_MAX} parts of {PART_BYTES_MAX} bytes")
    return size


class Room:
    """The memory in which parts wait, and their number, for all writers of one backend in one loop."""

    def __init__(self) -> None:
        self.flying = asyncio.Semaphore(PARTS_IN_FLIGHT)
        self.proving = asyncio.Lock()
        self.writers: set[S3Writer] = set()
        self._free: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """Memory of ``nbytes``; of what was given back, if that fits: fresh memory is slow."""
        for index, buffer in enumerate(self._free):
            if len(buffer) == nbytes:
                return self._free.pop(index)
        return bytearray(nbytes)

    def give(self, buffer: bytearray) -> None:
        if len(self._free) < PARTS_IN_FLIGHT and self.writers:
            self._free.append(buffer)

    def leave(self, writer: S3Writer) -> None:
        self.writers.discard(writer)
        if not self.writers:
            self._free.clear()

    async def close(self) -> None:
        for writer in list(self.writers):
            await writer.abort()


class S3Writer:
    """One object in the making. What is written is copied, so views may be reused at once.

    Whatever fails first ends it: later calls raise the same error, parts under way are cancelled, and the upload is
    aborted. With ``notes`` the upload's id is kept in them, and the checksum that the object is to have: parts that the
    server has already, by their checksums, are not sent, nor is an object that was completed."""

    def __init__(
        self, backend: S3Backend, name: str, nbytes: int, notes: Notes | None, at_most: bool = False
    ) -> None:
        self._backend = backend
        self._client = backend.client
        self._room = backend.client.room()
        self._target = backend.target(name)
        self._name = name
        self._announced = nbytes
        self._nbytes = nbytes  # with at_most a bound, until it is known
        self._at_most = at_most
        self._notes = notes
        self._whole = nbytes <= PART_BYTES
        self._part_bytes = nbytes if self._whole else part_bytes(nbytes, name)
        self._taken = 0
        self._buffer: bytearray | None = None
        self._filled = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._making = asyncio.Lock()
        self._upload: str | None = None
        self._stands = False  # the object was completed by a former writer
        self._there: dict[int, set[str]] = {}
        self._etags: dict[int, str] = {}
        self._crc32 = False  # what parts are sent with; an MD5 otherwise
        self._crcs: dict[int, bytes] = {}
        self._comparable = True  # every part's checksum at the server is its MD5
        self._error: BaseException | None = None
        self._done = False
        self.parts_sent = 0
        """Parts that went over the wire; the others were there already."""
        self._room.writers.add(self)

    async def write(self, view: memoryview) -> None:
        data = as_bytes(view, self._name)
        self._check()
        try:
            if self._taken + len(data) > self._nbytes:
                raise Permanent(self._name, f"more than the {self._nbytes} bytes that were announced")
            while len(data):
                data = data[self._fill(data) :]
                if self._filled == self._part_bytes and not self._whole:
                    await self._launch()
        except BaseException as error:
            await self._fail(error)
            raise

    async def commit(self) -> None:
        self._check()
        try:
            if self._at_most:
                self._nbytes = self._taken
                # Nothing was sent so far of what comes to less than a part.
                self._whole = self._whole or self._taken < self._part_bytes
            if self._taken != self._nbytes:
                raise Permanent(
                    self._name, f"{self._taken} bytes were written of the {self._nbytes} announced"
                )
            if self._whole:
                await self._backend.put(self._name, memoryview(self._buffer or b"")[: self._nbytes])
            else:
                await self._finish()
        except BaseException as error:
            await self._fail(error)
            raise
        self._done, self._buffer = True, None
        self._room.leave(self)

    async def abort(self) -> None:
        """Leave no trace; does nothing after a commit. An upload that cannot be aborted within ``ABORT_S`` seconds
        stays as a leftover."""
        if not self._done:
            await self._fail(Permanent(self._name, "this writer was aborted"))

    # -- parts -----------------------------------------------------------------------------------------

    def _fill(self, data: memoryview) -> int:
        """Copy as much of ``data`` as fits into the part; bytes taken."""
        if self._error is not None:
            raise self._error
        if self._buffer is None:
            self._buffer = self._room.take(self._part_bytes)
        count = min(len(data), self._part_bytes - self._filled)
        memoryview(self._buffer)[self._filled : self._filled + count] = data[:count]
        self._filled += count
        self._taken += count
        return count

    async def _launch(self) -> None:
        """Send the part that is filled, as soon as fewer than ``PARTS_IN_FLIGHT`` are under way."""
        await self._room.flying.acquire()
        buffer, nbytes = self._buffer, self._filled
        if self._error is not None or buffer is None:
            self._room.flying.release()
            raise self._error or Permanent(self._name, "no part to send")
        self._buffer, self._filled = None, 0
        number = -(-self._taken // self._part_bytes)
        task = asyncio.ensure_future(self._send(number, buffer, nbytes))
        self._tasks.add(task)

    async def _send(self, number: int, buffer: bytearray, nbytes: int) -> None:
        try:
            with memoryview(buffer)[:nbytes] as data:
                await self._send_part(number, data)
        except Exception as error:
            if self._error is None:
                self._error = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
        finally:
            self._room.give(buffer)
            self._room.flying.release()

    async def _send_part(self, number: int, data: memoryview) -> None:
        upload = await self._begun()
        digest: bytes | None = None
        sums: dict[str, str] = {}
        if not self._crc32 or self._stands or number in self._there:
            digest = await self._client.hashed(md5, data)
            sums["ContentMD5"] = header_of(digest)
        if self._crc32:
            self._crcs[number] = await self._client.hashed(crc32, data)
            sums = {"ChecksumCRC32": header_of(self._crcs[number])}
        if digest is not None and (self._stands or digest.hex() in self._there.get(number, ())):
            self._etags[number] = digest.hex()
            return

        async def attempt(line: Line, flow: Flow) -> tuple[str, bool]:
            answer = await line.call(
                "upload_part",
                **self._target,
                UploadId=upload,
                PartNumber=number,
                Body=Body(data, flow),
                **sums,
            )
            check_crc(self._name, answer, sums)
            return etag_of(answer), check_etag(self._name, answer, digest)

        try:
            self._etags[number], comparable = await self._client.do(self._name, attempt)
        except NotFound as error:
            raise Retryable(self._name, "the upload was aborted by others") from error
        self._comparable = self._comparable and comparable
        self.parts_sent += 1
        reach("s3.part.after", self._name)

    async def _begun(self) -> str:
        """The upload's id; the first part that needs it begins the upload, or finds the one of the notes."""
        async with self._making:
            if self._upload is None:
                self._crc32 = await self._backend.checks_crc32(self._name)
                self._upload = await self._resumed() or await self._begin()
            return self._upload

    async def _begin(self) -> str:
        kind = {"ChecksumAlgorithm": "CRC32"} if self._crc32 else {}
        answer = await self._client.call(self._name, "create_multipart_upload", **self._target, **kind)
        upload = str(answer["UploadId"])
        reach("s3.upload.after", self._name)
        if self._notes is not None:
            try:
                await self._notes.save(self._note(upload))
            except BaseException:
                self._upload = upload  # to be aborted
                raise
        return upload

    async def _resumed(self) -> str | None:
        """The upload that the notes know, with the parts that it has, or as one whose object stands; None if it cannot
        be gone on with."""
        upload, etag, kept = _known(self._notes.load() if self._notes is not None else None)
        if upload is None:
            return None
        if kept != self._note(upload, etag):
            await self._backend.abort_upload(self._name, upload)
            return None
        try:
            for number, _, found in await self._backend.parts(self._name, upload):
                self._there.setdefault(number, set()).add(found)
        except NotFound:
            self._stands = bool(etag) and await self._is_there(etag)
            return upload if self._stands else None
        return upload

    async def _is_there(self, etag: str) -> bool:
        """Whether an object of this size and checksum stands there."""
        try:
            found = await self._backend.head(self._name)
        except NotFound:
            return False
        return int(found["ContentLength"]) == self._nbytes and etag_of(found) == etag

    def _note(self, upload: str, etag: str = "") -> bytes:
        """``etag``: what the object is to have, once it is about to be completed."""
        facts = {
            "upload": upload,
            "name": self._name,
            "nbytes": self._announced,
            "part_bytes": self._part_bytes,
            "crc32": self._crc32,  # an upload takes only what it was begun for
            "etag": etag,
        }
        return json.dumps(facts, sort_keys=True).encode()

    # -- the end ---------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Send the last part, wait for all, complete the upload with exactly these, and look at what is there. Notes
        are kept: until the caller has made use of the object, it may have to be written once more."""
        if self._filled:
            await self._launch()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._error is not None:
            raise self._error
        count = -(-self._nbytes // self._part_bytes)
        if sorted(self._etags) != list(range(1, count + 1)):
            raise Retryable(self._name, f"{len(self._etags)} parts were sent of {count}")
        told = "" if self._stands else await self._complete(count)
        await self._verify(told)
        if self._notes is not None and not self._comparable:
            await self._notes.save(b"")

    async def _complete(self, count: int) -> str:
        """The object's checksum as the server says it; "" if it does not."""
        if self._notes is not None and self._comparable and self._upload is not None:
            await self._notes.save(self._note(self._upload, joined_etag(self._in_order())))
        parts: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            parts.append({"PartNumber": number, "ETag": f'"{self._etags[number]}"'})
            if self._crc32:
                parts[-1]["ChecksumCRC32"] = header_of(self._crcs[number])
        reach("s3.complete.before", self._name)
        try:
            answer = await self._client.call(
                self._name,
                "complete_multipart_upload",
                **self._target,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
        except NotFound:  # completed, if an answer was lost; what is there will tell
            answer = {}
        except PartLost as error:
            raise Retryable(self._name, f"the server lost a part: {error.cause}") from error
        reach("s3.complete.after", self._name)
        return etag_of(answer)

    def _in_order(self) -> list[str]:
        """The parts' checksums."""
        return [self._etags[number] for number in sorted(self._etags)]

    async def _verify(self, told: str) -> None:
        """Whether the object that stands there now is the one that was sent: by size, and by checksum as far as the
        server's is known to be of the parts' MD5, or as it said itself (``told``)."""
        try:
            found = await self._backend.head(self._name, sums=self._crc32)
        except NotFound as error:
            raise Retryable(self._name, "the upload is gone, and there is no object") from error
        size, etag = int(found["ContentLength"]), etag_of(found)
        if size != self._nbytes:
            raise Retryable(self._name, f"{size} bytes are there after {self._nbytes} were sent")
        if self._crc32:
            check_whole_crc(self._name, found, [self._crcs[number] for number in sorted(self._crcs)])
        expected = (whole_etag(self._in_order(), etag) if self._comparable else None) or told
        if not expected or etag != expected:
            raise Retryable(
                self._name, f"an object with checksum {etag or 'none'} is there, not the one sent"
            )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._done:
            raise Permanent(self._name, "this writer has ended")

    async def _fail(self, error: BaseException) -> None:
        """End the writer with ``error``, if it has none yet: no part is under way any more, no upload is left."""
        if self._error is None:
            self._error = error if isinstance(error, BackendError) else _interrupted(self._name, error)
        if self not in self._room.writers:
            return
        self._room.leave(self)
        clearing = asyncio.ensure_future(self._clear())
        await settled(clearing)  # also when the caller is cancelled, once more
        clearing.result()

    async def _clear(self) -> None:
        await ended(self._tasks)
        self._buffer = None
        if self._upload is None:
            return
        if await self._backend.drop_upload(self._name, self._upload) and self._notes is not None:
            await self._notes.save(b"")


def _interrupted(name: str, error: BaseException) -> BackendError:
    return Permanent(name, f"this writer was ended by {type(error).__name__}")


def _known(kept: bytes | None) -> tuple[str | None, str, bytes]:
    """The upload's id in notes, None where there is none; the checksum in them; and they themselves."""
    kept = kept or b""
    try:
        facts = json.loads(kept or b"{}")
        upload, etag = facts.get("upload"), facts.get("etag")
    except (ValueError, AttributeError):
        return None, "", kept
    found = upload if isinstance(upload, str) and upload else None
    return found, etag if isinstance(etag, str) else "", kept
