"""How a local file becomes durable under its name: the one place that knows the order.

1. a temporary beside the target (same directory, so the same file system), made with ``O_EXCL``
2. write; check the size (a file that is not whole is never published)
3. fsync the file: its bytes are on the disk before any name points at them
4. fsync every directory above that is not known to be durable, its own entry included
5. rename over the target, or link to it where the name must be free: readers see all of it or nothing
6. fsync the directory: the name itself is durable

Step 4 also covers directories that *others* made a moment ago and may not have synced yet.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress

from .door import Door, File, parent_of
from .errors import Permanent

TEMPORARY_PREFIX = ".tmp-"
"""Begins the last part of a temporary's name; no proper object name begins with a dot."""

STEM_MAX = 160
"""Characters of the target's own name in a temporary's: the rest must fit in a file name of 255."""

TRIES_MAX = 16
"""Tries to make a temporary while others remove the directory as empty."""

DIRECTORIES_OPEN_MAX = 64
"""Directories known to be durable, held open so that a removed and remade one is told apart."""

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def temporary_name(name: str) -> str:
    """A fresh name beside ``name``, with the process that makes it."""
    directory, _, last = name.rpartition("/")
    own = f"{TEMPORARY_PREFIX}{last[:STEM_MAX]}.{os.getpid()}.{secrets.token_hex(6)}"
    return f"{directory}/{own}" if directory else own


def _close_all(door: Door, files: OrderedDict[str, File]) -> None:
    while files:
        door.close(files.popitem()[1])


def is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


class Publisher:
    """Makes temporaries and publishes them. Raises OSError, and Permanent for what is no system error.

    May be called from several threads; the cache of durable directories is guarded by its lock."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = threading.Lock()
        self._durable: OrderedDict[str, File] = OrderedDict()
        # A backend that nobody closed lets go of its descriptors when it is collected.
        weakref.finalize(self, _close_all, door, self._durable)

    def temporary(self, name: str) -> File:
        """A new, empty file beside ``name``, open for reading and writing; makes the directories it needs."""
        for _ in range(TRIES_MAX):
            fresh = temporary_name(name)
            try:
                return self._door.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:
                self._make_directory(parent_of(name) or "")
        raise Permanent(name, f"its directory was removed {TRIES_MAX} times while it was being made")

    def replace(self, temporary: str, name: str) -> None:
        """Publish a finished, fsynced temporary as ``name``, over whatever was there."""
        directory = parent_of(name) or ""
        self.settle(directory)
        self._door.rename(temporary, name)
        self.sync_directory(directory)

    def move(self, name: str, to: str) -> None:
        """Give what lies under ``name`` the name ``to``, which is free, durably."""
        directory = parent_of(to) or ""
        self._make_directory(directory)
        self.settle(directory)
        self._door.rename(name, to)
        self.forget(name)
        self.sync_directory(directory)
        self.sync_directory(parent_of(name) or "")

    def link(self, temporary: str, name: str) -> bool:
        """Publish a finished, fsynced temporary as ``name`` if that is free, and remove the temporary. False
        if it is not free; then what is there has a durable name too, so that the caller may build on it."""
        directory = parent_of(name) or ""
        self.settle(directory)
        try:
            self._door.link(temporary, name)
            free = True
        except FileExistsError:
            free = False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise Permanent(
                name, "this file system has no hard links, which creating a name atomically needs"
            ) from error
        with suppress(OSError):  # else it stays as a leftover; the name itself is what counts
            self._door.unlink(temporary)
        self.sync_directory(directory)
        return free

    def sync_directory(self, name: str) -> None:
        directory = self._door.open_dir(name)
        try:
            self._door.fsync_dir(directory)
        finally:
            self._door.close(directory)

    def settle(self, directory: str) -> None:
        """Make the entry of ``directory`` durable, and of all above it, up to the mount point."""
        current: str | None = directory
        while current is not None and not self._is_known(current):
            try:
                current = self._settle_one(current)
            except PermissionError:
                # Above the root lie directories of other people: what may not be opened was not made here.
                if not (current or "").startswith("/"):
                    raise
                return

    def _settle_one(self, directory: str) -> str | None:
        """Make one entry durable; the directory above, None where that is another file system."""
        opened = self._door.open_dir(directory)
        try:
            above = _above(self._door, directory)
            if above is not None and self._door.stat(above).st_dev != self._door.stat_file(opened).st_dev:
                above = None
            if above is not None:
                self.sync_directory(above)
        except BaseException:
            self._door.close(opened)
            raise
        self._remember(directory, opened)
        return above

    def forget(self, directory: str) -> None:
        """``directory`` was removed."""
        with self._lock:
            opened = self._durable.pop(directory, None)
            if opened is not None:
                self._door.close(opened)

    def close(self) -> None:
        with self._lock:
            _close_all(self._door, self._durable)

    def _is_known(self, directory: str) -> bool:
        """Whether the very directory that is there now was found durable before. An open descriptor keeps
        its inode number from being given to another."""
        with self._lock:
            opened = self._durable.get(directory)
            if opened is None:
                return False
            self._durable.move_to_end(directory)
            before = self._door.stat_file(opened)
        now = self._door.stat(directory)
        return (before.st_dev, before.st_ino) == (now.st_dev, now.st_ino)

    def _remember(self, directory: str, opened: File) -> None:
        with self._lock:
            former = self._durable.pop(directory, None)
            self._durable[directory] = opened
            if former is None and len(self._durable) > DIRECTORIES_OPEN_MAX:
                former = self._durable.popitem(last=False)[1]
            if former is not None:
                self._door.close(former)

    def _make_directory(self, name: str) -> None:
        """``name`` and what is missing above it; their entries are made durable by :meth:`settle`."""
        try:
            self._door.mkdir(name)
        except FileExistsError:
            return
        except FileNotFoundError:
            above = _above(self._door, name)
            if above is None:
                raise
            self._make_directory(above)
            # Whoever made it meanwhile, or removed what is above it again: the caller tries again.
            with suppress(FileExistsError, FileNotFoundError):
                self._door.mkdir(name)


def _above(door: Door, directory: str) -> str | None:
    """The directory above, which for the root and its ancestors is an absolute path; None at the very top."""
    inside = None if directory.startswith("/") else parent_of(directory)
    if inside is not None:
        return inside
    path = directory or door.root
    above = os.path.dirname(path)
    return above if above != path else None
