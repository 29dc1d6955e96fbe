"""Storage options, credentials and endpoints that are wrong, without a server."""

from __future__ import annotations

import asyncio
import logging
import pickle
from pathlib import Path
from typing import Any

import everstep
import pytest
from botocore.loaders import JSONFileLoader
from everstep.backends import s3client
from everstep.backends.errors import Permanent, Retryable, UnknownOption
from everstep.backends.open import load_kind, open_backend
from everstep.backends.s3 import S3Backend
from everstep.backends.s3client import S3Client
from everstep.backends.s3options import READ_S, session_options
from everstep.errors import BadOption, CannotTell

from .server import free_ports

URL = "s3://bucket/prefix"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No keys, no configuration, no metadata service, short waits."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_FIRST", 0.01)


def test_what_is_known_goes_on() -> None:
    config = {"connect_timeout": 3, "s3": {"addressing_style": "virtual"}}
    given = {"key": "a", "region": "eu-1", "profile": "p", "use_ssl": False, "config_kwargs": config}
    found = session_options(URL, {**given, "client_kwargs": {"verify": False}, "requester_pays": True})
    assert found["client_kwargs"] == {"verify": False, "region_name": "eu-1"}
    assert found["config_kwargs"]["connect_timeout"] == 3 and found["config_kwargs"]["read_timeout"] == READ_S
    assert found["config_kwargs"]["s3"]["addressing_style"] == "virtual"
    assert found["key"] == "a" and found["profile"] == "p" and "requester_pays" not in found


@pytest.mark.parametrize(
    ("options", "found", "known"),
    [
        ({"regoin": "geheim"}, "'regoin' in storage_options", "region, region_name"),
        ({"sekret": "geheim", "kee": 1}, "'kee', 'sekret' in storage_options", "profile"),
        ({"client_kwargs": {"aws_key": "geheim"}}, "'aws_key' in client_kwargs", "aws_access_key_id"),
        ({"config_kwargs": {"read_timout": 1}}, "'read_timout' in config_kwargs", "read_timeout"),
    ],
)
def test_unknown_options_are_told_at_opening(
    options: dict[str, Any], found: str, known: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownOption) as first:
        open_backend(URL, options=options)
    copy = pickle.loads(pickle.dumps(first.value))  # noqa: S301
    assert copy.cause == first.value.cause == found and known in copy.known
    tier = everstep.Tier(URL, storage_options=options)
    for opening in (
        lambda: everstep.Checkpointer(URL, storage_options=options),
        lambda: everstep.Checkpointer(tmp_path / "run", tiers=[tier]),
        lambda: everstep.load(URL, storage_options=options),
    ):
        with pytest.raises(BadOption) as error:
            opening()
        assert found in str(error.value) and known in str(error.value) and URL in str(error.value)
        assert "geheim" not in str(error.value)


def test_a_value_that_is_refused_is_told_at_opening() -> None:
    options = {"config_kwargs": {"s3": {"addressing_style": "odd"}}}
    with pytest.raises(Permanent, match="style odd"):
        open_backend(URL, options=options)
    with pytest.raises(BadOption, match="style odd"):
        everstep.load(URL, storage_options=options)


@pytest.mark.parametrize(
    ("options", "words"), [({}, "there are no credentials"), ({"key": "a"}, "half of the credentials")]
)
def test_missing_credentials_are_not_called_expired(options: dict[str, Any], words: str) -> None:
    options["endpoint_url"] = "http://127.0.0.1:1"
    with pytest.raises(CannotTell) as error:
        everstep.load(URL, storage_options=options)
    assert "Expired" not in str(error.value)
    for word in (words, "storage_options", "AWS_ACCESS_KEY_ID", "~/.aws/credentials"):
        assert word in str(error.value)


def test_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    """It is told at once, for what is waited, and once."""
    (port,) = free_ports(1)
    options = {"key": "a", "secret": "geheim", "endpoint_url": f"http://127.0.0.1:{port}"}

    async def main() -> None:
        backend = open_backend(URL, options=options)
        assert isinstance(backend, S3Backend)
        with caplog.at_level(logging.WARNING, "everstep"):
            with pytest.raises(Retryable, match=f"127.0.0.1:{port}: Connection refused"):
                await asyncio.gather(backend.read("a"), backend.read("b"))
        await backend.close()

    asyncio.run(main())
    (record,) = caplog.records
    assert f"127.0.0.1:{port}: Connection refused" in record.getMessage()
    assert URL in record.getMessage() and "tried 8 times" in record.getMessage()
    assert "geheim" not in caplog.text


def test_clients_of_a_process_read_what_botocore_knows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of JSON. Keys are each client's own."""
    read: list[str] = []
    load = JSONFileLoader.load_file

    def counted(self: JSONFileLoader, path: str) -> Any:
        found = load(self, path)
        read.extend([path] if found is not None else [])
        return found

    monkeypatch.setattr(JSONFileLoader, "load_file", counted)

    async def keys(number: int) -> str:
        options = {"key": f"k{number}", "secret": "s", "region": "eu-1"}
        line = await S3Client(URL, options)._connect()
        try:
            return str(line.client._request_signer._credentials.access_key)
        finally:
            await line.close()

    s3client._loader.cache_clear()
    assert asyncio.run(keys(1)) == "k1" and read
    del read[:]
    assert asyncio.run(keys(2)) == "k2" and not read
    s3client._loader.cache_clear()
    load_kind("s3")
    assert read
    del read[:]
    assert asyncio.run(keys(3)) == "k3" and not read
