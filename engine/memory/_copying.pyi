from collections.abc import Mapping
from typing import Any

def copy(target: Any, source: Any) -> None: ...
def copy_each(rows: list[tuple[int, int, int]]) -> None: ...
def digest(data: Any) -> bytes: ...
def prove_and_copy(
    piece: memoryview,
    offset: int,
    chunk_bytes: int,
    expected: bytes,
    brief: bytes,
    reads: list[Any],
    targets: Mapping[int, memoryview],
) -> bytes | None: ...
