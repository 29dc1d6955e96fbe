"""Is there memory for an arena? Asked before a byte is reserved, so that the answer is an error and never a
SIGBUS, nor the kernel's out-of-memory killer."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import EverstepError, MemoryTooSmall

from .info import read_info

HEADROOM_BYTES = 64 << 20
"""Left free below a limit of the kernel: reserving the last byte of a cgroup kills the trainer instead."""

RESERVE_PIECE_BYTES = 64 << 20
"""Memory is reserved in pieces: where no file system sets a limit, the kernel kills instead of refusing. And closing
need not wait for all of it."""

BLOCK_BYTES = 512
"""Unit of a file's memory in stat."""

_HINT = (
    "Give the container more shared memory (docker run --shm-size, an emptyDir with medium: Memory, or "
    "mount -o remount,size=... /dev/shm), use fewer slots, or set Memory(path=...) to a larger memory "
    "file system"
)


def too_small(needed: int, free: int, where: str, directory: Path | None) -> MemoryTooSmall:
    """The error that says how many bytes are needed, how many are free, and what to do. ``directory``: of the arenas of
    the run that needs them; None: its memory has no name."""
    unused = 0 if directory is None else bytes_of_others(directory)
    cleaning = (
        f"{unused:,} bytes are snapshots of other runs that no process uses (killed, perhaps to be started again): "
        f"everstep clean-memory --all --memory {directory.parent.parent} frees them. Or: "
        if directory is not None and unused
        else ""
    )
    return MemoryTooSmall(
        f"no room for the snapshot slots in {where}",
        found=f"{free:,} bytes free",
        expected=f"{needed:,} bytes",
        hint=cleaning + _HINT,
        needed=needed,
        free=free,
        where=where,
    )


def bytes_of_others(directory: Path) -> int:
    """Memory that arenas of this user's other runs have, beside those in ``directory``, whose owners are dead."""
    found = 0
    for path in directory.parent.glob("*/*.arena"):
        with contextlib.suppress(OSError, EverstepError):
            owner = read_info(path).owner
            if path.parent != directory and (owner is None or not owner.alive()):
                found += path.stat().st_blocks * BLOCK_BYTES
    return found


def _files_too_small(needed: int, limit: int, where: str) -> MemoryTooSmall:
    """As :func:`too_small`, where this process may not make a file of that size."""
    return MemoryTooSmall(
        f"no room for the snapshot slots in {where}: this process's files may not be so large",
        found=f"a limit of {limit:,} bytes on the size of a file (RLIMIT_FSIZE)",
        expected=f"{needed:,} bytes",
        hint="Raise the limit (ulimit -f unlimited, LimitFSIZE= of a service), or use fewer slots",
        needed=needed,
        free=limit,
        where=where,
    )


def check_room(nbytes: int, directory: Path | None) -> None:
    """Raise :class:`MemoryTooSmall` when ``nbytes`` clearly do not fit: in the file system of ``directory``
    (None: memory without a name), in any memory cgroup above this process, or in the machine."""
    for where, free, headroom in limits(directory):
        if nbytes + headroom > free:
            raise too_small(nbytes + headroom, max(free, 0), where, directory)


def reserve(fd: int, nbytes: int, directory: Path | None, stop: threading.Event | None = None) -> None:
    """Give the file all its memory, unless told to ``stop``, or raise MemoryTooSmall: a page that is missing later
    would be a SIGBUS."""
    with _in_our_words(nbytes, directory):
        for start in range(0, nbytes, RESERVE_PIECE_BYTES):
            if stop is not None and stop.is_set():
                return
            # Again and again: others take memory too.
            check_room(nbytes - os.fstat(fd).st_blocks * BLOCK_BYTES, directory)
            os.posix_fallocate(fd, start, min(RESERVE_PIECE_BYTES, nbytes - start))


def resize(fd: int, nbytes: int, directory: Path | None) -> None:
    """Give the file its size, for which memory is reserved later. Raises as :func:`reserve`."""
    check_room(nbytes, directory)
    with _in_our_words(nbytes, directory):
        os.ftruncate(fd, nbytes)


@contextlib.contextmanager
def _in_our_words(nbytes: int, directory: Path | None) -> Iterator[None]:
    """MemoryTooSmall for what the system says of memory that is not to be had."""
    try:
        yield
    except OSError as error:
        where = "memory" if directory is None else str(directory)
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
            raise _files_too_small(nbytes, limit, where) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        free = min((free for _, free, _ in limits(directory)), default=0)
        raise too_small(nbytes, max(free, 0), where, directory) from error


def limits(directory: Path | None) -> Iterator[tuple[str, int, int]]:
    """What bounds memory here: (name, bytes free, bytes that are to stay free), as :func:`check_room` asks them."""
    if directory is not None:
        stat = os.statvfs(directory)
        yield str(directory), stat.f_bavail * stat.f_frsize, 0
    for where, free in _limits():
        yield where, free, HEADROOM_BYTES


def _limits() -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError, ValueError, IndexError):  # no cgroups here, or of an unknown make
        yield from _cgroup_limits()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield "the machine's memory", int(line.split()[1]) * 1024


def _cgroup_limits() -> Iterator[tuple[str, int]]:
    """(name, bytes still free) of every memory cgroup that this process is in, innermost first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            yield from _walk(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _walk(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[tuple[str, int]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        if not (group / limit_name).exists():
            continue
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 60:
            continue
        used = int((group / usage_name).read_text()) - _reclaimable(group)
        yield f"the memory limit of cgroup {group}", int(limit) - used


def _reclaimable(group: Path) -> int:
    """Bytes of page cache that the kernel drops before it kills."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
