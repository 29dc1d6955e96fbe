"""Planners that keep what differs between ranks.

torch's planners keep a value or a plain tensor of one rank where several have one of that name: random states,
positions of data loaders, counters of one rank are lost. These keep every rank's own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from ..errors import BadOption, UsageError
from ..format.hashing import digest
from ..state.tensors import bytes_of
from .values import encode_value

COMPARED_BYTES_MAX = 1 << 20
"""Plain tensors up to this size are compared between ranks by what they hold. A larger one that differs (no usual
state has one) is kept for each rank only where ``per_rank`` names it."""

_OWN = re.compile(r"(.*)@rank\d+", re.DOTALL)
_ALWAYS = b""
"""In place of a digest: each rank keeps its own, whatever the others have."""


class SavePlanner(DefaultSavePlanner):
    """As torch's ``DefaultSavePlanner``, but values and small plain tensors that differ between ranks are kept for
    each rank; so are, whatever they hold, keys that match a pattern of ``per_rank`` (as in a shell: ``loader.*``).

    What all ranks hold alike is stored once. Plans are not cached: what differs may change with every save.
    """

    def __init__(
        self,
        *,
        per_rank: Collection[str] = (),
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        if isinstance(per_rank, str):
            raise BadOption("per_rank= takes several patterns", found=repr(per_rank), expected="a list")
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self.per_rank = tuple(per_rank)

    def create_local_plan(self) -> SavePlan:
        """torch's plan, and digests of what could differ."""
        plan = super().create_local_plan()
        digests: dict[str, bytes] = {}
        for item in plan.items:
            found = self._digest(item)
            if found is not None:
                digests[item.index.fqn] = found
        return dataclasses.replace(plan, planner_data={"mappings": plan.planner_data, "digests": digests})

    def _digest(self, item: WriteItem) -> bytes | None:
        fqn = item.index.fqn
        if item.type is WriteItemType.SHARD:
            return None
        if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in self.per_rank):
            return _ALWAYS
        value = self.lookup_object(item.index)
        if isinstance(value, torch.Tensor):
            small = value.numel() * value.element_size() <= COMPARED_BYTES_MAX
            return _digest_of(value) if small and not value.is_meta else None
        encoded = encode_value(fqn, value)
        return digest(
            msgspec.msgpack.encode([encoded.node, *(_digest_of(leaf.tensor) for leaf in encoded.leaves)])
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Gives names of their own to what differs, so that nothing of it is taken for a copy."""
        digests: list[dict[str, bytes]] = [plan.planner_data["digests"] for plan in all_plans]
        first: dict[str, bytes] = {}
        own: set[str] = set()
        for some in digests:
            for fqn, found in some.items():
                if found == _ALWAYS or first.setdefault(fqn, found) != found:
                    own.add(fqn)
        taken = {item.index.fqn for plan in all_plans for item in plan.items}
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [_renamed(item, rank, taken) if item.index.fqn in own else item for item in plan.items]
            plans.append(dataclasses.replace(plan, items=items, planner_data=plan.planner_data["mappings"]))
        return super().create_global_plan(plans)

    def own_key(self, fqn: str) -> str | None:
        """The key of this rank's own value that a plan calls ``fqn``; None for any other item."""
        match = _OWN.fullmatch(fqn)
        if match is None or fqn in self.state_dict or match.group(1) not in self.state_dict:
            return None
        return match.group(1)

    def lookup_object(self, index: MetadataIndex) -> Any:
        own = self.own_key(index.fqn)
        return super().lookup_object(index if own is None else dataclasses.replace(index, fqn=own))


def _digest_of(tensor: torch.Tensor) -> bytes:
    described = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return digest(described + digest(bytes_of(tensor.detach())))


def _renamed(item: WriteItem, rank: int, taken: Collection[str]) -> WriteItem:
    fqn = f"{item.index.fqn}@rank{rank}"
    if fqn in taken:
        raise UsageError(
            f"two keys stand in each other's way: {item.index.fqn} of rank {rank}, and {fqn}",
            hint="Rename one",
        )
    return dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=fqn))


class LoadPlanner(DefaultLoadPlanner):
    """As torch's ``DefaultLoadPlanner``; values are put in place as they are, not by way of a stream.

    ``own`` says what a rank gets of keys that every rank kept for itself: ``"own"``, its own, and an error at another
    number of ranks; ``"modulo"``, that of rank r modulo the number of ranks that saved.
    """

    def __init__(
        self,
        *,
        own: str = "own",
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        if own not in ("own", "modulo"):
            raise BadOption("own= cannot be used", found=repr(own), expected='"own" or "modulo"')
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        self.own_mode = own

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Put a value that is no tensor in its place."""
        fqn = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], value)
        else:
            self.state_dict[fqn] = value
