"""Files of ``torch.save``. They are read as ``weights_only=True`` reads, and numpy too: nothing in them is executed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import Damaged, UnsupportedValue
from ..oneshot import load, save
from ..state.pickled import load_pickled, refused_by
from . import shape
from .output import new_file


def export_torch(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    parts: Collection[str] | None = None,
    rank: int = 0,
) -> None:
    """Write the checkpoint of ``step`` (default: the newest) as one ``torch.save`` file: {part: its state}, tensors
    whole and on the CPU, optimizers as ``load_state_dict`` takes them. All of it is held in memory once.

    Raises BadOption if ``out`` exists, UnsupportedValue by path, and what ``everstep.load`` raises.
    """
    values = load(root, step=step, parts=parts, rank=rank)
    if isinstance(values, Mapping):
        values = {part: shape.by_index(value) for part, value in values.items()}
    shape.refuse_unknown(values, "")
    # Into a file of ours: torch's own does not say why it cannot be written.
    with new_file(Path(out)) as aside, aside.open("wb") as file:
        torch.save(values, file)


def import_torch(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int = 0,
    parts: Mapping[str, str] | None = None,
) -> list[str]:
    """Make the contents of a ``torch.save`` file the checkpoint of ``step`` of the run at ``root``; the names of its
    parts. ``parts`` ({part: dotted path in the file}) chooses and renames; else the top-level items are parts, and
    a bare state dict is "model".

    Raises UnsupportedValue for a file that holds more than tensors and plain values, Damaged for one that torch
    cannot read, and what ``everstep.save`` raises.
    """
    value = read_torch(path)
    found = shape.parts_of(value, parts or {})
    save(root, step, found)
    return list(found)


def read_torch(path: str | os.PathLike[str]) -> Any:
    """The contents of a ``torch.save`` file, mapped where the file's kind allows it."""
    name = os.fspath(path)
    try:
        try:
            return load_pickled(name, map_location="cpu", mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return load_pickled(name, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise UnsupportedValue(
            f"{name} holds objects that are not tensors or plain values",
            found=refused_by(error),
            hint="Load it where its classes are known, and save plain state dicts",
            path=name,
        ) from error
    except (RuntimeError, EOFError, ValueError, TypeError) as error:
        raise Damaged(
            f"{name} cannot be read", found=str(error)[:300], expected="a file of torch.save", name=name
        ) from error
