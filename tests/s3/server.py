"""The S3 server of the tests: one of their own, or the endpoint that the environment names.

With ``EVERSTEP_TEST_S3_URL=s3://bucket/prefix`` the tests use that bucket (which they make if it is missing), with
the ``AWS_*`` variables for endpoint and keys; otherwise :func:`running_server` starts one of their own.
``EVERSTEP_TEST_S3_READER`` and ``EVERSTEP_TEST_S3_SUCCESSOR``, each ``key:secret``, name the further users of the
endpoint (see :class:`S3Server`); tests that need one are skipped without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from everstep.benchmarks.s3_server import S3Server, free_ports, make_bucket, named_server, own_server

__all__ = ["S3Server", "free_ports", "make_bucket", "running_server"]


@contextlib.contextmanager
def running_server(directory: Path) -> Iterator[S3Server]:
    """A server with its data below ``directory``, ended with the block; or the one that the environment names, where
    all is below a prefix of this block's own, which is emptied at its end."""
    url = os.environ.get("EVERSTEP_TEST_S3_URL")
    if url:
        with contextlib.closing(_Named(url)) as named:
            yield named.server
        return
    with own_server(directory) as server:
        yield server


class _Named:
    """A place at the endpoint that the environment names."""

    def __init__(self, url: str) -> None:
        given = named_server(url, "suite")
        reader, reader_secret = _user("EVERSTEP_TEST_S3_READER")
        successor, successor_secret = _user("EVERSTEP_TEST_S3_SUCCESSOR")
        self.server = dataclasses.replace(
            given,
            prefix=f"{given.prefix}/{secrets.token_hex(6)}",
            reader=reader,
            reader_secret=reader_secret,
            successor=successor,
            successor_secret=successor_secret,
        )

    def close(self) -> None:
        """Remove all objects and unfinished uploads."""
        client, place = self.server.client(), {"Bucket": self.server.bucket}
        below = {**place, "Prefix": f"{self.server.prefix}/"}
        for page in client.get_paginator("list_multipart_uploads").paginate(**below):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(**place, Key=upload["Key"], UploadId=upload["UploadId"])
        for page in client.get_paginator("list_objects_v2").paginate(**below):
            keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
            if keys:
                client.delete_objects(**place, Delete={"Objects": keys, "Quiet": True})


def _user(variable: str) -> tuple[str, str]:
    """Key and secret; empty where the environment has none."""
    key, _, secret = os.environ.get(variable, "").partition(":")
    return key, secret
