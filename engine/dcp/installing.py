"""For trainers that build torch's file system writer themselves, or pass a path only: put everstep's in its place."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ..errors import BadOption
from . import directory
from .reader import Reader
from .writer import Writer

_guard = threading.Lock()
_TORCHS_OWN = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.format_utils")
"""torch's modules in which the classes are replaced: where users import them from, and where its tools do."""

_storage_setup = _storage_utils._storage_setup


class InstalledWriter(Writer):
    """:class:`Writer` with the arguments of torch's ``FileSystemWriter``. Those that say how that one writes its files
    mean nothing here; files are always made durable."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
        **others: Any,
    ) -> None:
        if _extensions:
            raise BadOption("stream extensions cannot be used", found=repr(_extensions), expected="None")
        super().__init__(path, overwrite=overwrite)


class InstalledReader(Reader):
    """:class:`Reader` with the arguments of torch's ``FileSystemReader``; for a checkpoint that torch's own writer
    made, torch's own reader."""

    def __new__(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if directory.is_stock(os.fspath(path)):
            return FileSystemReader(path, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        super().__init__(path)

    def __reduce__(self) -> Any:
        return InstalledReader, (self.checkpoint_id,)


def _setup(
    storage: StorageReader | StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    reader: bool = False,
) -> StorageReader | StorageWriter | None:
    """Takes the place of torch's choice of storage for a path."""
    ours = checkpoint_id is not None and Writer.validate_checkpoint_id(checkpoint_id)
    if storage or not ours or checkpoint_id is None:
        return _storage_setup(storage, checkpoint_id, reader)
    if not reader:
        return Writer(checkpoint_id)
    if directory.is_stock(os.fspath(checkpoint_id)):
        return _storage_setup(None, checkpoint_id, reader)
    return Reader(checkpoint_id)


def install() -> None:
    """From now on DCP saves to, and loads from, local paths through everstep, also where a trainer passes only
    ``checkpoint_id``, or makes a ``FileSystemWriter`` or ``FileSystemReader``. Checkpoints that torch's own writer made
    can still be loaded. Doing it again covers modules that were imported meanwhile."""
    with _guard:
        _replace("_storage_setup", _storage_setup, _setup)
        _replace("FileSystemWriter", FileSystemWriter, InstalledWriter)
        _replace("FileSystemReader", FileSystemReader, InstalledReader)


def uninstall() -> None:
    """Put back what :func:`install` replaced."""
    with _guard:
        _replace("_storage_setup", _setup, _storage_setup)
        _replace("FileSystemWriter", InstalledWriter, FileSystemWriter)
        _replace("FileSystemReader", InstalledReader, FileSystemReader)


def _replace(name: str, before: Any, after: Any) -> None:
    """Wherever a module has ``before`` under ``name``. torch's own modules derive further classes from theirs: of
    these only those are changed from which others take them."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("everstep."):
            continue
        if name != "_storage_setup" and (
            module.__name__.startswith("torch.") and module.__name__ not in _TORCHS_OWN
        ):
            continue
        if vars(module).get(name) is before:
            setattr(module, name, after)
