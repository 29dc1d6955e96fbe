"""From storage options to s3fs' arguments. What it, or botocore, does not know is told before any request."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.session import Session
from s3fs import S3FileSystem

from .errors import Permanent, UnknownOption
from .s3trust import Session as TrustingSession

CONNECT_S = 10.0
READ_S = 30.0
"""Seconds to connect within, and for which a server may be silent; ``config_kwargs`` may say otherwise
(``connect_timeout``, ``read_timeout``)."""

CONNECTIONS_MAX = 32
"""Connections of one client, unless ``config_kwargs`` say otherwise (``max_pool_connections``)."""

USER_AGENT = "everstep"
"""What servers log. botocore would put its own together anew, twice for each request."""

OWN = frozenset({"region", "region_name"})
"""Options that s3fs has only within ``client_kwargs``."""

CACHES = frozenset({"use_listings_cache", "listings_expiry_time", "max_paths"})
"""Options of all file systems of fsspec; there are no caches here."""

SET_HERE = frozenset({"asynchronous", "loop", "session"})


def session_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of s3fs for a user's storage options: theirs go before ours, which are the limits in time, no
    repeating within botocore, no caches, no checksums but those that are put in here, and buckets in the path where
    the endpoint is not Amazon's. Raises UnknownOption, and Permanent for values that botocore refuses."""
    _check_names(url, "storage_options", options, _storage_names())
    given = {
        name: value
        for name, value in options.items()
        if name not in ("requester_pays", "s3_additional_kwargs")
    }
    client = dict(given.pop("client_kwargs", None) or {})
    _check_names(
        url, "client_kwargs", client, _parameters(Session.create_client) - {"service_name", "config"}
    )
    for name in ("region_name", "region"):
        if value := given.pop(name, None):
            client.setdefault("region_name", value)
    config = dict(given.pop("config_kwargs", None) or {})
    _check_names(url, "config_kwargs", config, {*Config.OPTION_DEFAULTS, *_parameters(AioConfig.__init__)})
    endpoint = (
        given.get("endpoint_url")
        or client.get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    style = {"addressing_style": "path"} if endpoint and "amazonaws.com" not in endpoint else {}
    ours: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "max_pool_connections": CONNECTIONS_MAX,
        "user_agent": USER_AGENT,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    known = Config.OPTION_DEFAULTS
    ours = {name: value for name, value in ours.items() if name in known}
    ours["s3"] = {"payload_signing_enabled": False, **style, **dict(config.pop("s3", None) or {})}
    if "http_session_cls" in _parameters(AioConfig.__init__):
        ours["http_session_cls"] = TrustingSession
    config = {**ours, **config}
    try:
        AioConfig(**config)
    except (TypeError, ValueError, BotoCoreError) as error:
        raise Permanent(url, f"config_kwargs that are not understood: {error}") from error
    # Asking for a bucket's region is a request to the bucket, which not everybody may make.
    fixed = {"use_listings_cache": False, "cache_regions": False}
    return {**given, "client_kwargs": client, "config_kwargs": config, **fixed}


def _storage_names() -> set[str]:
    session = _parameters(AioSession.__init__) & {"profile"}
    return (_parameters(S3FileSystem.__init__) - SET_HERE) | session | OWN | CACHES


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Names of its parameters that have one."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters
    return {name for name, one in found.items() if name != "self" and one.kind not in kinds}


def _check_names(url: str, where: str, given: Iterable[str], known: set[str]) -> None:
    """Raises UnknownOption for the names that are not ``known``; values, which may be secret, are not told."""
    if unknown := sorted(set(given) - known):
        raise UnknownOption(url, f"{', '.join(map(repr, unknown))} in {where}", ", ".join(sorted(known)))
