"""State images of several ranks as one: what a rank is given where its own image does not say all.

Works on nodes, before any value is made of them. Merged are dicts that hold tensors (their keys united) and the
states of optimizers that are keyed by names (their states and groups united); anything else is taken from the first
image that has it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ..errors import StateMismatch
from ..format.layout import Entry
from . import keys
from .codec import StateImage, walk
from .wire import ATTRIBUTE_TAGS, ITEM_TAGS, SEQUENCE_TAGS, Node, Tag, tag_of

NEAR_MAX = 5
"""How many keys of the checkpoint are named where none was found."""

_LISTS: tuple[dict[int, int], ...] = (ITEM_TAGS, SEQUENCE_TAGS, ATTRIBUTE_TAGS, {Tag.DATACLASS: 2})
_SINGLE: dict[int, int] = {Tag.STATE: 2, Tag.SUBVALUE: 3}
"""Where a tagged node has lists or maps of nodes, and where one node."""

_REFS = (Tag.REF, Tag.ARRAY_REF)
_GROUPS = {"state", "param_groups"}
_NAMED = {"params", "param_names"}


@dataclass(frozen=True, slots=True)
class Saved:
    """One rank's state image, and the entries of its layout, which the image refers to."""

    rank: int
    image: StateImage
    entries: Sequence[Entry]


@dataclass(slots=True)
class Skeleton:
    """Structure and plain values of a checkpoint as one rank is to see them. ``image`` refers to ``entries`` by
    index; ``ranks`` says of each from whose image the reference is."""

    image: StateImage
    entries: Sequence[Entry]
    ranks: Sequence[int]
    each: dict[str, list[Node]] = field(default_factory=dict)
    """By part: every rank's node of it, where all are needed."""

    @classmethod
    def of(cls, saved: Saved) -> Skeleton:
        """One rank's image alone."""
        return cls(saved.image, saved.entries, _Same(saved.rank, len(saved.entries)))


class _Same(Sequence[int]):
    """One number, ``count`` times."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._number


def merged(
    saved: Sequence[Saved],
    *,
    taken: Mapping[str, int] | None = None,
    each: Mapping[str, Sequence[int]] | None = None,
) -> Skeleton:
    """The images of ``saved`` as one; earlier ones win. ``taken``: parts that come from the image of one rank
    alone. ``each``: parts of which every named rank's own node is kept too. Ranks named so must be in ``saved``."""
    taken, each = taken or {}, each or {}
    copies = _copies(saved)
    parts: dict[str, Node] = {}
    for one in saved:
        for part in one.image.parts:
            if taken.get(part, one.rank) != one.rank:
                continue
            mine = copies[one.rank].part(part)
            parts[part] = _united(parts[part], mine) if part in parts else mine
    entries = [entry for one in saved for entry in one.entries]
    ranks = [one.rank for one in saved for _ in one.entries]
    lists = {
        part: [copies[rank].part(part) for rank in some if part in copies[rank].image.parts]
        for part, some in each.items()
    }
    return Skeleton(StateImage.of_nodes(parts, saved[0].image.name), entries, ranks, lists)


def selected(image: StateImage, parts: Collection[str], patterns: Collection[str]) -> StateImage:
    """``image`` with what matches one of ``patterns`` (over "part/key", ``*`` crosses slashes) and is in ``parts``.
    Dicts keep the keys that match or hold something that does; sequences stay whole. StateMismatch if nothing does,
    or if a pattern matches nothing."""
    copier = _Copier(image, 0)
    seen: list[str] = []
    used: set[str] = set()

    def wanted(path: str) -> bool:
        seen.append(path)
        hits = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
        used.update(hits)
        return bool(hits)

    found = {part: _kept(copier.part(part), part, wanted) for part in parts}
    for pattern in patterns:
        if pattern not in used:
            near = difflib.get_close_matches(pattern, seen, NEAR_MAX, 0.4)
            raise StateMismatch(
                f"no key of the checkpoint matches {pattern!r}",
                found=", ".join(near) or ", ".join(seen[:NEAR_MAX]),
                hint='Patterns are over "part/key", as `everstep show` lists them.',
            )
    return StateImage.of_nodes({p: node for p, node in found.items() if node is not _NOTHING}, image.name)


