"""Local files: what the operating system may answer, at every operation."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
from everstep.backends.aligned import aligned_buffer
from everstep.backends.conformance import content, names_of, put
from everstep.backends.door import Door, File
from everstep.backends.errors import (
    BackendError,
    Conflict,
    NoSpace,
    NotAnObject,
    NotFound,
    Permanent,
    Retryable,
)
from everstep.backends.files import LocalBackend
from everstep.backends.filewriter import FileWriter

from tests.backends.doors import FailingDoor, temporaries, with_backend

BIG = content((2 << 20) + 777)

ERRORS = [
    *((number, NoSpace) for number in (errno.ENOSPC, errno.EDQUOT)),
    *((number, Permanent) for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)),
    *((number, Retryable) for number in (errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT)),
    (errno.EFBIG, Permanent),
]


def test_a_directory_in_the_place_of_an_object_can_be_moved_and_nothing_else(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        await backend.write("a/object", b"x")
        (tmp_path / "a" / "d").mkdir()
        (tmp_path / "a" / "d" / "theirs").write_text("theirs")
        for call in (
            backend.read("a/d"),
            backend.size("a/d"),
            backend.read_into("a/d", 0, memoryview(bytearray(8))),
            backend.read_into("a/d", 0, aligned_buffer(2 << 20)),
            backend.write("a/d", b"y"),
            backend.delete(["a/d"]),
        ):
            with pytest.raises(NotAnObject):
                await call
        with pytest.raises(Conflict):
            await backend.displace("a/d", "a/object")
        with pytest.raises(Permanent):
            await backend.displace("a/object", "b/c/e")
        with pytest.raises(NotFound):
            await backend.displace("a/none", "b/c/e")
        await backend.displace("a/d", "b/c/d")
        await backend.write("a/d", b"y")
        assert (tmp_path / "b" / "c" / "d" / "theirs").read_text() == "theirs"
        assert await names_of(backend) == {"a/object", "a/d", "b/c/d/theirs"} and temporaries(tmp_path) == []

    with_backend(LocalBackend(tmp_path), job)


def test_a_limit_on_the_size_of_files_is_called_so(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, hard))
        try:
            with pytest.raises(Permanent, match=r"EFBIG.*307,200 bytes at most \(RLIMIT_FSIZE"):
                await backend.write("x", BIG)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert temporaries(tmp_path) == []

    with_backend(LocalBackend(tmp_path), job)


@pytest.mark.parametrize(("number", "kind"), ERRORS, ids=lambda value: errno.errorcode.get(value, ""))
def test_errors_of_the_system_while_writing(number: int, kind: type[BackendError], tmp_path: Path) -> None:
    """At each operation: the right error, the old object untouched or (after rename) the new one whole, no
    temporary left, and a second try succeeds."""

    async def job(backend: LocalBackend) -> None:
        await backend.write("a/old", b"old")
        for op in (
            "create",
            "mkdir",
            "fallocate",
            "write",
            "truncate",
            "fsync",
            "rename",
            "link",
            "fsyncdir",
        ):
            door.fail(op, number=number)
            name = "b/new" if op in ("mkdir", "link") else "a/old"
            data = BIG if op in ("fallocate", "truncate") else b"new"
            if op == "link" and number == errno.EPERM:
                expected: type[BackendError] = Permanent
            else:
                expected = kind
            with pytest.raises(expected) as caught:
                if op == "link":
                    await backend.create(name, data)
                else:
                    await put(backend, name, data, piece=2 << 20)
            assert type(caught.value) is expected and caught.value.name == name, op
            door.fault = lambda op, name: None
            assert temporaries(tmp_path) == [], op
            left = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
            assert left == (data if op == "fsyncdir" else b"old" if name == "a/old" else None), op
            await put(backend, name, data)
            assert await backend.read(name) == data
            await backend.delete(["b/new"])
            await backend.write("a/old", b"old")

    door = FailingDoor(tmp_path)
    with_backend(LocalBackend(tmp_path, door=door), job)


@pytest.mark.parametrize(("number", "kind"), ERRORS, ids=lambda value: errno.errorcode.get(value, ""))
def test_errors_of_the_system_while_reading(number: int, kind: type[BackendError], tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        await backend.write("a/b", b"123")
        for op in ("open", "read"):
            door.fail(op, number=number)
            with pytest.raises(kind):
                await backend.read("a/b")
            with pytest.raises(kind):
                await backend.read_into("a/b", 0, memoryview(bytearray(3)))
        door.fail("stat", number=number)
        with pytest.raises(kind):
            await backend.size("a/b")
        if number != errno.ENOTDIR:
            door.fail("scan", number=number)
            with pytest.raises(kind):
                await names_of(backend)
            with pytest.raises(kind):
                await backend.list_names("a")
            with pytest.raises(kind):
                await backend.leftovers()
        door.fail("unlink", number=number)
        with pytest.raises(kind):
            await backend.delete(["a/b"])

    door = FailingDoor(tmp_path)
    with_backend(LocalBackend(tmp_path, door=door), job)


def test_an_error_keeps_its_cause_when_removal_fails_too(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        door.fail("write", "unlink", number=errno.ENOSPC)
        with pytest.raises(NoSpace, match="ENOSPC"):
            await backend.write("a", b"1")
        door.fault = lambda op, name: None
        left = await backend.leftovers()
        assert len(left) == 1
        await backend.discard_leftovers(left)
        assert temporaries(tmp_path) == []
        writer = await backend.open_writer("a", 1)
        door.fail("unlink", number=errno.EIO)
        with pytest.raises(Permanent):
            await writer.abort()

    door = FailingDoor(tmp_path)
    with_backend(LocalBackend(tmp_path, door=door), job)


def test_delete_goes_on_after_an_error(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        for name in ("a/1", "a/2", "b/3"):
            await backend.write(name, b"")
        broken = OSError(errno.EIO, "broken")
        door.fault = lambda op, name: broken if (op, name) == ("unlink", "a/1") else None
        with pytest.raises(Permanent):
            await backend.delete(["a/1", "a/2", "b/3"])
        door.fault = lambda op, name: None
        assert await names_of(backend) == {"a/1"}

    door = FailingDoor(tmp_path)
    with_backend(LocalBackend(tmp_path, door=door), job)


def test_a_file_of_the_wrong_size_is_never_published(tmp_path: Path) -> None:
    class Losing(Door):
        def write(self, file: File, view: memoryview, offset: int) -> int:
            super().write(file, view[:-1], offset)
            return len(view)

    async def job(backend: LocalBackend) -> None:
        with pytest.raises(Permanent, match="9 bytes after 10"):
            await backend.write("a", b"1234567890")

    with_backend(LocalBackend(tmp_path, door=Losing(tmp_path)), job)
    assert list(tmp_path.iterdir()) == []


def test_directories_and_pipes_are_no_objects(tmp_path: Path) -> None:
    async def job(backend: LocalBackend) -> None:
        await backend.write("a/b", b"1")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "foreign file.txt").write_text("notes")
        (tmp_path / ".hidden").mkdir()
        (tmp_path / ".hidden" / "x").write_text("notes")
        for name in ("a", "pipe"):
            for call in (backend.read(name), backend.size(name), backend.read_into(name, 0, view)):
                with pytest.raises(Permanent):
                    await call
        with pytest.raises(Permanent):
            await backend.write("a", b"1")
        with pytest.raises(Permanent):
            await backend.create("a", b"1")
        with pytest.raises(Permanent):
            await backend.delete(["a"])
        with pytest.raises(Permanent):
            await backend.read("a/b/c")
        with pytest.raises(Permanent):
            await backend.write("a/b/c", b"1")
        assert await names_of(backend) == {"a/b"}
        assert await backend.list_names() == ["a", "pipe"]

    view = memoryview(bytearray(1))
    with_backend(LocalBackend(tmp_path), job)
    assert (tmp_path / "foreign file.txt").read_text() == "notes"
    assert temporaries(tmp_path) == []


def test_full_disk(tmp_path: Path) -> None:
    """On a real small file system: refused before the first byte, nothing left, the old objects untouched."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")

    async def job(backend: LocalBackend) -> None:
        await backend.write("a/old", b"old")
        with pytest.raises(NoSpace):
            await backend.open_writer("a/new", 8 << 20)
        with pytest.raises(NoSpace):
            await backend.write("a/old", bytes(8 << 20))
        patched = FileWriter._prepare
        FileWriter._prepare = lambda self, file: None  # type: ignore[method-assign]
        try:  # the room runs out in the middle, as where none can be reserved
            with pytest.raises(NoSpace):
                await put(backend, "a/new", bytes(8 << 20))
        finally:
            FileWriter._prepare = patched  # type: ignore[method-assign]
        assert await backend.leftovers() == []
        assert await names_of(backend) == {"a/old"}
        await put(backend, "a/new", BIG)
        assert await backend.read("a/new") == BIG

    try:
        with_backend(LocalBackend(small / "run"), job)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
