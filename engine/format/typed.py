"""From the plain body of a record to its frozen value, every type and every field checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import Damaged, UnknownFormat, UnsupportedValue
from .constants import NUMBER_MAX, SIZE_MAX
from .hashing import all_hashes, is_hash

T = TypeVar("T")


class Broken(Exception):
    """A rule that a record breaks, in words."""


def build(
    cls: type[T], body: dict[str, Any], nested: dict[str, type[Any]] | None = None, *, prefix: str = ""
) -> T:
    """An instance of the dataclass ``cls`` from ``body``; ``prefix`` is where that stands, for errors.

    Types are checked strictly. A field that ``cls`` does not have is a later release's: UnknownFormat, raised
    without a name (see :func:`decoding`). ``nested`` gives the classes of fields that hold records.
    """
    need(isinstance(body, dict), f"{prefix or 'the body'} is no map")
    _check_fields(cls, body, prefix)
    for field, inner in (nested or {}).items():
        value = body.get(field)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _check_fields(inner, item, f"{field}.")
    try:
        return msgspec.convert(body, cls, strict=True)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise Broken(str(problem)) from None


def _check_fields(cls: type[Any], body: dict[str, Any], prefix: str) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = [prefix + str(key) for key in body if key not in known]
    if unknown:
        raise UnknownFormat(
            "a record has fields that this release does not know", found=unknown, expected=known
        )
    missing = [prefix + key for key in known if key not in body]
    if missing:
        raise Broken(f"fields {missing} are missing")


def fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, in their order, values as they are."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def decoding(name: str, make: Callable[[], T]) -> T:
    """What ``make`` gives; its :class:`Broken` and nameless :class:`UnknownFormat` become errors that name
    the object ``name``."""
    try:
        return make()
    except Broken as problem:
        raise Damaged("the record breaks a rule", name=name, found=str(problem)) from None
    except UnknownFormat as problem:
        problem.fields.setdefault("name", name)
        raise


def encoding(path: str, check: Callable[[], None]) -> None:
    """Run ``check`` before a record is written; its :class:`Broken` becomes :class:`UnsupportedValue`."""
    try:
        check()
    except Broken as problem:
        raise UnsupportedValue("the record breaks a rule", found=str(problem), path=path) from None


def need(condition: bool, rule: str) -> None:
    """Break with ``rule`` unless ``condition`` holds."""
    if not condition:
        raise Broken(rule)


def need_number(field: str, value: int | None, least: int = 0, most: int = NUMBER_MAX) -> None:
    """``value`` is None or a number between ``least`` and ``most``."""
    need(value is None or least <= value <= most, f"{field} is {value}, not in {least}..{most}")


def need_size(field: str, value: int) -> None:
    """``value`` is a size in bytes."""
    need_number(field, value, 0, SIZE_MAX)


def need_hash(field: str, value: object) -> None:
    """``value`` is a hash in text form."""
    need(is_hash(value), f"{field} is {value!r}, not a hash")


def need_sizes(field: str, values: Sequence[int]) -> None:
    """All of ``values`` are sizes in bytes."""
    for value in (min(values, default=0), max(values, default=0)):
        need_size(field, value)


def need_hashes(field: str, values: Sequence[str]) -> None:
    """All of ``values`` are hashes in text form."""
    if not all_hashes(values):
        for value in values:
            need_hash(field, value)
