"""The exchange's own protocol: what is served, and that nobody can hold it up, flood it or read without the token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from everstep.errors import BadOption
from everstep.exchange import protocol
from everstep.exchange.client import PeerSource
from everstep.exchange.errors import PeerLost
from everstep.exchange.protocol import MAGIC, Offer, Proof, Request, encode_records
from everstep.exchange.server import Server, Shelf
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes, image_root, rank_root
from everstep.format.layout import Box, EntrySpec, build_layout, encode, layout_hash
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.peers.address import own_address
from everstep.peers.listener import Listener
from everstep.store.blocking import run_blocking
from everstep.store.flush import write_meta

CHUNK = 4096
TOKEN = bytes(range(32))
IO_S = 0.5
SOON_S = 10.0


class Snapshot:
    """One rank's regions, as they lie in a slot."""

    def __init__(self, rank: int) -> None:
        data = random.Random(rank).randbytes(5 * CHUNK + 123)
        layout = build_layout([EntrySpec("model", "w", "uint8", (len(data),), (Box((0,), (len(data),)),))])
        self.image = layout.images[0].name
        self.layout = encode(layout)
        self.meta = write_meta({"rank": rank})
        self.images = {
            self.image: bytearray(layout.images[0].header + data),
            STATE_IMAGE: bytearray(f"state of rank {rank}".encode()),
        }
        self.records = [self._record(name, bytes(image)) for name, image in self.images.items()]
        self.proof = Proof(
            rank, 1, layout_hash(self.layout), rank_root(self.records), bytes(self.meta[:HASH_BYTES])
        )

    @staticmethod
    def _record(name: str, data: bytes) -> ImageRecord:
        chunks = chunk_hashes(memoryview(data), CHUNK)
        return ImageRecord(name, len(data), image_root(len(data), chunks), chunks)

    def shelf(self) -> Shelf:
        return Shelf(
            memoryview(self.meta),
            memoryview(self.layout),
            memoryview(encode_records(self.records)),
            {name: memoryview(image) for name, image in self.images.items()},
        )


@pytest.fixture
def snapshots() -> dict[int, Snapshot]:
    return {rank: Snapshot(rank) for rank in (0, 3)}


@pytest.fixture
def server(snapshots: dict[int, Snapshot]) -> Iterator[Server]:
    with serving(snapshots) as made:
        yield made


def serving(snapshots: dict[int, Snapshot], **options: Any) -> Server:
    given = {"host": "127.0.0.1", "connections_max": 8, "idle_s": SOON_S, "io_s": SOON_S, **options}
    return Server({(rank, 0): one.shelf() for rank, one in snapshots.items()}, TOKEN, **given)


def source(
    server: Server, snapshots: dict[int, Snapshot], *, io_s: float = SOON_S, **changes: Any
) -> PeerSource:
    offer = Offer(server.host, server.port, TOKEN, [one.proof for one in snapshots.values()])
    for name, value in changes.items():
        setattr(offer, name, value)
    return PeerSource(offer, list(snapshots), key=(1, 7), world=4, chunk_bytes=CHUNK, node="x", io_s=io_s)


def read(peer: PeerSource, rank: int, image: str, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    run_blocking(peer.read_into(rank, image, offset, memoryview(data)))
    return bytes(data)


def dial(server: Server, said: bytes = MAGIC + TOKEN) -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=SOON_S)
    sock.sendall(said)
    return sock


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def hangs_up(sock: socket.socket) -> bytes:
    """What comes until the server ends the connection; fails if it does not."""
    got = b""
    with sock:
        while True:
            try:
                data = sock.recv(1 << 16)
            except ConnectionResetError:
                return got
            if not data:
                return got
            got += data


# -- what is served


def test_everything_of_a_snapshot_is_read_and_proved(server: Server, snapshots: dict[int, Snapshot]) -> None:
    peer = source(server, snapshots)
    for rank, one in snapshots.items():
        assert run_blocking(peer.meta(rank)) == {"rank": rank}
        assert run_blocking(peer.records(rank)) == {record.name: record for record in one.records}
        assert encode(run_blocking(peer.layout(rank))) == one.layout
        assert run_blocking(peer.state(rank)) == bytes(one.images[STATE_IMAGE])
        whole = bytes(one.images[one.image])
        assert read(peer, rank, one.image, 0, len(whole)) == whole
        assert read(peer, rank, one.image, 4097, 100) == whole[4097:4197]
        assert read(peer, rank, one.image, len(whole), 0) == b""
    run_blocking(peer.confirm())
    run_blocking(peer.close())


