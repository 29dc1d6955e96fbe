"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadOption, EverstepError, StorageFull

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; it becomes ``path``, durable, when the block ends well. Raises BadOption if
    ``path`` exists or cannot be written, StorageFull."""
    _refuse_existing(path)
    aside = _aside(path)
    with _explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            _sync(aside)
            os.link(aside, path)  # unlike a rename, this never replaces what came meanwhile
            _sync(path.parent)
        finally:
            with contextlib.suppress(OSError):  # it would stand before what went wrong
                aside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory beside ``path`` to write into; it becomes ``path``, durable, when the block ends well. Raises
    BadOption if ``path`` exists and is not empty, or cannot be written, StorageFull."""
    aside = _aside(path)
    with _explaining(path):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        _refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            yield aside
            for directory, _, names in os.walk(aside):
                for name in names:
                    _sync(Path(directory) / name)
                _sync(Path(directory))
            os.rename(aside, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Failed writes, in everstep's words. Libraries that write hide the system's error behind one of their own."""
    try:
        yield
    except EverstepError:
        raise
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        if cause.errno in _FULL:
            raise StorageFull(f"no room for {path}", found=cause.strerror, hint="Free some") from error
        raise BadOption(
            f"{path} cannot be written", found=cause.strerror or str(cause), hint="Name another place"
        ) from error


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise BadOption(f"{path} exists", expected="a name that is free", hint="Choose another, or remove it")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
