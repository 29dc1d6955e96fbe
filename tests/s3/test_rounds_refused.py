"""A store that refuses for a while: credentials that run out, a bucket that goes, a clock that is off. What is owed is
tried until it arrives, with what the network has taken already."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors

from tests.facade.kit import until

from . import proxy as network
from . import rounds_kit as rounds
from . import run_kit as kit
from .proxy import Fault, S3Proxy
from .server import S3Server, make_bucket
from .wire import Request

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EVER = 1 << 30
BIG_BYTES = 36 << 20


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture(autouse=True)
def good_network(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("everstep.agent.mirrors.PAUSE_FIRST_S", 0.1)
    proxy.wait_quiet()
    proxy.clear()
    yield
    proxy.clear()


class Credentials:
    """A file with credentials, which are taken as long as the network says so."""

    def __init__(self, server: S3Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server, self._path = server, path
        self.expired = False
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        monkeypatch.setenv("AWS_DEFAULT_REGION", server.region)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        self._write(server.key, server.secret)

    def _write(self, key: str, secret: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        new = self._path.with_suffix(".new")
        new.write_text(text)
        new.replace(self._path)

    def renew(self) -> None:
        self._write(self._server.successor, self._server.successor_secret)

    def refused(self, request: Request) -> bool:
        return self.expired and request.access_key == self._server.key

    def run_out_at_part(self, number: int) -> Fault:
        """From the ``number``-th part on."""
        met = 0

        def when(request: Request) -> bool:
            nonlocal met
            met += request.is_part
            self.expired = self.expired or met >= number
            return self.refused(request)

        return Fault("answer", when=when, times=EVER, answer=network.EXPIRED_TOKEN)


@pytest.fixture
def credentials(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    if not s3_server.successor:
        pytest.skip("needs EVERSTEP_TEST_S3_SUCCESSOR: another key that may do everything")
    return Credentials(s3_server, tmp_path / "credentials", monkeypatch)


def mirrored(root: Path, url: str, options: dict[str, Any], agent: str) -> everstep.Checkpointer:
    tier = everstep.Tier(url, name="far", storage_options=options)
    return everstep.Checkpointer(
        root, policy=kit.policy(linger_s=1.0, failures_max=None), tiers=[tier], agent=agent
    )


def failures(ckpt: everstep.Checkpointer) -> int:
    return int(ckpt.status()["tiers"][0]["failures"])


@pytest.mark.parametrize("agent", [pytest.param("inline", marks=pytest.mark.long), "process"])
def test_a_mirror_waits_for_new_credentials(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, credentials: Credentials, agent: str
) -> None:
    url, state = s3_server.url(), kit.tensors(1, nbytes=BIG_BYTES)
    with mirrored(tmp_path / "run", url, {"endpoint_url": proxy.endpoint}, agent) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        proxy.faults = [credentials.run_out_at_part(4)]
        handle = ckpt.save(1, state)
        handle.wait()
        until(lambda: failures(ckpt) >= 1, "a failure")
        with pytest.raises(errors.EverstepError):
            handle.wait("far", timeout_s=0.2)
        credentials.renew()
        handle.wait("far", timeout_s=rounds.WAIT_S)
    assert torch.equal(everstep.load(url, storage_options=s3_server.storage_options)["w"], state["w"])
    assert kit.uploads(s3_server, url) == []
    if agent == "process":
        assert rounds.sent_again(proxy.requests, []) == []


def test_a_root_goes_on_with_new_credentials(
    s3_server: S3Server, proxy: S3Proxy, credentials: Credentials
) -> None:
    url, state = s3_server.url(), kit.tensors(2, nbytes=BIG_BYTES)
    keep: dict[str, Any] = {"failures_max": None}
    with kit.opened(url, s3_server, storage_options={"endpoint_url": proxy.endpoint}, policy=keep) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        proxy.faults = [credentials.run_out_at_part(3)]
        with pytest.raises(errors.SaveFailed, match="expired"):
            ckpt.save(1, state).wait(timeout_s=rounds.WAIT_S)
        credentials.renew()
        step = 1
        while True:  # they are read again every few seconds at most, and flushes fail until then
            step += 1
            state["w"][0] = step
            ckpt.step(step, state)
            handle = ckpt.save(step, state)
            with contextlib.suppress(errors.SaveFailed):
                handle.wait(timeout_s=rounds.WAIT_S)
                break
            assert step < 1000
            time.sleep(0.1)
    assert torch.equal(everstep.load(url, storage_options=s3_server.storage_options)["w"], state["w"])
    assert kit.checkpoints(s3_server, kit.url_with_endpoint(s3_server, url)) == [step]
    code, said = kit.command(s3_server, "gc", kit.url_with_endpoint(s3_server, url), "--older-than", "0s")
    assert (code, kit.uploads(s3_server, url)) == (0, []), said


def remove_bucket(server: S3Server) -> None:
    client = server.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket):
        for item in page.get("Contents", ()):
            client.delete_object(Bucket=server.bucket, Key=item["Key"])
    client.delete_bucket(Bucket=server.bucket)


def test_a_bucket_that_goes_and_comes_back_empty_gets_the_run_anew(
    s3_server: S3Server, tmp_path: Path
) -> None:
    server = dataclasses.replace(s3_server, bucket=f"gone-{secrets.token_hex(4)}")
    url = server.url()
    make_bucket(server)
    state = kit.tensors(3, nbytes=1 << 20)
    with mirrored(tmp_path / "run", url, server.storage_options, "inline") as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        ckpt.save(1, state).wait("far", timeout_s=rounds.WAIT_S)
        remove_bucket(server)
        state["w"][0] = 2
        ckpt.step(2, state)
        handle = ckpt.save(2, state)
        handle.wait()
        until(lambda: failures(ckpt) >= 2, "failures")
        assert "bucket" in ckpt.status()["tiers"][0]["error"]
        make_bucket(server)
        handle.wait("far", timeout_s=rounds.WAIT_S)
    assert torch.equal(everstep.load(url, storage_options=server.storage_options)["w"], state["w"])
    assert kit.checkpoints(server, kit.url_with_endpoint(server, url)) == [2]
    assert kit.command(server, "fsck", kit.url_with_endpoint(server, url))[0] == 0
    remove_bucket(server)


@pytest.mark.parametrize("where", [pytest.param("root", marks=pytest.mark.long), "tier"])
def test_a_signature_that_is_too_old_is_made_anew(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, where: str
) -> None:
    """Once for each sort of request: a machine that slept, or whose clock was set right."""
    url, options = s3_server.url(), {**s3_server.storage_options, "endpoint_url": proxy.endpoint}
    state = kit.tensors(4, nbytes=10 << 20)
    if where == "tier":
        ckpt = mirrored(tmp_path / "run", url, options, "inline")
    else:
        ckpt = kit.opened(url, s3_server, storage_options=options, agent="inline")
    operations = (
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "ListObjectsV2",
    )
    with ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        proxy.faults = [
            Fault("answer", when=lambda one, name=name: one.operation == name, answer=network.SKEWED)  # type: ignore[misc]
            for name in operations
        ]
        handle = ckpt.save(1, state)
        handle.wait("far" if where == "tier" else None, timeout_s=rounds.WAIT_S)
        assert [fault.struck for fault in proxy.faults] == [1] * len(operations)
        made = [one for one in proxy.requests if one.operation == "CreateMultipartUpload"]
        assert len(made) == 3, (
            "nothing was begun anew but the request that was refused: a proof's, and the upload's"
        )
    assert torch.equal(everstep.load(url, storage_options=s3_server.storage_options)["w"], state["w"])


def test_a_clock_that_stays_off_is_told(s3_server: S3Server, proxy: S3Proxy) -> None:
    url, options = s3_server.url(), {**s3_server.storage_options, "endpoint_url": proxy.endpoint}
    state = {"w": torch.arange(3)}
    with kit.opened(url, s3_server, storage_options=options, agent="inline") as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        proxy.faults = [Fault("answer", times=EVER, answer=network.SKEWED)]
        with pytest.raises(errors.EverstepError, match="clock is off"):
            ckpt.save(1, state).wait(timeout_s=20)
        proxy.clear()
        ckpt.step(2, state)
        ckpt.save(2, state).wait()
