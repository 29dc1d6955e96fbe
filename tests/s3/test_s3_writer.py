"""Large objects: parts, what goes wrong with them, and what is left of an upload."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from everstep.backends import s3writer
from everstep.backends.conformance import content, feed, names_of, put
from everstep.backends.errors import NotFound, Permanent, Retryable
from everstep.backends.s3 import S3Backend
from everstep.backends.s3writer import PARTS_IN_FLIGHT, PARTS_MAX, part_bytes

from .kit import Keeping, Trouble, answer, opened, trouble
from .server import S3Server

MIB = 1 << 20
PART = 5 * MIB
"""The smallest that a part may be."""

BYTES = 2 * PART + 12345
DATA = content(BYTES)


OTHERS = {"etag": f'"{"0" * 32}"', "x-amz-checksum-crc32": "AAAAAA=="}
"""Checksums of other bytes."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3writer, "PART_BYTES", PART)
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_FIRST", 0.01)


@pytest.fixture(autouse=True, params=["crc32", "md5"])
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What parts are sent with; that is not found out here."""

    async def known(backend: S3Backend, name: str) -> bool:
        return bool(request.param == "crc32")

    monkeypatch.setattr(S3Backend, "checks_crc32", known)
    return str(request.param)


def run(server: S3Server, story: Callable[[S3Backend], Awaitable[None]], *troubles: Trouble) -> None:
    async def main() -> None:
        backend = opened(server)
        trouble(backend, *troubles)
        try:
            await story(backend)
        finally:
            await backend.close()

    asyncio.run(main())


async def nothing_is_left(backend: S3Backend, name: str = "a") -> None:
    assert await backend.leftovers() == []
    with pytest.raises(NotFound):
        await backend.size(name)


def test_part_sizes() -> None:
    tib = 1 << 40
    for nbytes in (PART + 1, PARTS_MAX * PART, PARTS_MAX * PART + 1, 10**12, 5 * tib, 40 * tib):
        size = part_bytes(nbytes)
        assert PART <= size <= 5 << 30 and size % MIB == 0
        assert -(-nbytes // size) <= PARTS_MAX
        assert size == PART or -(-nbytes // (size - MIB)) > PARTS_MAX
    with pytest.raises(Permanent, match="more than 10000 parts"):
        part_bytes(PARTS_MAX * (5 << 30) + 1)


def test_any_pieces(s3_server: S3Server) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)

    async def story(backend: S3Backend) -> None:
        for nbytes in (PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 1):
            data = DATA[:nbytes]
            await put(backend, f"d/{nbytes}", data, piece=draw.choice((MIB, 3 * MIB + 1, 7 * MIB, nbytes)))
            assert await backend.read(f"d/{nbytes}") == data
            into = memoryview(bytearray(nbytes))
            await backend.read_into(f"d/{nbytes}", 0, into)
            assert into == data
        assert await backend.leftovers() == []

    began = Trouble("CreateMultipartUpload")
    run(s3_server, story, began)
    assert began.met == 3  # the small ones are put whole


def test_memory_is_bounded(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in flight, and the one that is being filled: whatever is written, and by how many writers."""
    taken: list[int] = []
    held = most = 0
    take, give = s3writer.Room.take, s3writer.Room.give

    def counted_take(room: s3writer.Room, nbytes: int) -> bytearray:
        nonlocal held, most
        held += 1
        most = max(most, held)
        taken.append(nbytes)
        return take(room, nbytes)

    def counted_give(room: s3writer.Room, buffer: bytearray) -> None:
        nonlocal held
        held -= 1
        give(room, buffer)

    monkeypatch.setattr(s3writer.Room, "take", counted_take)
    monkeypatch.setattr(s3writer.Room, "give", counted_give)
    monkeypatch.setattr(s3writer, "PARTS_IN_FLIGHT", 2)

    async def story(backend: S3Backend) -> None:
        await asyncio.gather(*(put(backend, f"x{index}", DATA) for index in range(3)))
        assert [await backend.size(f"x{index}") for index in range(3)] == [BYTES] * 3

    run(s3_server, story)
    assert len(taken) == 9 and held == 0
    assert most <= 2 + 3, "parts in flight, and one per writer"
    assert PARTS_IN_FLIGHT == 8


