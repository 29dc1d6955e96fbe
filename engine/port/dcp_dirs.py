"""Directories of torch.distributed.checkpoint's own file system format.

That format keeps its metadata as a pickle. It is read here by an unpickler that knows the few classes of which such
metadata consists and refuses every other name, and values by ``weights_only=True``: nothing that a file names is
executed.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from ..errors import Damaged, EverstepError, UnsupportedValue
from ..oneshot import load, save
from ..state.pickled import load_pickled, refused_by
from . import shape
from .output import new_directory

METADATA = ".metadata"


def export_dcp(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    parts: Collection[str] | None = None,
    rank: int = 0,
) -> None:
    """Write the checkpoint of ``step`` (default: the newest) as a directory that ``dcp.load`` reads: {part: its state},
    optimizers by parameter names. All of it is held in memory once.

    Raises BadOption if ``out`` exists and is not empty, UnsupportedValue by path, and what ``everstep.load`` raises.
    """
    values = load(root, step=step, parts=parts, rank=rank)
    if not isinstance(values, Mapping):
        values = {"value": values}
    shape.refuse_unknown(values, "")
    with new_directory(Path(out)) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        failure: BaseException | None = None
        try:
            save_dcp(dict(values), storage_writer=filesystem.FileSystemWriter(aside), no_dist=True)
        except CheckpointException as failed:
            failure = next(iter(failed.failures.values()))[0]
        if failure is not None:
            raise failure  # here, where it keeps what led to it


def import_dcp(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    parts: Mapping[str, str] | None = None,
) -> list[str]:
    """Make a directory that ``dcp.save`` wrote, by whatever number of ranks, the checkpoint of ``step`` of the run at
    ``root``; the names of its parts. ``parts`` as in :func:`~everstep.port.torch_files.import_torch`.

    Raises UnsupportedValue where it holds more than tensors and plain values, Damaged for what torch cannot read, and
    what ``everstep.save`` raises.
    """
    found = shape.parts_of(read_dcp(path), parts or {})
    save(root, step, found)
    return list(found)


def read_dcp(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole state that a DCP directory holds, on the CPU, nested as it was saved."""
    values: dict[str, Any] = {}
    reader = _Reader(Path(path))  # before torch asks for the metadata: it would hide what is wrong with it
    try:
        # Unlike dcp.load, this leaves what the planner adds to an empty dict.
        _load_state_dict(values, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        raise _explained(error, path) from failed
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AssertionError) as error:
        raise _explained(error, path) from error
    return values


def _explained(error: BaseException, path: str | os.PathLike[str]) -> EverstepError:
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__ or cause
        if isinstance(cause, (EverstepError, pickle.UnpicklingError)):
            break
    if isinstance(cause, EverstepError):
        return cause
    name = os.fspath(path)
    if isinstance(cause, pickle.UnpicklingError):
        return UnsupportedValue(
            f"{name} holds objects that are not tensors or plain values",
            found=refused_by(cause),
            hint="Load it where its classes are known, and save plain state dicts",
            path=name,
        )
    return Damaged(f"{name} cannot be read", found=str(error)[:300], expected="a DCP directory", name=name)


class _Planner(_EmptyStateDictLoadPlanner):
    """Builds the state from the metadata; values that are not tensors come through ``weights_only=True``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = load_pickled(value, map_location="cpu")
        super().load_bytes(read_item, _again(plain))


def _again(plain: Any) -> io.BytesIO:
    """The plain value in the form that the planner above takes: written here, so safe to read."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    return buffer


class _Reader(filesystem.FileSystemReader):
    """Reads the metadata without running anything."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        path = directory / METADATA
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Damaged(
                f"{path} cannot be read",
                found=str(error),
                expected="the metadata of dcp.save",
                name=str(path),
            ) from error
        self._metadata = read_dcp_metadata(data, str(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = metadata.StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _Properties(metadata.TensorProperties):
    """Takes what later releases of torch add to the properties of a tensor."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(tuple(state)[:5])  # type: ignore[no-untyped-call]


_CLASSES: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}
"""By module and name: what such metadata may name. None of them does more than hold its arguments."""


class _Refused(pickle.UnpicklingError):
    """The metadata names something else than what such metadata consists of."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise _Refused(f"{module}.{name} is nothing that checkpoint metadata consists of")
        return found


def read_dcp_metadata(data: bytes, name: str) -> metadata.Metadata:
    """The metadata of a DCP directory. Raises UnsupportedValue for any other class that it names, Damaged for what is
    no such metadata."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except _Refused as error:
        raise UnsupportedValue(
            f"{name} is not plain checkpoint metadata", found=str(error), path=name
        ) from error
    except Exception as error:  # whatever malformed bytes make of an unpickler
        raise Damaged(
            f"{name} cannot be read", found=f"{type(error).__name__}: {error}", name=name
        ) from error
    if not isinstance(found, metadata.Metadata):
        raise Damaged(
            f"{name} is not checkpoint metadata", found=type(found).__name__, expected="Metadata", name=name
        )
    return found
