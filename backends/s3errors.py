"""From what S3 servers, botocore and the network say to the backends' own errors. No text of these has a secret: of a
server's answer only code and message are taken."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Any

from aiohttp import ClientConnectorError
from aiohttp import ClientError as HttpError
from botocore import exceptions as boto

from .errors import BackendError, Conflict, NoSpace, NotFound, Permanent, Retryable, ShortRead

LOOKED_FOR = (
    "looked for: storage_options (key and secret, profile, or anon=True for none), AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ~/.aws/credentials and ~/.aws/config, and the role of the container or machine"
)

CAUSE_CHARS_MAX = 300
"""Characters of a server's own words in an error."""


class Expired(Permanent):
    """Credentials that are not, or no longer, taken: new ones may be."""


class NoCredentials(Expired):
    """There are none, or only half of them."""


class Unreachable(Retryable):
    """No connection came about."""


class Stale(Permanent):
    """A signature that is too old: where a machine slept, or its clock has been set right since, a new one is taken."""


class Denied(Permanent):
    """A right is lacking; or the object is not there, which not everybody is told."""


class PartLost(BackendError):
    """A part that was sent, and that the server says it does not have."""


_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
)

_CODES: dict[str, type[BackendError]] = {
    **dict.fromkeys(_EXPIRED, Expired),
    "RequestTimeTooSkewed": Stale,
    "AccessDenied": Denied,
    "NoSuchKey": NotFound,
    "NoSuchUpload": NotFound,  # (Ceph says NoSuchKey of it.)
    "InvalidPart": PartLost,
    "InvalidPartOrder": PartLost,
    "EntityTooSmall": PartLost,
    "PreconditionFailed": Conflict,
    "InvalidRange": ShortRead,
    "NoSuchBucket": Permanent,
    "QuotaExceeded": NoSpace,
    "XMinioStorageFull": NoSpace,
    "XMinioAdminBucketQuotaExceeded": NoSpace,
    "InsufficientStorage": NoSpace,
    # Damaged or cut on its way to the server, which found it out: right the next time.
    "BadDigest": Retryable,
    "InvalidDigest": Retryable,
    "XAmzContentSHA256Mismatch": Retryable,
    "XAmzContentChecksumMismatch": Retryable,
    "IncompleteBody": Retryable,
    "MalformedXML": Retryable,
    "MissingContentLength": Retryable,
    # Two conditional requests at one moment; the server says that one of them is to come again.
    "ConditionalRequestConflict": Retryable,
    "OperationAborted": Retryable,
    "RequestTimeout": Retryable,
    "SlowDown": Retryable,
    "Throttling": Retryable,
    "ThrottlingException": Retryable,
    "RequestLimitExceeded": Retryable,
    "BandwidthLimitExceeded": Retryable,
    "TooManyRequests": Retryable,
}

_STATUS: dict[int, type[BackendError]] = {
    404: NotFound,
    408: Retryable,
    409: Retryable,
    412: Conflict,
    416: ShortRead,
    425: Retryable,
    429: Retryable,
    501: Permanent,
    507: NoSpace,
}
"""By status, for answers without a code that is known; other ones from 500 on are Retryable, the rest Permanent."""

_HINTS = {
    "NoSuchBucket": "the bucket does not exist",
    "AccessDenied": "denied; these credentials lack the right",
    "403": "denied; these credentials lack the right",
    "AllAccessDisabled": "denied",
    "InvalidAccessKeyId": "this access key is unknown there",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "this machine's clock is off",
    "PermanentRedirect": "the bucket is in another region, or behind another endpoint",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "IllegalLocationConstraintException": "the bucket is in another region",
    "301": "the bucket is in another region",
}

_TRANSIENT = (
    *(boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ReadTimeoutError),
    *(boto.ResponseStreamingError, boto.UnseekableStreamError, boto.CredentialRetrievalError),
    *(boto.MetadataRetrievalError, HttpError, asyncio.TimeoutError, OSError),
)


def from_s3_error(error: Exception, name: str) -> BackendError:
    """What a backend raises for ``error``, met at the object ``name``."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, boto.ClientError):
        return _from_answer(error.response, name, error.operation_name)
    if _certificate_refused(error):
        return Permanent(name, "the server's certificate is not trusted")
    if (why := _not_connected(error)) is not None:
        return Unreachable(name, _cut(why))
    if isinstance(error, _TRANSIENT) or type(error).__name__ == "ResponseParserError":
        return Retryable(name, _cut(str(error) or type(error).__name__))
    if isinstance(error, boto.PartialCredentialsError):
        return NoCredentials(name, f"half of the credentials are missing: {_cut(str(error))}; {LOOKED_FOR}")
    if isinstance(error, boto.NoCredentialsError):
        return NoCredentials(name, f"there are no credentials; {LOOKED_FOR}")
    return Permanent(name, _cut(f"{type(error).__name__}: {error}"))


def _not_connected(error: Exception) -> str | None:
    """Where no connection came about, and why; None for all that happens on one."""
    if isinstance(error, boto.ConnectTimeoutError):
        return str(error)
    reason = getattr(error, "kwargs", {}).get("error")
    if not isinstance(reason, ClientConnectorError):
        return None
    number = reason.os_error.errno or 0
    said = os.strerror(number) if number > 0 else reason.os_error.strerror or str(reason)
    return f"no connection to {reason.host}:{reason.port}: {said}"


def _from_answer(response: Any, name: str, operation: str) -> BackendError:
    told = response.get("Error", {})
    about = response.get("ResponseMetadata", {})
    code, status = str(told.get("Code", "")), int(about.get("HTTPStatusCode", 0))
    headers = about.get("HTTPHeaders", {})
    kind = _CODES.get(code) or _STATUS.get(status) or (Retryable if status >= 500 else Permanent)
    if status == 400 and code in ("", "400") and not operation.startswith("Head"):
        # Whoever answered made nothing of it (Ceph says so of a list of names that is no XML any more): damaged on its
        # way. Answers to HEAD have no body that could hold a code.
        kind = Retryable
    cause = _cut(": ".join(text for text in (code or str(status), str(told.get("Message") or "")) if text))
    hint = _HINTS.get(code)
    if hint:
        cause = f"{hint} ({cause})"
    if code == "RequestTimeTooSkewed" and (off_s := _clock_off_s(headers.get("date"))) is not None:
        cause += f"; it is {off_s:+.0f} s from the server's"
    if region := headers.get("x-amz-bucket-region"):
        cause += f"; its region: {_cut(str(region))}"
    if kind is Retryable:
        return Retryable(name, cause, retry_after_s(headers.get("retry-after")))
    return kind(name, cause)


def retry_after_s(header: object) -> float | None:
    """The seconds of a Retry-After header; None where it has none (a date is not taken: clocks differ)."""
    try:
        seconds = float(str(header))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _clock_off_s(date: object) -> float | None:
    """Seconds by which this machine's clock is before (+) or behind (-) the server's ``Date``."""
    try:
        return time.time() - parsedate_to_datetime(str(date)).timestamp()
    except (TypeError, ValueError):
        return None


def _certificate_refused(error: BaseException | None) -> bool:
    """Whether a refused certificate is at the bottom of ``error``."""
    for _ in range(8):
        if error is None:
            return False
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__ or getattr(error, "kwargs", {}).get("error")
    return False


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= CAUSE_CHARS_MAX else text[:CAUSE_CHARS_MAX] + "..."
