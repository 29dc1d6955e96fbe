"""Only agents of a run that know its secret talk to each other; whoever else comes hears a nonce, and no more."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import BadOption, PeerLost
from everstep.peers import greeting, listener
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.messages import Message, Need
from everstep.peers.secret import run_secret

from .kit import RUN, SECRET, SOON_S
from .proxy import Fault, Proxy

PREFACE_BYTES = 42


def say_back(link: Link, message: Message) -> None:
    link.send(message)


@contextmanager
def listening(**options: Any) -> Iterator[Listener]:
    with Listener("127.0.0.1", 0, SECRET, RUN, {Need: say_back}, me="there", **options) as there:
        yield there


def linked(port: int, *, secret: bytes = SECRET, run_id: str = RUN, me: str = "here") -> Link:
    return connect("127.0.0.1", port, secret, run_id, me=me, timeout_s=SOON_S)


def works(port: int) -> bool:
    with linked(port) as link:
        link.send(Need(["x"]))
        return link.receive(SOON_S) == Need(["x"])


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SOON_S)


def preface(version: int = greeting.VERSION, nonce: bytes = bytes(32)) -> bytes:
    return b"EVERPEER" + struct.pack(">H", version) + nonce


def proof(role: bytes, nonces: bytes, name: bytes, secret: bytes = SECRET) -> bytes:
    """As the page of the protocol has it, written down a second time."""
    text = b""
    for piece in (role, b"\x00\x01", nonces, RUN.encode(), name):
        text += struct.pack(">I", len(piece)) + piece
    return hmac.new(secret, text, hashlib.sha256).digest()


def all_of(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while data := sock.recv(4096):
            found += data
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"run_id": "run-2"}, {"secret": SECRET + b"0"}])
def test_another_secret_or_run_is_refused(other: dict[str, Any]) -> None:
    with listening() as there:
        with pytest.raises(PeerLost, match="ended the greeting") as caught:
            linked(there.port, **other)
        assert "EVERSTEP_SECRET" in str(caught.value)
        assert works(there.port)


def test_a_stranger_hears_nothing_but_a_nonce() -> None:
    with listening() as there:
        with raw(there.port) as sock:
            sock.sendall(preface() + b"\x04here" + bytes(32) + b"more")
            heard = all_of(sock)
            assert len(heard) == PREFACE_BYTES and heard[:10] == preface()[:10]
        with raw(there.port) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: there\r\nAccept: */*\r\n\r\n")
            assert all_of(sock) == b""


def test_a_listener_that_does_not_know_the_secret_is_not_believed() -> None:
    for answer in (bytes(32), b"own proof"):
        with socket.create_server(("127.0.0.1", 0)) as fake:

            def serve(answer: bytes = answer, fake: socket.socket = fake) -> None:
                sock, _ = fake.accept()
                with sock:
                    sock.recv(PREFACE_BYTES, socket.MSG_WAITALL)
                    sock.sendall(preface(nonce=bytes(range(32))))
                    said = sock.recv(1 + 4 + 32, socket.MSG_WAITALL)
                    sock.sendall(said if answer == b"own proof" else said[:5] + answer)
                    sock.recv(1)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(PeerLost, match="does not know this run's secret"):
                linked(fake.getsockname()[1])
            thread.join()


def test_the_greeting_is_the_one_that_is_written_down() -> None:
    """A caller made by hand, from the page of the protocol."""
    with listening() as there, raw(there.port) as sock:
        mine = os.urandom(32)
        sock.sendall(preface(nonce=mine))
        theirs = sock.recv(PREFACE_BYTES, socket.MSG_WAITALL)[10:]
        sock.sendall(b"\x04hand" + proof(b"caller", mine + theirs, b"hand"))
        answer = sock.recv(1 + 5 + 32, socket.MSG_WAITALL)
        assert answer == b"\x05there" + proof(b"listener", mine + theirs, b"there")


def test_a_recorded_greeting_is_worthless() -> None:
    with listening() as there:
        with Recorder(there.port) as recorder:
            assert works(recorder.port)
        said = recorder.up[: PREFACE_BYTES + 1 + 4 + 32]
        with raw(there.port) as sock:
            sock.sendall(said)
            heard = all_of(sock)
        assert len(heard) == PREFACE_BYTES and heard[10:] != recorder.down[10:PREFACE_BYTES]


class Recorder(Proxy):
    """Keeps what went by."""

    def __init__(self, port: int) -> None:
        self.up, self.down = bytearray(), bytearray()
        self._first: socket.socket | None = None
        super().__init__("127.0.0.1", port)

    def __enter__(self) -> Recorder:
        return self

    def _carry(self, source: socket.socket, sink: socket.socket, direction: Any) -> None:
        self._directions = {**getattr(self, "_directions", {}), id(sink): direction}
        super()._carry(source, sink, direction)

    def _send(self, sink: socket.socket, data: bytearray) -> None:
        kept = self.up if self._directions[id(sink)] == "up" else self.down
        kept += data
        super()._send(sink, data)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("at", [0, 9, 20, 42, 45, 60])
def test_a_greeting_with_a_changed_bit_is_none(
    at: int, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 1.0)  # a changed length has the other side wait for more
    with listening() as there, Proxy(there.host, there.port, [Fault("flip", at, direction)]) as proxy:
        with pytest.raises(PeerLost):
            linked(proxy.port)
        assert proxy.struck == 1 and works(proxy.port)


def test_versions_that_differ_are_both_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with listening() as there, raw(there.port) as sock, caplog.at_level(logging.DEBUG, "everstep.peers"):
        sock.sendall(preface(version=7))
        assert len(all_of(sock)) == PREFACE_BYTES  # so that the caller can name it too
        until = time.monotonic() + SOON_S
        while not any("protocol version 7" in text for text in caplog.messages):
            assert time.monotonic() < until
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve() -> None:
            sock, _ = fake.accept()
            with sock:
                sock.sendall(preface(version=9))
                sock.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerLost, match=r"found: protocol version 9 there; expected: version 1"):
            linked(fake.getsockname()[1])
        thread.join()


def test_a_slow_stranger_is_cut_off_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 1.0)
    with listening() as there:
        began = time.monotonic()
        with raw(there.port) as silent, raw(there.port) as slow:
            for byte in preface():
                slow.sendall(bytes([byte]))
                if time.monotonic() - began > 0.8:
                    break
                time.sleep(0.04)
            assert works(there.port)
            assert all_of(silent) == b"" and len(all_of(slow)) <= PREFACE_BYTES
        assert time.monotonic() - began < SOON_S / 2


def test_many_strangers_do_not_keep_out_who_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 1.0)
    monkeypatch.setattr(listener, "STRANGERS_MAX", 4)
    with listening() as there, linked(there.port) as link:
        strangers = [raw(there.port) for _ in range(12)]
        link.send(Need(["in"]))
        assert link.receive(SOON_S) == Need(["in"])
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert sum(thread.name == "everstep-peer" for thread in threading.enumerate()) <= 5
        for sock in strangers:
            sock.close()
        assert works(there.port)


def test_a_name_that_is_too_long_is_refused() -> None:
    with listening() as there:
        with pytest.raises(ValueError, match="at most 255"):
            linked(there.port, me="x" * 256)
        with linked(there.port, me="ü" * 127) as link:
            assert link.peer == "there"


# -- the secret


def test_the_secret_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.delenv("EVERSTEP_SECRET_FILE", raising=False)
    assert run_secret() is None
    monkeypatch.setenv("EVERSTEP_SECRET", "0123456789abcdef")
    assert run_secret() == b"0123456789abcdef"
    path = tmp_path / "secret"
    path.write_bytes(b"fedcba9876543210\n")
    path.chmod(0o600)
    monkeypatch.setenv("EVERSTEP_SECRET_FILE", str(path))
    with pytest.raises(BadOption, match="exclude each other"):
        run_secret()
    monkeypatch.delenv("EVERSTEP_SECRET")
    assert run_secret() == b"fedcba9876543210"
    path.chmod(0o440)
    assert run_secret() == b"fedcba9876543210"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666, 0o601])
def test_a_file_that_others_can_get_at_is_refused(
    mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"fedcba9876543210")
    path.chmod(mode)
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.setenv("EVERSTEP_SECRET_FILE", str(path))
    with pytest.raises(BadOption, match="open to other users") as caught:
        run_secret()
    assert stat.filemode(path.stat().st_mode) in str(caught.value) and "fedcba" not in str(caught.value)


@pytest.mark.parametrize("secret", ["short-secret", "x" * 5000])
def test_a_secret_of_a_wrong_size_is_refused_and_not_told(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERSTEP_SECRET_FILE", raising=False)
    monkeypatch.setenv("EVERSTEP_SECRET", secret)
    with pytest.raises(BadOption, match="too short or too long") as caught:
        run_secret()
    assert secret[:6] not in str(caught.value) and secret[:6] not in repr(caught.value)


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.setenv("EVERSTEP_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(BadOption, match=r"cannot be read.*none: No such file"):
        run_secret()


def test_the_secret_is_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in what is logged nor in what errors say."""
    secret = b"hush-hush-hush-hush-hush"
    texts = []
    with caplog.at_level(logging.DEBUG):
        with Listener("127.0.0.1", 0, secret, RUN, {Need: say_back}, me="there") as there:
            for wrong in (b"other-other-other-other", secret):
                try:
                    link = linked(there.port, secret=wrong)
                    texts += [repr(link), repr(vars(link))]
                    link.close()
                except PeerLost as error:
                    texts += [str(error), repr(error), repr(error.to_wire())]
            texts.append(repr(there))
    assert "hush" not in "".join([*texts, *caplog.messages])