@pytest.mark.parametrize(
    "wrong",
    [
        Trouble("CreateMultipartUpload", given=lambda: answer(503, "SlowDown", **{"retry-after": "0.01"})),
        Trouble("CreateMultipartUpload", lost=True),
        Trouble("UploadPart", nth=2, times=3, given=lambda: answer(500, "InternalError")),
        Trouble("UploadPart", nth=3, lost=True),
        Trouble("UploadPart", nth=2, given=lambda: answer(200)),
        Trouble("UploadPart", nth=2, given=lambda: answer(200, **OTHERS)),
        Trouble("CompleteMultipartUpload", given=lambda: answer(503, "ServiceUnavailable")),
        Trouble("CompleteMultipartUpload", given=lambda: answer(200, "InternalError")),
        Trouble("CompleteMultipartUpload", lost=True),
        Trouble("HeadObject", given=lambda: answer(500)),
        Trouble("UploadPart", nth=2, given=lambda: answer(400, "ExpiredToken")),
        Trouble("CompleteMultipartUpload", given=lambda: answer(400, "ExpiredToken")),
    ],
    ids=lambda wrong: f"{wrong.operation}-{wrong.nth}-{'lost' if wrong.lost else wrong.given().status_code}",
)
def test_what_can_be_repeated_is(s3_server: S3Server, wrong: Trouble) -> None:
    async def story(backend: S3Backend) -> None:
        await put(backend, "a", DATA)
        assert await backend.read("a") == DATA
        left = await backend.leftovers()
        await backend.discard_leftovers(left)
        # Of a beginning whose answer was lost nobody knows the id; it is found as a leftover.
        assert len(left) == (1 if wrong.operation == "CreateMultipartUpload" and wrong.lost else 0)
        assert await backend.leftovers() == []

    wrong = replace(wrong)
    run(s3_server, story, wrong)
    assert wrong.met > wrong.nth


def test_an_answer_that_is_of_other_bytes(s3_server: S3Server, sums: str) -> None:
    """With a crc32 nobody knows a part's MD5 beforehand; that exactly these parts are there is seen in the end."""

    async def story(backend: S3Backend) -> None:
        if sums == "crc32":
            with pytest.raises(Retryable):
                await put(backend, "a", DATA)
            await nothing_is_left(backend)
        await put(backend, "a", DATA)
        assert await backend.read("a") == DATA

    run(s3_server, story, Trouble("UploadPart", nth=2, given=lambda: answer(200, etag=OTHERS["etag"])))


def test_bytes_damaged_on_their_way(s3_server: S3Server, sums: str, checks_crc32: bool) -> None:
    """The server refuses them by their checksum, and gets them once more."""
    if sums == "crc32" and not checks_crc32:
        pytest.skip("this server checks no crc32: parts have an MD5")
    seen: list[object] = []

    def damage(request: object) -> None:
        seen.append(request)
        request.data = bytes(len(request.data))  # type: ignore[attr-defined]

    async def story(backend: S3Backend) -> None:
        await put(backend, "a", DATA)
        assert await backend.read("a") == DATA
        await backend.write("b", b"12345")
        assert await backend.read("b") == b"12345"

    run(s3_server, story, Trouble("UploadPart", changed=damage), Trouble("PutObject", changed=damage))
    assert len(seen) == 2


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_a_lasting_error_leaves_nothing(s3_server: S3Server, operation: str) -> None:
    async def story(backend: S3Backend) -> None:
        writer = await backend.open_writer("a", BYTES)
        with pytest.raises(Permanent, match="denied") as first:
            await feed(writer, DATA)
            await writer.commit()
        for again in (writer.commit, lambda: writer.write(memoryview(b""))):
            with pytest.raises(Permanent) as later:
                await again()
            assert later.value is first.value  # the first error is what is told
        await writer.abort()
        await nothing_is_left(backend)

    run(s3_server, story, Trouble(operation, times=100, given=lambda: answer(403, "AccessDenied")))


