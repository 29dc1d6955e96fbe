"""From what a user writes to a backend."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from .api import Backend
from .door import BoundDoor
from .errors import Permanent
from .files import LocalBackend

SUPPORTED = "a path, or file:///path"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


@dataclass(frozen=True, slots=True)
class Location:
    """A place. ``url`` is canonical and has no secrets; ``options`` are those of its storage, which may be secret."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def locate_store(given: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
    """The place that a path or a URL means; two names of one directory are one place."""
    path = os.path.realpath(local_path(given))
    return Location("file://" + quote(os.fsencode(path)), dict(options or {}))


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether it is a path, or a URL of one."""
    scheme = _SCHEME.match(os.fspath(url))
    return scheme is None or not isinstance(url, str) or scheme.group(1).lower() == "file"


def open_backend(
    url: str | os.PathLike[str],
    *,
    shared: bool = False,
    threads: int = 4,
    bound: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Backend:
    """The backend for a path or a ``file://`` URL; nothing is read or made yet. ``shared`` says that all
    nodes see the same files there. ``bound`` binds to the directory that is there now, if one is: when it is
    deleted and made anew, the new one is not touched. Raises Permanent for what is no such thing, naming what is
    supported."""
    path = local_path(url)
    door = None
    if bound:
        with contextlib.suppress(OSError):
            door = BoundDoor(path)
    return LocalBackend(path, shared=shared, threads=threads, door=door)


def local_path(url: str | os.PathLike[str]) -> str:
    """The path that a path or a ``file://`` URL means (in a URL ``%20`` is a space, in a path it is not)."""
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    if not text or "\0" in text:
        raise Permanent(text, f"no place at all; supported: {SUPPORTED}")
    if scheme is None or not isinstance(url, str):
        return text
    if scheme.group(1).lower() != "file":
        raise Permanent(text, f"no backend for {scheme.group(1)!r}; supported: {SUPPORTED}")
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise Permanent(text, "a file URL names one absolute path of this machine: file:///path")
    return os.fsdecode(unquote_to_bytes(parts.path))
