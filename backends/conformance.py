"""What every backend must do, as tests: subclass :class:`BackendConformance` in a test module.

::

    class TestMine(BackendConformance):
        def make(self, place):            # place: a pathlib.Path of this test's own
            return MyBackend(...)

pytest collects the inherited tests; nothing here imports it. Each gets two clients of the same place, so that
what one does must be seen by the other, at once.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .aligned import BLOCK, aligned_buffer
from .api import Backend, Item, Writer
from .errors import BackendError, Conflict, NotFound, Permanent, ShortRead

SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, (1 << 20) + 1)
"""Bytes of the objects that the tests write."""

IMPROPER_NAMES = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "./a", ".hidden", "a/.tmp-b"),
    *("a b", "a\n", "a\0b", "a\\b", "\u00e9", "a:b", "a" * 2000),
)

Case = Callable[[Any, Backend, Backend], Awaitable[None]]


def case(method: Case) -> Callable[[Any, Path], None]:
    """Makes a plain test of an asynchronous one that takes two clients."""

    def test(self: BackendConformance, tmp_path: Path) -> None:
        async def main() -> None:
            place = tmp_path / "place"
            backend, other = self.make(place), self.make(place)
            try:
                await method(self, backend, other)
            finally:
                await backend.close()
                await other.close()

        asyncio.run(main())

    test.__doc__ = method.__doc__
    return test


@contextmanager
def refused(kind: type[BackendError]) -> Iterator[None]:
    """The block must raise ``kind``, which must survive pickling."""
    try:
        yield
    except kind as error:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(copy) is type(error) and copy.args == error.args
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def content(nbytes: int, seed: int = 1) -> bytes:
    """Bytes in which no two places look alike."""
    return b"".join((index * 2654435761 + seed).to_bytes(8, "little") for index in range(nbytes // 8 + 1))[
        :nbytes
    ]


async def names_of(backend: Backend, prefix: str = "") -> set[str]:
    return {item.name async for item in backend.list(prefix)}


async def put(backend: Backend, name: str, data: bytes | memoryview, piece: int = 1 << 20) -> None:
    """Write an object piece by piece."""
    writer = await backend.open_writer(name, len(data))
    await feed(writer, data, piece)
    await writer.commit()


async def feed(writer: Writer, data: bytes | memoryview, piece: int = 1 << 20) -> None:
    view = memoryview(data)
    for start in range(0, len(data), piece):
        await writer.write(view[start : start + piece])


class BackendConformance:
    """See the module."""

    def make(self, place: Path) -> Backend:
        """A new client of ``place``, which does not exist before the first test writes to it."""
        raise NotImplementedError

    # -- nothing there ---------------------------------------------------------------------------------

    @case
    async def test_a_place_that_does_not_exist_is_empty(self, backend: Backend, other: Backend) -> None:
        assert await names_of(backend) == set()
        assert await names_of(backend, "some/prefix") == set()
        assert await backend.list_names() == []
        assert await backend.list_names("some/prefix") == []
        assert await backend.leftovers() == []
        await backend.delete(["nothing", "no/thing"])

    @case
    async def test_what_is_not_there_is_not_found(self, backend: Backend, other: Backend) -> None:
        for name in ("nothing", "no/thing"):
            with refused(NotFound):
                await backend.read(name)
            with refused(NotFound):
                await backend.read_into(name, 0, memoryview(bytearray(1)))
            with refused(NotFound):
                await backend.size(name)

    # -- writing and reading ---------------------------------------------------------------------------

    @case
    async def test_written_bytes_come_back(self, backend: Backend, other: Backend) -> None:
        for nbytes in SIZES:
            await backend.write(f"small/{nbytes}", content(nbytes))
            await put(backend, f"pieces/{nbytes}", content(nbytes, 2), piece=100_000)
        for nbytes in SIZES:
            assert await other.read(f"small/{nbytes}") == content(nbytes)
            assert await other.read(f"pieces/{nbytes}") == content(nbytes, 2)
            assert await other.size(f"pieces/{nbytes}") == nbytes

    @case
    async def test_writing_replaces(self, backend: Backend, other: Backend) -> None:
        await backend.write("a/b", b"old and long")
        await other.write("a/b", b"new")
        assert await backend.read("a/b") == b"new"
        await put(backend, "a/b", b"newer")
        assert await other.read("a/b") == b"newer"
        assert await names_of(other) == {"a/b"}

    @case
    async def test_read_is_bounded(self, backend: Backend, other: Backend) -> None:
        await backend.write("a", b"12345")
        assert await backend.read("a", 5) == b"12345"
        with refused(Permanent):
            await backend.read("a", 4)

    @case
    async def test_ranges(self, backend: Backend, other: Backend) -> None:
        data = content((1 << 20) + 5000)
        await put(backend, "a", data)
        room = aligned_buffer(len(data))
        for offset, nbytes, shift in (
            *((0, len(data), 0), (0, 1 << 20, 0), (BLOCK, 1 << 19, 0), (1, 1 << 19, 0), (0, 1 << 19, 1)),
            *((1 << 20, 5000, 0), ((1 << 20) + 4096, 904, 0), (len(data), 0, 0), (7, 3, 5)),
        ):
            view = room[shift : shift + nbytes]
            await backend.read_into("a", offset, view)
            assert view == data[offset : offset + nbytes], (offset, nbytes, shift)

    @case
    async def test_an_object_that_ends_too_early(self, backend: Backend, other: Backend) -> None:
        data = content((1 << 20) + 5000)
        await put(backend, "a", data)
        room = aligned_buffer(2 << 20)
        for offset, nbytes in (
            (0, len(data) + 1),
            (BLOCK, len(data)),
            (1 << 20, 8192),
            (len(data), 1),
            (3 << 20, 9),
        ):
            with refused(ShortRead):
                await backend.read_into("a", offset, room[:nbytes])

    @case
    async def test_views_of_other_shapes(self, backend: Backend, other: Backend) -> None:
        words = memoryview(content(4096)).cast("Q").cast("B").cast("Q", [8, 64])
        writer = await backend.open_writer("a", words.nbytes)
        await writer.write(words)
        await writer.commit()
        into = memoryview(bytearray(4096)).cast("Q")
        await backend.read_into("a", 0, into)
        assert into.tobytes() == content(4096)
        with refused(Permanent):
            await backend.read_into("a", 0, memoryview(b"read only"))

    # -- writers ---------------------------------------------------------------------------------------

    @case
    async def test_nothing_is_visible_before_commit(self, backend: Backend, other: Backend) -> None:
        writer = await backend.open_writer("a/b", 8)
        await writer.write(memoryview(b"12345678"))
        with refused(NotFound):
            await other.read("a/b")
        assert await names_of(other) == set()
        await writer.commit()
        assert await other.read("a/b") == b"12345678"
        await writer.abort()
        assert await other.read("a/b") == b"12345678"
        assert await other.leftovers() == []

    @case
    async def test_abort_leaves_no_trace(self, backend: Backend, other: Backend) -> None:
        await backend.write("a/b", b"old")
        for name in ("a/b", "a/c"):
            writer = await backend.open_writer(name, 2 << 20)
            await writer.write(memoryview(bytes(1 << 20)))
            await writer.abort()
            await writer.abort()
            with refused(Permanent):
                await writer.write(memoryview(b"1"))
            with refused(Permanent):
                await writer.commit()
        assert await other.read("a/b") == b"old"
        assert await names_of(other) == {"a/b"}
        assert await other.leftovers() == []

    @case
    async def test_the_announced_size_is_kept(self, backend: Backend, other: Backend) -> None:
        await backend.write("a", b"old")
        for nbytes in (10, 2 << 20):
            short = await backend.open_writer("a", nbytes)
            await short.write(memoryview(bytes(nbytes // 2)))
            with refused(Permanent):
                await short.commit()
            long = await backend.open_writer("a", nbytes)
            with refused(Permanent):
                await long.write(memoryview(bytes(nbytes + 1)))
            await short.abort()
            await long.abort()
        with refused(Permanent):
            await backend.open_writer("a", -1)
        assert await other.read("a") == b"old"
        assert await other.leftovers() == []

    @case
    async def test_an_object_that_turns_out_shorter(self, backend: Backend, other: Backend) -> None:
        for bound, nbytes in ((100, 10), (3 << 20, (1 << 20) + 5), (20 << 20, (9 << 20) + 1), (20 << 20, 0)):
            writer = await backend.open_writer("a", bound, at_most=True)
            data = content(nbytes)
            await feed(writer, data, 3 << 20)
            await writer.commit()
            assert await other.read("a") == data
        whole = await backend.open_writer("a", 10, at_most=True)
        await whole.write(memoryview(b"0123456789"))
        await whole.commit()
        long = await backend.open_writer("a", 10, at_most=True)
        with refused(Permanent):
            await long.write(memoryview(bytes(11)))
        await long.abort()
        assert await other.read("a") == b"0123456789"
        assert await other.leftovers() == []

    @case
    async def test_writers_side_by_side(self, backend: Backend, other: Backend) -> None:
        objects = {f"d{index % 3}/{index}": content(50_000 + index, index) for index in range(12)}
        await asyncio.gather(*(put(backend, name, data, 7000) for name, data in objects.items()))
        found = await asyncio.gather(*(other.read(name) for name in objects))
        assert found == [*objects.values()]

    # -- create ----------------------------------------------------------------------------------------

    @case
    async def test_create_once(self, backend: Backend, other: Backend) -> None:
        await backend.create("a/b", b"first")
        await other.create("a/b", b"first")
        with refused(Conflict):
            await other.create("a/b", b"second")
        with refused(Conflict):
            await backend.create("a/b", b"other")
        assert await other.read("a/b") == b"first"
        assert await other.leftovers() == []

    @case
    async def test_one_of_many_creates(self, backend: Backend, other: Backend) -> None:
        if not backend.capabilities.atomic_create:
            return
        answers = await asyncio.gather(
            *((backend, other)[index % 2].create("x/one", b"%d" % index) for index in range(10)),
            return_exceptions=True,
        )
        won = [index for index, answer in enumerate(answers) if answer is None]
        assert len(won) == 1
        assert all(isinstance(answer, Conflict) for index, answer in enumerate(answers) if index not in won)
        assert await backend.read("x/one") == b"%d" % won[0]

    # -- names -----------------------------------------------------------------------------------------

    @case
    async def test_listing(self, backend: Backend, other: Backend) -> None:
        for name in ("a/x", "a/b/y", "a/b/c/z", "ab/x", "top"):
            await backend.write(name, name.encode())
        assert [item async for item in other.list("a/b/c")] == [Item("a/b/c/z", 7)]
        assert await names_of(other) == {"a/x", "a/b/y", "a/b/c/z", "ab/x", "top"}
        assert await names_of(other, "a") == {"a/x", "a/b/y", "a/b/c/z"}
        assert await names_of(other, "top") == set()
        assert await names_of(other, "top/below") == set()
        assert await names_of(other, "b") == set()
        assert sorted(await other.list_names()) == ["a", "ab", "top"]
        assert sorted(await other.list_names("a")) == ["b", "x"]
        assert await other.list_names("top") == []
        assert await other.list_names("b") == []

    @case
    async def test_listing_is_never_stale(self, backend: Backend, other: Backend) -> None:
        assert await names_of(other, "a") == set()
        await backend.write("a/b", b"1")
        assert await names_of(other, "a") == {"a/b"}
        assert await other.list_names("a") == ["b"]
        await backend.write("a/b", b"longer")
        assert await other.read("a/b") == b"longer"
        await backend.delete(["a/b"])
        assert await names_of(other, "a") == set()
        with refused(NotFound):
            await other.size("a/b")

    @case
    async def test_delete(self, backend: Backend, other: Backend) -> None:
        names = [f"d/{index % 7}/{index}" for index in range(300)]
        await asyncio.gather(*(backend.write(name, b"") for name in [*names, "d/keep"]))
        await other.delete([*names, "d/9/absent", "e/absent"])
        assert await names_of(backend) == {"d/keep"}
        await backend.write(names[0], b"again")
        assert await other.read(names[0]) == b"again"

    @case
    async def test_improper_names_are_refused(self, backend: Backend, other: Backend) -> None:
        async def discard(name: str) -> None:
            await backend.discard_leftovers([Item(name, 0)])

        await backend.write("a", b"1")
        for name in IMPROPER_NAMES:
            calls: list[Callable[[str], Awaitable[object]]] = [
                backend.read,
                backend.size,
                lambda name: backend.read_into(name, 0, memoryview(bytearray(1))),
                lambda name: backend.write(name, b""),
                lambda name: backend.create(name, b""),
                lambda name: backend.open_writer(name, 1),
                lambda name: backend.delete(["a", name]),
                # (".tmp-" may well begin a temporary's name.)
                *([discard] if ".tmp-" not in name else []),
                *([backend.list_names, backend.leftovers] if name else []),
                *([lambda name: names_of(backend, name)] if name else []),
            ]
            for call in calls:
                with refused(Permanent):
                    await call(name)
        assert await names_of(other) == {"a"}

    @case
    async def test_leftovers(self, backend: Backend, other: Backend) -> None:
        await backend.write("a/done", b"1")
        writer = await backend.open_writer("a/b", 1)
        await writer.write(memoryview(b"1"))
        left = await other.leftovers()
        assert await other.leftovers("a") == left
        assert await other.leftovers("elsewhere") == []
        with refused(Permanent):
            await other.discard_leftovers([Item("a/done", 1)])
        await other.discard_leftovers(left)
        await other.discard_leftovers(left)
        assert await backend.leftovers() == []
        assert await names_of(backend) == {"a/done"}
        await writer.abort()

    @case
    async def test_closing_twice(self, backend: Backend, other: Backend) -> None:
        await backend.write("a", b"1")
        await backend.close()
        await backend.close()
