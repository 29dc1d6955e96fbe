"""What a rank's snapshot says so that the ranks' bytes can be compared: which entries are hashed, by whom, and when.

Nothing is asked of other ranks here. All ranks take the same flushes, count them alike, and find the same entries for
each; who counts otherwise (its snapshot failed where the others' did not) compares nothing, and that is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from .agent.client import Progress
from .format.layout import Entry, Scope
from .plan.agreement import copy_windows, windows
from .policy import Policy
from .snapshot.copier import Plan
from .snapshot.digests import digests
from .state.tree import FlatState, Leaf, ShardedLeaf
from .store.equality import AUDIT, HASHES, asked

STRUCTURES_MAX = 8
"""Structures whose own tensors are hashed, each once: a state that changes its structure at every flush would be
hashed at every one."""
FLUSHES_MAX = 256
"""Audits whose outcome is awaited."""

AGREED_MIN = 3
"""Flushes without a disagreement after which nothing is suspected any more. More than one: ranks hear of a
disagreement at different times, and compare nothing as long as some have not."""

Name = tuple[str, str]
"""(part, key)."""
Windows = list[list[int]]
"""Positions in a layout, dealt out to audits."""
_NONE: frozenset[Name] = frozenset()


class Auditor:
    """One rank's part in the comparison. Used from the trainer's thread only."""

    def __init__(self, rank: int, world: int, policy: Policy, copies: int = 0) -> None:
        self._rank = rank
        self._world = world
        self._copies = copies
        self._every = policy.audit_every if world > 1 else None
        self._policy = policy.on_disagreement
        self._number = -1
        self._step: int | None = None
        self._plan: Plan | None = None
        self._windows: list[Windows] = []
        self._copied: list[Windows] = []
        """As ``_windows``, of what this rank's slots hold of the entries with second copies."""
        self._here: frozenset[int] = frozenset()
        """Entries that lie in this rank's slots."""
        self._known: set[str] = set()
        """Hashes of the layouts of which the ranks' own tensors were compared."""
        self._asked: OrderedDict[int, tuple[str, frozenset[Name]]] = OrderedDict()
        """By step, for flushes without a verdict: the layout, if its own tensors are hashed, and the audited names."""
        self._unflushed: int | None = None
        """The newest step of these that was not to be flushed when it was taken: dropped with the next one."""
        self._suspects: frozenset[Name] = _NONE
        """Of a disagreement; audited at every flush until they agree."""
        self._agreed = 0

    def begin(self, step: int) -> None:
        """The snapshot of ``step`` is to be taken and flushed. A step that is tried again is the same audit."""
        if step != self._step:
            self._number += 1
            self._step = step

    def meta(self, step: int, flat: FlatState, plan: Plan, *, flush: bool) -> dict[str, Any]:
        """What the snapshot's meta holds: nothing where there is nothing to compare. With ``flush`` it hashes, now,
        what other ranks store of this rank's tensors, and this one has no copy of; a snapshot that may be flushed
        later asks for the agent's hashes only."""
        if self._world < 2:
            return {}
        self._plan_for(flat, plan)
        window = self._window(plan) if flush else []
        here = self._here
        stored = _current(self._copied, self._number)
        if window:
            stored = sorted({*stored, *(index for index in window if index in here)})
        live = [index for index in window if index not in here]
        equal = plan.layout_hash not in self._known and len(self._known) < STRUCTURES_MAX
        if window or equal:
            names = frozenset(_name(plan.layout.entries[index]) for index in window)
            self._remember(step, plan.layout_hash if equal else "", names, flush=flush)
        found: dict[str, Any] = {}
        if window or stored:
            found[AUDIT] = {"number": self._number, "on_disagreement": self._policy}
        if window or stored or equal:
            found[HASHES] = asked(
                stored=stored,
                live=live,
                digests=digests([flat.leaves[index].pieces for index in live]),
                equal=equal,
            )
        return found

    def note(self, progress: Progress) -> None:
        """Take in what became of a flush."""
        differ = progress.stage == "disagreement" or (progress.stage == "failed" and _differ(progress))
        if not differ and progress.stage != "committed":
            return
        layout_hash, names = self._asked.pop(progress.step, ("", _NONE))
        if layout_hash and progress.stage != "failed":
            self._known.add(layout_hash)
        if differ and names:
            # Those that are suspected already stay the only ones: which of all names differ is not said here.
            self._suspects = self._suspects or names
            self._agreed = 0
        elif self._suspects and names >= self._suspects:
            self._agreed += 1
            if self._agreed >= AGREED_MIN:
                self._suspects = _NONE

    def _remember(self, step: int, layout_hash: str, names: frozenset[Name], *, flush: bool) -> None:
        if self._unflushed is not None:
            self._asked.pop(self._unflushed, None)
        self._unflushed = None if flush else step
        self._asked.pop(step, None)
        self._asked[step] = layout_hash, names
        while len(self._asked) > FLUSHES_MAX:
            self._asked.popitem(last=False)

    def _plan_for(self, flat: FlatState, plan: Plan) -> None:
        if self._plan is plan:
            return
        groups = _groups(flat, plan)
        here = self._here = frozenset(place.entry for place in plan.layout.places())
        every, world, copies = self._every, self._world, self._copies
        self._windows = []
        if every:
            deal = partial(windows, least=every, world=world)
            self._windows = [_deal(plan, group, deal) for _, group in groups]
        self._copied = []
        for sharers, group in groups:
            count, some = len(sharers) or world, [index for index in group if index in plan.copied]
            dealt = _deal(plan, some, partial(copy_windows, sharers=count, copies=copies, world=world))
            self._copied.append([[index for index in window if index in here] for window in dealt])
        self._plan = plan

    def _window(self, plan: Plan) -> list[int]:
        """Positions in the layout of what this audit compares."""
        found = set(_current(self._windows, self._number))
        if self._suspects:
            for some in self._windows:
                found |= {
                    i for window in some for i in window if _name(plan.layout.entries[i]) in self._suspects
                }
        return sorted(found)


def _groups(flat: FlatState, plan: Plan) -> list[tuple[tuple[int, ...], list[int]]]:
    """Sets of ranks that hold the same, with the positions in the layout of what they hold."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (leaf, entry) in enumerate(zip(flat.leaves, plan.layout.entries, strict=True)):
        if entry.nbytes and (sharers := _sharers(leaf, entry)) is not None:
            groups.setdefault(sharers, []).append(index)
    return sorted(groups.items())


def _deal(plan: Plan, group: list[int], deal: Callable[[list[tuple[str, str, int]]], Windows]) -> Windows:
    """The windows of some positions in the layout."""
    entries = [plan.layout.entries[index] for index in group]
    dealt = deal([(entry.part, entry.key, entry.nbytes) for entry in entries])
    return [[group[position] for position in window] for window in dealt]


def _current(groups: list[Windows], number: int) -> list[int]:
    """What audit ``number`` is about."""
    return [index for some in groups if some for index in some[number % len(some)]]


def _sharers(leaf: Leaf, entry: Entry) -> tuple[int, ...] | None:
    """The ranks that hold this very entry; () for all of them; None where no other rank does."""
    if entry.scope is not Scope.GLOBAL:
        return None
    if not isinstance(leaf, ShardedLeaf):
        return ()
    return leaf.holders if leaf.holders is not None and len(leaf.holders) > 1 else None


def _name(entry: Entry) -> Name:
    return entry.part, entry.key


def _differ(progress: Progress) -> bool:
    return progress.error is not None and progress.error.get("type") == "ReplicasDiffer"
