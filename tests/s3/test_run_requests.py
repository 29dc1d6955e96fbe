"""Each request costs money and some ten milliseconds: what a run asks for is counted at the server's door."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import everstep
import pytest
import torch
from everstep.store import catalog

from tests.facade.kit import until

from . import run_kit as kit
from .proxy import S3Proxy
from .server import S3Server

LISTS = ("ListObjectsV2", "ListMultipartUploads")
INCARNATIONS = 4


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    for key, value in s3_server.env.items():
        monkeypatch.setenv(key, value)
    with S3Proxy(s3_server.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


def asked(proxy: S3Proxy) -> Counter[str]:
    """Requests since the last call, by operation."""
    proxy.wait_quiet()
    found = Counter(request.operation for request in proxy.requests)
    proxy.requests.clear()
    return found


def lists(found: Counter[str]) -> int:
    return sum(found[name] for name in LISTS)


def test_what_a_run_asks_for(s3_server: S3Server, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_server.url()
    state = {"w": torch.arange(1000.0), "model": {"a": torch.ones(2000)}}
    for step in range(1, INCARNATIONS):
        everstep.save(url, step, state)
    asked(proxy)
    everstep.load(url)
    found = asked(proxy)
    # Run, manifest, vote, layout, state, and of both images the size and the bytes.
    assert lists(found) == 2 and found.total() <= 11 + INCARNATIONS - 1, found

    quiet = kit.policy(full_every=None, keep_last=100, heartbeat_s=60)
    with everstep.Checkpointer(url, policy=quiet, agent="inline") as ckpt:
        ckpt.load(state)
        ckpt.step(10, state)
        ckpt.save(10, state).wait()
        for step in (11, 12):
            ckpt.step(step, state)
            until(lambda: not _rotating(ckpt), "the rotation has ended")
            asked(proxy)
            ckpt.save(step, state).wait()
        until(lambda: not _rotating(ckpt), "the rotation has ended")
        found = asked(proxy)
        assert lists(found) <= 9 and found.total() <= 26, f"one flush: {found}"
    code, listed = kit.command_here("ls", url)
    assert code == 0 and len(listed["checkpoints"]) == INCARNATIONS + 2
    asked(proxy)
    kit.command_here("ls", url)
    found = asked(proxy)
    assert lists(found) == 2, found
    assert found["GetObject"] == 1 + INCARNATIONS + len(listed["checkpoints"]), "run, incarnations, manifests"

    monkeypatch.setattr(catalog, "FLAT_ITEMS_MAX", 3)
    assert kit.command_here("ls", url)[1] == listed, "a large run is listed by its directories"
    assert lists(asked(proxy)) > 10


def test_a_rotation_asks_little_and_tombstones_that_wait_cost_nothing(
    s3_server: S3Server, proxy: S3Proxy
) -> None:
    url = s3_server.url()
    state = {"w": torch.arange(1000.0)}
    policy = kit.policy(full_every=None, keep_last=2, heartbeat_s=60)
    counts = []
    with everstep.Checkpointer(url, policy=policy, agent="inline") as ckpt:
        ckpt.load(state)
        for step in range(1, 7):
            ckpt.step(step, state)
            asked(proxy)
            ckpt.save(step, state).wait()
            if step > 2:
                until(lambda step=step: _removed(s3_server, url, step - 2), "rotation")
            until(lambda: not _rotating(ckpt), "the rotation has ended")
            counts.append(asked(proxy))
    assert counts[-1].total() <= 40, counts[-1]
    assert counts[-1].total() <= counts[3].total() + 2, f"it grows with what waits: {counts}"


def test_records_are_read_once_by_whoever_opens(s3_server: S3Server, proxy: S3Proxy) -> None:
    """By the trainer, from its load to its first step, and by its agent."""
    url = s3_server.url()
    state = {"w": torch.arange(1000.0)}
    for step in range(1, INCARNATIONS):
        everstep.save(url, step, state)
    asked(proxy)
    quiet = kit.policy(full_every=None, heartbeat_s=60)

    def of_records() -> Counter[str]:
        proxy.wait_quiet()
        got = [one.key for one in proxy.requests if one.operation == "GetObject"]
        return Counter(key.rpartition("/")[2] for key in got if "/incarnations/" in key)

    former = {f"{number:04d}.json" for number in range(1, INCARNATIONS)}
    with everstep.Checkpointer(url, policy=quiet, agent="inline") as ckpt:
        ckpt.load(state)
        assert of_records() == dict.fromkeys(former, 1)
        ckpt.save(10, state).wait()
        assert of_records() == {**dict.fromkeys(former, 2), f"{INCARNATIONS:04d}.json": 1}


def _removed(server: S3Server, url: str, step: int) -> bool:
    return not any(name.endswith(".vote") for name in kit.names(server, f"{url}/checkpoints/{step:09d}"))


def _rotating(ckpt: everstep.Checkpointer) -> bool:
    """Whether the inline agent still commits or rotates."""
    service = ckpt._session._client._inline._service  # type: ignore[union-attr]
    assert service is not None and service.pipeline is not None and service._rotator is not None
    return service.pipeline.busy or service._rotator.busy
