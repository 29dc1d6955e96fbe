"""The text of a typed path inside a part: injective, and readable where keys are plain.

Components are joined by ``/``. A string key is itself, with ``~`` as the escape; ``#3`` is an integer key,
``[3]`` a position in a list or tuple, ``.x`` nothing special: a field of a dataclass or named tuple is
written as its name. Other key types are tagged: ``~n`` None, ``~b1`` True, ``~f`` float, ``~y`` bytes, ``~x``
anything else (the hash of its node). ``@`` is escaped because the layout marks boxes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

from .wire import Node

RESERVED = "__metadata__"
"""A name that the safetensors header keeps for itself."""

_ESCAPES = {"~": "~0", "/": "~1", "@": "~2"}
_FIRST = {"#": "~3", "[": "~4"}
_EMPTY = "~5"
_RESERVED = "~6"
_SPECIAL = re.compile(r"[~/@#\[\ud800-\udfff]")
_ESCAPED = re.compile(r"[~/@\ud800-\udfff]")


def are_plain(keys: Iterable[str]) -> bool:
    """Whether no key of ``keys`` (all exact strings) needs an escape, so that each is its own component."""
    keys = list(keys)
    return not _SPECIAL.search("".join(keys)) and "" not in keys and RESERVED not in keys


def text_component(key: str) -> str:
    """The component of a string key."""
    if key == "":
        return _EMPTY
    if key == RESERVED:
        return _RESERVED
    escaped = _ESCAPED.sub(_escape, key)
    return _FIRST.get(escaped[0], escaped[0]) + escaped[1:]


def component(key: Any, node: Node) -> str:
    """The component of a key of any type; ``node`` is its encoded form."""
    kind = type(key)
    if kind is str:
        return text_component(key)
    if kind is int:
        return f"#{key}"
    if kind is bool:
        return f"~b{int(key)}"
    if key is None:
        return "~n"
    if kind is float:
        # The node's bytes decide: two NaN keys of different bits are two keys.
        return f"~f{key.hex()}" if key == key else f"~x{_digest(node)}"
    if kind is bytes and len(key) <= 32:
        return f"~y{key.hex()}"
    return f"~x{_digest(node)}"


def label(key: Any) -> str:
    """A key of any type for a message: as :func:`component` where that is readable."""
    if type(key) is str:
        return text_component(key)
    if type(key) in (int, bool, float, type(None)) and key == key:
        return component(key, None)
    return f"<{repr(key)[:60]}>"


def join(parent: str, child: str) -> str:
    return f"{parent}/{child}" if parent else child


def _escape(match: re.Match[str]) -> str:
    text = match.group()
    return _ESCAPES.get(text) or f"~u{ord(text):04x}"


def _digest(node: Node) -> str:
    return xxhash.xxh3_128(msgspec.msgpack.encode(node)).hexdigest()