def test_an_error_that_stays_is_given_up(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_MAX", 0.01)
    wrong = Trouble("UploadPart", nth=2, times=100, given=lambda: answer(503, "SlowDown"))

    async def story(backend: S3Backend) -> None:
        with pytest.raises(Retryable, match="SlowDown"):
            await put(backend, "a", DATA)
        await nothing_is_left(backend)

    run(s3_server, story, wrong)
    assert 8 <= wrong.met - 1 <= 2 * 8


def test_a_part_that_vanishes(s3_server: S3Server) -> None:
    """Whether the server says so or completes the upload without it: it is not believed."""

    def without_the_first(request: object) -> None:
        body = request.data  # type: ignore[attr-defined]
        start, end = body.index(b"<Part>"), body.index(b"</Part>") + len(b"</Part>")
        request.data = body[:start] + body[end:]  # type: ignore[attr-defined]

    async def short(backend: S3Backend) -> None:
        with pytest.raises(Retryable, match=f"after {BYTES} were sent|lost a part"):
            await put(backend, "a", DATA)
        await put(backend, "a", DATA)
        assert await backend.read("a") == DATA

    run(s3_server, short, Trouble("CompleteMultipartUpload", changed=without_the_first))

    async def lost(backend: S3Backend) -> None:
        with pytest.raises(Retryable, match="lost a part"):
            await put(backend, "a", DATA)
        await nothing_is_left(backend)

    run(s3_server, lost, Trouble("CompleteMultipartUpload", given=lambda: answer(400, "InvalidPart")))


def test_an_upload_that_vanishes(s3_server: S3Server) -> None:
    async def story(backend: S3Backend) -> None:
        writer = await backend.open_writer("a", BYTES)
        await feed(writer, DATA)
        for _ in range(100):  # until it is there to be taken away
            if left := await backend.leftovers():
                break
        await backend.discard_leftovers(left)
        with pytest.raises(Retryable):
            await writer.commit()
        await nothing_is_left(backend)

    run(s3_server, story)


def test_another_object_there_is_not_taken_for_ours(s3_server: S3Server) -> None:
    """The upload is gone and an object of the same size is there: its checksum tells."""

    async def story(backend: S3Backend) -> None:
        await put(backend, "a", bytes(BYTES))
        with pytest.raises(Retryable, match="not the one sent"):
            await put(backend, "a", DATA)
        assert await backend.leftovers() == []

    run(
        s3_server, story, Trouble("CompleteMultipartUpload", nth=2, given=lambda: answer(404, "NoSuchUpload"))
    )


@pytest.mark.parametrize("how", ["abort", "close", "cancel", "short"])
def test_what_ends_early_leaves_nothing(s3_server: S3Server, how: str) -> None:
    async def story(backend: S3Backend) -> None:
        writer = await backend.open_writer("a", BYTES)
        await writer.write(memoryview(DATA)[: PART + 1])
        other = opened(s3_server, backend.url)
        for _ in range(100):
            if await other.leftovers():
                break
        if how == "abort":
            await writer.abort()
        elif how == "close":
            await backend.close()
        elif how == "short":
            with pytest.raises(Permanent, match="announced"):
                await writer.commit()
        else:
            rest = asyncio.ensure_future(feed(writer, memoryview(DATA)[PART + 1 :]))
            await asyncio.sleep(0)
            finishing = asyncio.ensure_future(writer.commit()) if rest.done() else rest
            finishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finishing
            await writer.abort()
        await nothing_is_left(other)
        await other.close()

    run(s3_server, story)


# -- going on after a crash --------------------------------------------------------------------------------


def crashed(server: S3Server, notes: Keeping, nbytes: int, url: str) -> None:
    """A writer that sent ``nbytes`` and was killed: its upload is not aborted."""

    async def main() -> None:
        backend = opened(server, url)
        writer = await backend.open_writer("a", BYTES, notes)
        await writer.write(memoryview(DATA)[:nbytes])
        await asyncio.wait(writer._tasks)
        writer._room.writers.clear()  # nobody is left to abort it
        await backend.close()

    asyncio.run(main())


async def sent(backend: S3Backend, data: bytes | bytearray, notes: Keeping) -> int:
    """The parts that it took to write an object."""
    writer = await backend.open_writer("a", len(data), notes)
    await feed(writer, data)
    await writer.commit()
    return writer.parts_sent


def test_finished_parts_are_not_sent_again(s3_server: S3Server) -> None:
    notes, url = Keeping(), s3_server.url()
    crashed(s3_server, notes, 2 * PART, url)
    assert notes.saved == 1

    async def main() -> None:
        backend = opened(s3_server, url)
        changed = bytearray(DATA)
        changed[7] ^= 1  # the first part's bytes are others by now
        assert await sent(backend, changed, notes) == 2
        assert await backend.read("a") == changed
        assert await backend.leftovers() == []
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("now", ["there", "gone", "another", "of other bytes"])
def test_a_completed_object_is_not_sent_again(s3_server: S3Server, now: str) -> None:
    """Its writer was killed before anybody knew that it stands there."""
    began = Trouble("CreateMultipartUpload")

    async def story(backend: S3Backend) -> None:
        notes, data = Keeping(), bytearray(DATA)
        assert await sent(backend, DATA, notes) == 3
        if now == "gone":
            await backend.delete(["a"])
        elif now == "another":
            await put(backend, "a", bytes(BYTES))
        elif now == "of other bytes":
            data[7] ^= 1
            with pytest.raises(Retryable, match="not the one sent"):
                await sent(backend, data, notes)
        assert await sent(backend, data, notes) == (0 if now == "there" else 3)
        assert await backend.read("a") == data
        assert await backend.leftovers() == []

    run(s3_server, story, began)
    assert began.met == {"there": 1, "gone": 2, "another": 3, "of other bytes": 2}[now]


@pytest.mark.parametrize("gone", ["upload", "size", "garbage", "sums"])
def test_notes_that_are_of_no_use(s3_server: S3Server, gone: str, sums: str) -> None:
    notes, url = Keeping(), s3_server.url()
    crashed(s3_server, notes, PART, url)

    async def main() -> None:
        backend = opened(s3_server, url)
        data = DATA
        if gone == "upload":
            await backend.abort_upload("a", notes.upload)
        elif gone == "size":
            data = DATA[:-1]
        elif gone == "sums":  # the upload was begun for another checksum
            notes.data = json.dumps({**json.loads(notes.data or b""), "crc32": sums != "crc32"}).encode()
        else:
            await backend.abort_upload("a", notes.upload)
            notes.data = b"\xff{"
        assert await sent(backend, data, notes) == 3
        assert await backend.read("a") == data
        assert await backend.leftovers() == []
        await backend.close()

    asyncio.run(main())


def test_an_abortion_forgets_the_notes(s3_server: S3Server) -> None:
    async def story(backend: S3Backend) -> None:
        notes = Keeping()
        writer = await backend.open_writer("a", BYTES, notes)
        await writer.write(memoryview(DATA)[:PART])
        await asyncio.wait(writer._tasks)
        assert notes.upload
        await writer.abort()
        assert notes.data == b""
        await nothing_is_left(backend)
        assert await names_of(backend) == set()

    run(s3_server, story)
