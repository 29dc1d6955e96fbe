"""Length-prefixed frames over a non-blocking Unix stream socket, descriptors riding along.

Nothing here ever waits. One thread at a time uses a FrameSocket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

from everstep.errors import AgentError

from .protocol import FRAME_BYTES_MAX

_LENGTH = struct.Struct(">I")
_FD = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")
READ_BYTES = 64 << 10
OUTBOX_BYTES_MAX = 4 << 20
"""What may wait to be sent; a peer that reads so slowly is hung up on, and registers again when it wakes."""
DESCRIPTORS_MAX = 64
"""Descriptors in one frame, and received ones that no message has claimed."""
_EXTRAS_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * _FD.size)
FRAMES_PER_PULL_MAX = 1024


class FrameSocket:
    """``ended`` is True once the peer is gone or has broken the rules; then only :meth:`close` is left."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._out_nbytes = 0
        self._fds: deque[int] = deque()
        self.ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def queue(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Append ``frame`` to what is to be sent. The descriptors are duplicated, so the caller may close
        its own."""
        if len(frame) > FRAME_BYTES_MAX or len(fds) > DESCRIPTORS_MAX:
            raise AgentError(
                "a message is too large", found=len(frame), expected=f"at most {FRAME_BYTES_MAX} bytes"
            )
        if self.ended:
            return
        self._out.append((memoryview(_LENGTH.pack(len(frame)) + frame), tuple(os.dup(fd) for fd in fds)))
        self._out_nbytes += _LENGTH.size + len(frame)
        if self._out_nbytes > OUTBOX_BYTES_MAX:
            self.ended = True

    def peer_pid(self) -> int:
        """Process id of the peer (of whoever listens, if it has not accepted yet)."""
        packed = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(packed)[0])

    def push(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._out and not self.ended:
                data, fds = self._out[0]
                sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
                self._out_nbytes -= sent
                _close_all(fds)
                if sent == len(data):
                    self._out.popleft()
                else:
                    self._out[0] = (data[sent:], ())
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.ended = True

    def pull(self) -> list[bytes]:
        """The complete frames that have arrived, at most FRAMES_PER_PULL_MAX."""
        frames: list[bytes] = []
        while not self.ended and len(frames) < FRAMES_PER_PULL_MAX and self._receive():
            self._split(frames)
        return frames

    def take_fd(self) -> int:
        """The next descriptor that came along; the caller owns it. Raises AgentError if there is none."""
        if not self._fds:
            raise AgentError("a message announced a descriptor that did not come with it")
        return self._fds.popleft()

    def close(self) -> None:
        for _, fds in self._out:
            _close_all(fds)
        _close_all(self._fds)
        self._out.clear()
        self._fds.clear()
        self.ended = True
        self._sock.close()

    def _receive(self) -> bool:
        """One read; False when there is nothing more for now."""
        try:
            data, extras, _, _ = self._sock.recvmsg(READ_BYTES, _EXTRAS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.ended = True
            return False
        for level, kind, packed in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(
                    fd for (fd,) in _FD.iter_unpack(packed[: len(packed) // _FD.size * _FD.size])
                )
        if not data or len(self._fds) > DESCRIPTORS_MAX:
            self.ended = True
            return False
        self._in += data
        return True

    def _split(self, frames: list[bytes]) -> None:
        start = 0
        while len(self._in) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._in, start)
            if nbytes > FRAME_BYTES_MAX:
                self.ended = True
                break
            end = start + _LENGTH.size + nbytes
            if len(self._in) < end:
                break
            frames.append(bytes(self._in[start + _LENGTH.size : end]))
            start = end
        del self._in[:start]


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
