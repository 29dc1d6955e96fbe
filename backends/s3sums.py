"""Checksums of what goes to an S3 server: those it is sent, checks, and answers with.

A part has a crc32 where the server proves that it refuses a wrong one, and an MD5, a fifth as fast, where not. What is
put whole, and so small, always has an MD5.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from .errors import NotFound, Permanent, Retryable
from .s3body import Body, Flow
from .s3errors import Expired, Stale

if TYPE_CHECKING:
    from .s3 import S3Backend
    from .s3client import Line

_MD5 = re.compile(r"[0-9a-f]{32}")
_MD5S = re.compile(r"[0-9a-f]{32}-\d+")

_REFUSED = frozenset({"BadDigest", "XAmzContentChecksumMismatch"})
"""What servers say of bytes that do not have the checksum that came with them."""

_PROBE = b"1"
_OTHER = b"0"


def md5(data: memoryview | bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def crc32(data: memoryview | bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def header_of(digest: bytes) -> str:
    """A digest as headers have it."""
    return base64.b64encode(digest).decode()


def etag_of(answer: dict[str, Any]) -> str:
    """The checksum in an answer, without quotes; "" if it has none."""
    return str(answer.get("ETag") or "").strip('"').lower()


def check_etag(name: str, answer: dict[str, Any], digest: bytes | None) -> bool:
    """Whether the checksum in an answer is ``digest``, an MD5; without that, whether it looks like one. False where
    it is of another kind, as with the server's encryption; Retryable where there is none, or it is of other bytes."""
    etag = etag_of(answer)
    encrypted = (
        str(answer.get("ServerSideEncryption", "")).startswith("aws:") or "SSECustomerAlgorithm" in answer
    )
    plain = _MD5.fullmatch(etag) is not None and not encrypted
    if digest is None:
        if not etag:
            raise Retryable(name, "the server has no checksum for bytes that were sent")
        return plain
    if etag == digest.hex():
        return True
    if not etag or plain:
        raise Retryable(name, f"the server has checksum {etag or 'none'} for bytes with {digest.hex()}")
    return False


def check_crc(name: str, answer: dict[str, Any], sent: dict[str, str]) -> None:
    """Retryable where an answer has another crc32 than the one that was sent. Not all servers say it."""
    told, own = answer.get("ChecksumCRC32"), sent.get("ChecksumCRC32")
    if told and own and told != own:
        raise Retryable(name, f"the server has crc32 {told} for bytes with {own}")


def whole_etag(etags: list[str], found: str) -> str | None:
    """What the ETag of an object that is made of parts with these ETags, all of them MD5s, must be; None where
    ``found`` is of another kind."""
    if not _MD5S.fullmatch(found):
        return None
    return joined_etag(etags)


def joined_etag(etags: list[str]) -> str:
    """The ETag of an object made of parts with these ETags, all of them MD5s."""
    return f"{md5(b''.join(bytes.fromhex(etag) for etag in etags)).hex()}-{len(etags)}"


def check_whole_crc(name: str, answer: dict[str, Any], crcs: list[bytes]) -> None:
    """Retryable where an answer has the crc32 of an object made of other parts than those with ``crcs``."""
    told = str(answer.get("ChecksumCRC32") or "")
    expected = f"{header_of(crc32(b''.join(crcs)))}-{len(crcs)}"
    if "-" in told and told != expected:
        raise Retryable(name, f"an object with crc32 {told} is there, not the one sent, with {expected}")


async def checks_crc32(backend: S3Backend, name: str) -> bool:
    """Whether the server refuses a part with a wrong crc32; one is sent in an upload of its own, of ``name``, which is
    then aborted. Raises what may be otherwise a moment later."""
    client = backend.client

    async def refused(line: Line, flow: Flow) -> bool:
        try:
            await line.call(
                "upload_part",
                **backend.target(name),
                UploadId=upload,
                PartNumber=1,
                Body=Body(memoryview(_PROBE), flow),
                ChecksumCRC32=header_of(crc32(_OTHER)),
            )
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in _REFUSED:
                return True
            raise
        return False

    try:
        begun = await client.call(
            name, "create_multipart_upload", **backend.target(name), ChecksumAlgorithm="CRC32"
        )
        upload = str(begun["UploadId"])
        try:
            return await client.do(name, refused)
        finally:
            await backend.drop_upload(name, upload)
    except NotFound as error:
        raise Retryable(name, "an upload was aborted by others") from error
    except (Expired, Stale):
        raise
    except Permanent:  # not known there, or not allowed; what matters is told by what is sent in earnest
        return False
