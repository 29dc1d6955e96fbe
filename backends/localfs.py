"""Local files, synchronously: every operation of the backend as one blocking call. No OSError escapes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from .aligned import BLOCK, aligned_buffer, as_bytes, is_aligned, round_down
from .api import Item, check_name, is_name
from .door import O_DIRECT, UNSUPPORTED, Door, Entry, File, parent_of
from .errors import BackendError, Conflict, NotAnObject, NotFound, Permanent, Retryable, ShortRead
from .filewriter import FileWriter
from .oserrors import from_os_error, translated
from .publish import TEMPORARY_PREFIX, Publisher

DIRECT_READ_MIN = 64 << 10
"""Reads below this go through the page cache."""

LINKS_MAX = 4
"""Symbolic links to directories that a listing follows on one path: a moved directory is still seen, a loop
of links ends."""

SCAN_ITEMS_MAX = 1024
"""A listing hands over its items in lots of about so many."""


class LocalFiles:
    """Objects as files below ``door.root``. May be called from several threads at once."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self._publisher = Publisher(door)

    def close(self) -> None:
        self._publisher.close()

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, name: str, nbytes_max: int) -> bytes:
        check_name(name)
        with translated(name):
            file = self.door.open(name, _READ)
            try:
                nbytes = self._regular_size(file)
                if nbytes > nbytes_max:
                    raise Permanent(
                        name, f"{nbytes} bytes, which is more than the {nbytes_max} expected at most"
                    )
                return self._read_whole(file, nbytes)
            finally:
                self.door.close(file)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        check_name(name)
        data = as_bytes(view, name)
        if data.readonly:
            raise Permanent(name, "cannot be read into read-only memory")
        if offset < 0:
            raise Permanent(name, f"offset {offset}")
        with translated(name):
            file = self._open_for(name, offset, data)
            try:
                self._fill(file, offset, data)
            finally:
                self.door.close(file)

    def size(self, name: str) -> int:
        check_name(name)
        with translated(name):
            found = self.door.stat(name)
        if not stat.S_ISREG(found.st_mode):
            raise NotAnObject(name, _what(found.st_mode))
        return found.st_size

    def displace(self, name: str, to: str) -> None:
        check_name(name)
        check_name(to)
        with translated(name):
            if stat.S_ISREG(self.door.stat(name).st_mode):
                raise Permanent(name, "an object, which is not to be displaced")
        with suppress(NotFound), translated(to):
            self.door.stat(to)
            raise Conflict(to, "exists already")
        with translated(name):
            self._publisher.move(name, to)

    def _regular_size(self, file: File) -> int:
        found = self.door.stat_file(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotAnObject(file.name, _what(found.st_mode))
        return found.st_size

    def _read_whole(self, file: File, nbytes: int) -> bytes:
        pieces: list[bytes] = []
        done = 0
        while done < nbytes:
            piece = self.door.read(file, nbytes - done, done)
            if not piece:
                raise ShortRead(file.name, f"ends after {done} of {nbytes} bytes")
            pieces.append(piece)
            done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _open_for(self, name: str, offset: int, data: memoryview) -> File:
        """Open for reading ``data`` at ``offset``: directly if that can be."""
        if O_DIRECT and len(data) >= DIRECT_READ_MIN and offset % BLOCK == 0 and is_aligned(data):
            try:
                return self.door.open(name, _READ | O_DIRECT)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        return self.door.open(name, _READ)

    def _fill(self, file: File, offset: int, data: memoryview) -> None:
        """Read all of ``data``. With direct I/O, whole blocks go straight into it and the rest of a block
        through a block of our own."""
        done = 0
        while done < len(data):
            rest = data[done:]
            try:
                count = self._read_some(file, offset + done, rest)
            except OSError as error:
                # Taken with the flag but refused now, or an odd place after a short read: the page cache can.
                if not file.direct or error.errno != errno.EINVAL:
                    raise
                self.door.set_direct(file, False)
                count = self.door.read_into(file, rest, offset + done)
            if count == 0:
                raise ShortRead(
                    file.name, f"ends at {offset + done}, {len(data)} bytes were wanted from {offset} on"
                )
            done += count

    def _read_some(self, file: File, offset: int, rest: memoryview) -> int:
        if not file.direct:
            return self.door.read_into(file, rest, offset)
        whole = round_down(len(rest))
        if whole:
            return self.door.read_into(file, rest[:whole], offset)
        block = aligned_buffer(BLOCK)
        count = min(self.door.read_into(file, block, offset), len(rest))
        rest[:count] = block[:count]
        return count

    # -- writing ---------------------------------------------------------------------------------------

    def open_writer(self, name: str, nbytes: int, at_most: bool = False) -> FileWriter:
        check_name(name)
        if nbytes < 0:
            raise Permanent(name, f"a size of {nbytes} bytes")
        return FileWriter(self.door, self._publisher, name, nbytes, at_most)

    def write(self, name: str, data: bytes) -> None:
        writer = self.open_writer(name, len(data))
        writer.write(memoryview(data))
        writer.commit()

    def create(self, name: str, data: bytes) -> None:
        writer = self.open_writer(name, len(data))
        writer.write(memoryview(data))
        if writer.commit_new() or self._holds(name, data):
            return
        raise Conflict(name, "exists already, with other bytes")

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether the object is equal to ``data``: then it was made by us, and the answer got lost."""
        try:
            return self.size(name) == len(data) and self.read(name, len(data)) == data
        except NotFound as error:
            raise Retryable(name, "the name was taken, and was free again a moment later") from error

    # -- names -----------------------------------------------------------------------------------------

    def scan(self, pending: list[tuple[str, int]], temporaries: bool) -> list[Item]:
        """A lot of the objects (or of the temporaries) below the directories of ``pending``, which is a stack
        of (name, links followed) that is worked off: the listing ends when it is empty."""
        items: list[Item] = []
        while pending and len(items) < SCAN_ITEMS_MAX:
            directory, links = pending.pop()
            for entry in self._entries(directory):
                name = f"{directory}/{entry.name}" if directory else entry.name
                if entry.is_dir:
                    if is_name(name) and links + entry.is_link <= LINKS_MAX:
                        pending.append((name, links + entry.is_link))
                elif entry.is_file and (is_temporary_of_ours(name) if temporaries else is_name(name)):
                    items.append(Item(name, entry.nbytes, entry.modified))
        return items

    def list_names(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        return [entry.name for entry in self._entries(prefix) if is_name(entry.name)]

    def _entries(self, directory: str) -> list[Entry]:
        """The entries of a directory; none if it does not exist. A root that is something else than a
        directory, or what may not be read, is no empty listing."""
        try:
            return self.door.scan(directory)
        except (FileNotFoundError, NotADirectoryError) as error:
            if directory and self._root_is_directory():
                return []
            if isinstance(error, FileNotFoundError) and not directory:
                return []
            raise from_os_error(error, directory) from error
        except OSError as error:
            raise from_os_error(error, directory) from error

    def _root_is_directory(self) -> bool:
        with translated(""):
            try:
                return stat.S_ISDIR(self.door.stat("").st_mode)
            except FileNotFoundError:
                return True

    def delete(self, names: Iterable[str]) -> None:
        """Remove all, then raise the first error that was met, if any."""
        first: BackendError | None = None
        touched: dict[str, None] = {}
        for name in names:
            try:
                with translated(name):
                    self.door.unlink(name)
            except NotFound:
                pass  # a crash may have left its directories empty
            except BackendError as error:
                first = first or error
                continue
            touched[parent_of(name) or ""] = None
        for directory in touched:
            try:
                self._sync_after_removal(directory)
            except BackendError as error:
                first = first or error
        if first is not None:
            raise first

    def _sync_after_removal(self, directory: str) -> None:
        """Make removals durable and climb while directories are empty."""
        current = directory
        with translated(current):
            while True:
                try:
                    self._publisher.sync_directory(current)
                    if not current:
                        return
                    self.door.rmdir(current)
                except FileNotFoundError:  # another one removed it, being empty
                    if not current:
                        return
                except OSError as error:
                    if error.errno in _STAYS:
                        return
                    raise
                self._publisher.forget(current)
                current = parent_of(current) or ""


_READ = os.O_RDONLY | os.O_NONBLOCK
"""Non-blocking does nothing to regular files; a pipe put in an object's place must not hang a reader."""

_STAYS = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOTDIR, errno.EACCES, errno.EPERM})
"""Errors of rmdir by which a directory simply stays."""


def _what(mode: int) -> str:
    return "a directory" if stat.S_ISDIR(mode) else "not a regular file"


def check_prefix(prefix: str) -> str:
    return check_name(prefix) if prefix else prefix


def is_temporary_of_ours(name: str) -> bool:
    """Whether ``name`` is a temporary as :mod:`.publish` makes them, in a proper directory."""
    directory, _, last = name.rpartition("/")
    return (not directory or is_name(directory)) and last.startswith(TEMPORARY_PREFIX) and is_name(last[1:])
