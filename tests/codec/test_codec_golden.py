"""Payloads that each format version wrote, kept for ever, are read by whatever the code is now."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.codec import planes
from everstep.codec.chunk import decode_chunk
from everstep.format.constants import FORMAT_VERSION

from .make_golden import PARTS
from .test_codec_chunk import samples

GOLDEN = Path(__file__).parent / "golden"
FOUND = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())


def read(path: Path) -> tuple[bytes, ...]:
    return tuple((path / part).read_bytes() for part in PARTS)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("kernel", [planes._kernel, None], ids=["compiled", "numpy"])
def test_what_was_written_is_read(path: Path, kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "_kernel", kernel)
    payload, base, chunk = read(path)
    out = bytearray(len(chunk))
    decode_chunk(int(path.suffix[1:]), memoryview(payload), memoryview(base), memoryview(out))
    assert out == chunk


def test_nothing_is_missing() -> None:
    """But for what zstandard compressed, which its releases may do differently, the code still writes the same."""
    names = {path.name for path in FOUND if path.parent.name == f"v{FORMAT_VERSION}"}
    assert names == {f"{name}.{encoding}" for name, (encoding, *_) in samples().items()}
    assert {path.parent.name for path in FOUND} == {"v4", "v5"}
