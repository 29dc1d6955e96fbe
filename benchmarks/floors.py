"""What the machine can do at best with the same bytes: the floors that everstep's times are set against.

Each floor is given every advantage that a checkpoint has not: memory that is there already, one plain file,
no hashes, no names to publish.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

ALIGN_BYTES = 4096
PIECE_BYTES = 8 << 20
READ_THREADS = 4
WRITE_THREADS = 2


class CopyFloor:
    """A plain multi-threaded copy of ``tensors`` into memory that has been touched before, in three ways:
    which one is fastest depends on the machine, and on how busy it is."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sources = list(tensors)
        self._room = torch.zeros(sum(map(_words, tensors)), dtype=torch.int64)
        self._targets: list[Tensor] = []
        offset = 0
        for tensor in tensors:
            words = self._room[offset : offset + _words(tensor)]
            self._targets.append(words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape))
            offset += _words(tensor)
        self.fused()
        self._flat = self._room.clone()

    def flat(self) -> None:
        """One call, as if all tensors were one."""
        self._room.copy_(self._flat)

    def fresh(self) -> None:
        """One call into memory that nobody has touched."""
        with mmap.mmap(-1, max(1, self._flat.nbytes), flags=mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE) as room:
            target = torch.frombuffer(room, dtype=torch.int64)
            target[: len(self._flat)].copy_(self._flat)
            del target

    def fused(self) -> None:
        """One fused call for all tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources)

    def one_by_one(self) -> None:
        """A call for each tensor."""
        with torch.no_grad():
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)


def _words(tensor: Tensor) -> int:
    """How many words of eight bytes ``tensor`` takes."""
    return -(-tensor.numel() * tensor.element_size() // 8)


class Buffer:
    """Aligned memory of its own, touched, and filled with what does not compress."""

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        """``shared``: in pages as slots have them. Else in huge pages, which direct I/O is fastest with."""
        self.nbytes = nbytes
        room = max(1, -(-nbytes // ALIGN_BYTES)) * ALIGN_BYTES
        self._map = mmap.mmap(
            -1, room, flags=mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        )
        if not shared:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(self._map, dtype=torch.int64).random_()
        self.view = memoryview(self._map)


def raw_write(path: Path, buffer: Buffer, *, direct: bool) -> None:
    """``buffer`` into a new file: fallocate, O_DIRECT and a few threads, or through the page cache; then
    fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if direct:
            os.posix_fallocate(fd, 0, len(buffer.view))
            with ThreadPoolExecutor(WRITE_THREADS) as pool:
                for done in [pool.submit(_pwrite_all, fd, piece, at) for at, piece in _pieces(buffer.view)]:
                    done.result()
            os.ftruncate(fd, buffer.nbytes)
        else:
            for at, piece in _pieces(buffer.view[: buffer.nbytes]):
                _pwrite_all(fd, piece, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(paths: Sequence[Path], buffer: Buffer, *, direct: bool) -> None:
    """The files' bytes into ``buffer``, one behind the other: O_DIRECT with four threads, or through the
    cache."""
    offset = 0
    with ThreadPoolExecutor(READ_THREADS if direct else 1) as pool, _opened(paths, direct) as files:
        jobs = []
        for fd, nbytes in files:
            room = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
            target = buffer.view[offset : offset + room]
            jobs += [pool.submit(_pread_all, fd, piece, at, nbytes) for at, piece in _pieces(target)]
            offset += room
        for job in jobs:
            job.result()


def read_room(paths: Sequence[Path]) -> int:
    """The size of the buffer that :func:`raw_read` needs."""
    return sum(-(-path.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES for path in paths)


@contextmanager
def _opened(paths: Sequence[Path], direct: bool) -> Iterator[list[tuple[int, int]]]:
    fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)) for path in paths]
    try:
        yield [(fd, os.fstat(fd).st_size) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def _pieces(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    for at in range(0, len(view), PIECE_BYTES):
        yield at, view[at : at + PIECE_BYTES]


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _pread_all(fd: int, view: memoryview, offset: int, end: int) -> None:
    while offset < end and view:
        done = os.preadv(fd, [view], offset)
        if done == 0:
            raise EOFError(f"the file ends at {offset}, not at {end}")
        view, offset = view[done:], offset + done
