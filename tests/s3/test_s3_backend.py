"""What an S3 server may do to small requests, who may talk to it, and from where."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from everstep.backends import s3 as s3module
from everstep.backends.api import Item
from everstep.backends.conformance import content, names_of
from everstep.backends.errors import (
    BackendError,
    Conflict,
    NotFound,
    Permanent,
    Retryable,
    ShortRead,
)
from everstep.backends.limit import SLICE_BYTES
from everstep.backends.open import open_backend
from everstep.backends.s3 import GATED_RANGE_BYTES, S3Backend
from everstep.backends.s3client import Line
from everstep.backends.s3options import READ_S

from .kit import Trouble, answer, opened, trouble
from .server import S3Server, free_ports

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_FIRST", 0.01)


def run(server: S3Server, story: Callable[[S3Backend], Awaitable[None]], *troubles: Trouble) -> None:
    async def main() -> None:
        backend = opened(server)
        trouble(backend, *troubles)
        try:
            await story(backend)
        finally:
            await backend.close()

    asyncio.run(main())


# -- create ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        Trouble("PutObject", nth=3, lost=True),
        Trouble("PutObject", nth=3, given=lambda: answer(409, "ConditionalRequestConflict")),
        Trouble("PutObject", nth=3, given=lambda: answer(503, "SlowDown")),
        Trouble("PutObject", nth=3, given=lambda: answer(200, "InternalError")),
        Trouble("PutObject", nth=3, given=lambda: answer(200)),
    ],
    ids=["lost", "conflict", "slow", "error", "nothing"],
)
def test_creating_is_settled(s3_server: S3Server, wrong: Trouble) -> None:
    """Requests one and two prove that the server knows conditional puts."""

    async def story(backend: S3Backend) -> None:
        await backend.create("a/b", b"first")
        assert await backend.read("a/b") == b"first"
        with pytest.raises(Conflict):
            await backend.create("a/b", b"second")

    run(s3_server, story, wrong)
    assert wrong.met >= 4


def test_a_name_that_is_free_again(s3_server: S3Server) -> None:
    async def story(backend: S3Backend) -> None:
        with pytest.raises(Retryable, match="free again"):
            await backend.create("a", b"1")

    taken = Trouble("PutObject", nth=3, given=lambda: answer(412, "PreconditionFailed"))
    run(s3_server, story, taken)


def test_a_server_without_conditional_puts(s3_server: S3Server) -> None:
    """It is found out before anything of anybody is put over."""

    def unconditional(request: Any) -> None:
        del request.headers["If-None-Match"]

    async def story(backend: S3Backend) -> None:
        assert backend.capabilities.atomic_create
        other = opened(s3_server, backend.url)
        await other.create("a", b"theirs")
        for _ in range(2):
            with pytest.raises(Permanent, match="atomic"):
                await backend.create("a", b"ours")
            assert not backend.capabilities.atomic_create
        assert await other.read("a") == b"theirs"
        assert await names_of(other) == {"a"}
        await backend.write("b", b"a mirror it can be")
        await other.close()

    run(s3_server, story, Trouble("PutObject", times=100, changed=unconditional))


# -- reading -----------------------------------------------------------------------------------------------


def test_a_large_read_is_made_of_ranges(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3module, "RANGE_BYTES", MIB)
    data = content(5 * MIB + 77)
    asked = Trouble("GetObject", nth=3, times=2, given=lambda: answer(500, "InternalError"))

    async def story(backend: S3Backend) -> None:
        await backend.write("a", data)
        into = memoryview(bytearray(4 * MIB + 99))
        await backend.read_into("a", 1000, into)
        assert into == data[1000 : 1000 + len(into)]
        with pytest.raises(ShortRead, match=f"ends at {len(data)}"):
            await backend.read_into("a", 4 * MIB, memoryview(bytearray(2 * MIB)))

    run(s3_server, story, asked)
    assert asked.met >= 5 + 2 + 1


def test_answers_to_another_question(s3_server: S3Server) -> None:
    async def story(backend: S3Backend) -> None:
        await backend.write("a", content(100))
        into = memoryview(bytearray(10))
        await backend.read_into("a", 20, into)  # the first answer is of another range
        assert into == content(100)[20:30]
        with pytest.raises(Permanent, match="100 bytes came"):
            await backend.read_into("a", 20, into)  # ranges are not known there
        await backend.read_into("a", 0, memoryview(bytearray(100)))

    def other_range(request: Any) -> None:
        del request.headers["Range"]
        request.headers["Range"] = "bytes=0-9"

    def no_range(request: Any) -> None:
        del request.headers["Range"]

    run(
        s3_server,
        story,
        Trouble("GetObject", changed=other_range),
        Trouble("GetObject", nth=3, times=2, changed=no_range),
    )


def test_a_silent_server(s3_server: S3Server) -> None:
    """It answers to nothing; each try is given up after the time that the options say."""

    async def main() -> None:
        held: list[asyncio.StreamWriter] = []

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        backend = opened(
            s3_server,
            "s3://b/r",
            endpoint_url=f"http://127.0.0.1:{port}",
            config_kwargs={"read_timeout": 0.2},
        )
        for call in (
            lambda: backend.client.do(
                "a", lambda line, flow: line.call("head_object", Bucket="b", Key="a"), tries_max=1
            ),
            lambda: backend.client.do(
                "a",
                lambda line, flow: line.call("put_object", Bucket="b", Key="a", Body=bytes(30 * MIB)),
                tries_max=1,
            ),
        ):
            began = time.monotonic()
            with pytest.raises(Retryable):
                await call()
            assert time.monotonic() - began < 10
        await backend.close()
        for writer in held:
            writer.close()
        server.close()

    asyncio.run(main())


# -- names -------------------------------------------------------------------------------------------------


def test_listings_of_many_pages(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Line.call

    async def small_pages(line: Line, method: str, **arguments: Any) -> dict[str, Any]:
        if method == "list_objects_v2":
            arguments.setdefault("MaxKeys", 3)
        return await made(line, method, **arguments)

    monkeypatch.setattr(Line, "call", small_pages)

    async def story(backend: S3Backend) -> None:
        names = {f"d/{index % 4}/{index}" for index in range(11)} | {"top"}
        await asyncio.gather(*(backend.write(name, b"12") for name in names))
        assert await names_of(backend) == names
        assert sorted(await backend.list_names()) == ["d", "top"]
        assert sorted(await backend.list_names("d")) == ["0", "1", "2", "3"]
        (item,) = [item async for item in backend.list("d/3") if item.name == "d/3/3"]
        assert item == Item("d/3/3", 2) and abs((item.modified or 0) - time.time()) < 3600

    run(s3_server, story, Trouble("ListObjectsV2", nth=2, given=lambda: answer(503, "SlowDown")))


def test_what_a_deletion_says_of_single_names(s3_server: S3Server) -> None:
    """The server's answer to the whole is 200."""

    def told(code: str) -> Callable[[], Any]:
        body = f"<DeleteResult><Error><Key>KEY</Key><Code>{code}</Code><Message>so</Message></Error></DeleteResult>"

        def given() -> Any:
            made = answer(200)
            made.raw._body = body.replace("KEY", prefix[0] + "/b").encode()
            return made

        return given

    def sums(request: Any) -> None:
        checksums.append(
            [name for name in request.headers if "md5" in name.lower() or "checksum" in name.lower()]
        )

    checksums: list[list[str]] = []
    prefix: list[str] = []
    slow = Trouble("DeleteObjects", given=told("SlowDown"))

    async def story(backend: S3Backend) -> None:
        prefix[:] = [backend._root.rstrip("/")]
        await backend.write("b", b"1")
        await backend.delete(["a", "b"])
        assert await names_of(backend) == set()
        for name in ("a", "b"):
            await backend.write(name, b"1")
        with pytest.raises(Permanent, match="AccessDenied") as caught:
            await backend.delete(["a", "b"])
        assert caught.value.name == "b"

    denied = Trouble("DeleteObjects", nth=3, times=9, given=told("AccessDenied"))
    run(s3_server, story, slow, denied, Trouble("DeleteObjects", times=9, changed=sums))
    assert slow.met >= 3
    assert checksums == [["Content-MD5"]] * len(checksums), "the one checksum that every server knows"


