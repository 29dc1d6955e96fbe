"""Writes the golden payloads: ``python -m tests.codec.make_golden DIRECTORY``, from the top.

They were written once, by the release that introduced a format version, and are never written again; every later
release must read them. A new format version gets a directory of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .test_codec_chunk import samples

PARTS = ("payload", "base", "chunk")


def main(directory: str) -> None:
    for name, (encoding, *parts) in samples().items():
        path = Path(directory) / f"{name}.{encoding}"
        path.mkdir(parents=True, exist_ok=True)
        for part, data in zip(PARTS, parts, strict=True):
            (path / part).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
