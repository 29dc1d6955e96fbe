"""Where arenas lie, and how they are found and cleaned up."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from everstep.errors import BadOption, EverstepError, OwnershipError

from .arena import SUFFIX, UNFINISHED_SUFFIX, Arena
from .errors import ArenaGone
from .header import Kind
from .info import ArenaInfo, read_info
from .process import Process, boot_id

_NAME = re.compile(r"(?:rank|held|parity)-(\d+)\.[0-9a-f]+\.arena")
_UNFINISHED = re.compile(r"(?:rank|held|parity)-\d+\.[0-9a-f]+\.arena\.(\d+)\.(\d+)\.new")


def arena_dir(base: Path, run_key: str) -> Path:
    """``<base>/everstep-<uid>/<run_key>``, made if absent: mode 0700, ours, never a symbolic link.
    OwnershipError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_key):
        raise BadOption("run key", found=run_key, expected="1 to 64 letters, digits, - or _")
    path = base / f"everstep-{os.geteuid()}" / run_key
    private_dir(path)
    return path


def private_dir(path: Path) -> None:
    """Make ``path``, and the directory in which it lies, if absent: mode 0700, ours, never a symbolic link.
    OwnershipError."""
    for part in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700)
        _check_private(part)


def _check_private(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OwnershipError(
            f"{path} is not a directory of this user",
            found=f"{stat.filemode(found.st_mode)}, owner {found.st_uid}",
            expected=f"a directory, owner {os.geteuid()}",
            hint="Somebody else made it; remove it, or choose another directory for arenas",
        )
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)


def find_arenas(directory: Path, *kinds: Kind) -> list[ArenaInfo]:
    """Headers of all readable arenas in ``directory`` (of ``kinds``, if any are given), by rank; nothing is mapped.
    Damaged and foreign files, and arenas of other releases, are left out."""
    found = []
    for path in _paths(directory, SUFFIX):
        with contextlib.suppress(OSError, EverstepError):
            found.append(read_info(path))
    wanted = [info for info in found if not kinds or info.kind in kinds]
    return sorted(wanted, key=lambda info: (info.rank, str(info.path)))


def clean(directory: Path, *, keep: Callable[[ArenaInfo], bool]) -> list[Path]:
    """Remove the arenas that no living process owns or pins and that ``keep`` does not want; also what a
    crash left half made, and damaged ones that no process maps. Returns what was removed."""
    removed = []
    for path in _paths(directory, UNFINISHED_SUFFIX):
        named = _UNFINISHED.fullmatch(path.name)
        if named and not Process(int(named[1]), int(named[2]), boot_id()).alive() and _unlink(path):
            removed.append(path)
    for path in _paths(directory, SUFFIX):
        if _NAME.fullmatch(path.name) and _remove(path, keep):
            removed.append(path)
    return removed


def _remove(path: Path, keep: Callable[[ArenaInfo], bool]) -> bool:
    try:
        with Arena.attach(path) as arena:
            return not keep(arena.info) and arena.remove_if_unused()
    except (OSError, ArenaGone):  # gone meanwhile, no regular file, not ours
        return False
    except EverstepError:
        # Damaged, or of another release: its owner cannot be read, so ask the kernel who uses it.
        return not mapped_by(path) and _unlink(path)


def mapped_by(path: Path) -> list[int]:
    """Process ids (of this user, in this pid namespace) that map the file."""
    wanted = os.fsencode(path.resolve())
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/maps").read_bytes():
                    found.append(int(entry))
    return found


def _paths(directory: Path, suffix: str) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(suffix))
    except FileNotFoundError:
        return []


def _unlink(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False
