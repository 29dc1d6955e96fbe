"""A link carries messages and bytes, ends in bounded time when the other side does not go on, and not before."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep.errors import CapacityError, EverstepError, PeerLost
from everstep.format.hashing import digest
from everstep.peers import stream
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.messages import (
    FRAME_BYTES_MAX,
    Complete,
    Kept,
    Message,
    Moved,
    Need,
    Sent,
    Standing,
    expect,
)
from everstep.peers.stream import Stream

from .kit import RUN, SECRET, SOON_S
from .proxy import Fault, Proxy

IO_S = 0.5


class Echo(Message, frozen=True):
    """A message that only these tests know; ``nbytes`` of bulk follow it, and come back."""

    nbytes: int


def echo(link: Link, message: Echo) -> None:
    data = memoryview(bytearray(message.nbytes))
    link.receive_into(data)
    link.send(message)
    link.send_bytes(data)


def say_back(link: Link, message: Message) -> None:
    link.send(message)


HANDLERS: dict[type[Message], Callable[[Link, Any], None]] = {
    Echo: echo, Standing: say_back, Complete: say_back, Moved: say_back, Need: say_back,
}  # fmt: skip


@contextmanager
def listening(**options: Any) -> Iterator[Listener]:
    given = {"handlers": HANDLERS, "me": "there", "io_s": SOON_S, **options}
    handlers = given.pop("handlers")
    with Listener("127.0.0.1", given.pop("port", 0), SECRET, RUN, handlers, **given) as listener:
        yield listener


def linked(at: Listener | Proxy, *, io_s: float = SOON_S) -> Link:
    return connect("127.0.0.1", at.port, SECRET, RUN, me="here", timeout_s=SOON_S, io_s=io_s)


def raw_pair() -> tuple[Link, socket.socket]:
    """A link without greeting, and the other end of its connection."""
    near, far = socket.socketpair()
    near.setblocking(False)
    return Link(Stream(near), "there", io_s=IO_S), far


def frame(body: bytes) -> bytes:
    return struct.pack(">I16s", len(body), digest(body)) + body


# -- what it carries


@pytest.mark.parametrize(
    "message",
    [
        Standing("a", 3, 7, -1, 12, {"type": "PeerLost"}),
        Complete(3, 7, {"b": {"type": "PeerLost"}}),
        Moved("a", "10.0.0.1", 4000),
        Need(["model", "optimizer"]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    with listening() as there, linked(there) as link:
        link.send(message)
        assert link.receive(SOON_S) == message


def test_bulk_of_any_size_comes_back_between_messages() -> None:
    source = random.Random(11)
    with listening() as there, linked(there) as link:
        for nbytes in (0, 1, 4095, stream.PIECE_BYTES - 1, stream.PIECE_BYTES, 3 * stream.PIECE_BYTES + 5):
            data = source.randbytes(nbytes)
            link.send(Echo(nbytes))
            link.send_bytes(memoryview(data))
            assert link.receive(SOON_S) == Echo(nbytes)
            back = bytearray(nbytes)
            link.receive_into(memoryview(back))
            assert back == data


def test_one_thread_sends_while_another_receives() -> None:
    number = 200
    with listening() as there, linked(there) as link:
        heard: list[Message] = []
        reader = threading.Thread(target=lambda: heard.extend(link.receive(SOON_S) for _ in range(number)))
        reader.start()
        sent = [Need([f"{at}" * 500]) for at in range(number)]
        for message in sent:
            link.send(message)
        reader.join(SOON_S)
        assert heard == sent


def test_names_of_both_sides_are_known() -> None:
    names = []

    def note(link: Link, message: Need) -> None:
        names.append(link.peer)
        link.send(message)

    handlers = {Need: note}
    with listening(handlers=handlers) as there, linked(there) as link:
        link.send(Need([]))
        link.receive(SOON_S)
        assert link.peer == "there" and names == ["here"]


# -- what breaks the rules


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">I16s", FRAME_BYTES_MAX + 1, bytes(16)), "too large"),
        (frame(b"\x81\xa4type\xa4Sent")[:-1] + b"X", "damaged"),
        (frame(b"\x81\xa4type\xa4None"), "no message"),
        (frame(b"\x81\xa4type\xa4Sent\xa1x\x01"), "no message"),
        (frame(b"\xc1"), "no message"),
        (frame(b""), "no message"),
        (frame(msgspec.msgpack.encode({"type": "Kept", "root": 3})), "no message"),
        (frame(msgspec.msgpack.encode({"type": "Kept", "root": b"", "more": 1})), "no message"),
        (struct.pack(">I16s", 100, bytes(16)) + b"short", "gone"),
    ],
)
def test_what_is_no_message_ends_the_link(data: bytes, why: str) -> None:
    link, far = raw_pair()
    with far:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost, match=why) as caught:
            link.receive(SOON_S)
        assert caught.value.node == "there" and link.closed
        with pytest.raises(PeerLost):
            link.send(Sent())


def test_an_oversized_message_is_refused_before_it_is_sent() -> None:
    with listening() as there, linked(there) as link:
        with pytest.raises(EverstepError, match="too large"):
            link.send(Kept(bytes(FRAME_BYTES_MAX)))
        link.send(Need([]))
        assert link.receive(SOON_S) == Need([])


def test_what_the_listener_does_not_serve_is_answered_and_ends_the_connection() -> None:
    with listening() as there, linked(there) as link:
        link.send(Sent())
        with pytest.raises(PeerLost, match="was not asked; found: Sent"):
            expect(link.receive(SOON_S), Kept)
        with pytest.raises(PeerLost):
            link.receive(SOON_S)


def test_an_error_of_a_handler_is_told_with_its_type() -> None:
    def refuse(link: Link, message: Need) -> None:
        raise CapacityError("no room " + "x" * 10_000, found=3, expected=5)

    with listening(handlers={Need: refuse}) as there, linked(there) as link:
        link.send(Need([]))
        with pytest.raises(CapacityError, match="no room") as caught:
            expect(link.receive(SOON_S), Kept)
        assert caught.value.expected == "5" and len(caught.value.message) < 3000


# -- deadlines


def test_silence_ends_in_bounded_time() -> None:
    link, far = raw_pair()
    with far:
        began = time.monotonic()
        with pytest.raises(PeerLost, match="does not answer"):
            link.receive(0.3)
        assert 0.25 < time.monotonic() - began < SOON_S


@pytest.mark.parametrize("nbytes", [1000, 40_000_000])
def test_a_receiver_of_half_of_it_ends_in_bounded_time(nbytes: int) -> None:
    link, far = raw_pair()
    with far:
        far.sendall(bytes(500))
        began = time.monotonic()
        with pytest.raises(PeerLost, match="does not answer"):
            link.receive_into(memoryview(bytearray(nbytes)))
        assert IO_S * 0.9 < time.monotonic() - began < SOON_S


def test_a_sender_to_one_that_does_not_read_ends_in_bounded_time() -> None:
    link, far = raw_pair()
    with far:
        with pytest.raises(PeerLost, match="does not answer"):
            link.send_bytes(memoryview(bytes(32 << 20)))


def test_who_dribbles_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something moves all the time, but it would take hours."""
    monkeypatch.setattr(stream, "BYTES_PER_S_MIN", 1 << 20)
    link, far = raw_pair()
    ended = threading.Event()

    def dribble() -> None:
        while not ended.wait(0.05):
            try:
                far.send(b"x")
            except OSError:
                return

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        began = time.monotonic()
        with pytest.raises(PeerLost, match="does not answer"):
            link.receive_into(memoryview(bytearray(1 << 20)))
        assert IO_S < time.monotonic() - began < SOON_S
    finally:
        ended.set()
        thread.join()
        far.close()