def test_a_deletion_of_which_nothing_is_understood(s3_server: S3Server) -> None:
    """Damaged on its way, so that the server finds neither names nor words."""
    wrong = Trouble("DeleteObjects", times=2, given=lambda: answer(400))

    async def story(backend: S3Backend) -> None:
        await backend.write("a", b"1")
        await backend.delete(["a"])
        assert await names_of(backend) == set()

    run(s3_server, story, wrong)
    assert wrong.met == 3


# -- who may ---------------------------------------------------------------------------------------------


async def all_calls(backend: S3Backend) -> list[BackendError | None]:
    """What each kind of call raises."""
    found: list[BackendError | None] = []
    for call in (
        lambda: backend.write("a", b"1"),
        lambda: backend.create("a", b"1"),
        lambda: backend.read("a"),
        lambda: backend.read_into("a", 0, memoryview(bytearray(1))),
        lambda: backend.size("a"),
        lambda: names_of(backend),
        lambda: backend.list_names("x"),
        lambda: backend.delete(["a"]),
        lambda: backend.leftovers(),
    ):
        try:
            await call()
            found.append(None)
        except BackendError as error:
            found.append(error)
    return found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"secret": "geheimgeheim"}, "secret key is not|denied"),
        ({"key": "geheimgeheim"}, "access key is unknown"),
        ({"profile": "there-is-none", "key": None, "secret": None}, "profile"),
        ({"s3_additional_kwargs": {"NoSuchThing": "geheimgeheim"}}, "'NoSuchThing' in s3_additional_kwargs"),
    ],
)
def test_wrong_credentials_are_told_at_once(
    s3_server: S3Server, options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "everstep")

    async def main() -> None:
        backend = opened(s3_server, **options)
        began = time.monotonic()
        found = await all_calls(backend)
        assert time.monotonic() - began < 20
        for error in found:
            assert isinstance(error, Permanent)
            text = "".join(traceback.format_exception(error)) + repr(error)
            assert "geheimgeheim" not in text and s3_server.secret not in text
            assert type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301
        assert any(words in str(error) for words in words.split("|") for error in found)
        await backend.close()

    asyncio.run(main())
    assert "geheimgeheim" not in caplog.text and s3_server.secret not in caplog.text


