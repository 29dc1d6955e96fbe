"""A network between two agents that does what a test asks for: flips, loses, holds up, slows or cuts.

:class:`Proxy` stands before one address. A :class:`Fault` strikes once a connection has carried ``at`` bytes in its
direction: "up" from the caller, "down" to it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

READ_BYTES = 64 << 10
JOIN_S = 10.0

What = Literal["flip", "lose", "stall", "close"]
Direction = Literal["up", "down"]


@dataclass
class Fault:
    """``flip`` inverts a bit of the byte at ``at``, ``lose`` drops ``nbytes`` from there, ``stall`` holds everything
    behind it back until :meth:`Proxy.release`, ``close`` ends both directions. ``times``: on so many connections."""

    what: What
    at: int
    direction: Direction = "up"
    times: int = 1
    nbytes: int = 1


class Proxy:
    """Listens at ``host``, ``port``. ``faults`` may be changed at any time; ``struck`` counts those that happened.

    ``bytes_per_s`` slows both directions; :meth:`cut` ends all connections; while ``refusing`` new ones are closed at
    once.
    """

    def __init__(
        self, host: str, port: int, faults: Sequence[Fault] = (), *, bytes_per_s: float | None = None
    ) -> None:
        self._target = (host, port)
        self.faults = list(faults)
        self.bytes_per_s = bytes_per_s
        self.refusing = False
        self.struck = 0
        self.carried = {"up": 0, "down": 0}
        self.stalled = threading.Event()
        """Set once a stall has begun."""
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()[:2]
        self._run(self._accept)

    def release(self) -> None:
        """End all stalls, also those to come."""
        self._released.set()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release()
        self.cut()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="test-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, JOIN_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets += [near, far]
            self._run(self._carry, near, far, "up")
            self._run(self._carry, far, near, "down")

    def _carry(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        done = 0
        mine = [fault for fault in self.faults if fault.direction == direction]
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(READ_BYTES)):
                start = done
                for fault in list(mine):
                    if start <= fault.at < start + len(data) and fault.times > 0:
                        mine.remove(fault)
                        fault.times -= 1
                        self.struck += 1
                        data = self._strike(fault, data, fault.at - start, sink)
                done += len(data)
                self.carried[direction] += len(data)
                self._send(sink, data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _strike(self, fault: Fault, data: bytearray, at: int, sink: socket.socket) -> bytearray:
        """What is left to be sent."""
        if fault.what == "flip":
            data[at] ^= 0x10
            return data
        if fault.what == "lose":
            return data[:at] + data[at + fault.nbytes :]
        self._send(sink, data[:at])
        if fault.what == "close":
            raise ConnectionAbortedError
        self.stalled.set()
        self._released.wait()
        return data[at:]

    def _send(self, sink: socket.socket, data: bytearray) -> None:
        if self.bytes_per_s is not None:
            time.sleep(len(data) / self.bytes_per_s)
        sink.sendall(data)