def test_who_is_slow_but_goes_on_is_not_lost() -> None:
    """The whole takes several times as long as nothing may move for."""
    nbytes = 2 << 20
    with listening(io_s=IO_S) as there:
        with Proxy(there.host, there.port, bytes_per_s=1 << 20) as proxy, linked(proxy, io_s=IO_S) as link:
            began = time.monotonic()
            link.send(Echo(nbytes))
            link.send_bytes(memoryview(bytes(nbytes)))
            assert link.receive(SOON_S) == Echo(nbytes)
            link.receive_into(memoryview(bytearray(nbytes)))
            assert time.monotonic() - began > 3 * IO_S


def test_closing_wakes_whoever_sends_and_whoever_receives() -> None:
    link, far = raw_pair()
    errors: list[BaseException] = []

    def run(what: Callable[[], object]) -> None:
        try:
            what()
        except PeerLost as error:
            errors.append(error)

    link._io_s = 60
    threads = [
        threading.Thread(target=run, args=(lambda: link.receive(60),)),
        threading.Thread(target=run, args=(lambda: link.send_bytes(memoryview(bytes(64 << 20))),)),
    ]
    with far:
        for thread in threads:
            thread.start()
        select.select([far], [], [], SOON_S)  # it sends
        link.close()
        for thread in threads:
            thread.join(SOON_S)
        assert len(errors) == 2 and not any(thread.is_alive() for thread in threads)


