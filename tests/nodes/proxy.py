"""A bad network between agents: each node's agent is reached through a proxy that can be told to misbehave."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.agent.client import AgentClient

from .job import Life

PIECE_BYTES = 1 << 14
POLL_S = 0.1
CONNECT_S = 5.0
MODES = ("close", "stall", "drop")


class Proxy:
    """Passes on what comes for one node's agent. Misbehaving as one of MODES begins after some more bytes on their way
    to the agent: connections are closed; or nothing moves any more, but they stay open; or they are closed and no new
    one is taken. ``hurt`` counts connections that this met in the middle."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target: tuple[str, int] | None = None
        self.hurt = 0
        self._mode = ""
        self._left = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def misbehave(self, mode: str, after_bytes: int = 0) -> None:
        assert mode in MODES
        with self._lock:
            self._mode, self._left, self.hurt = mode, after_bytes, 0

    def behave(self) -> None:
        """As before; connections that are stalled go on."""
        with self._lock:
            self._mode = ""

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        for sock in list(self._open):
            _end(sock)

    def _accept(self) -> None:
        while not self._closed:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            if self.target is None or (self._mode == "drop" and self._left <= 0):
                _end(inner)
                continue
            try:
                outer = socket.create_connection(self.target, CONNECT_S)
            except OSError:
                _end(inner)
                continue
            self._open |= {inner, outer}
            for one in (inner, outer):
                one.settimeout(POLL_S)
            for source, sink, counts in ((inner, outer, True), (outer, inner, False)):
                threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while not self._closed:
                if not self._may(0, counts):
                    if self._mode != "stall":
                        break
                    threading.Event().wait(POLL_S)
                    continue
                try:
                    data = source.recv(PIECE_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    break
                if not self._may(len(data), counts) and self._mode in ("close", "drop"):
                    break
                self._send(sink, data)
        except OSError:
            pass
        finally:
            self._open -= {source, sink}
            _end(source)
            _end(sink)

    def _send(self, sink: socket.socket, data: bytes) -> None:
        while data and not self._closed:
            with contextlib.suppress(TimeoutError):
                data = data[sink.send(data) :]

    def _may(self, nbytes: int, counts: bool) -> bool:
        with self._lock:
            if not self._mode:
                return True
            if self._left <= 0:
                return False
            if counts and nbytes:
                self._left -= nbytes
                if self._left <= 0:
                    self.hurt += 1
                    return False
            return True


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Proxies:
    """One for each of ``count`` nodes. ``enter`` is a life's: it has the agents announced at the proxies' addresses."""

    def __init__(self, count: int) -> None:
        self.all = [Proxy() for _ in range(count)]

    def enter(self) -> Any:
        return functools.partial(_announce, tuple(one.port for one in self.all))

    def find_targets(self, out: Path) -> bool:
        """Take in where the agents really listen; whether all are known."""
        for number, proxy in enumerate(self.all):
            with contextlib.suppress(FileNotFoundError, ValueError):
                host, port = (out / f"listens-{number}").read_text().split()
                proxy.target = host, int(port)
        return all(one.target for one in self.all)

    def watch(self, out: Path) -> None:
        """Do so until all are known: agents wait for one another at the start."""

        def look() -> None:
            for one in self.all:
                one.target = None
            while not self.find_targets(out):
                threading.Event().wait(0.01)

        threading.Thread(target=look, daemon=True).start()

    def close(self) -> None:
        for one in self.all:
            one.close()


@contextlib.contextmanager
def proxies(count: int) -> Iterator[Proxies]:
    made = Proxies(count)
    try:
        yield made
    finally:
        made.close()


def _announce(ports: tuple[int, ...], rank: int, life: Life) -> None:
    """In a rank: its agent's address is left for the proxy, and the proxy's told to the others."""
    listen = AgentClient.listen_for_peers

    def through_proxy(self: AgentClient, *args: Any, **options: Any) -> tuple[str, int]:
        host, port = listen(self, *args, **options)
        number = life.numbers[rank]
        unfinished = Path(life.out) / f"listens-{number}.new"
        unfinished.write_text(f"{host} {port}")
        unfinished.rename(Path(life.out) / f"listens-{number}")
        return "127.0.0.1", ports[number]

    AgentClient.listen_for_peers = through_proxy  # type: ignore[method-assign]
