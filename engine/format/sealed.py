"""Sealed records: JSON that a person can read and that carries its own hash.

The file begins, byte for byte, with the kind and the hash; the hash is taken over the whole file with its own
digits replaced by ``0``. So a change of any byte, white space included, is found.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import Damaged, UnknownFormat, UnsupportedValue
from .constants import FORMAT_VERSION, HASH_DIGITS, HASH_ID, READABLE_VERSIONS, SEALED_BYTES_MAX
from .hashing import hexdigest
from .plain import from_plain, to_plain

_HEAD = re.compile(
    rb'\{\n  "everstep": "([a-z][a-z0-9-]{0,31})",\n  "hash": "([a-z0-9-]{1,32}):([0-9a-f]{1,256})"'
)
_RESERVED = ("everstep", "hash", "format")
_INT_CHARS_MAX = 20
_LINE_CHARS = 100
"""A list or map that fits into a line of this length is written on one."""

UPGRADE_HINT = "Read this run with the release of everstep that wrote it, or a newer one."


def seal(kind: str, body: dict[str, Any], *, format: int = FORMAT_VERSION) -> bytes:
    """``body`` as the bytes of a sealed record of ``kind`` (lower-case letters, digits, ``-``).

    Raises :class:`UnsupportedValue` by path for values that are not plain (see :mod:`.plain`).
    """
    for field in _RESERVED:
        if field in body:
            raise UnsupportedValue("this name is reserved in records", path=field)
    record = {"everstep": kind, "hash": f"{HASH_ID}:{'0' * HASH_DIGITS}", "format": format, **to_plain(body)}
    try:
        data = (_render(record, 0, ascii_only=False) + "\n").encode()
    except UnicodeEncodeError:  # lone surrogates: only \u escapes can say them
        data = (_render(record, 0, ascii_only=True) + "\n").encode()
    head = _HEAD.match(data)
    if head is None:
        raise UnsupportedValue("this is no proper kind of record", path="everstep", found=kind)
    if len(data) > SEALED_BYTES_MAX:
        raise UnsupportedValue(
            "the record is too large", path=kind, found=len(data), expected=f"<= {SEALED_BYTES_MAX}"
        )
    return data[: head.start(3)] + hexdigest(data).encode() + data[head.end(3) :]


def _render(value: Any, column: int, *, ascii_only: bool) -> str:
    """``value`` as JSON whose further lines are indented by ``column``; what is short stands on one line."""
    line = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)
    if not value or not isinstance(value, (dict, list)) or (column and column + len(line) <= _LINE_CHARS):
        return line
    inner = " " * (column + 2)
    lines = []
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + _filled(value, inner, ascii_only=ascii_only) + "\n" + " " * column + "]"
    for key in value if isinstance(value, dict) else range(len(value)):
        label = json.dumps(key, ensure_ascii=ascii_only) + ": " if isinstance(value, dict) else ""
        lines.append(inner + label + _render(value[key], column + 2, ascii_only=ascii_only))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * column + closing


def _filled(items: list[Any], indent: str, *, ascii_only: bool) -> str:
    """Scalars, as many on each line as fit."""
    lines: list[str] = []
    line = ""
    for text in json.dumps(items, ensure_ascii=ascii_only, allow_nan=False, separators=("\n", ":"))[
        1:-1
    ].split("\n"):
        if line and len(indent) + len(line) + len(text) + 3 > _LINE_CHARS:
            lines.append(indent + line)
            line = text
        else:
            line = f"{line}, {text}" if line else text
    return ",\n".join([*lines, indent + line])


def unseal(data: bytes, kind: str | None, name: str) -> dict[str, Any]:
    """The body that :func:`seal` was given, of a record of ``kind`` (None: of any).

    Raises :class:`Damaged` for every byte that is not as written, :class:`UnknownFormat` for a record of
    another format version or under a hash that this release does not have; both name the object ``name``.
    """
    return unseal_any(data, name, (kind,) if kind is not None else None)[1]


def unseal_any(data: bytes, name: str, kinds: tuple[str, ...] | None = None) -> tuple[str, dict[str, Any]]:
    """Kind and body of a sealed record of one of ``kinds`` (None: of any); raises as :func:`unseal`."""
    kind, _, body = unseal_versioned(data, name, kinds)
    return kind, body


def unseal_versioned(
    data: bytes, name: str, kinds: tuple[str, ...] | None = None
) -> tuple[str, int, dict[str, Any]]:
    """Kind, format version and body of a sealed record of one of ``kinds``; raises as :func:`unseal`."""
    kind = _verify(data, name)
    if kinds is not None and kind not in kinds:
        raise Damaged("this is another kind of record", name=name, found=kind, expected=" or ".join(kinds))
    try:
        record = json.loads(
            data.decode(), object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_int=_int
        )
    except (ValueError, RecursionError) as problem:
        raise Damaged("the record is no proper JSON", name=name, found=str(problem)) from None
    if not isinstance(record, dict) or record.get("everstep") != kind:
        raise Damaged("the record does not begin with its kind", name=name)
    version = record.get("format")
    if version not in READABLE_VERSIONS or type(version) is not int:
        raise UnknownFormat(
            "the record has another format version",
            name=name,
            found=version,
            expected=f"at most {FORMAT_VERSION}",
            hint=UPGRADE_HINT,
        )
    try:
        return (
            kind,
            version,
            {key: from_plain(value) for key, value in record.items() if key not in _RESERVED},
        )
    except (ValueError, RecursionError) as problem:
        raise Damaged("the record has a value that cannot be read", name=name, found=str(problem)) from None


def _verify(data: bytes, name: str) -> str:
    """Check the hash; the record's kind."""
    if len(data) > SEALED_BYTES_MAX:
        raise Damaged(
            "the record is too large", name=name, found=len(data), expected=f"<= {SEALED_BYTES_MAX}"
        )
    head = _HEAD.match(data)
    if head is None:
        raise Damaged(
            "this is no sealed record", name=name, found=bytes(data[:32]), expected="a sealed record"
        )
    hash_id, written = head[2].decode(), head[3].decode()
    ours = data[: head.start(2)] + HASH_ID.encode() + b":" + b"0" * len(written) + data[head.end(3) :]
    found = hexdigest(ours)
    if hash_id != HASH_ID:
        if found == written:
            # Sealed with our hash, whose name was changed: damage, and no other release's record.
            raise Damaged(
                "the name of the record's hash is wrong", name=name, found=hash_id, expected=HASH_ID
            )
        raise UnknownFormat(
            "the record is sealed with a hash that this release does not have",
            name=name,
            found=hash_id,
            expected=HASH_ID,
            hint=UPGRADE_HINT,
        )
    if found != written:
        raise Damaged("the record's hash is wrong", name=name, found=found, expected=written)
    return head[1].decode()


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a field twice")
    return record


def _int(text: str) -> int:
    if len(text) > _INT_CHARS_MAX:
        raise ValueError("an integer over 64 bits without a tag")
    return int(text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"bare {text}")
