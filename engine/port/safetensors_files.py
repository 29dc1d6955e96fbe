"""safetensors: one file, or several with an index, as ``from_pretrained`` reads them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import BadOption, Damaged, StateError, UnsupportedValue
from ..oneshot import load, save
from . import shape
from .output import new_directory, new_file

SHARD_BYTES = 5_000_000_000
"""Largest file of a sharded export, as is the custom for model hubs."""
STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
_OF_THE_SYSTEM = re.compile(r"\(os error (\d+)\)")
_SUFFIX = ".safetensors"


def export_safetensors(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    part: str = "model",
    shard_bytes: int = SHARD_BYTES,
    rank: int = 0,
) -> list[str]:
    """Write the tensors of ``part`` at ``step`` (default: the newest), whole, under dotted names; the files' names.

    ``out`` ending in ``.safetensors`` is one file; else a directory with ``model.safetensors``, or, above
    ``shard_bytes``, numbered files and ``model.safetensors.index.json``. Tied tensors are written once, under their
    first name. Raises BadOption if ``out`` exists, UnsupportedValue for dtypes that safetensors lacks, StateError.
    """
    if shard_bytes <= 0:
        raise BadOption("the size of a shard", found=shard_bytes, expected="bytes, more than 0")
    values = load(root, step=step, parts=[part], rank=rank)
    tensors = shape.dotted(values[part] if isinstance(values, Mapping) else values, part)
    path = Path(out)
    if path.suffix == _SUFFIX:
        with new_file(path) as aside:
            _write(tensors, aside)
        return [path.name]
    with new_directory(path) as aside:
        return _write_directory(tensors, aside, shard_bytes)


def _write_directory(tensors: Mapping[str, torch.Tensor], directory: Path, shard_bytes: int) -> list[str]:
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        _write(shards[0], directory / f"{STEM}{_SUFFIX}")
        return [f"{STEM}{_SUFFIX}"]
    names = [f"{STEM}-{n + 1:05d}-of-{len(shards):05d}{_SUFFIX}" for n in range(len(shards))]
    for name, some in zip(names, shards, strict=True):
        _write(some, directory / name)
    weight_map = {key: name for name, some in zip(names, shards, strict=True) for key in some}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*names, INDEX]


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """In the order given, each as full as it may be; a tensor that is larger has a shard of its own."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    # Two names may be views of one memory, which the library refuses to write twice.
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    addresses: set[int] = set()
    for name, tensor in whole.items():
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and address in addresses:
            whole[name] = tensor.clone()
        addresses.add(address)
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        if found := _OF_THE_SYSTEM.search(str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        raise UnsupportedValue(
            f"{path.name}: safetensors cannot hold these tensors: {error}",
            found=kinds,
            hint="Export this part as torch or dcp",
        ) from error
    # The library makes its files private to the user; a checkpoint follows the umask.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def import_safetensors(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    part: str = "model",
) -> list[str]:
    """Make a safetensors file, or a directory of them (with or without an index), part ``part`` of the checkpoint of
    ``step`` of the run at ``root``; the names of its parts.

    Raises Damaged for files that are incomplete or do not fit their index, and what ``everstep.save`` raises.
    """
    tensors = read_safetensors(Path(path))
    save(root, step, {part: tensors})
    return [part]


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file or directory, by name."""
    if not path.is_dir():
        return _read(path)
    index = next(iter(sorted(path.glob(f"*{_SUFFIX}.index.json"))), None)
    if index is not None:
        return _read_indexed(path, index)
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files:
        raise StateError(
            f"{path} holds no safetensors file", expected=f"*{_SUFFIX}, or an index", path=str(path)
        )
    found: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read(file).items():
            if name in found:
                raise StateError(f"{file}: a tensor that another file has too", found=name, path=str(file))
            found[name] = tensor
    return found


def _read_indexed(directory: Path, index: Path) -> dict[str, torch.Tensor]:
    try:
        weight_map: Any = json.loads(index.read_text())["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(
            f"{index} is no index", found=str(error), expected="weight_map", name=str(index)
        ) from error
    found: dict[str, torch.Tensor] = {}
    for name in files:
        if Path(name).name != name:
            raise Damaged(f"{index}: a file outside the directory", found=name, name=str(index))
        found.update(_read(directory / name))
    if set(found) != set(weight_map):
        missing = sorted(set(weight_map) - set(found)) or sorted(set(found) - set(weight_map))
        raise Damaged(
            f"{index} and its files differ in {len(set(weight_map) ^ set(found))} tensors",
            found=missing[:5],
            expected="the index's tensors in the files, and no others",
            name=str(index),
        )
    return {name: found[name] for name in weight_map}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise Damaged(
            f"{path} is missing", found="nothing", expected="a safetensors file", name=str(path)
        ) from None
    except (SafetensorError, OSError) as error:
        raise Damaged(
            f"{path} cannot be read", found=str(error), expected="a safetensors file", name=str(path)
        ) from error