def test_a_bucket_that_is_not_there(s3_server: S3Server) -> None:
    async def main() -> None:
        backend = opened(s3_server, "s3://there-is-none/x")
        for error in await all_calls(backend):
            assert isinstance(error, Permanent) and "bucket does not exist" in str(error)
        await backend.close()

    asyncio.run(main())


def test_who_may_only_read(s3_server: S3Server) -> None:
    if not s3_server.reader:
        pytest.skip("needs EVERSTEP_TEST_S3_READER: a user of that endpoint who may only read")

    async def main() -> None:
        writer = opened(s3_server)
        await writer.write("a", b"1")
        reader = opened(s3_server, writer.url, key=s3_server.reader, secret=s3_server.reader_secret)
        found = await all_calls(reader)
        assert all(isinstance(found[index], Permanent) and "denied" in str(found[index]) for index in (0, 1))
        assert isinstance(found[7], Permanent)
        assert found[2:7] == [None] * 5
        assert await writer.read("a") == b"1"
        await reader.close()
        await writer.close()

    asyncio.run(main())


def test_who_may_list_below_his_prefix_only(s3_server: S3Server) -> None:
    """He is denied what is not there as if it were."""

    async def story(backend: S3Backend) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.read("d/a"),
            lambda: backend.read_into("d/a", 0, memoryview(bytearray(1))),
            lambda: backend.size("d/a"),
        ]
        writer = opened(s3_server, backend.url)
        await writer.write("d/a.more", b"1")
        for call in calls:
            with pytest.raises(NotFound):
                await call()
        await writer.write("d/a", b"1")
        for call in calls:
            with pytest.raises(Permanent, match="denied"):
                await call()
        await writer.close()

    run(
        s3_server,
        story,
        Trouble("GetObject", times=99, given=lambda: answer(403, "AccessDenied")),
        Trouble("HeadObject", times=99, given=lambda: answer(403)),
    )


def test_no_bucket_is_asked_for(s3_server: S3Server) -> None:
    """Rights on objects, and to list them, are enough."""
    calls = {
        name: Trouble(name) for name in ("HeadBucket", "CreateBucket", "GetBucketLocation", "ListBuckets")
    }

    async def story(backend: S3Backend) -> None:
        assert await all_calls(backend) == [None] * 9

    run(s3_server, story, *calls.values())
    assert not any(call.met for call in calls.values())


