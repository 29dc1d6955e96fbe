"""``everstep bench s3`` runs, small, and counts nothing that is wrong; numbers of this size mean nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest
from everstep.benchmarks import object_store
from everstep.benchmarks.common import Mismatch
from everstep.benchmarks.object_relay import Passed, relayed
from everstep.benchmarks.object_store import run_s3
from everstep.benchmarks.object_ways import WAYS
from everstep.cli.bench import _s3_text
from everstep.errors import BadOption, EverstepError

from .server import S3Server

MIB = 1 << 20


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server.url()


def test_all_ways_are_measured(url: str, s3_server: S3Server, tmp_path: Path) -> None:
    stages: list[str] = []
    found = run_s3(48 / 1024, 1, tmp_path, stages.append, url=url, window_s=0.5)
    left_out = found["left_out"]
    if not s3_server.pid:
        # It wants the ETag of a finished upload in the answer, which some servers tell in HEAD only.
        left_out = {
            way: why for way, why in left_out.items() if (way, "ETag" in why) != ("s3torchconnector", True)
        }
    assert left_out == {}
    measured = [way for way in WAYS if way not in found["left_out"]]
    for order in ("put", "get"):
        assert list(found[order]) == measured
        own = found[order]["everstep"]
        fastest = min(one["median_s"] for way, one in found[order].items() if way != "everstep")
        assert found[f"{order}_vs_best_rival"] == fastest / own["median_s"]
        assert 0 < own["peak_extra_mib"] < found["memory_bound"][f"{order}_mib"] + 64
        assert own["bytes_per_s"] * own["median_s"] == pytest.approx(48 * MIB)
    assert found["rate_limit_error"] >= 0 and found["rate_limit_get_error"] >= 0
    assert len(stages) == 4  # the bar of the command counts them
    assert os.listdir(tmp_path) == []
    prefix = url.removeprefix(f"s3://{s3_server.bucket}/")
    listed = s3_server.client().list_objects_v2(Bucket=s3_server.bucket, Prefix=prefix)
    assert [one["Key"] for one in listed.get("Contents", ()) if not one["Key"].endswith(".probe")] == []
    text = _s3_text(found)
    assert text.count("left out: ") == len(found["left_out"]) and all(way in text for way in WAYS)


def test_a_rival_that_fails_is_named_and_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "WAYS", {"everstep": None, "boto3": None, "teleport": None})
    found = run_s3(4 / 1024, 1, tmp_path, lambda what: None, url=url, window_s=0.2)
    assert "teleport" in found["left_out"] and list(found["get"]) == ["everstep", "boto3"]
    monkeypatch.setattr(object_store, "WAYS", {"everstep": None, "teleport": None})
    with pytest.raises(EverstepError, match="no rival is left"):
        run_s3(4 / 1024, 1, tmp_path, lambda what: None, url=url, window_s=0.2)


def test_other_bytes_do_not_count(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = object_store.make_images
    monkeypatch.setattr(object_store, "make_images", lambda *args: [*make(*args)[1:], "another"])
    with pytest.raises(Mismatch, match="everstep: 4 of 4"):
        run_s3(4 / 1024, 1, tmp_path, lambda what: None, url=url)


def test_a_url_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadOption, match="AWS_ACCESS_KEY_ID"):
        run_s3(1, 1, tmp_path, lambda what: None, url="s3://bucket/prefix")


def test_the_rates_of_a_stream() -> None:
    passed = Passed()
    with pytest.raises(ValueError, match="no bytes"):
        passed.rates(5.0)
    passed._moments, passed._totals = [0.1 * i for i in range(101)], [10 * (i + 1) for i in range(101)]
    assert passed.rates(5.0) == pytest.approx((100, 100), abs=3)
    assert passed.rates(20.0) == pytest.approx((1010 / 20, 1010 / 20))  # all of it within so short a time
    passed._totals = [total + (300 if i >= 70 else 0) for i, total in enumerate(passed._totals)]
    assert passed.rates(5.0) == pytest.approx((100, 160), abs=3)
    passed._moments[-1] = 60.0  # one last word, long after: not part of the stream
    assert passed.rates(5.0) == pytest.approx((100, 160), abs=3)


def test_the_relay_sees_all_bytes() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        with server, server.accept()[0] as peer:
            while data := peer.recv(MIB):
                peer.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    sent = os.urandom(MIB)

    async def talk(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        came = await reader.readexactly(MIB)
        writer.close()
        return came

    with relayed(f"http://127.0.0.1:{server.getsockname()[1]}") as relay:
        assert asyncio.run(talk(int(relay.endpoint.rpartition(":")[2]))) == sent
        thread.join(10)
        assert [passed._totals[-1] for passed in (relay.sent, relay.received)] == [MIB, MIB]
    assert not thread.is_alive()
