from collections.abc import Sequence
from typing import Any

def split(new: Any, base: Any, transform: int, item: int, grouped: bool, out: Any) -> None: ...
def join(planes: Sequence[Any], base: Any, transform: int, item: int, grouped: bool, out: Any) -> None: ...
def thin(plane: Any, map: Any, values: Any) -> int: ...
def fill(map: Any, values: Any, plane: Any) -> bool: ...
def weigh(planes: Any, rows: int, weights: Any) -> list[tuple[int, int, int]]: ...
def changed(new: Any, base: Any, item: int, map: Any) -> int: ...
def pick(all: Any, map: Any, item: int, some: Any) -> bool: ...
def place(some: Any, map: Any, item: int, all: Any) -> bool: ...
def look(
    new: Any,
    base: Any,
    transform: int,
    item: int,
    shift: int,
    contexts: int,
    runs: int,
    each: int,
    weights: Any,
) -> tuple[int, int, int, list[tuple[int, int, int]], tuple[int, int, int, int, list[int]] | None]: ...
def code(
    new: Any,
    base: Any,
    transform: int,
    item: int,
    shift: int,
    low: int,
    contexts: int,
    lanes: int,
    weights: Any,
    marks: Any,
    room: Any,
    out: Any,
) -> tuple[int, int, int]: ...
def frequencies(weights: Any, out: Any) -> None: ...
def declassify(
    words: Any,
    lanes: int,
    bits: Any,
    frequencies: Any,
    base: Any,
    transform: int,
    item: int,
    shift: int,
    low: int,
    contexts: int,
    symbols: Any,
    out: Any,
) -> bool: ...
