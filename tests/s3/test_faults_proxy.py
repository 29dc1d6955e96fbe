"""The proxy itself: what each fault does to a plain client, and what reaches the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError

from . import proxy as network
from .proxy import Fault, S3Proxy
from .server import S3Server

BODY = bytes(range(256)) * 1200


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


def client_through(proxy: S3Proxy, server: S3Server) -> Any:
    """A client that tries once and is not patient."""
    return boto3.client(
        "s3",
        endpoint_url=proxy.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            read_timeout=1,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


class Place:
    """One key, put and got through the proxy, and looked at past it."""

    def __init__(self, proxy: S3Proxy, server: S3Server, key: str) -> None:
        self.proxy, self.server, self.key = proxy, server, key
        self.near, self.direct = client_through(proxy, server), server.client()

    def put(self, body: bytes = BODY) -> Any:
        return self.near.put_object(Bucket=self.server.bucket, Key=self.key, Body=body)

    def get(self) -> bytes:
        body: bytes = self.near.get_object(Bucket=self.server.bucket, Key=self.key)["Body"].read()
        return body

    def there(self) -> bytes | None:
        try:
            body: bytes = self.direct.get_object(Bucket=self.server.bucket, Key=self.key)["Body"].read()
            return body
        except self.direct.exceptions.NoSuchKey:
            return None


@pytest.fixture
def place(proxy: S3Proxy, s3_server: S3Server, request: pytest.FixtureRequest) -> Place:
    proxy.clear()
    return Place(proxy, s3_server, f"{s3_server.prefix}/proxy/{request.node.name} +%=\u00e9")


def test_a_good_network_changes_nothing(place: Place) -> None:
    place.put()
    assert place.get() == BODY == place.there()
    for _ in place.near.get_paginator("list_objects_v2").paginate(
        Bucket=place.server.bucket, Prefix=place.key
    ):
        pass
    place.near.head_object(Bucket=place.server.bucket, Key=place.key)
    place.near.delete_object(Bucket=place.server.bucket, Key=place.key)
    assert place.there() is None
    seen = place.proxy.requests
    assert [request.operation for request in seen] == [
        *("PutObject", "GetObject", "ListObjectsV2", "HeadObject", "DeleteObject")
    ]
    assert [request.status for request in seen] == [200, 200, 200, 200, 204]
    assert seen[0].nbytes == seen[1].answer_nbytes == place.proxy.up.nbytes == len(BODY)
    assert seen[0].key == place.key and seen[0].bucket == place.server.bucket
    assert not any("authorization" in request.headers for request in seen)


def test_an_upload_in_parts_is_seen_part_by_part(place: Place) -> None:
    where = {"Bucket": place.server.bucket, "Key": place.key}
    upload = place.near.create_multipart_upload(**where)["UploadId"]
    tag = place.near.upload_part(**where, UploadId=upload, PartNumber=1, Body=BODY)["ETag"]
    place.near.list_parts(**where, UploadId=upload)
    place.near.list_multipart_uploads(Bucket=place.server.bucket)
    place.near.complete_multipart_upload(
        **where, UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}]}
    )
    upload = place.near.create_multipart_upload(**where)["UploadId"]
    place.near.abort_multipart_upload(**where, UploadId=upload)
    place.near.delete_objects(Bucket=place.server.bucket, Delete={"Objects": [{"Key": place.key}]})
    assert [request.operation for request in place.proxy.requests] == [
        *(
            "CreateMultipartUpload",
            "UploadPart",
            "ListParts",
            "ListMultipartUploads",
            "CompleteMultipartUpload",
        ),
        *("CreateMultipartUpload", "AbortMultipartUpload", "DeleteObjects"),
    ]
    assert place.proxy.requests[1].part == 1 and place.proxy.requests[1].upload


@pytest.mark.parametrize(
    ("fault", "stored"),
    [
        (Fault("reset"), None),
        (Fault("cut_up"), None),
        (Fault("lose"), BODY),
        (Fault("answer", answer=network.SLOW_DOWN), None),
        (Fault("replace", answer=network.INTERNAL_ERROR), BODY),
        (Fault("answer", answer=network.EXPIRED_TOKEN), None),
    ],
    ids=lambda value: value.what if isinstance(value, Fault) else "",
)
def test_what_a_put_meets(place: Place, fault: Fault, stored: bytes | None) -> None:
    place.proxy.faults = [fault]
    with pytest.raises((BotoCoreError, ClientError)) as caught:
        place.put()
    assert fault.struck == 1 and place.there() == stored
    if fault.what == "answer":
        told = fault.answer_to(place.proxy.requests[0], b"")
        assert caught.value.response["Error"]["Code"] == told.reason
    place.put()
    assert place.there() == BODY


def test_a_put_that_comes_twice_is_there_once(place: Place) -> None:
    place.proxy.faults = [Fault("twice", times=2)]
    place.put()
    assert place.there() == BODY
    with pytest.raises(ClientError):  # the second of the two finds what the first has made
        place.near.put_object(Bucket=place.server.bucket, Key=place.key + "2", Body=BODY, IfNoneMatch="*")


def test_a_stalled_put_arrives_when_nobody_waits_for_it(place: Place) -> None:
    place.proxy.faults = [Fault("stall")]
    with pytest.raises(ReadTimeoutError):
        place.put()
    assert place.proxy.stalled.is_set() and place.there() is None
    place.proxy.release()
    place.proxy.wait_quiet()
    assert place.there() == BODY


def test_a_stalled_answer_comes_after_its_release(place: Place) -> None:
    place.proxy.faults = [Fault("stall_answer")]

    def release() -> None:
        place.proxy.stalled.wait(10)
        place.proxy.release()

    thread = threading.Thread(target=release)
    thread.start()
    place.put()
    thread.join()
    assert place.there() == BODY


def test_a_cut_answer_is_short(place: Place) -> None:
    place.put()
    place.proxy.faults = [Fault("cut_down"), Fault("stall_body")]
    for _ in range(2):
        with pytest.raises(BotoCoreError):
            place.get()
    assert place.get() == BODY


def test_flips_change_one_byte(place: Place) -> None:
    place.put()
    place.proxy.faults = [Fault("flip_down")]
    found = place.get()
    assert [at for at in range(len(BODY)) if found[at] != BODY[at]] == [len(BODY) // 2]
    place.proxy.faults = [Fault("flip_up")]
    with pytest.raises(ClientError):  # the checksum does not fit
        place.near.put_object(Bucket=place.server.bucket, Key=place.key, Body=BODY, ChecksumAlgorithm="CRC32")
    assert place.there() == BODY


def test_deletes_are_refused_key_by_key(place: Place) -> None:
    place.put()
    place.proxy.faults = [Fault("answer", answer=network.deletes_refused)]
    told = place.near.delete_objects(Bucket=place.server.bucket, Delete={"Objects": [{"Key": place.key}]})
    assert [error["Key"] for error in told["Errors"]] == [place.key]
    assert place.there() == BODY


def test_the_nth_that_matches_is_struck(place: Place) -> None:
    place.put()
    fault = Fault("reset", lambda request: request.operation == "GetObject", nth=2, times=2)
    place.proxy.faults = [fault]
    for good in (True, False, False, True):
        place.put()
        if good:
            assert place.get() == BODY
        else:
            with pytest.raises(BotoCoreError):
                place.get()
    assert fault.struck == 2 and fault.met == 4


def test_a_slow_link_is_as_slow_as_it_says(place: Place) -> None:
    place.proxy.link.bytes_per_s = 4 * len(BODY)
    began = time.monotonic()
    place.put(2 * BODY)
    assert time.monotonic() - began > 0.4
    assert max(place.proxy.up.rates(0.25)) < 1.5 * place.proxy.link.bytes_per_s


def test_refused_connections(place: Place) -> None:
    place.proxy.refusing = True
    try:
        with pytest.raises(BotoCoreError):
            client_through(place.proxy, place.server).list_buckets()
    finally:
        place.proxy.refusing = False