def differences(first: Saved, others: Iterable[Saved], parts: Collection[str]) -> dict[str, list[int]]:
    """Paths (part and key) of plain values that differ from those of ``first``, each with the ranks where they do.
    What only some ranks have, as with pipeline stages, is no difference; tensors are not looked at."""
    own = _Copier(first.image, 0)
    known: dict[tuple[str, bytes], list[str]] = {}
    found: dict[str, list[int]] = {}
    for other in others:
        copier = _Copier(other.image, 0)
        for part in parts:
            if part not in other.image.parts or part not in first.image.parts:
                continue
            key = (part, msgspec.msgpack.encode(other.image.parts[part]))
            if key not in known:
                mine = msgspec.msgpack.encode(first.image.parts[part])
                same = key[1] == mine
                known[key] = [] if same else list(_differing(own.part(part), copier.part(part), part))
            for path in known[key]:
                found.setdefault(path, []).append(other.rank)
    return found


# ------------------------------------------------------------------------------------------------ copying


def _copies(saved: Sequence[Saved]) -> dict[int, _Copier]:
    found: dict[int, _Copier] = {}
    base = 0
    for one in saved:
        found[one.rank] = _Copier(one.image, base)
        base += len(one.entries)
    return found


class _Copier:
    """Copies nodes of one image: references count from ``base``, and what the image says by an alias is the very
    same object in the copy."""

    def __init__(self, image: StateImage, base: int) -> None:
        self.image = image
        self._base = base
        self._made: dict[int, Node] = {}
        self._parts: dict[str, Node] = {}

    def part(self, part: str) -> Node:
        if part not in self._parts:
            node = self.image.parts[part]
            for inner in walk(node, self.image.name):
                tag = tag_of(inner)
                if tag in (*_REFS, Tag.ALIAS) and (len(inner) < 2 or type(inner[1]) is not int):
                    raise self.image.damaged(inner)
            self._parts[part] = self._node(node)
        return self._parts[part]

    def _node(self, node: Node) -> Node:
        if type(node) is not dict and type(node) is not list:
            return node
        if id(node) in self._made:
            return self._made[id(node)]
        tag = tag_of(node)
        if tag == Tag.ALIAS:
            return self._node(self.image.container(node[1]))
        if type(node) is dict:
            made: Node = {}
            self._made[id(node)] = made
            made.update((key, self._node(child)) for key, child in node.items())
            return made
        made = list(node)
        self._made[id(node)] = made
        if tag in _REFS:
            made[1] = node[1] + self._base
        for table in _LISTS:
            at = table.get(tag, len(node))
            if at < len(node):
                made[at] = self._all(node[at])
        at = _SINGLE.get(tag, len(node))
        if at < len(node):
            made[at] = self._node(node[at])
        return made

    def _all(self, inner: Node) -> Node:
        """A bare list or map of nodes."""
        if type(inner) is dict:
            return {key: self._node(child) for key, child in inner.items()}
        return [self._node(child) for child in inner]


# ------------------------------------------------------------------------------------------------ looking


def holds_refs(node: Node) -> bool:
    """Whether a copied ``node`` holds a tensor or a large array."""
    return any(tag_of(inner) in _REFS for inner in walk(node))


def _pairs(node: Node) -> dict[bytes, tuple[Node, Node]] | None:
    """{the key's bytes: (key node, node)} of a dict-like node, else None."""
    items: Node = node if type(node) is dict else None
    tag = tag_of(node)
    if tag in ITEM_TAGS:
        items = node[ITEM_TAGS[tag]]
    if type(items) is dict:
        return {msgspec.msgpack.encode(key): (key, child) for key, child in items.items()}
    if type(items) is list:
        return {
            msgspec.msgpack.encode(items[at]): (items[at], items[at + 1])
            for at in range(0, len(items) - 1, 2)
        }
    return None


