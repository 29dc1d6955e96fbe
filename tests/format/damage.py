"""Damages that any stored object may suffer, for the tests that must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from everstep.errors import Damaged, UnknownFormat

MASKS = (0x01, 0x20, 0x80, 0xFF)
"""Bits flipped at every position: the lowest, the one between upper and lower case, the highest, all."""


def damages(data: bytes, masks: tuple[int, ...] = MASKS) -> Iterator[tuple[str, bytes]]:
    """Every single-byte change (by ``masks``), removal and insertion, every truncation, and some growths."""
    for at in range(len(data)):
        for mask in masks:
            yield f"byte {at} ^ {mask:#x}", data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
        yield f"byte {at} removed", data[:at] + data[at + 1 :]
        yield f"byte {at} doubled", data[:at] + data[at : at + 1] + data[at:]
        yield f"cut at {at}", data[:at]
    for tail in (b"\0", b"\n", b" ", data):
        yield f"grown by {tail[:4]!r}", data + tail


def assert_all_found(
    data: bytes, read: Callable[[bytes], object], name: str, masks: tuple[int, ...] = MASKS
) -> int:
    """``read`` must refuse every damage of ``data`` with an error that names ``name``; how many it were."""
    read(data)
    count = 0
    for what, damaged in damages(data, masks):
        if damaged == data:
            continue
        count += 1
        try:
            read(damaged)
        except (Damaged, UnknownFormat) as error:
            assert error.fields.get("name") == name, f"{what}: {error!r} does not name the object"
        else:
            raise AssertionError(f"{what}: not found")
    return count
