"""By which address the other ranks reach this host."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket

from everstep.errors import BadOption

ADDRESS = "EVERSTEP_ADDRESS"
"""The environment's word on it: an address or a name of this host."""

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): asking for the way to it names the interface of the default route, and
sends nothing."""
PORT = 9


def own_address() -> str:
    """The address to serve at: EVERSTEP_ADDRESS; else the interface on the way to MASTER_ADDR, which is where the
    ranks meet (loopback if that is loopback: then all of them are here); else what this host's name stands for, or
    the interface of the default route."""
    given = os.environ.get(ADDRESS)
    if given:
        return given
    master = os.environ.get("MASTER_ADDR")
    if master and (master == "localhost" or _is_loopback(master)):
        return LOOPBACK
    for host in (master, socket.gethostname(), ELSEWHERE):
        found = _interface_to(host) if host else None
        if found is not None and not _is_loopback(found):
            return found
    return LOOPBACK


def unusable(host: str, error: OSError) -> Exception:
    """What to raise where nothing can listen at ``host``: BadOption if it is no address of this host, else the error
    itself."""
    if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
        return error
    return BadOption(
        f"{host} is no address of this host",
        found=error.strerror or str(error),
        expected=f"{ADDRESS} (or --listen) with an address or a name of this host, by which the others reach it",
    )


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[host]:port" for IPv6). ValueError where it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ValueError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port)


def joined_address(host: str, port: int) -> str:
    """As :func:`split_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _interface_to(host: str) -> str | None:
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0])
    return None


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