def _with_pairs(node: Node, pairs: Mapping[bytes, tuple[Node, Node]]) -> Node:
    """``node`` (a copied dict-like one, changed in place) with other contents."""
    plain = all(type(key) is str for key, _ in pairs.values())
    items: Node = dict(pairs.values()) if plain else [one for pair in pairs.values() for one in pair]
    if type(node) is dict:
        if plain:
            node.clear()
            node.update(items)
            return node
        return [Tag.DICT.value, items]
    node[ITEM_TAGS[tag_of(node)]] = items
    return node


def _kind(node: Node) -> int:
    """The tag of a node, where a map is a dict."""
    return Tag.DICT.value if type(node) is dict else tag_of(node)


def _component(key: Node) -> str:
    return keys.component(key if type(key) is not list else object(), key)


def _is_optimizer(node: Node) -> bool:
    """Whether this is an optimizer's state that is keyed by the names of parameters."""
    if type(node) is not dict or not set(node) >= _GROUPS or type(node["state"]) is not dict:
        return False
    groups = _elements(node["param_groups"])
    if groups is None or not all(type(group) is dict and "params" in group for group in groups):
        return False
    names = [_elements(group["params"]) for group in groups]
    return all(some is not None and all(type(name) is str for name in some) for some in names)


def _elements(node: Node) -> list[Node] | None:
    tag = tag_of(node)
    return node[SEQUENCE_TAGS[tag]] if tag in (Tag.LIST, Tag.TUPLE) else None


# ------------------------------------------------------------------------------------------------ uniting


def _united(mine: Node, other: Node) -> Node:
    """``mine`` (changed in place) with what only ``other`` has."""
    if mine is other or _kind(mine) != _kind(other):
        return mine
    if tag_of(mine) == Tag.STATE:
        mine[2] = _united(mine[2], other[2])
        return mine
    if _is_optimizer(mine) and _is_optimizer(other):
        return _united_optimizer(mine, other)
    if type(mine) is dict and set(mine) >= _GROUPS:
        return mine  # keyed by position: the same number on two ranks is another parameter
    ours, theirs = _pairs(mine), _pairs(other)
    if ours is None or theirs is None or not (holds_refs(mine) or holds_refs(other)):
        return mine
    both = {
        key: (pair[0], _united(pair[1], theirs[key][1])) if key in theirs else pair
        for key, pair in ours.items()
    }
    made = _with_pairs(mine, {**theirs, **both} if not ours else {**both, **_absent(theirs, ours)})
    if tag_of(made) == Tag.ORDERED:
        _unite_metadata(made, other)
    return made


def _absent(
    theirs: Mapping[bytes, tuple[Node, Node]], ours: Mapping[bytes, tuple[Node, Node]]
) -> dict[bytes, tuple[Node, Node]]:
    return {key: pair for key, pair in theirs.items() if key not in ours}


def _unite_metadata(mine: Node, other: Node) -> None:
    """The versions of modules that torch keeps beside a module's state."""
    if len(mine) > 2 and len(other) > 2:
        ours, theirs = _pairs(mine[2].get("_metadata")), _pairs(other[2].get("_metadata"))
        if ours is not None and theirs is not None:
            mine[2]["_metadata"] = _with_pairs(mine[2]["_metadata"], {**theirs, **ours})


