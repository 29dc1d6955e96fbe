"""The agent's private directory on this node: lock, socket, journal, log.

All of a run's processes on a node find one another here, so the directory must be theirs alone (0700, no
symbolic link) and on a local file system, where locks, sockets and memory maps mean what they say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import AgentError

LOCK = "agent.lock"
SOCKET = "agent.sock"
JOURNAL = "journal"
LOG = "agent.log"
BACKLOG = 128
ELECT_TRIES_MAX = 10
SUN_PATH_MAX = 107
"""Longest path of a Unix socket in bytes, its final NUL not counted."""

_REMOTE = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "9p",
    "glusterfs",
    "orangefs",
    "fuse.",
)
_HINT = (
    "Set EVERSTEP_RUNTIME_DIR to another directory on a local disk of this node, one that this user may write"
)


def prepare(runtime_dir: Path) -> None:
    """Make the directory if it is missing, and check it. Raises AgentError saying what is wrong with it."""
    if not runtime_dir.is_absolute():
        raise AgentError("the runtime directory must be an absolute path", found=str(runtime_dir), hint=_HINT)
    try:
        runtime_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            runtime_dir.mkdir(mode=0o700)
        _check_parent(runtime_dir.parent)
        _check_private(runtime_dir)
        _check_local(runtime_dir)
    except OSError as error:
        raise AgentError(
            "the runtime directory cannot be used",
            found=f"{runtime_dir}: {error.strerror or error}",
            hint=_HINT,
        ) from None


def _check_private(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise AgentError(
            "the runtime directory must be a directory", found=f"{path} is a link or file", hint=_HINT
        )
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AgentError(
            "the runtime directory must be private",
            found=f"{path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}",
            expected=f"owner {os.getuid()}, mode 0700",
            hint=_HINT,
        )


def _check_parent(path: Path) -> None:
    """Others must not be able to replace the directory: theirs and writable by all only with the sticky
    bit."""
    found = path.stat()
    open_to_others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.getuid()) or open_to_others:
        raise AgentError(
            "others can replace the runtime directory",
            found=f"{path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}",
            expected=f"owner {os.getuid()} or root, not writable by others (or sticky)",
            hint=_HINT,
        )


def _check_local(path: Path) -> None:
    kind = file_system_of(path)
    if kind.startswith(_REMOTE):
        raise AgentError(
            "the runtime directory must be on a local file system", found=f"{path}: {kind}", hint=_HINT
        )


def file_system_of(path: Path) -> str:
    """The file system's type, as the kernel names it; "" where that cannot be told."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, kinds = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kinds.split()[0]
    return ""


def elect(runtime_dir: Path) -> int | None:
    """Become the agent of this directory: the descriptor that holds the lock until it is closed or the
    process dies, however it dies. None while another process holds it."""
    for _ in range(ELECT_TRIES_MAX):
        fd = os.open(runtime_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is(fd, runtime_dir / LOCK):
            return fd
        os.close(fd)  # it was removed, or replaced, while we waited for it
    raise AgentError("the lock vanishes again and again", found=str(runtime_dir / LOCK), hint=_HINT)


def in_office(runtime_dir: Path, lock: int, socket_inode: int) -> bool:
    """Whether lock and socket still lie where others look for them. They are touched, so that whoever cleans
    temporary directories by age leaves them alone."""
    try:
        if not _is(lock, runtime_dir / LOCK) or (runtime_dir / SOCKET).stat().st_ino != socket_inode:
            return False
        for path in (runtime_dir, runtime_dir / LOCK, runtime_dir / SOCKET):
            os.utime(path)
    except OSError:
        return False
    return True


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _address(runtime_dir: Path) -> Iterator[str]:
    """The socket's address. A path too long for one goes through a descriptor of its directory, so that
    neither a second place nor a change of directory is needed."""
    path = runtime_dir / SOCKET
    if len(os.fsencode(path)) <= SUN_PATH_MAX:
        yield str(path)
        return
    fd = os.open(runtime_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def listen(runtime_dir: Path) -> socket.socket:
    """The listening socket. Only the holder of the lock may call this: it removes what a dead agent left."""
    with contextlib.suppress(FileNotFoundError):
        (runtime_dir / SOCKET).unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _address(runtime_dir) as address:
            sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def connect(runtime_dir: Path) -> socket.socket | None:
    """A connection to the agent of this directory; None if none answers. Does not wait."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        with _address(runtime_dir) as address:
            sock.connect(address)
    except OSError:  # no socket, nobody behind it, or a full backlog
        sock.close()
        return None
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)
