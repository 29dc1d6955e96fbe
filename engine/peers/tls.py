"""TLS between agents, where the environment has certificates for it.

Both sides show a certificate of the run's own authority. Names in it are not compared: agents move between hosts, and
who is meant is proved by the run's secret.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from everstep.errors import BadOption

CERT = "EVERSTEP_TLS_CERT"
KEY = "EVERSTEP_TLS_KEY"
CA = "EVERSTEP_TLS_CA"
"""Files in PEM form: this node's certificate (and what it is signed by), its key, and the authority's certificate."""


@dataclass(frozen=True)
class Tls:
    """One side's settings each; never part of a text."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_settings() -> Tls | None:
    """TLS as the environment says; None where it says nothing. BadOption where it is incomplete, or a file cannot be
    used."""
    given = {name: os.environ.get(name, "") for name in (CERT, KEY, CA)}
    if not any(given.values()):
        return None
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise BadOption(
            "TLS between agents is set up in part",
            found=f"{', '.join(missing)} not set",
            expected=f"{CERT}, {KEY}, {CA}",
        )
    return Tls(_context(ssl.PROTOCOL_TLS_SERVER, given), _context(ssl.PROTOCOL_TLS_CLIENT, given))


def _context(protocol: int, given: dict[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(given[CERT], given[KEY], password=_no_password)
        context.load_verify_locations(given[CA])
    except (OSError, ValueError) as error:
        raise BadOption(
            "the files of TLS between agents cannot be used",
            found=f"{type(error).__name__}: {error}",
            expected=f"PEM files in {CERT}, {KEY} (without a password), {CA}",
        ) from None
    return context


def _no_password() -> str:
    """Without this, OpenSSL would ask a terminal."""
    raise ValueError("the key has a password")
