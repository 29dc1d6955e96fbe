"""From what a user writes to a place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from everstep.backends.errors import Permanent
from everstep.backends.open import open_backend


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
        *("s3://bucket/run", "s3:/bucket/run", "S3://x", "gs://b", "http://h/p", "memory://", "c://x"),
        *("file://host/path", "file://", "file:///a?b", "file:///a#b", "", "a\0b"),
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
