"""What a server says, in the backends' own errors."""

from __future__ import annotations

import asyncio
import pickle
import re

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)
from everstep.backends.errors import (
    BackendError,
    Conflict,
    NoSpace,
    NotFound,
    Permanent,
    Retryable,
    ShortRead,
)
from everstep.backends.s3errors import from_s3_error, retry_after_s


def told(status: int, code: str = "", operation: str = "PutObject", **headers: str) -> ClientError:
    return ClientError(
        {
            "Error": {"Code": code, "Message": "words"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        },  # type: ignore[typeddict-item]
        operation,
    )


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (told(404, "NoSuchKey"), NotFound, "words"),
        (told(404, "404"), NotFound, ""),
        (told(403, "AccessDenied"), Permanent, "denied"),
        (told(403, "SomethingNew"), Permanent, "SomethingNew"),
        (told(403, "QuotaExceeded"), NoSpace, "Quota"),
        (told(507, "XMinioStorageFull"), NoSpace, ""),
        (told(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-1"}), Permanent, "region.*eu-1"),
        (told(400, "RequestTimeout"), Retryable, ""),
        (told(400, "BadDigest"), Retryable, ""),
        (told(400, "InvalidArgument"), Permanent, ""),
        (told(400), Retryable, ""),
        (told(400, "400"), Retryable, ""),
        (told(400, "400", "HeadObject"), Permanent, ""),
        (told(409, "OperationAborted"), Retryable, ""),
        (told(412, "PreconditionFailed"), Conflict, ""),
        (told(416, "InvalidRange"), ShortRead, ""),
        (told(500, "InternalError"), Retryable, ""),
        (told(501, "NotImplemented"), Permanent, ""),
        (told(503, "SlowDown"), Retryable, ""),
        (told(599), Retryable, ""),
        (
            told(403, "RequestTimeTooSkewed", date="Mon, 01 Jan 2001 00:00:00 GMT"),
            Permanent,
            r"clock is off.*\+",
        ),
        (EndpointConnectionError(endpoint_url="http://x"), Retryable, "http://x"),
        (NoCredentialsError(), Permanent, "there are no credentials; looked for: .*AWS_ACCESS_KEY_ID"),
        (
            PartialCredentialsError(provider="env", cred_var="the_secret"),
            Permanent,
            "half of .*the_secret.*looked for",
        ),
        (ConnectionResetError("reset"), Retryable, "reset"),
        (asyncio.TimeoutError(), Retryable, "Timeout"),
        (ValueError("odd"), Permanent, "ValueError: odd"),
        (Conflict("b"), Conflict, ""),
    ],
)
def test_errors(error: Exception, kind: type[BackendError], words: str) -> None:
    found = from_s3_error(error, "a")
    assert isinstance(found, kind) and isinstance(found, Permanent) == issubclass(kind, Permanent)
    assert re.search(words, str(found))


def test_waits_that_a_server_asks_for() -> None:
    found = from_s3_error(told(503, "SlowDown", **{"retry-after": "7"}), "a")
    assert isinstance(found, Retryable) and found.after_s == 7
    copy = pickle.loads(pickle.dumps(found))  # noqa: S301
    assert copy.after_s == 7 and str(copy) == str(found)
    assert retry_after_s("Mon, 01 Jan 2001 00:00:00 GMT") is None
    assert retry_after_s(None) is retry_after_s("-1") is retry_after_s("inf") is None
