"""Training runs whose root is on an S3 server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everstep
import torch
from click.testing import CliRunner
from everstep.cli.main import main
from everstep.places import locate

from tests.facade.kit import Training, policy

from .server import S3Server

OPTIONS = {"full_every": None, "keep_last": 2, "linger_s": 2.0}


def opened(url: str, server: S3Server, **options: Any) -> everstep.Checkpointer:
    """With the keys as storage options; a ``dict`` as policy changes OPTIONS."""
    made = policy(**{**OPTIONS, **options.pop("policy", {})})
    given = options.pop("storage_options", server.storage_options)
    return everstep.Checkpointer(url, policy=made, storage_options=given, **options)


def train(
    training: Training, ckpt: everstep.Checkpointer, first: int, last: int, *, save: bool = True
) -> None:
    """Steps ``first`` to ``last``, the last of them made durable."""
    for step in range(first, last + 1):
        training.step()
        ckpt.step(step, training.state)
    if save:
        ckpt.save(last, training.state).wait()


def command(server: S3Server, *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of an everstep command, with the keys in the environment."""
    return command_here(*args, env=server.env)


def command_here(*args: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """As :func:`command`, with the environment as it is."""
    done = CliRunner().invoke(main, [*args, "--json"], env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    value: dict[str, Any] = json.loads(done.stdout)
    return done.exit_code, value


def checkpoints(server: S3Server, url: str) -> list[int]:
    code, found = command(server, "ls", url)
    assert code == 0
    return [one["step"] for one in found["checkpoints"]]


def url_with_endpoint(server: S3Server, url: str) -> str:
    """The canonical URL of a place that was opened with the server's storage options."""
    return locate(url, options=server.storage_options).url


def _prefix(url: str) -> str:
    return url.partition("://")[2].partition("?")[0].partition("/")[2] + "/"


def names(server: S3Server, url: str) -> list[str]:
    """All objects below ``url``, seen past everstep."""
    prefix, found = _prefix(url), []
    for page in (
        server.client().get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=prefix)
    ):
        found += [item["Key"][len(prefix) :] for item in page.get("Contents", ())]
    return found


def objects(server: S3Server, url: str) -> Iterator[tuple[str, bytes]]:
    """The same, with what is in them."""
    client = server.client()
    for name in names(server, url):
        body: bytes = client.get_object(Bucket=server.bucket, Key=_prefix(url) + name)["Body"].read()
        yield name, body


def uploads(server: S3Server, url: str) -> list[str]:
    """Keys of unfinished uploads below ``url``."""
    prefix = _prefix(url)
    found = server.client().list_multipart_uploads(Bucket=server.bucket, Prefix=prefix)
    return [one["Key"] for one in found.get("Uploads", ())]


def files_below(directory: Path) -> Iterator[tuple[Path, bytes]]:
    for path, _, names in os.walk(directory):
        for name in names:
            file = Path(path) / name
            if file.is_file():
                yield file, file.read_bytes()


def tensors(seed: int, *, nbytes: int) -> dict[str, torch.Tensor]:
    """One tensor of about ``nbytes``, of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 1 << 62, (nbytes // 8,), generator=generator)}
