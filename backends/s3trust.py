"""The certificates that are trusted, read once in a process and not anew by every client (30 ms each)."""

from __future__ import annotations

import os
import ssl
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession, get_cert_path

_Key = tuple[object, ...]

_kept: dict[_Key, ssl.SSLContext] = {}


class Session(AIOHTTPSession):  # type: ignore[misc, unused-ignore]
    """aiobotocore's own, which verifies as it always does. What has a certificate of the client's, or a proxy, is made
    anew each time; so is everything by a release of aiobotocore that makes it elsewhere."""

    def _build_ssl_contexts(self, proxy_url: str | None) -> tuple[ssl.SSLContext, Any]:
        if proxy_url or self._cert_file:
            made: tuple[ssl.SSLContext, Any] = super()._build_ssl_contexts(proxy_url)
            return made
        key = _place(get_cert_path(self._verify) if self._verify else None)
        if key not in _kept:
            _kept.clear()
            _kept[key] = super()._build_ssl_contexts(None)[0]
        return _kept[key], None


def _place(path: str | None) -> _Key:
    """A bundle of certificates as it is now: one that is replaced is read again."""
    if path is None:
        return (None,)
    found = os.stat(path)
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


__all__ = ["Session"]
