"""The storage reader: ``dcp.load`` from what :class:`~everstep.dcp.Writer` wrote, every chunk verified."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..backends.open import SUPPORTED, local_path
from ..errors import BadOption, EverstepError, NotARun, StateMismatch, UsageError
from ..format.dtypes import itemsize_bits
from ..format.entries import Box, Entry, Scope
from ..state.tensors import copy_into, dtype_named, empty, writable_bytes
from . import directory
from .opened import Opened
from .values import STATE, as_stream
from .writer import Writer

STAGED_BYTES_MAX = 256 << 20
"""Bytes in memory at a time for tensors that cannot be filled where they lie (on another device, strided)."""


@dataclass(slots=True)
class _Target:
    """One tensor item: where it goes, and the memory that is filled."""

    item: ReadItem
    entry: Entry
    live: torch.Tensor
    filled: torch.Tensor
    view: memoryview


class Reader(StorageReader):
    """Loads one DCP checkpoint from the directory ``root``, or the ``checkpoint_id`` of the call.

    Works at any number of ranks and without a process group. A tensor of another dtype than the stored one is an error
    unless ``cast`` allows to convert. Of values and tensors that every rank kept for itself (see
    :class:`~everstep.dcp.SavePlanner`) each rank gets its own; at another number of ranks that is an error, unless the
    planner says otherwise, and a single process without a group gets rank 0's, with a warning.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, cast: bool = False) -> None:
        super().__init__()
        self._id: str | os.PathLike[str] | None = None
        self.cast = cast
        self.load_id = uuid.uuid4().hex
        self._opened: Opened | None = None
        self._failed: EverstepError | None = None
        self._rank = 0
        if root is not None:
            self.reset(root)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The directory of the load."""
        return self._id

    @property
    def path(self) -> str:
        """The directory as a local path. Raises UsageError where none was given."""
        if self._id is None:
            raise UsageError("no directory was given", hint="Reader(directory), or checkpoint_id=")
        return local_path(self._id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` names a directory of this machine."""
        return Writer.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another directory, if one is given."""
        self._close()
        if checkpoint_id is not None:
            if not self.validate_checkpoint_id(checkpoint_id):
                raise BadOption(
                    "a checkpoint_id that cannot be used", found=repr(checkpoint_id), expected=SUPPORTED
                )
            self._id = checkpoint_id
        self.load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds. With ``rank``: of what that rank saved for itself.

        Raises NotARun (a FileNotFoundError), NoCheckpoint, Damaged, CannotTell.
        """
        self._close()
        opened = self._opened = self._open(kwargs.get("rank"))
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            fqn: _described(entry) for fqn, entry in opened.tensors().items()
        }
        found.update(dict.fromkeys(opened.values(), BytesStorageMetadata()))
        me = _rank_now(opened.world)
        for fqn in opened.own:
            own = opened.own_tensor(fqn, me)
            found[fqn] = BytesStorageMetadata() if own is None else _described(own)
        return Metadata(
            state_dict_metadata=found,
            planner_data=opened.planner_data,
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._id, load_id=self.load_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._rank = int(kwargs.get("rank") or 0) if kwargs.get("use_collectives", True) else 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells every rank how many load."""
        for plan in plans:
            plan.storage_data = len(plans)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the plan wants. Raises Damaged, StateMismatch, Pruned, CannotTell: torch tells it to all ranks."""
        opened = self._opened
        if opened is None:
            raise UsageError(
                "read_data() without read_metadata()", expected="the calls of dcp.load, in order"
            )
        try:
            rank = self._own_rank(opened, plan, planner)
            tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
            self._read_tensors(opened, tensors, planner, rank)
            for item in plan.items:
                if item.type is not LoadItemType.TENSOR:
                    value, stream = opened.value(item.storage_index.fqn, rank)
                    load_value = getattr(planner, "load_value", None)
                    if load_value is not None and not stream:
                        load_value(item, value)
                    else:
                        planner.load_bytes(item, as_stream(value, stream))
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- inside

    def _open(self, rank: int | None) -> Opened:
        """The directory, or what ``rank`` saved there for itself. torch asks for the latter whenever the former cannot
        be read; only where nothing is there may it be taken instead."""
        if rank is None:
            try:
                self._failed = None
                return Opened(self.path)
            except EverstepError as error:
                self._failed = error
                raise
        if self._failed is not None and not isinstance(self._failed, NotARun):
            raise self._failed
        return Opened(directory.rank_directory(self.path, rank))

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _own_rank(self, opened: Opened, plan: LoadPlan, planner: LoadPlanner) -> int:
        """The saved rank whose own values this one gets."""
        world = plan.storage_data if isinstance(plan.storage_data, int) else 1
        wanted = sorted({item.storage_index.fqn for item in plan.items} & opened.own)
        if world == opened.world or not wanted:
            return self._rank % opened.world
        if getattr(planner, "own_mode", "own") == "modulo":
            return self._rank % opened.world
        named = ", ".join(wanted[:8]) + (" and more" if len(wanted) > 8 else "")
        if world == 1:
            warnings.warn(
                f"everstep: {named}: each of {opened.world} ranks saved its own; this one process gets rank 0's",
                RuntimeWarning,
                stacklevel=2,
            )
            return 0
        raise StateMismatch(
            f"{named}: every rank saved its own, and another number of ranks loads",
            found=f"{world} ranks",
            expected=f"{opened.world} ranks",
            hint='Leave these keys out, or load with everstep.dcp.LoadPlanner(own="modulo")',
        )

    def _read_tensors(
        self, opened: Opened, items: Sequence[ReadItem], planner: LoadPlanner, rank: int
    ) -> None:
        """What can be filled in place in one go, the rest in groups of bounded size."""
        known = opened.tensors()
        direct: list[_Target] = []
        group: list[_Target] = []
        staged = 0
        for item in items:
            fqn = item.storage_index.fqn
            entry = opened.own_tensor(fqn, rank) if fqn in opened.own else known.get(fqn)
            if entry is None:
                raise StateMismatch(f"{fqn}: the checkpoint has no such tensor", found="nothing")
            target = self._target(item, entry, planner)
            if target.filled is target.live:
                direct.append(target)
                continue
            group.append(target)
            staged += target.entry.nbytes
            if staged >= STAGED_BYTES_MAX:
                _fill(opened, group, planner, rank)
                group, staged = [], 0
        _fill(opened, direct, planner, rank)
        _fill(opened, group, planner, rank)

    def _target(self, item: ReadItem, entry: Entry, planner: LoadPlanner) -> _Target:
        fqn = item.storage_index.fqn
        lengths = tuple(item.lengths)
        live = planner.resolve_tensor(item).detach()
        if tuple(live.shape) != lengths:
            raise StateMismatch(
                f"{fqn}: the plan wants another region than the tensor is",
                found=f"a tensor of shape {list(live.shape)}",
                expected=f"{list(lengths)}",
                hint="torch's planner is wrong for uneven shards of several kinds (FSDP2 with tensor parallelism)",
            )
        dtype = dtype_named(entry.dtype)
        if live.dtype != dtype and not self.cast:
            raise StateMismatch(
                f"{fqn}: stored in another dtype",
                found=entry.dtype,
                expected=str(live.dtype).removeprefix("torch."),
                hint="Reader(directory, cast=True) converts",
            )
        first = item.storage_index.offset or (0,) * len(lengths)
        offsets = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        box = Box(offsets, lengths)
        nbytes = (itemsize_bits(entry.dtype) * box.volume + 7) // 8
        whole = entry.scope is Scope.RANK
        boxes = entry.boxes if whole else (box,)
        wanted = Entry(STATE, fqn, entry.dtype, entry.shape, boxes, entry.scope, None, 0, nbytes)
        view = writable_bytes(live) if live.dtype == dtype else None
        if view is not None:
            return _Target(item, wanted, live, live, view)
        filled = empty(lengths, dtype)
        view = writable_bytes(filled)
        assert view is not None
        return _Target(item, wanted, live, filled, view)


def _fill(opened: Opened, targets: Sequence[_Target], planner: LoadPlanner, rank: int) -> None:
    opened.fill([target.entry for target in targets], [target.view for target in targets], rank)
    for target in targets:
        if target.filled is not target.live:
            copy_into(target.live, target.filled)
        planner.commit_tensor(target.item, target.live)


def _described(entry: Entry) -> TensorStorageMetadata:
    """One tensor as one chunk: any region of it can be read, however it is cut on disk."""
    size = torch.Size(entry.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    properties = TensorProperties(dtype=dtype_named(entry.dtype))
    return TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])


def _rank_now(world: int) -> int:
    """This process's rank where as many ranks run as saved; else 0."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() == world:
        return torch.distributed.get_rank()
    return 0
