"""How two agents prove to each other that they are of one run, before anything else is said.

::

    both       magic, version (2 bytes), nonce (32 bytes); the caller first
    caller     its name (length in 1 byte), proof (32 bytes)
    listener   its name, proof; nothing unless the caller's was right

A proof is HMAC-SHA256, under the run's secret, over the speaker's role, the version, both nonces, the run's id and the
speaker's name. Fresh nonces make a recorded greeting worthless, roles make an echoed one so. Integers are big-endian.
The greeting proves who is there when the connection is made; on a network where others could change what is under way,
TLS is what keeps them out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

from everstep.errors import PeerLost

from .stream import LOST, Deadline, Stream
from .tls import CERT

MAGIC = b"EVERPEER"
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES_MAX = 255
GREETING_S = 5.0
"""How long a greeting may take in all, TLS included."""

_PREFACE = struct.Struct(f">8sH{NONCE_BYTES}s")
_CALLER, _LISTENER = b"caller", b"listener"


class _Greeting:
    """One side's. ``secret`` never leaves :meth:`proof`."""

    def __init__(self, stream: Stream, secret: bytes, run_id: str, me: str) -> None:
        self._stream = stream
        self._secret = secret
        self._run_id = run_id.encode()
        self._me = me.encode()
        self._nonce = os.urandom(NONCE_BYTES)
        self._deadline = Deadline(GREETING_S)

    def proof(self, role: bytes, nonces: bytes, name: bytes) -> bytes:
        said = [role, struct.pack(">H", VERSION), nonces, self._run_id, name]
        text = b"".join(struct.pack(">I", len(piece)) + piece for piece in said)
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def say_preface(self) -> None:
        self._stream.send(_PREFACE.pack(MAGIC, VERSION, self._nonce), self._deadline)

    def hear_preface(self, *, answer: bool) -> bytes:
        """The other side's nonce. PeerLost if it speaks otherwise. ``answer``: this side's goes out in any case, so
        that both can name both versions."""
        magic, version, nonce = _PREFACE.unpack(self._receive(_PREFACE.size))
        if magic != MAGIC:
            raise PeerLost(
                "the other side does not speak as agents do",
                found=magic,
                expected=MAGIC,
                hint=f"Either it is none, or TLS is set up ({CERT}) on one side only",
            )
        if answer:
            self.say_preface()
        if version != VERSION:
            raise PeerLost(
                "agents of different releases cannot talk",
                found=f"protocol version {version} there",
                expected=f"version {VERSION}, as here",
                hint="Run the same release of everstep on all nodes",
            )
        return bytes(nonce)

    def say_proof(self, role: bytes, nonces: bytes) -> None:
        proof = self.proof(role, nonces, self._me)
        self._stream.send(bytes([len(self._me)]) + self._me + proof, self._deadline)

    def hear_proof(self, role: bytes, nonces: bytes) -> str:
        """The other side's name. PeerLost if its proof is not right."""
        name = self._receive(self._receive(1)[0])
        said = self._receive(PROOF_BYTES)
        if not hmac.compare_digest(said, self.proof(role, nonces, name)):
            raise PeerLost(
                "the other side does not know this run's secret",
                hint="It is the agent of another run, or has another EVERSTEP_SECRET",
                stranger=True,
            )
        return name.decode(errors="replace")

    @property
    def nonce(self) -> bytes:
        return self._nonce

    def handshake(self) -> None:
        self._stream.handshake(self._deadline)

    def _receive(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._stream.receive_into(memoryview(data), self._deadline)
        return bytes(data)


def call(stream: Stream, secret: bytes, run_id: str, me: str) -> str:
    """The caller's greeting; the listener's name. PeerLost."""
    mine = _Greeting(stream, secret, run_id, me)
    try:
        mine.handshake()
        mine.say_preface()
        nonces = mine.nonce + mine.hear_preface(answer=False)
        mine.say_proof(_CALLER, nonces)
        return mine.hear_proof(_LISTENER, nonces)
    except LOST as error:
        raise PeerLost(
            "the other side ended the greeting",
            found=f"{type(error).__name__}: {error}",
            hint="It is of another run, has another EVERSTEP_SECRET, or TLS is set up on one side only",
            stranger=True,
        ) from None


def answer(stream: Stream, secret: bytes, run_id: str, me: str) -> str:
    """The listener's greeting; the caller's name. A stranger hears a nonce, and nothing else. PeerLost."""
    mine = _Greeting(stream, secret, run_id, me)
    try:
        mine.handshake()
        nonces = mine.hear_preface(answer=True) + mine.nonce
        name = mine.hear_proof(_CALLER, nonces)
        mine.say_proof(_LISTENER, nonces)
        return name
    except LOST as error:
        raise PeerLost("a caller ended its greeting", found=f"{type(error).__name__}: {error}") from None


def check_name(me: str) -> str:
    """ValueError if it is too long to be said."""
    if len(me.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"a node's name has at most {NAME_BYTES_MAX} bytes: {me!r}")
    return me