def test_many_reads_at_once_over_few_connections(server: Server, snapshots: dict[int, Snapshot]) -> None:
    peer = source(server, snapshots)
    one = snapshots[3]
    whole = bytes(one.images[one.image])
    seed = random.randrange(10**9)
    print("seed", seed)
    rng = random.Random(seed)
    spans = [sorted(rng.randrange(len(whole) + 1) for _ in range(2)) for _ in range(200)]

    async def all_of() -> list[bytearray]:
        targets = [bytearray(end - begin) for begin, end in spans]
        await asyncio.gather(
            *(
                peer.read_into(3, one.image, begin, memoryview(target))
                for (begin, _), target in zip(spans, targets, strict=True)
            )
        )
        return targets

    for (begin, end), target in zip(spans, run_blocking(all_of()), strict=True):
        assert bytes(target) == whole[begin:end]
    run_blocking(peer.close())


@pytest.mark.parametrize(
    "request_", [("read", 3, "no such image", 0, 1), ("meta", 1, "", 0, 0)], ids=["image", "rank"]
)
def test_what_is_not_there_is_refused_by_name(
    server: Server, snapshots: dict[int, Snapshot], request_: tuple[Any, ...]
) -> None:
    with dial(server) as sock:
        sock.sendall(frame(msgspec.msgpack.encode(Request(*request_))))
        _, answer = reply(sock), reply(sock)
        assert answer["nbytes"] == 0 and ("no such image" in answer["error"] or "rank 1" in answer["error"])


@pytest.mark.parametrize("span", [(-1, 5), (0, -1), (0, 1 << 62), (1 << 40, 1)])
def test_bytes_outside_an_image_are_refused(
    server: Server, snapshots: dict[int, Snapshot], span: tuple[int, int]
) -> None:
    with dial(server) as sock:
        sock.sendall(frame(msgspec.msgpack.encode(Request("read", 3, snapshots[3].image, *span))))
        reply(sock)
        assert "bytes" in reply(sock)["error"]
        sock.sendall(frame(msgspec.msgpack.encode(Request("meta", 3))))
        assert reply(sock)["nbytes"] == len(snapshots[3].meta), "the connection goes on"


def reply(sock: socket.socket) -> dict[str, Any]:
    (nbytes,) = struct.unpack(">I", exactly(sock, 4))
    found: dict[str, Any] = msgspec.msgpack.decode(exactly(sock, nbytes))
    return found


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        assert more, "the server hung up"
        data += more
    return data


# -- hostile clients


@pytest.mark.parametrize(
    "said",
    [
        MAGIC + bytes(32),
        MAGIC[:-1] + b"x" + TOKEN,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n",
        (MAGIC + TOKEN)[1:] + b"\0",
    ],
    ids=["token", "magic", "http", "shifted"],
)
def test_without_the_token_nothing_is_said(server: Server, said: bytes) -> None:
    assert hangs_up(dial(server, said)) == b""


@pytest.mark.parametrize("said", [b"", MAGIC, MAGIC + TOKEN[:-1]], ids=["nothing", "magic", "half-a-token"])
def test_a_stranger_who_waits_is_shown_out(snapshots: dict[int, Snapshot], said: bytes) -> None:
    with serving(snapshots, io_s=IO_S) as server:
        began = time.monotonic()
        assert hangs_up(dial(server, said)) == b""
        assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", protocol.FRAME_BYTES_MAX + 1),
        struct.pack(">I", 0xFFFFFFFF) + bytes(100),
        frame(b"\xc1" * 10),
        frame(b""),
        frame(msgspec.msgpack.encode({"what": "exec", "rank": 0})),
        frame(msgspec.msgpack.encode({"what": "meta", "rank": "0"})),
        frame(msgspec.msgpack.encode({"what": "meta", "rank": 0, "more": 1})),
        frame(msgspec.msgpack.encode([1, 2, 3])),
        frame(b"\x91" * 60000),
    ],
    ids=["large", "huge", "garbage", "empty", "verb", "type", "field", "list", "deep"],
)
def test_malformed_requests_end_the_connection(
    server: Server, snapshots: dict[int, Snapshot], said: bytes
) -> None:
    sock = dial(server)
    sock.sendall(said)
    assert len(hangs_up(sock)) < 100, "the greeting's answer, and no more"
    peer = source(server, snapshots)
    assert run_blocking(peer.meta(0)) == {"rank": 0}, "others are served as before"
    run_blocking(peer.close())