def _united_optimizer(mine: Node, other: Node) -> Node:
    mine["state"] = _with_pairs(
        mine["state"], {**(_pairs(other["state"]) or {}), **(_pairs(mine["state"]) or {})}
    )
    groups, theirs = _elements(mine["param_groups"]) or [], _elements(other["param_groups"]) or []
    known = {name for group in groups for name in _elements(group["params"]) or []}
    for group in theirs:
        # Groups follow each other, without the parameters that were there already.
        names = _elements(group["params"]) or []
        kept = [at for at, name in enumerate(names) if name not in known]
        if kept:
            lists = {key: _elements(group[key]) or [] for key in _NAMED if key in group}
            short = {key: [Tag.LIST.value, [some[at] for at in kept]] for key, some in lists.items()}
            groups.append({**group, **short})
    return mine


# ---------------------------------------------------------------------------------------------- comparing


def _differing(mine: Node, other: Node, path: str) -> Iterator[str]:
    """Paths of plain values of which both have one, and not the same."""
    if tag_of(mine) in _REFS and tag_of(other) in _REFS:
        if mine[2:] != other[2:] and tag_of(mine) == Tag.ARRAY_REF:
            yield path
        return
    if _kind(mine) != _kind(other):
        yield path
        return
    if tag_of(mine) == Tag.STATE:
        yield from _differing(mine[2], other[2], path)
    elif _is_optimizer(mine) and _is_optimizer(other):
        yield from _differing_optimizer(mine, other, path)
    elif (ours := _pairs(mine)) is not None and (theirs := _pairs(other)) is not None:
        if not (holds_refs(mine) or holds_refs(other)) and ours.keys() != theirs.keys():
            yield path
            return
        for key, (node, value) in ours.items():
            if key in theirs:
                yield from _differing(value, theirs[key][1], f"{path}/{_component(node)}")
    elif (some := _elements(mine)) is not None and holds_refs(mine):
        more = _elements(other) or []
        if len(some) != len(more):
            yield path
            return
        for at, (one, two) in enumerate(zip(some, more, strict=True)):
            yield from _differing(one, two, f"{path}/[{at}]")
    elif msgspec.msgpack.encode(mine) != msgspec.msgpack.encode(other):
        yield path


def _differing_optimizer(mine: Node, other: Node, path: str) -> Iterator[str]:
    for name, value in mine["state"].items():
        if name in other["state"]:
            yield from _differing(value, other["state"][name], f"{path}/state/{_component(name)}")
    groups, theirs = _elements(mine["param_groups"]) or [], _elements(other["param_groups"]) or []
    # Pipeline stages need not have the same groups: those that share a parameter are compared.
    number_of = {name: at for at, group in enumerate(theirs) for name in _elements(group["params"]) or []}
    for at, group in enumerate(groups):
        shared = {number_of[name] for name in _elements(group["params"]) or [] if name in number_of}
        for more in (theirs[number] for number in sorted(shared)):
            for name in sorted((set(group) & set(more)) - _NAMED):
                yield from _differing(group[name], more[name], f"{path}/param_groups/[{at}]/{name}")


# ---------------------------------------------------------------------------------------------- selecting

_NOTHING: Node = object()


def _kept(node: Node, path: str, wanted: Callable[[str], bool]) -> Node:
    """What of a copied ``node`` is wanted; :data:`_NOTHING` if nothing is."""
    if wanted(path):
        return node
    if tag_of(node) == Tag.STATE:
        inner = _kept_items(node[2], path, wanted)
        return _NOTHING if inner is _NOTHING else [*node[:2], inner]
    return _kept_items(node, path, wanted)


def _kept_items(node: Node, path: str, wanted: Callable[[str], bool]) -> Node:
    pairs = _pairs(node)
    if pairs is not None:
        kept = {
            key: (name, inner)
            for key, (name, child) in pairs.items()
            if (inner := _kept(child, f"{path}/{_component(name)}", wanted)) is not _NOTHING
        }
        return _with_pairs(node, kept) if kept else _NOTHING
    some = _elements(node)
    if some is not None:
        inside = [_kept(child, f"{path}/[{at}]", wanted) for at, child in enumerate(some)]
        return node if any(inner is not _NOTHING for inner in inside) else _NOTHING
    return _NOTHING
