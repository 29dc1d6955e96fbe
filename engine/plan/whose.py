"""Whose images a rank's structure and own tensors come from, where another number of ranks wrote them. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..format.entries import Entry, Layout, Scope

Key = tuple[str, str]
"""(part, key)"""


def home(rank: int, world: int) -> int:
    """The rank of the save whose plain values rank ``rank`` takes, of ``world`` that saved."""
    return rank % world


def representatives(layouts: Sequence[Layout], first: int) -> list[int]:
    """Ranks whose layouts together have every key, ``first`` leading and without those that add none (pipeline
    stages have keys of their own; the ranks of one stage have the same)."""
    found = [first]
    have = {(entry.part, entry.key) for entry in layouts[first].entries}
    looked = {id(layouts[first])}
    for rank, layout in enumerate(layouts):
        if id(layout) in looked:
            continue
        looked.add(id(layout))
        keys = {(entry.part, entry.key) for entry in layout.entries}
        if not keys <= have:
            found.append(rank)
            have |= keys
    return found


def alike(layouts: Sequence[Layout]) -> list[list[int]]:
    """The ranks by what keys they have, each group ascending, in the order of their first ranks."""
    groups: dict[frozenset[Key], list[int]] = {}
    known: dict[int, frozenset[Key]] = {}
    for rank, layout in enumerate(layouts):
        keys = known.get(id(layout))
        if keys is None:
            keys = known[id(layout)] = frozenset((entry.part, entry.key) for entry in layout.entries)
        groups.setdefault(keys, []).append(rank)
    return list(groups.values())


def doubtful(wanted: Iterable[Entry], layouts: Sequence[Layout], own: int | None) -> dict[Key, list[int]]:
    """Keys of ``wanted`` that several ranks have, each for itself, and nothing says whose counts: with those ranks.

    ``own``: the rank at the save that the reader is (None: another number of ranks wrote it). What it has for
    itself is settled, unless it is wanted as a region of a tensor of the whole job.
    """
    mine = (
        {(e.part, e.key) for e in layouts[own].entries if e.image is not None} if own is not None else set()
    )
    open_keys: set[Key] = set()
    for entry in wanted:
        key = (entry.part, entry.key)
        if entry.scope is Scope.GLOBAL or key not in mine:
            open_keys.add(key)
    if not open_keys:
        return {}
    holders: dict[Key, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for entry in layout.entries:
            key = (entry.part, entry.key)
            if key not in open_keys:
                continue
            if entry.scope is Scope.GLOBAL or (entry.scope is Scope.FIRST and key not in holders):
                open_keys.discard(key)
                holders.pop(key, None)
            elif entry.image is not None:
                holders.setdefault(key, []).append(rank)
    return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}


def equal_by_image(
    doubt: Mapping[Key, Sequence[int]],
    layouts: Sequence[Layout],
    roots: Mapping[tuple[int, str], bytes],
) -> set[Key]:
    """Keys of ``doubt`` whose tensors are equal on all their ranks because the images that hold them are. ``roots``
    by (rank, image name)."""
    return {
        key for key, ranks in doubt.items() if len({_image_of(layouts[r], key, r, roots) for r in ranks}) == 1
    }


def images_of(doubt: Mapping[Key, Sequence[int]], layouts: Sequence[Layout]) -> set[tuple[int, str]]:
    """(rank, image name) of all images that hold a key of ``doubt``."""
    found = set()
    for (part, key), ranks in doubt.items():
        for rank in ranks:
            entry = find(layouts[rank], (part, key))
            assert entry.image is not None
            found.add((rank, layouts[rank].images[entry.image].name))
    return found


def find(layout: Layout, key: Key) -> Entry:
    """The stored entry ``key`` of a layout that has it."""
    return next(e for e in layout.entries if (e.part, e.key) == key and e.image is not None)


def _image_of(
    layout: Layout, key: Key, rank: int, roots: Mapping[tuple[int, str], bytes]
) -> tuple[int, bytes, bytes, int]:
    entry = find(layout, key)
    assert entry.image is not None
    image = layout.images[entry.image]
    return image.nbytes, image.header, roots[rank, image.name], entry.offset


def names_of(
    entries: Iterable[Entry], places: Iterable[str], layouts: Sequence[Layout], own: int | None
) -> set[str]:
    """What identifies stored things among the ranks that load: tensors by part and key, plain values by their path.

    Where as many ranks load as saved, what several have for themselves is each one's own: it is told apart by
    ``own``, the rank.
    """
    suffix = f"@{own}" if own is not None else ""
    found = {place + suffix for place in places}
    private: Collection[Key] = ()
    if own is not None:
        counts: dict[Key, int] = {}
        some = {(entry.part, entry.key) for entry in entries}
        for layout in layouts:
            for entry in layout.entries:
                if entry.scope is not Scope.GLOBAL and (entry.part, entry.key) in some:
                    counts[entry.part, entry.key] = counts.get((entry.part, entry.key), 0) + 1
        private = {key for key, count in counts.items() if count > 1}
    for entry in entries:
        own_one = (entry.part, entry.key) in private
        found.add(f"={entry.part}/{entry.key}{suffix if own_one else ''}")
    return found
