"""Nodes in network namespaces of their own, each on two networks: one for training, one for the agents."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import subprocess
from collections.abc import Iterator
from typing import Any

CLONE_NEWNET = 0x40000000
TRAIN, AGENTS = "10.213.1", "10.213.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"everstep-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class Networks:
    """``count`` namespaces. ``enter`` is for a life: it puts a rank into that of its node."""

    def __init__(self, count: int) -> None:
        self.tag = secrets.token_hex(2)
        self.names = [f"everstep-{self.tag}-{number}" for number in range(count)]
        for net, kind in ((TRAIN, "t"), (AGENTS, "a")):
            bridge = f"eb{kind}{self.tag}"
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
            for number, name in enumerate(self.names):
                if kind == "t":
                    ip("netns", "add", name)
                    ip("-n", name, "link", "set", "lo", "up")
                ip(
                    "link",
                    "add",
                    self.outer(kind, number),
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"{kind}0",
                    "netns",
                    name,
                )
                ip("link", "set", self.outer(kind, number), "master", bridge)
                ip("link", "set", self.outer(kind, number), "up")
                ip("-n", name, "addr", "add", f"{net}.{number + 1}/24", "dev", f"{kind}0")
                ip("-n", name, "link", "set", f"{kind}0", "up")

    def outer(self, kind: str, number: int) -> str:
        return f"ev{kind}{self.tag}{number}"

    def cut(self, number: int) -> None:
        """The node's link to the other agents goes down."""
        ip("link", "set", self.outer("a", number), "down")

    def mend(self, number: int) -> None:
        ip("link", "set", self.outer("a", number), "up")

    def enter(self, numbers: tuple[int, ...]) -> Any:
        """For the launcher: by rank, into the namespace of its node."""
        return functools.partial(_enter, tuple(self.names[number] for number in numbers), numbers[0])

    def address(self, number: int) -> str:
        return f"{AGENTS}.{number + 1}"

    def close(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)
        for kind in "ta":
            with contextlib.suppress(subprocess.SubprocessError):
                ip("link", "del", f"eb{kind}{self.tag}")


def _enter(names: tuple[str, ...], first: int, rank: int) -> str:
    """In a rank: the address of rank 0's node for training."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{names[rank]}", os.O_RDONLY)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
    os.environ["GLOO_SOCKET_IFNAME"] = "t0"
    return f"{TRAIN}.{first + 1}"


@contextlib.contextmanager
def networks(count: int) -> Iterator[Networks]:
    made = None
    try:
        made = Networks(count)
        yield made
    finally:
        if made is not None:
            made.close()
