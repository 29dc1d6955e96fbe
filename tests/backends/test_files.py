"""Local files: paths of the bytes, errors, permissions, cancellation, fork."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from everstep.backends import filewriter, localfs, points
from everstep.backends.aligned import address_of, aligned_buffer, is_aligned
from everstep.backends.conformance import content, names_of, put
from everstep.backends.door import Door, File
from everstep.backends.errors import (
    BackendError,
    NotFound,
    Permanent,
    ShortRead,
)
from everstep.backends.files import LocalBackend
from everstep.backends.filewriter import FileWriter
from everstep.backends.open import open_backend
from everstep.backends.publish import Publisher
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.doors import PlainDoor, ProudDoor, SlowDoor, temporaries, with_backend

T = TypeVar("T")

BIG = content((2 << 20) + 777)


# -- the way of the bytes --------------------------------------------------------------------------------


def test_addresses() -> None:
    buffer = aligned_buffer(10_000)
    assert len(buffer) == 12288 and is_aligned(buffer) and not is_aligned(buffer[1:])
    assert address_of(buffer[4097:]) == address_of(buffer) + 4097
    assert address_of(buffer.toreadonly()) == address_of(buffer)
    assert is_aligned(buffer.toreadonly()[4096:])


pieces = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3)), max_size=8)


@settings(max_examples=150, deadline=None)
@given(pieces=pieces, kind=st.sampled_from([Door, PlainDoor, ProudDoor, SlowDoor]))
def test_any_pieces_at_any_addresses(
    pieces: list[tuple[int, int]], kind: type[Door], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Views of any length, aligned (0) or not, give the file that their concatenation is."""
    root = tmp_path_factory.mktemp("pieces")
    source = aligned_buffer(32 << 10)
    source[:] = content(len(source))
    views = [source[shift * 13 : shift * 13 + nbytes] for nbytes, shift in pieces]
    whole = b"".join(views)
    door = kind(root)
    publisher = Publisher(door)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filewriter, "DIRECT_BYTES_MIN", 0)
        patch.setattr(filewriter, "STAGING_BYTES", 8192)
        writer = FileWriter(door, publisher, "a", len(whole))
        for view in views:
            writer.write(view)
        writer.commit()
    publisher.close()
    assert (root / "a").read_bytes() == whole


def test_aligned_views_go_straight_to_the_disk(tmp_path: Path) -> None:
    """No copy is made of them: each is written as it is, by direct I/O where the disk has it."""
    seen: list[tuple[int, int, bool]] = []

    class Watching(Door):
        def write(self, file: File, view: memoryview, offset: int) -> int:
            seen.append((address_of(view), len(view), file.direct))
            return super().write(file, view, offset)

    buffer = aligned_buffer(3 << 20)
    buffer[: len(BIG)] = BIG
    probe = Door(tmp_path)
    file = probe.open("probe", os.O_CREAT | os.O_RDWR)
    probe.set_direct(file, True)
    direct = file.direct
    probe.close(file)

    async def job(backend: LocalBackend) -> None:
        writer = await backend.open_writer("a", len(BIG))
        await writer.write(buffer[: 1 << 20].toreadonly())
        await writer.write(buffer[1 << 20 : len(BIG)])
        await writer.commit()

    with_backend(LocalBackend(tmp_path, door=Watching(tmp_path)), job)
    base = address_of(buffer)
    assert seen[0] == (base, 1 << 20, direct)
    assert seen[1][0] == base + (1 << 20)
    assert (tmp_path / "a").read_bytes() == BIG


