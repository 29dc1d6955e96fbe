"""Bounded decompression of zstandard frames."""

from __future__ import annotations

import zstandard

from ..errors import Damaged


def inflate(frame: bytes, nbytes: int, nbytes_max: int, name: str) -> bytes:
    """Decompress one zstandard frame that holds exactly ``nbytes`` (at most ``nbytes_max``), else Damaged."""
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != nbytes or nbytes > nbytes_max:
            raise Damaged(
                "a compressed block has a wrong size",
                name=name,
                found=declared,
                expected=min(nbytes, nbytes_max),
            )
        plain: bytes = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=nbytes, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError) as problem:
        raise Damaged("a compressed block cannot be read", name=name, found=str(problem)) from None
    if len(plain) != nbytes:
        raise Damaged("a compressed block has a wrong size", name=name, found=len(plain), expected=nbytes)
    return plain
