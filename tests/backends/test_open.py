"""From what a user writes to a place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from everstep.backends.errors import Permanent
from everstep.backends.files import LocalBackend
from everstep.backends.fsspecfs import FsspecBackend
from everstep.backends.open import Location, is_local, locate_store, open_backend
from everstep.backends.s3 import S3Backend


def test_paths_and_urls_name_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b%20c" / "run"
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        first = open_backend(place)
        await first.write("x", b"1")
        for name in (
            *(str(place), str(place) + "/", os.path.join("a b%20c", "run"), first.url, place.as_uri()),
            *(first.url.replace("file://", "file:"), first.url.replace("file://", "file://localhost")),
        ):
            backend = open_backend(name)
            assert backend.url == first.url, name
            assert await backend.read("x") == b"1"
            await backend.close()
        await first.close()

    asyncio.run(main())
    assert os.listdir(tmp_path) == ["a b%20c"]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3:/bucket/run",
            "s3://",
            "s3:///",
            "s3://?endpoint_url=http://h",
            "s3://b/../c",
            "s3://b/./c",
            "s3://b/a\nb",
        ),
        *(
            "c://x",
            "simplecache::s3://b/c",
            "file://host/path",
            "file://",
            "file:///a?b",
            "file:///a#b",
            "",
            "a\0b",
        ),
    ],
)
def test_what_is_not_supported(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Permanent, match=r"file:///path|supported"):
        open_backend(url)


def test_nothing_is_made_by_opening(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "run", shared=True, threads=2)
    promised = backend.capabilities
    assert promised.shared and promised.atomic_create and promised.direct_io
    asyncio.run(backend.close())
    assert os.listdir(tmp_path) == []
    assert not open_backend(tmp_path).capabilities.shared
    for threads in (0, -1, 1000):
        with pytest.raises(Permanent):
            open_backend(tmp_path, threads=threads)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket//a///run//", "s3://bucket/a/run"),
        ("s3a://bucket/run/", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a b+c%20d=\u00e9#", "s3://bucket/a b+c%20d=\u00e9#"),
        ("s3://b/r?endpoint_url=HTTP://H:1/", "s3://b/r?endpoint_url=http://h:1"),
        ("s3://b/r/?profile=x&endpoint_url=http://h", "s3://b/r?endpoint_url=http://h&profile=x"),
        ("s3://b/r?anon=True", "s3://b/r?anon=true"),
        ("memory://a//b/", "memory://a/b"),
        ("gs://bucket/a/", "gs://bucket/a"),
        (
            "abfs://container@account.dfs.core.windows.net/a",
            "abfs://container@account.dfs.core.windows.net/a",
        ),
    ],
)
def test_canonical_urls(given: str, url: str) -> None:
    found = locate_store(given)
    assert found.url == url
    assert locate_store(found.url) == Location(url, found.options)


def test_options_of_url_and_mapping_are_one() -> None:
    secret = {"key": "k", "secret": "geheim", "client_kwargs": {"region_name": "r"}}
    first = locate_store("s3://b/r?endpoint_url=http://h:1&anon=false", secret)
    assert first.options == {**secret, "endpoint_url": "http://h:1", "anon": False}
    for options in (
        {**secret, "endpoint_url": "http://h:1"},
        {"client_kwargs": {"endpoint_url": "http://h:1/"}},
    ):
        assert locate_store("s3://b/r?anon=false", options).url == first.url
    assert "geheim" not in repr(first)
    backend = open_backend("s3://b/r?endpoint_url=http://h:1", options=secret)
    assert isinstance(backend, S3Backend) and backend.url == "s3://b/r?endpoint_url=http://h:1"
    assert "geheim" not in repr(backend)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://b/r?secret=geheim",
            "s3://b/r?key=geheim",
            "s3://b/r?token=geheim",
            "s3://b?aws_access_key_id=geheim",
        ),
        *("s3://user:geheim@b/r", "s3://b/r?endpoint_url=http://user:geheim@h", "sftp://u:geheim@h/p"),
        *("abfs://c/p?account_key=geheim", "abfs://c/p?sas_token=geheim", "gs://b?password=geheim"),
    ],
)
def test_secrets_in_urls_are_refused_and_not_told(url: str) -> None:
    for use in (locate_store, open_backend):
        with pytest.raises(Permanent, match="storage options") as caught:
            use(url)
        assert "geheim" not in str(caught.value) and "geheim" not in repr(caught.value)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(Permanent, match="endpoint_url"):
        locate_store("s3://b/r?endpoint_url=http://h", {"endpoint_url": "http://other"})
    with pytest.raises(Permanent, match="twice"):
        locate_store("s3://b/r?anon=true&anon=false")
    for endpoint in ("h:1", "ftp://h", "http://h?x=1"):
        with pytest.raises(Permanent, match="https://host:port"):
            locate_store("s3://b/r", {"endpoint_url": endpoint})


def test_which_backend(tmp_path: Path) -> None:
    assert is_local(tmp_path) and is_local(str(tmp_path)) and is_local(tmp_path.as_uri())
    assert not is_local("s3://b/r") and not is_local("memory://x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert locate_store(tmp_path / "link", {"key": "x"}) == Location((tmp_path / "real").as_uri())
    assert isinstance(open_backend(tmp_path, options={"key": "x"}), LocalBackend)
    memory = open_backend("memory://x/y")
    assert isinstance(memory, FsspecBackend) and memory.url == "memory://x/y"
    assert not memory.capabilities.atomic_create and not memory.capabilities.shared
    promised = open_backend("s3://b/r").capabilities
    assert promised.atomic_create and promised.shared and promised.flat
    with pytest.raises(Permanent, match="supported"):
        open_backend("gs://b")  # its file system is not installed
