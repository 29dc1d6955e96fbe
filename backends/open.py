"""From what a user writes to a backend."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode, urlsplit

from .api import Backend
from .door import BoundDoor
from .errors import Permanent
from .files import LocalBackend
from .limit import Gate

SUPPORTED = "a path, file:///path, s3://bucket/prefix, or the URL of another file system that fsspec knows"

S3_PROTOCOLS = frozenset({"s3", "s3a"})

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_CHAINED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::.*://")
_SECRET = re.compile(
    r"key|secret|token|pass|credential|signature|^sas|_sas|connection_string|^auth", re.IGNORECASE
)
_WORDS = {"true": True, "false": False}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Location:
    """A place: its canonical URL, without secrets, and the options (secrets, maybe) with which it is opened."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def open_backend(
    url: str | os.PathLike[str],
    *,
    shared: bool = False,
    threads: int = 4,
    bound: bool = False,
    options: Mapping[str, Any] | None = None,
    gate: Gate | None = None,
) -> Backend:
    """The backend for a path or a URL; nothing is read or made yet, and no connection opened.

    ``options`` are the storage options, as fsspec's file system of that kind takes them; they and the options in the
    URL's query are put together (:func:`locate_store`). All bytes that go over a network pass ``gate``.
    For local files, ``shared`` says that all nodes see the same ones there, ``threads`` how many work on them, and
    ``bound`` binds to the directory that is there now, if one is: when it is deleted and made anew, the new one is not
    touched. Raises Permanent for what is no such thing, naming what is supported."""
    if is_local(url):
        return _open_local(url, shared=shared, threads=threads, bound=bound)
    location = locate_store(url, options)
    protocol, rest, _ = _parts(location.url)
    if protocol in S3_PROTOCOLS:
        from .s3 import S3Backend

        bucket, _, prefix = rest.partition("/")
        return S3Backend(bucket, prefix, location.options, url=location.url, gate=gate)
    from .fsspecfs import FsspecBackend

    return FsspecBackend(
        f"{protocol}://{rest}", location.options, shown=location.url, threads=threads, gate=gate
    )


def kind_of(url: str | os.PathLike[str]) -> str:
    """The protocol of a store, for :func:`load_kind`; "" for local files."""
    return "" if is_local(url) else _parts(str(url))[0]


def load_kind(kind: str) -> None:
    """Load what backends of that protocol need, which takes half a second and more: before one is opened."""
    if kind in S3_PROTOCOLS:
        from . import s3
        from .s3client import load_interfaces

        del s3
        load_interfaces()
        return
    import fsspec

    from . import fsspecfs

    del fsspecfs
    fsspec.get_filesystem_class(kind)


def _open_local(url: str | os.PathLike[str], *, shared: bool, threads: int, bound: bool) -> Backend:
    path = local_path(url)
    door = None
    if bound:
        with contextlib.suppress(OSError):
            door = BoundDoor(path)
    return LocalBackend(path, shared=shared, threads=threads, door=door)


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether it is a path or a ``file:`` URL."""
    if not isinstance(url, str):
        return True
    scheme = _SCHEME.match(url)
    return scheme.group(1).lower() == "file" if scheme is not None else not _CHAINED.match(url)


def locate_store(given: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
    """The place that a path or a URL means, with the options of the URL's query and ``options`` together.

    Two ways to write a place give one URL: no doubled or trailing slashes, options in order, the endpoint among them
    wherever it was given, for another endpoint is another place. The part between bucket and ``?`` is taken as it is:
    ``%20`` there are three characters. Raises Permanent for secrets in a URL (they belong into ``options`` or the
    environment, for URLs are shown and stored), for an option that is given twice with different values, and
    for what is no URL. Options mean nothing to local files."""
    if is_local(given):
        return Location(Path(os.path.realpath(local_path(given))).as_uri())
    protocol, rest, query = _parts(str(given))
    place = f"{protocol}://{rest}"
    named = _named_options(place, query)
    merged = dict(options or {})
    if client := dict(merged.get("client_kwargs") or {}):
        merged["client_kwargs"] = client
    for given_options in (named, merged, client):
        if endpoint := given_options.pop("endpoint_url", None):
            plain = _plain_endpoint(place, str(endpoint))
            if named.setdefault("endpoint_url", plain) != plain:
                raise Permanent(place, "endpoint_url is given twice, with different values")
    for name, value in named.items():
        if merged.setdefault(name, value) != value:
            raise Permanent(place, f"{name} is in the URL and, different, in the storage options")
    shown = urlencode(
        sorted((name, _text(value)) for name, value in named.items()), quote_via=quote, safe=":/"
    )
    return Location(place + (f"?{shown}" if shown else ""), merged)


def _parts(url: str) -> tuple[str, str, str]:
    """Protocol, the canonical rest, and the query of a URL that is not local."""
    scheme = _SCHEME.match(url)
    shown = url.partition("?")[0]
    if scheme is None or not url.startswith("//", scheme.end() - 1) or "::" in shown:
        raise Permanent(shown, f"not understood; supported: {SUPPORTED}")
    protocol = scheme.group(1).lower()
    path, _, query = url[scheme.end() + 1 :].partition("?")
    parts = [part for part in path.split("/") if part]
    if ":" in (parts[0].rpartition("@")[0] if parts else ""):
        raise Permanent(f"{protocol}://...", "a password in a URL; pass it in the storage options")
    if protocol in S3_PROTOCOLS:
        protocol = "s3"
        if not parts:
            raise Permanent(shown, f"no bucket; supported: {SUPPORTED}")
    if any(part in (".", "..") for part in parts) or _CONTROL.search(path):
        raise Permanent(shown, f"'.', '..' and control characters name no place; supported: {SUPPORTED}")
    return protocol, "/".join(parts), query


def _named_options(place: str, query: str) -> dict[str, Any]:
    """The options in a URL's query."""
    named: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if _SECRET.search(name):
            raise Permanent(
                place, f"{name!r} in the URL is a secret; pass it in the storage options or the environment"
            )
        if named.setdefault(name, _WORDS.get(value.lower(), value)) != _WORDS.get(value.lower(), value):
            raise Permanent(place, f"{name!r} is in the URL twice")
    if query and not named:
        raise Permanent(place, "options in a URL are written ?name=value&name=value")
    return named


def _plain_endpoint(place: str, endpoint: str) -> str:
    """An endpoint as it is written in a canonical URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise Permanent(place, "an endpoint is a URL: https://host:port")
    if "@" in parts.netloc:
        raise Permanent(
            place, "a secret in the endpoint's URL; pass keys in the storage options or the environment"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def local_path(url: str | os.PathLike[str]) -> str:
    """The path that a path or a ``file://`` URL means (in a URL ``%20`` is a space, in a path it is not)."""
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    if not text or "\0" in text:
        raise Permanent(text, f"no place at all; supported: {SUPPORTED}")
    if scheme is None or not isinstance(url, str):
        return text
    if scheme.group(1).lower() != "file":
        raise Permanent(text, f"no local path but {scheme.group(1)!r}; wanted: a path, or file:///path")
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise Permanent(text, "a file URL names one absolute path of this machine: file:///path")
    return os.fsdecode(unquote_to_bytes(parts.path))
