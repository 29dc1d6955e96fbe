"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadOption


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; it becomes ``path``, durable, when the block ends well. Raises BadOption if
    ``path`` exists."""
    _refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        yield aside
        _sync(aside)
        os.link(aside, path)  # unlike a rename, this never replaces what came meanwhile
        _sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory beside ``path`` to write into; it becomes ``path``, durable, when the block ends well. Raises
    BadOption if ``path`` exists and is not empty."""
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    _refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
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
