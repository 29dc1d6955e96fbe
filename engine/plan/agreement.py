"""What ranks that should hold equal bytes say of them, compared. Pure.

A vote's entry hashes are a map from an entry's name (:func:`entry_name`) to the hash of its bytes, all its boxes one
behind the other. Names of one tensor of the job, in the same boxes, are the same on every rank that holds them: their
hashes must be equal. Names of tensors that are one rank's own end in ``@rank``: where their hashes are equal on all
ranks, they need not be stored by each.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..format.entries import Box, Entry, Scope, path_of

AUDIT_BYTES = 256 << 20
"""What a rank reads at one flush to audit the replicated entries that it shares with one set of ranks; one entry is
not cut, so the largest may come on top."""
HASHES_MAX = 1 << 18
"""Entry hashes in all votes of one attempt together: the committing agent reads them all."""
NAMED_MAX = 8
"""Disagreements, and ranks of each, that a text names; more are counted."""
KEPT_MAX = 64
"""Disagreements that a manifest records one by one."""
TOLD_BYTES_MIN = 1 << 20
"""What marking parts must save of each checkpoint for a trainer to be told; less is in the manifest only."""
REFUSED = "replicas differ: "
"""How an abort record's reason begins where a disagreement was refused."""
OWN_PARTS = frozenset({"rng", "loader", "grads"})
"""Parts that are each rank's own by their nature: that they are equal at one moment says nothing."""

_OWN = "@rank"
_ESCAPES = str.maketrans({"~": "~0", "/": "~1", "@": "~2"})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Hashes = Mapping[int, Mapping[str, str]]
"""By rank: its vote's entry hashes."""


def entry_name(part: str, key: str, shape: Sequence[int], boxes: Sequence[Box], scope: Scope) -> str:
    """``PART/KEY`` of one tensor of the job held whole; with its boxes behind ``@`` where it is not; with ``@rank``
    where it is the rank's own. Keys have no ``@`` of their own."""
    name = f"{part.translate(_ESCAPES)}/{key}"
    if scope is not Scope.GLOBAL:
        return name + _OWN
    if len(boxes) == 1 and boxes[0].lengths == tuple(shape):
        return name
    return name + "@" + "+".join(f"{_numbers(box.offsets)}:{_numbers(box.lengths)}" for box in boxes)


def name_of(entry: Entry) -> str:
    """:func:`entry_name` of an entry of a layout."""
    return entry_name(entry.part, entry.key, entry.shape, entry.boxes, entry.scope)


def split_name(name: str) -> tuple[str, str]:
    """(part, key with the boxes if there are any) of a name."""
    part, _, key = name.partition("/")
    part = part.replace("~1", "/").replace("~2", "@").replace("~0", "~")
    return part, key.removesuffix(_OWN)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


# -- what is asked for


