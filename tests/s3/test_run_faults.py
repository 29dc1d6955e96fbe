"""What happens to a run while its storage misbehaves: training goes on, and what is told is true."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors
from everstep.backends.s3writer import PART_BYTES
from everstep.format import names
from everstep.format.beacon import encode_beacon
from everstep.format.records import decode_incarnation, encode_incarnation

from tests.facade.kit import Forked, until
from tests.live.kit import BEAT_S, beacon_of

from . import proxy as network
from . import run_kit as kit
from .proxy import Fault, S3Proxy
from .server import S3Server
from .wire import Request

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EVER = 1 << 30
PARTS = 6


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


def through(proxy: S3Proxy, server: S3Server) -> dict[str, Any]:
    return {**server.storage_options, "endpoint_url": proxy.endpoint}


def is_image(request: Request) -> bool:
    return request.method == "PUT" and request.key.endswith(".safetensors")


def test_a_bucket_that_is_gone_for_a_while_costs_flushes_and_no_step(
    s3_server: S3Server, proxy: S3Proxy
) -> None:
    url, options = s3_server.url(), through(proxy, s3_server)
    state = {"w": torch.arange(100.0)}
    with kit.opened(url, s3_server, storage_options=options, policy={"failures_max": 100}) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        ckpt.save(1, state).wait()
        proxy.clear([Fault("answer", times=EVER, answer=network.NO_SUCH_BUCKET)])
        for step in (2, 3):
            ckpt.step(step, state)
            began = time.monotonic()
            with pytest.raises(errors.EverstepError, match="bucket"):
                ckpt.save(step, state).wait(timeout_s=20)
            assert time.monotonic() - began < 10, "it is told at once"
        proxy.clear()
        ckpt.step(4, state)
        ckpt.save(4, state).wait()
    assert kit.checkpoints(s3_server, kit.url_with_endpoint(s3_server, url)) == [1, 4]
    code, _ = kit.command(s3_server, "fsck", kit.url_with_endpoint(s3_server, url))
    assert code == 0


def test_keys_that_expire_in_mid_run_are_read_again(s3_server: S3Server, proxy: S3Proxy) -> None:
    url, options = s3_server.url(), through(proxy, s3_server)
    state = {"w": torch.arange(100.0)}
    with kit.opened(url, s3_server, storage_options=options, agent="inline") as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        expired = Fault("answer", when=is_image, answer=network.EXPIRED_TOKEN)
        proxy.clear([expired])
        ckpt.save(1, state).wait()
        assert expired.struck == 1
    assert torch.equal(everstep.load(url, storage_options=options)["w"], state["w"])


def test_a_writer_on_another_host_is_seen_in_the_bucket(s3_server: S3Server) -> None:
    url = s3_server.url()
    state = {"n": 1}
    everstep.save(url, 1, state, storage_options=s3_server.storage_options)
    client, prefix = s3_server.client(), url.partition("://")[2].partition("/")[2]

    def key(name: str) -> dict[str, str]:
        return {"Bucket": s3_server.bucket, "Key": f"{prefix}/{name}"}

    name = names.incarnation(1)
    record = decode_incarnation(client.get_object(**key(name))["Body"].read(), name)
    record = dataclasses.replace(record, writer=dataclasses.replace(record.writer, host="another-host"))
    client.put_object(**key(name), Body=encode_incarnation(record))

    def goes_on(say: Callable[..., None]) -> None:
        there, count = s3_server.client(), 1
        while True:
            there.put_object(**key(names.beacon("far")), Body=encode_beacon(beacon_of(record, count)))
            count += 1
            say(count)
            time.sleep(BEAT_S)

    far = Forked(goes_on)
    try:
        assert far.line()
        with pytest.raises(errors.RunInUse, match="another-host"):
            everstep.save(url, 2, state, storage_options=s3_server.storage_options)
    finally:
        far.stop()
    everstep.save(url, 2, state, storage_options=s3_server.storage_options)


def test_a_killed_agents_finished_parts_are_not_sent_again(
    s3_server: S3Server, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = s3_server.url(), through(proxy, s3_server)
    state = kit.tensors(5, nbytes=PARTS * PART_BYTES)
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", f"kill:s3.part.after:w.safetensors:{PARTS // 2}")
    with kit.opened(url, s3_server, storage_options=options) as ckpt:
        ckpt.load({"w": torch.zeros(1)})
        ckpt.step(1, state)
        first = ckpt.agent_pid
        monkeypatch.delenv("EVERSTEP_AGENT_POINTS")
        handle = ckpt.save(1, state)
        assert first is not None
        until(lambda: not _lives(first), "the agent is dead")
        # Its successor may be at work already.
        done = [one for one in proxy.requests if one.is_part and one.status == 200]
        finished = {one.part for one in done}
        handle.wait(timeout_s=60)
    known = {id(one) for one in done}
    again = {one.part for one in proxy.requests if one.is_part and id(one) not in known}
    assert len(finished) >= PARTS // 2 - 1
    assert not finished & again, (finished, again)
    assert torch.equal(everstep.load(url, storage_options=options)["w"], state["w"])
    assert kit.uploads(s3_server, url) == []


def _lives(pid: int) -> bool:
    """Whether it runs: a process that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_agents_killed_anywhere_lose_nothing(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a random moment of a flush; the next agent ends it, and no upload is left over."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    url = s3_server.url()
    state = kit.tensors(seed, nbytes=48 << 20)
    with kit.opened(url, s3_server, policy={"keep_last": 3, "linger_s": 10.0}) as ckpt:
        ckpt.load({"w": torch.zeros(1)})
        for step in range(1, 9):
            state["w"][0] = step
            ckpt.step(step, state)
            handle = ckpt.save(step, state)
            time.sleep(rng.uniform(0.0, 1.0))
            agent = ckpt.agent_pid
            if agent is not None:
                os.kill(agent, signal.SIGKILL)
            handle.wait(timeout_s=120)
    assert everstep.load(url, storage_options=s3_server.storage_options)["w"][0] == 8
    assert kit.uploads(s3_server, url) == []
    code, found = kit.command(s3_server, "fsck", kit.url_with_endpoint(s3_server, url))
    assert code == 0, found


@pytest.mark.long
def test_a_large_image_is_uploaded_with_bounded_memory(s3_server: S3Server) -> None:
    url = s3_server.url()
    state = kit.tensors(7, nbytes=768 << 20)
    with kit.opened(url, s3_server) as ckpt:
        ckpt.load({"w": torch.zeros(1)})
        ckpt.step(1, state)
        handle = ckpt.save(1, state)
        agent = until(lambda: ckpt.agent_pid, "the agent")
        most = _private_bytes(agent)
        while not handle.done():
            most = max(most, _private_bytes(agent))
            time.sleep(0.02)
        handle.wait(timeout_s=60)
    print(f"{most >> 20} MiB")
    assert most < 256 << 20
    values = everstep.load(url, storage_options=s3_server.storage_options)
    assert torch.equal(values["w"], state["w"])


def _private_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        found = next(line for line in file if line.startswith("RssAnon:"))
    return int(found.split()[1]) << 10
