"""Doors that fail, and what tests of local files share."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from everstep.backends.door import O_DIRECT, Door, Entry, File
from everstep.backends.files import LocalBackend

T = TypeVar("T")


class FailingDoor(Door):
    """Raises what ``fault(op, name)`` gives; it is asked before each operation, reads and listings
    included."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.fault: Callable[[str, str], OSError | None] = lambda op, name: None

    def fail(self, *ops: str, number: int) -> None:
        """From now on these operations fail with an error number."""
        self.fault = lambda op, name: OSError(number, os.strerror(number), name) if op in ops else None

    def _ask(self, op: str, name: str) -> None:
        error = self.fault(op, name)
        if error is not None:
            raise error

    def open(self, name: str, flags: int, mode: int = 0o666) -> File:
        self._ask("create" if flags & os.O_CREAT else "open", name)
        return super().open(name, flags, mode)

    def write(self, file: File, view: memoryview, offset: int) -> int:
        self._ask("write", file.name)
        return super().write(file, view, offset)

    def read_into(self, file: File, view: memoryview, offset: int) -> int:
        self._ask("read", file.name)
        return super().read_into(file, view, offset)

    def read(self, file: File, nbytes: int, offset: int) -> bytes:
        self._ask("read", file.name)
        return super().read(file, nbytes, offset)

    def fsync(self, file: File) -> None:
        self._ask("fsync", file.name)
        super().fsync(file)

    def truncate(self, file: File, nbytes: int) -> None:
        self._ask("truncate", file.name)
        super().truncate(file, nbytes)

    def fallocate(self, file: File, nbytes: int) -> None:
        self._ask("fallocate", file.name)
        super().fallocate(file, nbytes)

    def stat(self, name: str) -> os.stat_result:
        self._ask("stat", name)
        return super().stat(name)

    def rename(self, source: str, target: str) -> None:
        self._ask("rename", target)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._ask("link", target)
        super().link(source, target)

    def unlink(self, name: str) -> None:
        self._ask("unlink", name)
        super().unlink(name)

    def mkdir(self, name: str) -> None:
        self._ask("mkdir", name)
        super().mkdir(name)

    def rmdir(self, name: str) -> None:
        self._ask("rmdir", name)
        super().rmdir(name)

    def fsync_dir(self, directory: File) -> None:
        self._ask("fsyncdir", directory.name)
        super().fsync_dir(directory)

    def scan(self, name: str) -> list[Entry]:
        self._ask("scan", name)
        return super().scan(name)


class PlainDoor(Door):
    """A file system that has neither direct I/O nor room to reserve."""

    def open(self, name: str, flags: int, mode: int = 0o666) -> File:
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O", name)
        return super().open(name, flags, mode)

    def set_direct(self, file: File, on: bool) -> None:
        assert not file.direct

    def fallocate(self, file: File, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no room to reserve", file.name)


class ProudDoor(Door):
    """A file system that takes the flag for direct I/O and then refuses each such read and write."""

    def write(self, file: File, view: memoryview, offset: int) -> int:
        self._refuse(file)
        return super().write(file, view, offset)

    def read_into(self, file: File, view: memoryview, offset: int) -> int:
        self._refuse(file)
        return super().read_into(file, view, offset)

    def _refuse(self, file: File) -> None:
        if file.direct:
            raise OSError(errno.EINVAL, "not like this", file.name)


class SlowDoor(Door):
    """Reads and writes only a part of what it is asked for: one block of many, half of a block."""

    def write(self, file: File, view: memoryview, offset: int) -> int:
        return super().write(file, view[: _part(len(view))], offset)

    def read_into(self, file: File, view: memoryview, offset: int) -> int:
        return super().read_into(file, view[: _part(len(view))] if not file.direct else view, offset)

    def read(self, file: File, nbytes: int, offset: int) -> bytes:
        return super().read(file, _part(nbytes), offset)


def _part(nbytes: int) -> int:
    return 4096 if nbytes > 4096 else max(1, nbytes // 2) if nbytes < 4096 else nbytes


def with_backend(backend: LocalBackend, job: Callable[[LocalBackend], Awaitable[T]]) -> T:
    async def main() -> T:
        try:
            return await job(backend)
        finally:
            await backend.close()

    return asyncio.run(main())


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".tmp-*"))