@pytest.mark.parametrize(
    "operation", ["PutObject", "GetObject", "HeadObject", "ListObjectsV2", "DeleteObjects"]
)
def test_credentials_that_expire(
    s3_server: S3Server, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is made anew, with the credentials that are there by then."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    # (An answer to HEAD has no body that could say what is wrong.)
    code = "" if operation == "HeadObject" else "ExpiredToken"
    expired = Trouble(operation, nth=2, given=lambda: answer(400, code))
    made: list[Line] = []

    async def main() -> None:
        backend = S3Backend(s3_server.bucket, s3_server.url().split("/", 3)[3])
        trouble(backend, expired, Trouble("GetObject", nth=99))
        connect = backend.client._connect

        async def counted() -> Line:
            made.append(await connect())
            return made[-1]

        backend.client._connect = counted  # type: ignore[method-assign]
        await backend.write("a", b"1")
        for _ in range(3):
            await backend.write("b", b"2")
            assert await backend.read("a") == b"1"
            assert await backend.size("a") == 1
            assert await names_of(backend) == {"a", "b"}
            await backend.delete(["b"])
        await backend.close()

    asyncio.run(main())
    assert expired.met > 2 and len(made) == (1 if operation == "HeadObject" else 2)


def test_credentials_that_stay_expired(s3_server: S3Server) -> None:
    expired = Trouble("PutObject", times=100, given=lambda: answer(400, "ExpiredToken"))

    async def story(backend: S3Backend) -> None:
        with pytest.raises(Permanent, match="expired"):
            await backend.write("a", b"1")

    run(s3_server, story, expired)
    assert expired.met == 2


def test_a_server_that_is_away(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.backends.s3client.WAIT_S_MAX", 0.01)

    async def main() -> None:
        backend = opened(s3_server, endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}")
        for error in await all_calls(backend):
            assert isinstance(error, Retryable)
        await backend.close()

    asyncio.run(main())


# -- from where --------------------------------------------------------------------------------------------


def test_several_loops(s3_server: S3Server) -> None:
    backend = opened(s3_server)

    async def story(name: str) -> None:
        await backend.write(name, name.encode())
        assert await backend.read(name) == name.encode()
        await backend.client._loops[-1].line.close()  # type: ignore[union-attr]

    asyncio.run(story("a"))
    asyncio.run(story("b"))
    assert len(backend.client._loops) == 1


def test_a_forked_child_makes_its_own_connections(s3_server: S3Server) -> None:
    """And closes none of its parent's."""
    backend = opened(s3_server)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(backend.write("a", b"parent"))
    child = os.fork()
    if child == 0:
        status = 1
        try:

            async def inside() -> None:
                assert await backend.read("a") == b"parent"
                gc.collect()
                await backend.write("b", b"child")
                await backend.close()

            asyncio.run(inside())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    began = time.monotonic()
    assert loop.run_until_complete(backend.read("b")) == b"child"
    assert time.monotonic() - began < READ_S / 2, "the connection is still heard"
    loop.run_until_complete(backend.close())
    loop.close()


def test_a_gate_sees_all_bytes_in_slices(s3_server: S3Server) -> None:
    class Counter:
        taken: list[int] = []

        async def take(self, nbytes: int) -> None:
            self.taken.append(nbytes)

    async def main() -> None:
        gate = Counter()
        backend = open_backend(s3_server.url(), options=s3_server.storage_options, gate=gate)
        data = content(10 * MIB + 5)
        await backend.write("large", data)
        await backend.create("small", data[:100_001])
        assert (
            sum(gate.taken) == len(data) + 100_001 + 3
        )  # what proves that names are created once, and checksums checked
        sent = len(gate.taken)
        into = memoryview(bytearray(len(data)))
        await backend.read_into("large", 0, into)
        assert into == data
        assert sum(gate.taken[sent:]) == len(data)
        assert max(gate.taken[:sent]) == SLICE_BYTES
        assert max(gate.taken[sent:]) == GATED_RANGE_BYTES
        await backend.close()

    asyncio.run(main())


# -- errors ------------------------------------------------------------------------------------------------