# -- TLS

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command makes the certificates"
)


def openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


def make_certificates(path: Path, name: str) -> None:
    """An authority, and a node's certificate and key that it has signed, for a host that is none of ours."""
    path.mkdir()
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca = ["-x509", "-days", "2", "-subj", f"/CN=authority of {name}", "-keyout", "ca.key", "-out", "ca.pem"]
    openssl("req", *curve, *ca, cwd=path)
    openssl("req", *curve, "-subj", f"/CN={name}.invalid", "-keyout", "key.pem", "-out", "node.csr", cwd=path)
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "cert.pem", cwd=path)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    for name in ("run", "other"):
        make_certificates(path / name, name)
    return path


def use(monkeypatch: pytest.MonkeyPatch, path: Path | None, **instead: Path) -> None:
    for name, file in (("CERT", "cert.pem"), ("KEY", "key.pem"), ("CA", "ca.pem")):
        if path is None:
            monkeypatch.delenv(f"EVERSTEP_TLS_{name}", raising=False)
        else:
            monkeypatch.setenv(f"EVERSTEP_TLS_{name}", str(instead.get(name, path / file)))


@needs_openssl
def test_with_tls_nothing_goes_in_the_clear(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, certificates / "run")
    with listening() as there, Recorder(there.port) as recorder:
        with linked(recorder.port) as link:
            heard: list[Message] = []
            reader = threading.Thread(target=lambda: heard.extend(link.receive(SOON_S) for _ in range(50)))
            reader.start()  # both directions at once, of a connection whose state they share
            for _ in range(50):
                link.send(Need(["a name that can be seen"] * 1000))
            reader.join(SOON_S)
        assert heard == [Need(["a name that can be seen"] * 1000)] * 50
        for seen in (recorder.up, recorder.down):
            assert len(seen) > 1_000_000 and b"can be seen" not in seen and b"EVERPEER" not in seen


