"""Writing one local object front to back, directly from the caller's memory where that is possible."""

from __future__ import annotations

import errno
from contextlib import suppress

from .aligned import BLOCK, aligned_buffer, as_bytes, is_aligned, round_down, round_up
from .door import UNSUPPORTED, Door, File
from .errors import BackendError, Permanent
from .oserrors import publishing
from .publish import Publisher

DIRECT_BYTES_MIN = 1 << 20
"""Objects below this go through the page cache: direct I/O pays only for large ones."""

STAGING_BYTES = 4 << 20
"""Size of the one buffer through which memory that is not aligned takes the direct way."""

WRITE_BYTES_MAX = 8 << 20
"""Bytes of one write call, so that none is long in the kernel. (Asking it to write buffered bytes out early,
with sync_file_range after each call, was tried: it takes two to six times as long as one fsync at the
end.)"""


class FileWriter:
    """One object in the making: a temporary, published by :meth:`commit`.

    With direct I/O, views that begin at a multiple of 4 KiB, at such a position of the object, go to the disk
    out of the caller's memory, into room that was reserved at the start; other bytes are gathered in a
    staging buffer first. The last block is padded there and the file cut to its length. Without (the file
    system has none, or the object is small) all goes through the page cache.

    Synchronous; used by one thread at a time. Whatever fails removes the temporary and ends the writer."""

    def __init__(
        self, door: Door, publisher: Publisher, name: str, nbytes: int, at_most: bool = False
    ) -> None:
        self._door = door
        self._publisher = publisher
        self._name = name
        self._nbytes = nbytes  # with at_most a bound, until it is known
        self._at_most = at_most
        self._taken = 0  # bytes that the caller gave
        self._written = 0  # of them, given to the file; the rest is staged
        self._staging: memoryview | None = None
        self._staged = 0
        self._file: File | None = None
        with publishing(name):
            self._file = publisher.temporary(name)
            try:
                self._prepare(self._file)
            except BaseException:
                self._remove()
                raise

    def write(self, view: memoryview) -> None:
        """Append ``view``; it may be reused when this returns. Permanent beyond the announced size."""
        file = self._open_file()
        data = as_bytes(view, self._name)
        if self._taken + len(data) > self._nbytes:
            raise self._ended(f"more than the {self._nbytes} bytes that were announced")
        try:
            with publishing(self._name):
                self._append(file, data)
        except BaseException:
            self._remove()
            raise
        self._taken += len(data)

    def commit(self) -> None:
        """Make durable and publish, over what had that name. Permanent if bytes are missing."""
        self._publish(replace=True)

    def commit_new(self) -> bool:
        """As :meth:`commit`, only if the name is free; False if it is not."""
        return self._publish(replace=False)

    @property
    def ended(self) -> bool:
        """Whether it was committed, aborted, or has failed."""
        return self._file is None

    def abort(self) -> None:
        """Leave no trace; does nothing after the end. Permanent if the temporary cannot be removed."""
        with publishing(self._name):
            self._remove(quiet=False)

    def _prepare(self, file: File) -> None:
        if self._nbytes < DIRECT_BYTES_MIN:
            return
        self._door.set_direct(file, True)
        if self._at_most:
            return  # room for all of what may come to little would be refused on a disk that has enough
        try:
            self._door.fallocate(file, round_up(self._nbytes) if file.direct else self._nbytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def _append(self, file: File, data: memoryview) -> None:
        if not file.direct:
            self._flush_staging(file, pad=False)
            self._write_out(file, data)
            return
        if self._taken == self._written and self._written % BLOCK == 0 and is_aligned(data):
            whole = round_down(len(data))
            self._write_out(file, data[:whole])
            data = data[whole:]
        while len(data):
            data = data[self._stage(file, data) :]

    def _stage(self, file: File, data: memoryview) -> int:
        """Copy as much of ``data`` as fits behind what is staged; a full buffer is written. Bytes taken."""
        if self._staging is None:
            self._staging = aligned_buffer(STAGING_BYTES)
        used = self._staged
        count = min(len(data), STAGING_BYTES - used)
        self._staging[used : used + count] = data[:count]
        self._staged = used + count
        if self._staged == STAGING_BYTES:
            self._write_out(file, self._staging)
            self._staged = 0
        return count

    def _write_out(self, file: File, data: memoryview) -> None:
        """Write ``data`` at the end of what is written, whatever number of calls it takes."""
        while len(data):
            try:
                count = self._door.write(file, data[:WRITE_BYTES_MAX], self._written)
            except OSError as error:
                # The file system takes the flag but not this write: from here on through the page cache.
                if not file.direct or error.errno != errno.EINVAL:
                    raise
                self._door.set_direct(file, False)
                continue
            self._written += count
            data = data[count:]

    def _flush_staging(self, file: File, pad: bool) -> None:
        """Write what is staged, with zeros up to the end of the block if ``pad``."""
        if self._staging is None or not self._staged:
            return
        staged, self._staged = self._staged, 0
        padded = round_up(staged) if pad else staged
        self._staging[staged:padded] = bytes(padded - staged)
        self._write_out(file, self._staging[:padded])

    def _finish(self, file: File) -> None:
        """Write what is staged, give the file its length and make it durable."""
        self._flush_staging(file, pad=file.direct)
        if self._door.stat_file(file).st_size > self._nbytes:
            self._door.truncate(file, self._nbytes)
        size = self._door.stat_file(file).st_size
        if size != self._nbytes:
            raise Permanent(self._name, f"the file has {size} bytes after {self._nbytes} were written")
        self._door.fsync(file)

    def _publish(self, replace: bool) -> bool:
        file = self._open_file()
        if self._at_most:
            self._nbytes = self._taken
        if self._taken != self._nbytes:
            raise self._ended(f"{self._taken} bytes were written of the {self._nbytes} announced")
        published = True
        try:
            with publishing(self._name):
                self._finish(file)
                self._door.close(file)
                if replace:
                    self._publisher.replace(file.name, self._name)
                else:
                    published = self._publisher.link(file.name, self._name)
                self._file = None
        finally:
            self._remove()
        return published

    def _open_file(self) -> File:
        if self._file is None:
            raise Permanent(self._name, "this writer has ended")
        return self._file

    def _ended(self, cause: str) -> BackendError:
        self._remove()
        return Permanent(self._name, cause)

    def _remove(self, quiet: bool = True) -> None:
        """Close and unlink the temporary, once. Where an error is on its way already, ``quiet`` lets that one
        be seen instead of one from here; what stays then is a leftover."""
        file, self._file, self._staging = self._file, None, None
        if file is None:
            return
        with suppress(OSError) if quiet else suppress(FileNotFoundError):
            self._door.close(file)
            self._door.unlink(file.name)
