"""A shared file mapping that ends with its last user and does not pass a fork.

Python's ``mmap`` keeps a second descriptor that a forked child cannot be rid of, and unmaps by address in the
child, where something else may lie by then. So the mapping is made by hand here: views keep it alive; a
forked child gets inaccessible pages at the same addresses at once, so a stale view faults there instead of
keeping the memory of the arena, and loader workers that outlive the trainer hold nothing.

Pages are made huge where the kernel can collapse those of shared memory by request (Linux 6.1 and later, whatever the
system's setting for new ones is). They stay so for everybody who maps the file: mapping a GiB anew is then 512 faults,
not 262,144.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
"""Mappings begin at a multiple of it, as files do: only then a huge page can be mapped as one."""
POPULATE_PIECE_BYTES = 64 << 20
"""Pre-faulting goes in pieces, so that closing need not wait for all of it."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """``nbytes`` of the file behind ``fd``, mapped shared and writable at ``address``.

    The pages are unmapped when the last buffer taken from :attr:`view` (memoryview, tensor) is gone, so no
    view can ever dangle. Any thread may use it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.address = address = _map(fd, nbytes)
        self.nbytes = nbytes
        self._stop = threading.Event()

        class Pages(ctypes.c_ubyte * nbytes):  # type: ignore[misc]  # a subclass can be referred to weakly
            __slots__ = ()

        pages = Pages.from_address(address)
        weakref.finalize(pages, _unmap, address, nbytes).atexit = False
        self._pages: Any = pages
        self.view: memoryview = memoryview(pages).cast("B")

    def populate(self, begin: int = 0, end: int | None = None) -> None:
        """Give every page from byte ``begin`` (a multiple of ``HUGE_BYTES``) to ``end`` its memory now (about 1 s per
        GiB), in huge pages where these can be had, unless :meth:`close` is called meanwhile.

        It is all left to the kernel, which leaves contents alone, so this may run beside writers and readers. The
        interpreter lock is not held.
        """
        keep = self._pages  # until this returns, whoever closes
        address = self.address
        end = self.nbytes if end is None else min(end, self.nbytes)
        for start in range(begin, end, POPULATE_PIECE_BYTES):
            if self._stop.is_set():
                return
            nbytes = min(POPULATE_PIECE_BYTES, end - start)
            # Refused by older kernels, for what is in use for direct I/O now, and where memory is in pieces: then
            # pages stay small, slower but right.
            _libc.madvise(address + start, nbytes, _MADV_COLLAPSE)
            if _libc.madvise(address + start, nbytes, _MADV_POPULATE_WRITE) != 0:
                return  # an older kernel: pages come at the first touch, slower but right
        del keep

    def on_unmap(self, act: Callable[[], object]) -> None:
        """Call ``act`` just before the pages are unmapped (not at the interpreter's exit). A forked child
        may call it, too, when it lets go of what it has no more."""
        weakref.finalize(self._pages, act).atexit = False  # the newest finalizer runs first

    def close(self) -> None:
        """Let go. The pages stay mapped for as long as somebody holds a view of them."""
        self._stop.set()
        self.view = memoryview(b"")
        self._pages = None


_guard = threading.RLock()
"""Held while mappings and descriptors come and go, and by a fork: a child knows all that it must drop.
Re-entrant, because a finalizer may run anywhere."""
_mappings: dict[int, int] = {}
"""Address -> size. Guarded by _guard."""
_descriptors: set[int] = set()
"""Open files of arenas. Guarded by _guard."""


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """``os.open`` of a file that neither a fork nor an exec inherits."""
    with _guard:
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
        _descriptors.add(fd)
    return fd


def open_memory(name: str) -> int:
    """A memory file without a name in the file system, that may be sealed; inherited by nobody."""
    with _guard:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _descriptors.add(fd)
    return fd


def close_file(fd: int) -> None:
    """Close a descriptor of :func:`open_file` or :func:`open_memory`; in a forked child it is closed
    already."""
    with _guard:
        if fd in _descriptors:
            _descriptors.remove(fd)
            os.close(fd)


def _map(fd: int, nbytes: int) -> int:
    with _guard:
        room = nbytes + HUGE_BYTES
        reserved = _mmap(None, room, _PROT_NONE, _ANONYMOUS, -1)
        address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        try:
            _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(reserved, room)
            raise
        end = -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES
        for start, stop in ((reserved, address), (end, reserved + room)):
            if start < stop:
                _libc.munmap(start, stop - start)
        _mappings[address] = nbytes
        # For forks by foreign code that runs no Python handlers.
        _libc.madvise(address, nbytes, _MADV_DONTFORK)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}")
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    with _guard:
        if _mappings.pop(address, None) is not None:
            _libc.munmap(address, nbytes)


def _drop_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for address, nbytes in _mappings.items():
        _libc.mmap(address, nbytes, _PROT_NONE, _ANONYMOUS | _MAP_FIXED, -1, 0)
    for fd in _descriptors:
        os.close(fd)
    _descriptors.clear()


os.register_at_fork(
    before=lambda: _guard.acquire(),
    after_in_parent=lambda: _guard.release(),
    after_in_child=_drop_in_child,
)
