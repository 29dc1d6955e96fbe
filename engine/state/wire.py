"""The state image on the wire: tags, limits, and how nodes nest. Neither torch nor numpy.

A state image is msgpack of ``{"v": 1, "parts": {part: node}}``. A node is

- nil, bool, float, str, bin, and integers of 64 bits: themselves;
- a map with string keys: a ``dict`` whose keys are all plain strings, in its order;
- an array ``[tag, ...]``: everything else, by :class:`Tag`.

Below, ``items`` is a map (all keys plain strings) or a flat array ``[key node, value node, ...]``;
``attributes`` is a map of instance attributes, left out where there are none.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

Node = Any
"""What msgpack gives back for one node."""

STATE_VERSION = 1

DEPTH_MAX = 64
"""Containers within containers, in the user's terms; deeper state is refused at save and at load."""

NODE_DEPTH_MAX = 2 * DEPTH_MAX + 8
"""The same on the wire: a container may cost two levels (attributes of a dict subclass, say)."""

STATE_BYTES_MAX = 1 << 30
"""A state image holds plain values; tensors lie in the images. Larger ones are refused."""

INLINE_BYTES_MAX = 64 << 10
"""numpy arrays above this are entries of an image; smaller ones lie in the state image."""


class Tag(enum.IntEnum):
    """First element of a tagged node. Stored: never renumbered."""

    REF = 1
    """[1, entry index] or [1, entry index, flags]: a tensor (flags: :data:`REQUIRES_GRAD`,
    :data:`PARAMETER`)."""
    ALIAS = 2
    """[2, n]: the n-th mutable container of the image once more (counted from 0 as they begin)."""
    LIST = 3
    TUPLE = 4
    """[tag, [node, ...]]"""
    DICT = 5
    """[5, [key node, value node, ...]]: a dict with other keys than plain strings."""
    SET = 6
    FROZENSET = 7
    """[tag, [node, ...]] in the order of the nodes' bytes."""
    BIGINT = 8
    """[8, two's complement, little-endian]"""
    COMPLEX = 9
    """[9, real, imaginary]"""
    BYTEARRAY = 10
    TEXT = 11
    """[11, UTF-8 with surrogates passed]: a str that is no valid Unicode text."""
    RANGE = 12
    SLICE = 13
    """[tag, start node, stop node, step node]"""
    ORDERED = 14
    """[14, items] or [14, items, attributes]: an OrderedDict."""
    DEFAULTDICT = 15
    """[15, items, factory name or nil]"""
    COUNTER = 16
    """[16, items]"""
    DEQUE = 17
    """[17, [node, ...], maxlen or nil]"""
    ARRAY = 18
    """[18, numpy dtype, shape, bytes]: a small numpy array, row-major."""
    SCALAR = 19
    """[19, numpy dtype, bytes]: a numpy scalar."""
    ARRAY_REF = 20
    """[20, entry index, numpy dtype, shape]: a numpy array that is an entry (raw bytes where torch lacks the
    dtype)."""
    TORCH = 21
    """[21, kind, text]: a torch dtype, device, layout or memory format, by name."""
    SIZE = 22
    """[22, [int, ...]]: a torch.Size."""
    GENERATOR = 23
    """[23, device, state bytes]: a torch.Generator."""
    NUMPY_DTYPE = 24
    """[24, text]"""
    DATE = 25
    """[25, year, month, day]"""
    TIME = 26
    """[26, hour, minute, second, microsecond, fold, zone node]"""
    DATETIME = 27
    """[27, year, month, day, hour, minute, second, microsecond, fold, zone node]"""
    TIMEDELTA = 28
    """[28, days, seconds, microseconds]"""
    TIMEZONE = 29
    """[29, days, seconds, microseconds, name or nil]: a fixed offset."""
    ZONE = 30
    """[30, key]: a zoneinfo.ZoneInfo."""
    PATH = 31
    """[31, class name, text node]"""
    ENUM = 32
    """[32, type, member name or nil] or [32, type, member name or nil, value node] (where it is a plain
    scalar)"""
    NAMEDTUPLE = 33
    """[33, type, [field, ...], [node, ...]] (attributes may follow)"""
    DATACLASS = 34
    """[34, type, {field: node}, [fields not set]] (attributes may follow)"""
    SUBDICT = 35
    """[35, type, items] (attributes may follow)"""
    SUBLIST = 36
    """[36, type, [node, ...]] (attributes may follow)"""
    SUBVALUE = 37
    """[37, type, base name, node] (attributes may follow): a subclass of an immutable builtin."""
    STATE = 38
    """[38, type, node]: what ``state_dict()`` of an object of that type gave; decodes to that value alone."""


