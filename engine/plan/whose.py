"""Whose images a rank's structure and own tensors come from, where another number of ranks wrote them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..format.entries import Entry, ImageSpec, Layout, Scope

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


Holders = dict[int, Entry]
"""By rank: the entry that it stored for itself."""


def doubtful(
    wanted: Iterable[Entry], layouts: Sequence[Layout], first: int, *, own: bool
) -> dict[Key, Holders]:
    """Keys of ``wanted`` that several ranks have, each for itself, and nothing says whose counts: with what they have.

    ``first``: the rank at the save whose structure the reader takes. ``own``: it is that rank, and what that one has
    for itself is settled, unless it is wanted as a region of a tensor of the whole job.
    """
    scopes = {(e.part, e.key): e.scope for e in layouts[first].entries}
    open_keys: set[Key] = set()
    for entry in wanted:
        scope = scopes.get((entry.part, entry.key))
        settled = scope is Scope.GLOBAL or (own and scope is not None and entry.scope is not Scope.GLOBAL)
        if not settled:
            open_keys.add((entry.part, entry.key))
    holders: dict[Key, Holders] = {}
    for rank, layout in enumerate(layouts if open_keys else ()):
        for entry in layout.entries:
            key = (entry.part, entry.key)
            if key not in open_keys:
                continue
            if entry.scope is Scope.GLOBAL or (entry.scope is Scope.FIRST and key not in holders):
                open_keys.discard(key)
                holders.pop(key, None)
            elif entry.image is not None:
                holders.setdefault(key, {})[rank] = entry
    return {key: found for key, found in holders.items() if len(found) > 1}


def images_of(doubt: Mapping[Key, Holders], layouts: Sequence[Layout]) -> set[tuple[int, str]]:
    """(rank, image name) of all images that hold a key of ``doubt``."""
    return {
        (rank, _image_of(layouts[rank], entry).name)
        for holders in doubt.values()
        for rank, entry in holders.items()
    }


def equal_by_image(
    doubt: Mapping[Key, Holders], layouts: Sequence[Layout], roots: Mapping[tuple[int, str], bytes]
) -> set[Key]:
    """Keys of ``doubt`` whose tensors are equal on all their ranks because the images that hold them are, and they
    lie at one place of these. ``roots`` by (rank, image name)."""
    found = set()
    for key, holders in doubt.items():
        seen = set()
        for rank, entry in holders.items():
            image = _image_of(layouts[rank], entry)
            seen.add((image.header, entry.offset, roots[rank, image.name]))
        if len(seen) == 1:
            found.add(key)
    return found


def _image_of(layout: Layout, entry: Entry) -> ImageSpec:
    return layout.images[entry.image or 0]


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
        key = (entry.part, entry.key)
        found.add(name_of(key, own if key in private else None))
    return found


def name_of(key: Key, own: int | None) -> str:
    """What identifies a tensor, or rank ``own``'s own one, among the ranks that load."""
    return f"={key[0]}/{key[1]}" + (f"@{own}" if own is not None else "")


def twins(
    keys: Collection[Key], layouts: Sequence[Layout], own: int, takes: Callable[[Key, int], bool]
) -> dict[Key, Holders]:
    """Of ``keys`` those that rank ``own`` has for itself, and another rank too, which ``takes`` its own: with what
    these two have. Under another partition of as many ranks, the first may be a copy that nobody needs."""
    mine = {key: entry for key, entry in _private(layouts[own]).items() if key in keys}
    found: dict[Key, Holders] = {}
    for rank, layout in enumerate(layouts if mine else ()):
        if rank != own:
            theirs = _private(layout)
            for key in mine.keys() & theirs.keys() - found.keys():
                if takes(key, rank):
                    found[key] = {own: mine[key], rank: theirs[key]}
    return found


def _private(layout: Layout) -> dict[Key, Entry]:
    return {
        (entry.part, entry.key): entry
        for entry in layout.entries
        if entry.scope is not Scope.GLOBAL and entry.image is not None
    }