def test_random_bytes_do_no_harm(server: Server, snapshots: dict[int, Snapshot]) -> None:
    seed = random.randrange(10**9)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        sock = dial(server)
        with contextlib.suppress(OSError):
            sock.sendall(rng.randbytes(rng.randrange(1, 200)))
            sock.shutdown(socket.SHUT_WR)
        hangs_up(sock)
    peer = source(server, snapshots)
    assert run_blocking(peer.state(3)) == bytes(snapshots[3].images[STATE_IMAGE])
    run_blocking(peer.close())


def test_a_request_that_stops_half_way_is_given_up(snapshots: dict[int, Snapshot]) -> None:
    with serving(snapshots, io_s=IO_S) as server:
        sock = dial(server)
        sock.sendall(frame(msgspec.msgpack.encode(Request("meta", 0)))[:-1])
        began = time.monotonic()
        hangs_up(sock)
        assert IO_S / 2 < time.monotonic() - began < SOON_S


def test_a_client_that_does_not_read_is_given_up(snapshots: dict[int, Snapshot]) -> None:
    one = snapshots[0]
    one.images["large"] = bytearray(64 << 20)
    with serving(snapshots, io_s=IO_S) as server, dial(server) as sock:
        sock.sendall(frame(msgspec.msgpack.encode(Request("read", 0, "large", 0, 1 << 20))) * 60)
        ended = time.monotonic() + SOON_S + 3 * protocol.within_s(1 << 20, IO_S)
        time.sleep(0.1)
        while time.monotonic() < ended:
            try:
                sock.send(b"\0", socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                return  # it hung up
            time.sleep(0.05)
        raise AssertionError("the server still waits for a client that does not read")


def test_connections_are_bounded_and_those_that_wait_get_their_turn(snapshots: dict[int, Snapshot]) -> None:
    with serving(snapshots, connections_max=2, idle_s=0.6, io_s=5.0) as server:
        holding = [dial(server), dial(server)]
        for sock in holding:
            assert reply(sock)["error"] == ""
        third = dial(server)
        third.settimeout(0.1)
        with pytest.raises(TimeoutError):
            third.recv(1)
        third.settimeout(SOON_S)
        assert reply(third)["error"] == "", "the idle ones were closed"
        for sock in (*holding, third):
            sock.close()


def test_a_closed_server_leaves_no_thread_socket_or_descriptor(snapshots: dict[int, Snapshot]) -> None:
    run_blocking(asyncio.sleep(0))  # the storage thread is there from now on
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    server = serving(snapshots)
    peer = source(server, snapshots)
    run_blocking(peer.meta(0))
    sock = dial(server)
    server.close()
    server.close()
    hangs_up(sock)
    with pytest.raises(OSError):
        socket.create_connection((server.host, server.port), timeout=SOON_S)
    run_blocking(peer.close())
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= len(before)


# -- peers that fail


class Impostor:
    """Listens, and does ``act`` with each connection."""

    def __init__(self, act: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._act = act
        self.connections = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._listener.settimeout(0.05)
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                self.connections += 1
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(SOON_S)
                    self._act(sock)

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *args: object) -> None:
        self._ended.set()
        self._thread.join()
        self._listener.close()


OK = frame(msgspec.msgpack.encode({"nbytes": 0, "error": ""}))


def says(*parts: bytes) -> Any:
    def act(sock: socket.socket) -> None:
        exactly(sock, len(MAGIC + TOKEN))
        sock.sendall(b"".join(parts))
        if parts:
            sock.settimeout(2 * IO_S)
            while sock.recv(1 << 16):
                pass

    return act


@pytest.mark.parametrize(
    "act",
    [
        says(),
        says(b"\0"),
        says(OK),
        says(OK, struct.pack(">I", protocol.FRAME_BYTES_MAX + 1)),
        says(OK, frame(b"\xc1")),
        says(OK, frame(msgspec.msgpack.encode({"nbytes": protocol.BLOB_BYTES_MAX + 1}))),
        says(OK, frame(msgspec.msgpack.encode({"nbytes": -1}))),
        says(OK, frame(msgspec.msgpack.encode({"nbytes": 100})), b"only this"),
        says(OK, frame(msgspec.msgpack.encode({"nbytes": 0, "error": "no"}))),
    ],
    ids=["gone", "mute", "stalls", "huge-head", "garbage", "huge", "negative", "short", "refuses"],
)
def test_a_peer_that_does_not_answer_rightly_is_lost_in_bounded_time(
    snapshots: dict[int, Snapshot], act: Any
) -> None:
    with Impostor(act) as impostor:
        peer = source(impostor, snapshots, io_s=IO_S)  # type: ignore[arg-type]
        began = time.monotonic()
        with pytest.raises(PeerLost, match="memory of node x cannot be read") as caught:
            run_blocking(peer.meta(0))
        assert time.monotonic() - began < SOON_S
        assert f":{impostor.port}" in str(caught.value) and "EVERSTEP_ADDRESS" in str(caught.value)
        asked = impostor.connections
        for _ in range(20):
            with pytest.raises(PeerLost):
                read(peer, 0, "model", 0, 1)
        assert impostor.connections == asked, "a peer that is lost is not asked again"
        run_blocking(peer.close())


def test_closing_in_the_middle_leaves_nothing_running(snapshots: dict[int, Snapshot]) -> None:
    """Whoever asked was cancelled, because of another rank's error say; the question goes with it."""

    async def ask_and_leave(peer: PeerSource) -> tuple[int, int]:
        before = len(asyncio.all_tasks())
        asking = asyncio.ensure_future(peer.layout(0))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await peer.close()
        return before, len(asyncio.all_tasks())

    with Impostor(says(OK)) as impostor:
        before, after = run_blocking(ask_and_leave(source(impostor, snapshots)))  # type: ignore[arg-type]
    assert after <= before


def test_nobody_listens(snapshots: dict[int, Snapshot]) -> None:
    server = serving(snapshots)
    server.close()
    with pytest.raises(PeerLost, match="Refused"):
        run_blocking(source(server, snapshots).meta(0))


@pytest.mark.parametrize("what", ["meta", "layout", "root", "records"])
def test_what_is_not_as_offered_is_not_believed(snapshots: dict[int, Snapshot], what: str) -> None:
    """Each is well formed in itself, but of another snapshot: the offer, which came by another way, tells."""
    proofs = {rank: one.proof for rank, one in snapshots.items()}
    one, other = snapshots[0], Snapshot(9)
    if what == "meta":
        one.meta = other.meta
    elif what == "layout":
        one.layout = encode(build_layout([EntrySpec("model", "v", "uint8", (5,), (Box((0,), (5,)),))]))
    elif what == "root":
        one.records = other.records
    with serving(snapshots) as server:
        if what == "records":
            server._shelves[0, 0] = Shelf(b"", b"", b"\x93\x01\x02", {})  # type: ignore[arg-type,index]
        peer = source(server, snapshots, proofs=list(proofs.values()))
        with pytest.raises(PeerLost, match="not what was offered"):
            run_blocking(peer.meta(0) if what == "meta" else peer.layout(0))
        assert run_blocking(peer.meta(3)) == {"rank": 3}, "the others are read from it all the same"
        run_blocking(peer.close())


def test_a_connection_that_was_left_alone_too_long_is_made_anew(snapshots: dict[int, Snapshot]) -> None:
    with serving(snapshots, idle_s=0.1) as server:
        peer = source(server, snapshots)
        assert run_blocking(peer.meta(0)) == {"rank": 0}
        time.sleep(0.5)
        assert run_blocking(peer.meta(0)) == {"rank": 0}
        run_blocking(peer.close())


# -- where


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_ranks_that_meet_on_loopback_exchange_there(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("EVERSTEP_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_address() == "127.0.0.1"


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("EVERSTEP_ADDRESS", "10.1.2.3")
    assert own_address() == "10.1.2.3"


@pytest.mark.parametrize("wrong", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_host_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("EVERSTEP_ADDRESS", wrong)
    with pytest.raises(BadOption, match=f"{wrong} is no address of this host.*EVERSTEP_ADDRESS"):
        Server({}, b"token", host=own_address(), connections_max=1, idle_s=1.0)
    with pytest.raises(BadOption, match=f"{wrong} is no address of this host.*EVERSTEP_ADDRESS"):
        Listener(own_address(), 0, b"0123456789abcdef", "run", {}, me="there")


def test_without_a_word_the_address_is_one_of_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_ADDRESS", raising=False)
    for master in (None, "192.0.2.7"):
        if master is None:
            monkeypatch.delenv("MASTER_ADDR", raising=False)
        else:
            monkeypatch.setenv("MASTER_ADDR", master)
        with socket.create_server((own_address(), 0)):
            pass