REQUIRES_GRAD = 1
PARAMETER = 2

MUTABLE: frozenset[int] = frozenset(
    {
        Tag.LIST,
        Tag.DICT,
        Tag.SET,
        Tag.BYTEARRAY,
        Tag.ORDERED,
        Tag.DEFAULTDICT,
        Tag.COUNTER,
        Tag.DEQUE,
        Tag.ARRAY,
        Tag.GENERATOR,
        Tag.DATACLASS,
        Tag.SUBDICT,
        Tag.SUBLIST,
    }
)
"""Tags of nodes that :data:`Tag.ALIAS` counts; maps count too."""

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (int, float, complex, str, bytes, bytearray, bool, list, dict, tuple, set, frozenset)
}
"""Factories that a defaultdict may have."""

CONTAINER_LENGTHS: dict[int, tuple[int, ...]] = {
    Tag.LIST: (2,),
    Tag.TUPLE: (2,),
    Tag.SET: (2,),
    Tag.FROZENSET: (2,),
    Tag.DEQUE: (3,),
    Tag.DICT: (2,),
    Tag.ORDERED: (2, 3),
    Tag.DEFAULTDICT: (3,),
    Tag.COUNTER: (2,),
}
"""How many elements the node of a builtin container may have, its tag included."""

ITEM_TAGS: dict[int, int] = {Tag.DICT: 1, Tag.ORDERED: 1, Tag.DEFAULTDICT: 1, Tag.COUNTER: 1, Tag.SUBDICT: 2}
"""Where the items of a dict-like node lie."""

SEQUENCE_TAGS: dict[int, int] = {
    Tag.LIST: 1,
    Tag.TUPLE: 1,
    Tag.SET: 1,
    Tag.FROZENSET: 1,
    Tag.DEQUE: 1,
    Tag.SUBLIST: 2,
    Tag.NAMEDTUPLE: 3,
}
"""Where the element nodes of a sequence-like node lie."""

ATTRIBUTE_TAGS: dict[int, int] = {
    Tag.ORDERED: 2,
    Tag.NAMEDTUPLE: 4,
    Tag.DATACLASS: 4,
    Tag.SUBDICT: 3,
    Tag.SUBLIST: 3,
    Tag.SUBVALUE: 4,
}
"""Where instance attributes lie, if any."""


def tag_of(node: Node) -> int:
    """The tag of a tagged node, else -1."""
    if type(node) is list and node and type(node[0]) is int:
        return node[0]
    return -1


def children(node: Node) -> Iterator[Node]:
    """The nodes directly inside ``node``, in the order in which they were written."""
    if type(node) is dict:
        yield from node.values()
        return
    tag = tag_of(node)
    if tag in ITEM_TAGS:
        items = node[ITEM_TAGS[tag]]
        yield from items.values() if type(items) is dict else items
    elif tag in SEQUENCE_TAGS:
        yield from node[SEQUENCE_TAGS[tag]]
    elif tag == Tag.DATACLASS:
        yield from node[2].values()
    elif tag == Tag.SUBVALUE:
        yield node[3]
    elif tag == Tag.STATE:
        yield node[2]
    place = ATTRIBUTE_TAGS.get(tag)
    if place is not None and len(node) > place:
        yield from node[place].values()