# -- the listener


def test_a_free_port_is_taken_as_asked_and_another_if_it_is_not_free() -> None:
    with listening() as first:
        with listening(port=first.port) as second:
            assert second.port != first.port
            assert linked(second).peer == "there"
        port = second.port
    with listening(port=port) as again:
        assert again.port == port


def test_one_connection_too_many_is_told_so_and_finds_a_place_later() -> None:
    with listening(connections_max=2) as there:
        links = [linked(there), linked(there)]
        for link in links:
            link.send(Need([]))
            link.receive(SOON_S)
        with linked(there) as third:
            with pytest.raises(CapacityError, match="as many connections as it may"):
                expect(third.receive(SOON_S), Kept)
        links.pop().close()
        until = time.monotonic() + SOON_S
        while True:
            try:
                with linked(there) as fourth:
                    fourth.send(Need(["x"]))
                    assert fourth.receive(SOON_S) == Need(["x"])
                    break
            except (PeerLost, AssertionError):
                assert time.monotonic() < until
        links.pop().close()


def test_an_idle_connection_is_cut_off() -> None:
    with listening(idle_s=0.2) as there, linked(there) as link:
        with pytest.raises(PeerLost, match="is gone"):
            link.receive(SOON_S)


def test_closing_ends_connections_and_threads_at_once() -> None:
    with listening() as there:
        links = [linked(there) for _ in range(3)]
        began = time.monotonic()
        there.close()
        assert time.monotonic() - began < 2
        for link in links:
            with pytest.raises(PeerLost):
                link.receive(SOON_S)
        with pytest.raises(PeerLost, match="no agent can be reached"):
            linked(there)


def test_a_connection_that_is_cut_on_the_way_ends_both_sides() -> None:
    with listening() as there, Proxy(there.host, there.port, [Fault("close", 5000)]) as proxy:
        with linked(proxy) as link:
            link.send(Echo(100_000))
            with pytest.raises(PeerLost):
                link.send_bytes(memoryview(bytes(100_000)))
                link.receive(SOON_S)
        assert proxy.struck == 1


def test_a_forked_child_has_no_connection() -> None:
    """It would hold the other side up when this process dies."""
    others = sockets()
    with listening() as there:
        link = linked(there)
        link.send(Need([]))
        link.receive(SOON_S)
        mine = sockets() - others
        assert len(mine) >= 3
        child = os.fork()
        if child == 0:
            os._exit(len(mine & sockets()))
        assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0
        link.send(Need(["still"]))
        assert link.receive(SOON_S) == Need(["still"])
        link.close()


def sockets() -> set[str]:
    """Inodes of this process's TCP connections and listeners."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    table = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    inodes = {line.split()[9] for line in table.splitlines() if ":" in line and len(line.split()) > 9}
    return {text for text in found if text.startswith("socket:[") and text[8:-1] in inodes}
