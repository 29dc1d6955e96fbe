"""The one door to the operating system that local files use.

Every operation that changes the disk reaches the points ``<op>.before`` and ``<op>.after`` (see
:mod:`.points`) with the name it works on, relative to the root: open, write, fsync, rename, link, unlink,
mkdir, rmdir, fsyncdir, truncate, fallocate. Tests subclass :class:`Door` to record, to fail or to simulate.
All methods are synchronous and may block; they raise OSError. They may be called from several threads at
once, but one :class:`File` is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .points import reach

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where the platform has no direct I/O."""

UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})
"""Errors by which a file system says that it cannot do a thing at all."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class File:
    """An open file; ``name`` is relative to the door's root, ``direct``: not through the page cache."""

    fd: int
    name: str
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory. ``nbytes`` and ``modified`` (seconds since the epoch) are 0 for what is not a regular
    file."""

    name: str
    is_dir: bool
    is_file: bool
    is_link: bool
    nbytes: int
    modified: float


class Door:
    """Works below ``root``. Names are relative to it ("" is the root itself); an absolute path is taken as it
    is, which only the making of the root's own ancestors needs."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    @contextmanager
    def _step(self, op: str, name: str) -> Iterator[None]:
        """Around the one system call of an operation."""
        reach(f"{op}.before", name)
        yield
        reach(f"{op}.after", name)

    # -- open files ------------------------------------------------------------------------------------

    def open(self, name: str, flags: int, mode: int = 0o666) -> File:
        """New files get ``mode`` less the umask (or what the directory's default ACL says)."""
        with self._step("open", name):
            fd = os.open(self.path(name), flags | os.O_CLOEXEC, mode)
        return File(fd, name, bool(O_DIRECT and flags & O_DIRECT))

    def close(self, file: File) -> None:
        """Safe to call twice."""
        fd, file.fd = file.fd, -1
        if fd >= 0:
            os.close(fd)

    def set_direct(self, file: File, on: bool) -> None:
        """Switch direct I/O of an open file; ``file.direct`` stays False if the file system has none."""
        if not O_DIRECT or file.direct == on:
            return
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file.fd, fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        else:
            file.direct = on

    def write(self, file: File, view: memoryview, offset: int) -> int:
        """Bytes written, which may be fewer than asked for."""
        with self._step("write", file.name):
            count = os.pwrite(file.fd, view, offset)
        return count

    def read_into(self, file: File, view: memoryview, offset: int) -> int:
        """Bytes read, 0 at the end of the file."""
        return os.preadv(file.fd, [view], offset)

    def read(self, file: File, nbytes: int, offset: int) -> bytes:
        return os.pread(file.fd, nbytes, offset)

    def fsync(self, file: File) -> None:
        with self._step("fsync", file.name):
            os.fsync(file.fd)

    def truncate(self, file: File, nbytes: int) -> None:
        with self._step("truncate", file.name):
            os.ftruncate(file.fd, nbytes)

    def fallocate(self, file: File, nbytes: int) -> None:
        """Reserve room for ``nbytes`` from the start, growing the file; raises OSError where the file system
        cannot. (``posix_fallocate`` would then write into every block instead.)"""
        with self._step("fallocate", file.name):
            call = getattr(_libc, "fallocate64", None) or _libc.fallocate
            _checked(call(file.fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)), self.path(file.name))

    def stat_file(self, file: File) -> os.stat_result:
        return os.fstat(file.fd)

    # -- names -----------------------------------------------------------------------------------------

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self.path(name))

    def rename(self, source: str, target: str) -> None:
        with self._step("rename", target):
            os.rename(self.path(source), self.path(target))

    def link(self, source: str, target: str) -> None:
        """A second name for ``source``; FileExistsError if there is a ``target``."""
        with self._step("link", target):
            os.link(self.path(source), self.path(target))

    def unlink(self, name: str) -> None:
        with self._step("unlink", name):
            os.unlink(self.path(name))

    def mkdir(self, name: str) -> None:
        with self._step("mkdir", name):
            os.mkdir(self.path(name))

    def rmdir(self, name: str) -> None:
        with self._step("rmdir", name):
            os.rmdir(self.path(name))

    def open_dir(self, name: str) -> File:
        """A directory, for :meth:`fsync_dir`."""
        return File(os.open(self.path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name)

    def fsync_dir(self, directory: File) -> None:
        """Make the entries of a directory durable. File systems that cannot do it (some network ones) keep
        them durable by themselves."""
        with self._step("fsyncdir", directory.name):
            try:
                os.fsync(directory.fd)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise

    def scan(self, name: str) -> list[Entry]:
        """The entries of a directory, sorted by name; those that vanish meanwhile are left out."""
        with os.scandir(self.path(name)) as entries:
            found = [_entry(entry) for entry in entries]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.name)


def parent_of(name: str) -> str | None:
    """The directory that holds ``name``: "" for a top-level one; None for the root, whose parent has no
    relative name."""
    return name.rpartition("/")[0] if name else None


def _entry(entry: os.DirEntry[str]) -> Entry | None:
    try:
        is_dir = entry.is_dir()
        is_file = not is_dir and entry.is_file()
        found = entry.stat() if is_file else None
    except FileNotFoundError:
        return None
    nbytes, modified = (found.st_size, found.st_mtime) if found is not None else (0, 0.0)
    return Entry(entry.name, is_dir, is_file, entry.is_symlink(), nbytes, modified)


def _checked(result: int, path: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


class BoundDoor(Door):
    """Works below the very directory that ``root`` is now. If that is deleted, every operation fails with ENOENT,
    also when another directory takes its name: what is written late can never land in a successor.

    Raises OSError where ``root`` is no directory.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def path(self, name: str) -> str:
        base = f"/proc/self/fd/{self._fd}"
        return os.path.join(base, name) if name else base