@needs_openssl
@pytest.mark.parametrize("side", ["caller", "listener"])
@pytest.mark.parametrize("has", ["other", None])
def test_without_a_certificate_of_the_runs_authority_nobody_talks(
    side: str, has: str | None, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate of another authority, or none at all, on either side; the secret is right."""
    wrong = None if has is None else certificates / has
    use(monkeypatch, wrong if side == "listener" else certificates / "run")
    with listening() as there:
        use(monkeypatch, wrong if side == "caller" else certificates / "run")
        with pytest.raises(PeerLost) as caught:
            linked(there.port).receive(SOON_S)
        assert "TLS" in str(caught.value) or "gone" in str(caught.value)


@needs_openssl
def test_a_caller_that_only_trusts_the_run_is_not_let_in_by_it(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller knows the run's authority, but has a certificate of another."""
    use(monkeypatch, certificates / "run")
    with listening() as there:
        other = certificates / "other"
        use(monkeypatch, other, CA=certificates / "run" / "ca.pem")
        with pytest.raises(PeerLost):
            linked(there.port).receive(SOON_S)


@needs_openssl
def test_tls_that_is_set_up_in_part_is_refused(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, certificates / "run")
    monkeypatch.delenv("EVERSTEP_TLS_KEY")
    with pytest.raises(BadOption, match="EVERSTEP_TLS_KEY not set"), listening():
        pass
    use(monkeypatch, certificates / "run", KEY=certificates / "other" / "key.pem")
    with pytest.raises(BadOption, match="cannot be used"), listening():
        pass
    use(monkeypatch, certificates / "run", CA=certificates / "none")
    with pytest.raises(BadOption, match=r"cannot be used.*FileNotFoundError"), listening():
        pass
