"""Who holds the same of a DTensor along the axes of a larger mesh that its own mesh leaves out.

A rank's model is made parallel over the axes of one mesh; some of its tensors over all of them, some over a few. Along
an axis that any DTensor of the rank is placed on, all ranks run the same modules: there a tensor that is not placed on
that axis is held by all of them (an embedding that is fully sharded, between tensor parallel layers). Along an axis
that no DTensor is placed on (pipeline stages) others hold other tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from .sharded import Held

Ranks = tuple[int, ...]


@dataclass(slots=True)
class _Root:
    """A mesh that others are parts of: the ranks' coordinates, and what was found out about its parts."""

    sizes: tuple[int, ...]
    at: dict[int, tuple[int, ...]]
    ranks: Any
    axes: dict[Ranks, frozenset[int] | None] = field(default_factory=dict)
    spread: dict[tuple[Ranks, frozenset[int]], Ranks] = field(default_factory=dict)

    @property
    def all_axes(self) -> frozenset[int]:
        return frozenset(range(len(self.sizes)))

    def axes_of(self, ranks: Ranks) -> frozenset[int] | None:
        """The axes along which the ranks of a part differ; None where they are no part made of whole axes."""
        if ranks not in self.axes:
            places = [self.at[rank] for rank in ranks] if set(ranks) <= self.at.keys() else []
            axes = {axis for axis in range(len(self.sizes)) if len({place[axis] for place in places}) > 1}
            whole = prod(self.sizes[axis] for axis in axes) == len(ranks)
            self.axes[ranks] = frozenset(axes) if places and whole else None
        return self.axes[ranks]

    def along(self, holders: Ranks, axes: frozenset[int]) -> Ranks:
        """All ranks that differ from one of ``holders`` along ``axes`` only."""
        key = holders, axes
        found = self.spread.get(key)
        if found is None:
            lines = {tuple([None if a in axes else at for a, at in enumerate(self.at[r])]) for r in holders}
            picks = [tuple([slice(None) if at is None else at for at in line]) for line in lines]
            ranks = {int(rank) for pick in picks for rank in self.ranks[pick].reshape(-1)}
            found = self.spread[key] = tuple(sorted(ranks))
        return found


_roots: weakref.WeakKeyDictionary[Any, _Root] = weakref.WeakKeyDictionary()
"""By mesh. Structure only."""


def spread(values: Sequence[tuple[Any, Held, bool]]) -> list[Held]:
    """What this rank holds of all sharded values of a state, with holders along axes that their meshes leave out.

    ``values``: each with what is held of it, and whether the whole job is known to hold the same: then along all axes.
    """
    module = sys.modules.get("torch.distributed.tensor")
    found = [held for _, held, _ in values]
    if module is None:
        return found
    places: list[tuple[int, _Root, frozenset[int]]] = []
    used: dict[int, frozenset[int]] = {}
    for index, (value, _, _) in enumerate(values):
        if isinstance(value, module.DTensor):
            mesh = value._spec.mesh
            root = _root_of(mesh)
            axes = root.axes_of(_ranks_of(mesh))
            if axes is None:
                continue
            used[id(root)] = used.get(id(root), frozenset()) | axes
            places.append((index, root, axes))
    for index, root, axes in places:
        left_out = (root.all_axes if values[index][2] else used[id(root)]) - axes
        holders = found[index].holders
        if left_out and holders and set(holders) <= root.at.keys():
            found[index] = replace(found[index], holders=root.along(holders, left_out))
    return found


_ranks: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


def _ranks_of(mesh: Any) -> Ranks:
    found = _ranks.get(mesh)
    if found is None:
        found = _ranks[mesh] = tuple(sorted(mesh.mesh.reshape(-1).tolist()))
    return found


def _root_of(mesh: Any) -> _Root:
    """The mesh that ``mesh`` was taken from; itself, where there is none, or this torch does not tell."""
    whole = getattr(mesh, "_get_root_mesh", lambda: None)() or mesh
    found = _roots.get(whole)
    if found is None:
        ranks = whole.mesh.numpy()
        at = {int(rank): place for place, rank in np.ndenumerate(ranks)}
        found = _roots[whole] = _Root(tuple(ranks.shape), at, ranks)
    return found
