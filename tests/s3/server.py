"""The S3 server of the tests: one of their own, or the endpoint that the environment names.

With ``EVERSTEP_TEST_S3_URL=s3://bucket/prefix`` the tests use that bucket (which they make if it is missing), with
the ``AWS_*`` variables for endpoint and keys; otherwise :func:`running_server` starts one of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from everstep.benchmarks.s3_server import REGION, S3Server, free_ports, make_bucket, named_server, own_server

__all__ = ["REGION", "S3Server", "free_ports", "make_bucket", "running_server"]


@contextlib.contextmanager
def running_server(directory: Path) -> Iterator[S3Server]:
    """A server with its data below ``directory``, ended with the block; or the one that the environment names."""
    named = os.environ.get("EVERSTEP_TEST_S3_URL")
    if named:
        yield named_server(named, "suite")
        return
    with own_server(directory) as server:
        yield server