@pytest.mark.parametrize("kind", [PlainDoor, ProudDoor, SlowDoor])
def test_lesser_file_systems(kind: type[Door], tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        buffer = aligned_buffer(3 << 20)
        buffer[: len(BIG)] = BIG
        writer = await backend.open_writer("big", len(BIG))
        await writer.write(buffer[: 1 << 20])
        await writer.write(buffer[1 << 20 : len(BIG) - 100])
        await writer.write(buffer[len(BIG) - 100 : len(BIG)])
        await writer.commit()
        await backend.write("small", BIG[:5000])
        into = aligned_buffer(3 << 20)
        await backend.read_into("big", 0, into[: len(BIG)])
        assert into[: len(BIG)] == BIG
        with pytest.raises(ShortRead):
            await backend.read_into("big", 0, into)
        assert await backend.read("big") == BIG
        assert await backend.read("small") == BIG[:5000]

    with_backend(LocalBackend(tmp_path, door=kind(tmp_path)), job)


def test_order_of_publication(tmp_path: Path) -> None:
    reached: list[tuple[str, str]] = []

    async def job(backend: LocalBackend) -> None:
        await backend.write("run/x", b"1")
        points.hook = lambda name, detail: reached.append((name, detail.split(".tmp-")[0]))
        await backend.create("run/a", b"1")
        reached.append(("", ""))
        await put(backend, "run/b", BIG, piece=2 << 20)

    try:
        with_backend(LocalBackend(tmp_path / "root"), job)
    finally:
        points.hook = None
    names = [name for name, _ in reached]
    both = [f"{op}.{when}" for op in ("open", "write", "fsync") for when in ("before", "after")]
    ends = [f"{op}.{when}" for op in ("link", "unlink", "fsyncdir") for when in ("before", "after")]
    assert names[: names.index("")] == both + ends
    assert ("link.before", "run/a") in reached and ("fsync.before", "run/") in reached
    streamed = [name for name in names[names.index("") + 1 :] if not name.startswith("write")]
    ops = ("open", "fallocate", "truncate", "fsync", "rename", "fsyncdir")
    expected = [f"{op}.{when}" for op in ops for when in ("before", "after")]
    assert [name for name in streamed if not name.startswith("truncate")] == [
        name for name in expected if not name.startswith("truncate")
    ]


# -- permissions -----------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[None]:
    """This process as a user without rights, on all its threads."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_cannot_be_read_is_not_empty(nobody: None) -> None:
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "run" / "sub").mkdir(parents=True)
        (place / "run" / "sub" / "x").write_text("1")

        async def job(backend: LocalBackend) -> None:
            with pytest.raises(Permanent, match="EACCES"):
                await names_of(backend)
            with pytest.raises(Permanent, match="EACCES"):
                await names_of(backend, "sub")
            with pytest.raises(Permanent, match="EACCES"):
                await backend.list_names()
            with pytest.raises(Permanent, match="EACCES"):
                await backend.read("sub/x")
            with pytest.raises(Permanent, match="EACCES"):
                await backend.write("sub/x", b"2")
            (place / "run").chmod(0o755)
            (place / "run" / "sub").chmod(0)
            with pytest.raises(Permanent, match="EACCES"):
                await names_of(backend)
            (place / "run" / "sub").chmod(0o555)
            with pytest.raises(Permanent, match="EACCES"):
                await backend.create("sub/y", b"2")
            assert await names_of(backend) == {"sub/x"}

        (place / "run").chmod(0)
        try:
            with_backend(LocalBackend(place / "run"), job)
        finally:
            (place / "run").chmod(0o755)
            (place / "run" / "sub").chmod(0o755)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        for call in (names_of(backend), backend.list_names(), backend.read("a"), backend.write("a", b"")):
            with pytest.raises(Permanent, match="ENOTDIR"):
                await call
        with pytest.raises(Permanent, match="ENOTDIR"):
            await names_of(backend, "a")

    (tmp_path / "file").write_text("1")
    with_backend(LocalBackend(tmp_path / "file"), job)


def test_new_files_follow_umask_and_directory(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        await backend.write("a/b", b"1")
        await backend.create("a/c", b"1")
        await put(backend, "a/d", BIG)

    group = next((gid for gid in os.getgroups() if gid != os.getgid()), 12345 if os.geteuid() == 0 else -1)
    if group >= 0:
        os.chown(tmp_path, -1, group)
        tmp_path.chmod(0o2750)
    before = os.umask(0o027)
    try:
        with_backend(LocalBackend(tmp_path / "run"), job)
    finally:
        os.umask(before)
    for name in ("run/a/b", "run/a/c", "run/a/d"):
        found = (tmp_path / name).stat()
        assert stat.S_IMODE(found.st_mode) == 0o640
        assert group < 0 or found.st_gid == group
    assert stat.S_IMODE((tmp_path / "run" / "a").stat().st_mode) & 0o777 == 0o750


# -- names -----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    name=st.text(max_size=20)
    | st.lists(st.sampled_from(["..", ".", "", "a", "~", ".tmp-x", "a\0", "b\n"]), max_size=6).map("/".join)
)
def test_no_name_leads_out_of_the_root(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "names" / "root"
    files = localfs.LocalFiles(Door(root))
    try:
        files.write(name, b"1")
    except BackendError:
        pass
    else:
        path = root / name
        assert root in Path(os.path.normpath(path)).parents and path.read_bytes() == b"1"
        files.delete([name])
    files.close()
    assert not root.parent.exists() or os.listdir(root.parent) == ["root"]


def test_long_names_fit(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        name = "/".join(["d" * 255, "n" * 255])
        await backend.write(name, b"1")
        assert await names_of(backend) == {name}
        writer = await backend.open_writer(name, 1)
        assert len(await backend.leftovers()) == 1
        await writer.abort()
        with pytest.raises(Permanent, match="ENAMETOOLONG"):
            await backend.write("n" * 256, b"1")

    with_backend(LocalBackend(tmp_path), job)


def test_symbolic_links(tmp_path: Path) -> None:
    """A directory that was moved away and linked is still seen; a loop of links ends."""

    async def job(backend: LocalBackend) -> None:
        await backend.write("moved/a", b"1")
        (tmp_path / "run" / "moved").rename(tmp_path / "elsewhere")
        (tmp_path / "run" / "moved").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "run" / "dangling").symlink_to(tmp_path / "nowhere")
        assert await names_of(backend) == {"moved/a"}
        assert await backend.read("moved/a") == b"1"
        (tmp_path / "run" / "loop").symlink_to(tmp_path / "run")
        (tmp_path / "run" / "loop2").symlink_to(tmp_path / "run")
        assert {"moved/a", "loop/moved/a"} <= await names_of(backend)

    with_backend(LocalBackend(tmp_path / "run"), job)


def test_a_directory_that_vanishes_under_a_writer_is_made_again(tmp_path: Path) -> None:
    """A deleter removes the empty directory between the writer's mkdir and its open."""
    removed: list[str] = []

    def hook(name: str, detail: str) -> None:
        if name == "mkdir.after" and detail == "a/b" and len(removed) < 3:
            removed.append(detail)
            os.rmdir(tmp_path / "a" / "b")

    async def job(backend: LocalBackend) -> None:
        points.hook = hook
        await backend.write("a/b/c", b"1")
        assert await backend.read("a/b/c") == b"1"

    try:
        with_backend(LocalBackend(tmp_path), job)
    finally:
        points.hook = None
    assert len(removed) == 3


def test_a_temporary_taken_away_is_said(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        writer = await backend.open_writer("a/b", 1)
        await writer.write(memoryview(b"1"))
        for path in temporaries(tmp_path):
            path.unlink()
        with pytest.raises(Permanent, match="removed by others"):
            await writer.commit()
        with pytest.raises(NotFound):
            await backend.read("a/b")

    with_backend(LocalBackend(tmp_path), job)


# -- processes, threads, tasks ---------------------------------------------------------------------------


def test_a_cancelled_read_has_ended_when_it_says_so(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Held(Door):
        def read_into(self, file: File, view: memoryview, offset: int) -> int:
            entered.set()
            assert leave.wait(30)
            return super().read_into(file, view, offset)

    async def job(backend: LocalBackend) -> None:
        await backend.write("a", b"123")
        view = memoryview(bytearray(3))
        task = asyncio.create_task(backend.read_into("a", 0, view))
        queued = asyncio.create_task(backend.read("a"))
        await asyncio.to_thread(entered.wait, 30)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued  # it had not begun
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done() and bytes(view) == b"\0\0\0"
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bytes(view) == b"123"

    with_backend(LocalBackend(tmp_path, door=Held(tmp_path), threads=1), job)


def test_a_cancelled_open_writer_leaves_nothing(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(name: str, detail: str) -> None:
        if name == "open.after":
            entered.set()
            assert leave.wait(30)

    async def job(backend: LocalBackend) -> None:
        points.hook = hook
        task = asyncio.create_task(backend.open_writer("a/b", 10))
        await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert temporaries(tmp_path) == []

    try:
        with_backend(LocalBackend(tmp_path), job)
    finally:
        points.hook = None


def test_not_after_a_fork(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    asyncio.run(backend.write("a", b"1"))
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(backend.read("a"))
        except Permanent as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(backend.read("a")) == b"1"  # another loop, the same backend
    asyncio.run(backend.close())
    with pytest.raises(Permanent, match="closed"):
        asyncio.run(backend.read("a"))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        for index in range(100):
            await backend.write(f"d{index}/x", b"1")
            writer = await backend.open_writer(f"d{index}/y", 10)
            await writer.abort()
            await backend.read(f"d{index}/x")
        assert len(os.listdir("/proc/self/fd")) < before + 90

    before = len(os.listdir("/proc/self/fd"))
    with_backend(LocalBackend(tmp_path), job)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bound_backend_never_writes_into_a_successor_of_its_directory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    async def story() -> None:
        backend = open_backend(root, bound=True)
        await backend.write("a/b", b"1")
        assert await backend.read("a/b") == b"1"
        assert await backend.list_names("a") == ["b"]
        shutil.rmtree(root)
        for made_anew in (False, True):
            if made_anew:
                root.mkdir()
            with pytest.raises((NotFound, Permanent)):
                await backend.write("a/c", b"2")
            with pytest.raises((NotFound, Permanent)):
                await backend.create("c", b"3")
            with pytest.raises(NotFound):
                await backend.read("a/b")
        await backend.close()

    asyncio.run(story())
    assert list(root.iterdir()) == []