def windows(sizes: Sequence[tuple[str, str, int]], least: int, world: int) -> list[list[int]]:
    """Positions in ``sizes`` (part, key, bytes of the replicated entries that one set of ranks shares), dealt out to
    as many flushes as the bounds demand, ``least`` or more, evenly by bytes: every rank that has the same entries
    finds the same windows, whatever their order. Empty without entries."""
    total = sum(nbytes for _, _, nbytes in sizes)
    return _dealt(sizes, max(least, -(-total // AUDIT_BYTES), -(-len(sizes) // hashes_max(world))))


def copy_windows(
    sizes: Sequence[tuple[str, str, int]], sharers: int, copies: int, world: int
) -> list[list[int]]:
    """As :func:`windows`, of entries with ``copies`` second copies, which ``sharers`` ranks share: all of them at each
    flush, as long as not too many hashes come together of it. Their bytes are read by agents, and count for nothing."""
    at_once = max(1, hashes_max(world) * sharers // (1 + copies))
    return _dealt(sizes, -(-len(sizes) // at_once))


def _dealt(sizes: Sequence[tuple[str, str, int]], count: int) -> list[list[int]]:
    if not sizes:
        return []
    found: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i][2], sizes[i][0], sizes[i][1]))
    for index in order:
        load, entries, number = heap[0]
        found[number].append(index)
        heapq.heapreplace(heap, (load + sizes[index][2], entries + 1, number))
    return found


def own_entries(entries: Sequence[Entry], world: int) -> list[int]:
    """Positions of a rank's own tensors whose hashes go into its vote once per structure, the largest first."""
    found = [
        index
        for index, entry in enumerate(entries)
        if entry.scope is Scope.RANK
        and entry.image is not None
        and entry.nbytes
        and entry.part not in OWN_PARTS
    ]
    found.sort(key=lambda i: (-entries[i].nbytes, entries[i].part, entries[i].key))
    return found[: hashes_max(world)]


def hashes_max(world: int) -> int:
    """How many hashes one rank's vote may carry for one purpose."""
    return max(1, HASHES_MAX // world)


# -- what the votes say


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One replicated entry of which ranks hold different bytes. ``groups``: the ranks that hold equal bytes, the
    largest group first. ``key`` has the boxes behind ``@`` where it is not the whole tensor."""

    part: str
    key: str
    groups: tuple[tuple[int, ...], ...]
    stored: int | None = None
    """The rank whose bytes the checkpoint holds, where that is known."""

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that are few against a majority; none where there is no majority."""
        seen = sum(map(len, self.groups))
        if 2 * len(self.groups[0]) <= seen:
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def text(self) -> str:
        where = path_of(self.part, self.key)
        if self.odd:
            said = f"{where} is different on {ranks_text(self.odd)} than on {ranks_text(self.groups[0])}, who are more"
        else:
            said = f"{where} is different on " + " and ".join(ranks_text(group) for group in self.groups[:4])
            said += " and others" if len(self.groups) > 4 else ""
        if self.stored is None:
            return said
        return f"{said} (stored is that of rank {self.stored})"

    def to_plain(self) -> dict[str, Any]:
        """As a manifest's facts hold it; ranks are cut at :data:`KEPT_MAX` a group."""
        groups = [list(group[:KEPT_MAX]) for group in self.groups[:KEPT_MAX]]
        return {
            "part": self.part,
            "key": self.key,
            "ranks": groups,
            "odd": list(self.odd[:KEPT_MAX]),
            "stored": self.stored,
        }


def disagreements(hashes: Hashes) -> list[Disagreement]:
    """Where ranks have different hashes for one name, in order of the names. One rank alone agrees with itself."""
    seen: dict[str, dict[str, list[int]]] = {}
    for rank in sorted(hashes):
        for name, found in hashes[rank].items():
            if not name.endswith(_OWN):
                seen.setdefault(name, {}).setdefault(found, []).append(rank)
    return [
        Disagreement(*split_name(name), _groups(by_hash))
        for name, by_hash in sorted(seen.items())
        if len(by_hash) > 1
    ]


def audited(hashes: Hashes) -> int:
    """How many names at least two ranks speak of."""
    ranks: dict[str, int] = {}
    for of_rank in hashes.values():
        for name in of_rank:
            if not name.endswith(_OWN):
                ranks[name] = ranks.get(name, 0) + 1
    return sum(1 for count in ranks.values() if count > 1)


def _groups(by_hash: Mapping[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted((tuple(ranks) for ranks in by_hash.values()), key=lambda group: (-len(group), group)))


@dataclass(frozen=True, slots=True)
class EqualPart:
    """Of one part, how many of the tensors that are each rank's own are equal on all ranks, and their bytes (of one
    rank). ``whole``: all of them are, so that the part may be marked ``replicated=``."""

    part: str
    tensors: int
    nbytes: int
    whole: bool


def all_tell_own(hashes: Hashes, world: int) -> bool:
    """Whether every rank speaks of tensors of its own; there is something to compare only then."""
    return len(hashes) == world > 1 and all(
        any(name.endswith(_OWN) for name in of_rank) for of_rank in hashes.values()
    )


def equal_parts(hashes: Hashes, world: int, first: Sequence[Entry]) -> list[EqualPart]:
    """Parts with tensors of equal bytes on all ranks, though each stores its own. ``first`` are rank 0's entries, for
    the sizes. Empty unless every rank speaks of its own tensors."""
    own = [
        {name: found for name, found in hashes.get(rank, {}).items() if name.endswith(_OWN)}
        for rank in range(world)
    ]
    if not all_tell_own(hashes, world):
        return []
    first_own = own[0]
    equal = {name for name in first_own if all(o.get(name) == first_own[name] for o in own[1:])}
    unequal = {split_name(name)[0] for names in own for name in names if name not in equal}
    tensors: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for entry in first:
        if entry.scope is Scope.GLOBAL or not entry.nbytes:
            continue
        if name_of(entry) in equal:
            tensors[entry.part] = tensors.get(entry.part, 0) + 1
            nbytes[entry.part] = nbytes.get(entry.part, 0) + entry.nbytes
        else:
            unequal.add(entry.part)
    return [EqualPart(part, tensors[part], nbytes[part], part not in unequal) for part in tensors]


# -- facts and texts


def equality_facts(parts: Sequence[EqualPart], world: int) -> dict[str, Any]:
    """What a manifest's facts say under "equal": by part, and what marking those that may be marked would save."""
    return {
        "world": world,
        "saves": sum(part.nbytes for part in parts if part.whole) * (world - 1),
        "parts": {
            part.part: {"tensors": part.tensors, "nbytes": part.nbytes, "whole": part.whole} for part in parts
        },
    }


def equality_text(facts: Mapping[str, Any]) -> str:
    """One sentence or two of :func:`equality_facts`."""
    world, parts = facts["world"], facts["parts"]
    told = []
    for part, about in parts.items():
        some = "all" if about["whole"] else "some"
        told.append(f"{part} ({some}: {_count(about['tensors'], 'tensor')}, {bytes_text(about['nbytes'])})")
    text = f"tensors that each of the {world} ranks stores are equal on all of them: {', '.join(told)}"
    whole = sorted(part for part, about in parts.items() if about["whole"])
    if not whole:
        return text
    return (
        f"{text}. If they are meant to stay so, TrainState(replicated={{{', '.join(map(repr, whole))}}}) saves "
        f"{bytes_text(facts['saves'])} per checkpoint"
    )


def disagreement_facts(found: Sequence[Disagreement]) -> dict[str, Any]:
    """What a manifest's facts say under "disagreements": the first ones, their number, and the text."""
    return {
        "count": len(found),
        "text": disagreements_text(found),
        "entries": [one.to_plain() for one in found[:KEPT_MAX]],
    }


def disagreements_text(found: Sequence[Disagreement]) -> str:
    """All of them in one sentence, the first ones by name."""
    named = "; ".join(one.text() for one in found[:NAMED_MAX])
    more = len(found) - NAMED_MAX
    return named + (f"; and {more} more" if more > 0 else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2 and 7 more``."""
    some = ", ".join(str(rank) for rank in ranks[:NAMED_MAX])
    more = len(ranks) - NAMED_MAX
    return f"rank{'s' if len(ranks) > 1 else ''} {some}" + (f" and {more} more" if more > 0 else "")


def bytes_text(nbytes: float) -> str:
    """A size for people."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:g} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
