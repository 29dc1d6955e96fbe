"""Values into nodes. Knows the standard library's types; torch and numpy come in through ``handlers`` and
``other``.

An :class:`Encoder` serves one flattening, on one thread. It keeps no reference beyond that.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from ..errors import UnsupportedValue
from ..format.entries import ROOT, path_of
from . import keys
from .registry import VALUE_BASES, Unknown, attributes_of, type_name
from .wire import DEPTH_MAX, FACTORIES, STATE_BYTES_MAX, STATE_VERSION, Node, Tag

Path = tuple[Any, ...]
Handler = Callable[["Encoder", Any, str, Path], Node]

_ATOMS = frozenset({type(None), bool, float})
_TEXT_KEYS = {str}
_INTEGERS = {int}
_PLAIN_KEYS_MAX = 1 << 17
_plain_keys: set[str] = set()
"""String keys known to need no escape. Only ever added to, or cleared."""
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


class Encoder:
    """Walks values, giving nodes. ``text`` is the key text of the value's place, ``path`` the typed path."""

    handlers: ClassVar[dict[type, Handler]] = {}
    leaf_types: frozenset[type] = frozenset()
    """Exact types that :meth:`leaf` takes; asked first, for speed."""

    def __init__(self) -> None:
        self.part = ""
        self._ordinals: dict[int, int] = {}
        self._alive: list[object] = []
        self._in_key = False

    def encode_parts(self, parts: Mapping[str, Any]) -> bytes:
        """The state image of ``parts``. Raises UnsupportedValue naming the path."""
        nodes: dict[str, Node] = {}
        for part, value in parts.items():
            if type(part) is not str or not part.isprintable() or not part:
                raise UnsupportedValue(
                    "a part's name must be a non-empty printable text", found=repr(part), path=""
                )
            self.part = part
            try:
                nodes[part] = self.node(value, "", ())
            except RecursionError:
                raise UnsupportedValue(f"{part}: containers lie too deep for this stack", path=part) from None
        data: bytes = msgspec.msgpack.encode({"v": STATE_VERSION, "parts": nodes})
        if len(data) > STATE_BYTES_MAX:
            raise UnsupportedValue(
                "plain values take too much room", found=len(data), expected=STATE_BYTES_MAX, path=""
            )
        return data

    # What a subclass adds.
    def leaf(self, value: Any, text: str, path: Path, key: Any) -> Node:
        """A value of one of :attr:`leaf_types`; ``path`` is its parent's, ``key`` its own last component."""
        raise NotImplementedError

    def other(self, value: Any, text: str, path: Path) -> Node | None:
        """A value that no handler knows; None where this does not know it either."""
        return None

    def refuse(self, value: Any, text: str, why: str, hint: str | None = None) -> UnsupportedValue:
        """The error for a value that cannot be stored, to be raised by the caller."""
        where = path_of(self.part, text)
        kind = type(value)
        return UnsupportedValue(
            f"{where}: {why}",
            found=f"{kind.__module__}.{kind.__qualname__}",
            hint=hint,
            path=where,
        )

    # The walk.
    def node(self, value: Any, text: str, path: Path) -> Node:
        """The node of any value."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is str:
            return value if value.isascii() else _text(value)
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else _bigint(value)
        if kind in self.leaf_types:
            if self._in_key:
                raise self.refuse(value, text, "a tensor cannot be a key or an element of a set")
            return self.leaf(value, text or ROOT, path[:-1], path[-1] if path else None)
        handler = self.handlers.get(kind) or HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value, text, path)
        found = self.other(value, text, path)
        return found if found is not None else _user(self, value, text, path)

    def enter(self, value: object, text: str, path: Path) -> Node | None:
        """Begin a mutable container: its alias node if it was met before, else None (then :meth:`leave`
        it)."""
        if self._in_key:
            raise self.refuse(value, text, "a mutable value cannot be a key or an element of a set")
        if len(path) > DEPTH_MAX:
            raise self.refuse(value, text, f"containers lie more than {DEPTH_MAX} deep")
        number = self._ordinals.get(id(value))
        if number is None:
            # Inverted while the container is open: then meeting it again is a cycle.
            self._ordinals[id(value)] = ~len(self._ordinals)
            # Keeps an object that was made on the fly, so that its id is not given to another one.
            self._alive.append(value)
            return None
        if number < 0:
            raise self.refuse(value, text, "a container holds itself")
        return [Tag.ALIAS.value, number]

    def leave(self, value: object) -> None:
        self._ordinals[id(value)] = ~self._ordinals[id(value)]

    def items(self, items: Mapping[Any, Any], view: Iterable[tuple[Any, Any]], text: str, path: Path) -> Node:
        """The ``items`` of a dict-like value: a map (perhaps encoded already) if all keys are plain strings, else a
        flat array."""
        if not set(map(type, items)) <= _TEXT_KEYS:
            return self._pairs(view, text, path)
        plain = _plain_keys.issuperset(items) or _learn_plain(items)
        if not plain and not _all_unicode(items):
            return self._pairs(view, text, path)
        parent = f"{text}/" if text else ""
        out: dict[str, Node] = {}
        leaf_types = self.leaf_types
        for key, value in view:
            kind = type(value)
            if kind in _ATOMS:
                out[key] = value
                continue
            place = parent + (key if plain else keys.text_component(key))
            if kind in leaf_types:
                out[key] = self.leaf(value, place, path, key)
            elif kind is dict:
                out[key] = _dict(self, value, place, (*path, key))
            else:
                out[key] = self.node(value, place, (*path, key))
        return out

    def _pairs(self, view: Iterable[tuple[Any, Any]], text: str, path: Path) -> list[Node]:
        out: list[Node] = []
        for key, value in view:
            node = key if type(key) is int and _INT_MIN <= key <= _INT_MAX else self.key(key, text, path)
            out.append(node)
            place = keys.join(text, keys.component(key, node))
            out.append(self.node(value, place, (*path, key)))
        return out

    def key(self, key: Any, text: str, path: Path) -> Node:
        """The node of a dict key or an element of a set, which must not be mutable."""
        kind = type(key)
        if kind is str or kind is int or kind in _ATOMS:
            return self.node(key, text, path)
        before, self._in_key = self._in_key, True
        try:
            return self.node(key, keys.join(text, "<key>"), path)
        finally:
            self._in_key = before

    def sequence(self, values: Iterable[Any], text: str, path: Path) -> list[Node]:
        if len(path) > DEPTH_MAX:
            raise self.refuse(values, text, f"containers lie more than {DEPTH_MAX} deep")
        values = list(values)
        # The state of Python's random numbers is hundreds of them: a call for each would take a tenth of all.
        if {*map(type, values)} == _INTEGERS and min(values) >= _INT_MIN and max(values) <= _INT_MAX:
            return values
        out: list[Node] = []
        parent = f"{text}/[" if text else "["
        for index, value in enumerate(values):
            if type(value) in _ATOMS:
                out.append(value)
            else:
                out.append(self.node(value, f"{parent}{index}]", (*path, index)))
        return out

    def attributes(self, attributes: dict[str, Any], text: str, path: Path) -> list[Node]:
        """``[]``, or a list of one map: what follows a node whose object has instance attributes."""
        if not attributes:
            return []
        place = keys.join(text, "~a")
        items = self.items(attributes, attributes.items(), place, (*path, "~a"))
        if type(items) is list:
            raise self.refuse(attributes, place, "names of attributes must be plain texts")
        return [items]


def _learn_plain(texts: Mapping[str, Any]) -> bool:
    """Whether no key needs an escape; if so they are remembered, as most states have the same keys again."""
    if not keys.are_plain(texts) or not _all_unicode(texts):
        return False
    if len(_plain_keys) > _PLAIN_KEYS_MAX:
        _plain_keys.clear()
    _plain_keys.update(texts)
    return True


def _all_unicode(texts: Iterable[str]) -> bool:
    joined = "".join(texts)
    return joined.isascii() or type(_text(joined)) is str


def _text(value: str) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError:
        return [Tag.TEXT.value, value.encode("utf-8", "surrogatepass")]
    return value


def _bigint(value: int) -> Node:
    return [Tag.BIGINT.value, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _dict(encoder: Encoder, value: dict[Any, Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    items = encoder.items(value, value.items(), text, path)
    encoder.leave(value)
    return [Tag.DICT.value, items] if type(items) is list else items


def _list(encoder: Encoder, value: list[Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    nodes = encoder.sequence(value, text, path)
    encoder.leave(value)
    return [Tag.LIST.value, nodes]


def _tuple(encoder: Encoder, value: tuple[Any, ...], text: str, path: Path) -> Node:
    return [Tag.TUPLE.value, encoder.sequence(value, text, path)]


def _ordered(encoder: Encoder, value: collections.OrderedDict[Any, Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    items = encoder.items(value, value.items(), text, path)
    after = encoder.attributes(value.__dict__, text, path)
    encoder.leave(value)
    return [Tag.ORDERED.value, items, *after]


def _defaultdict(encoder: Encoder, value: collections.defaultdict[Any, Any], text: str, path: Path) -> Node:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise encoder.refuse(factory, text, "the factory of a defaultdict must be a builtin type, or None")
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    items = encoder.items(value, value.items(), text, path)
    encoder.leave(value)
    return [Tag.DEFAULTDICT.value, items, name]


def _counter(encoder: Encoder, value: collections.Counter[Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    items = encoder.items(value, value.items(), text, path)
    after = encoder.attributes(value.__dict__, text, path)
    encoder.leave(value)
    if after:
        raise encoder.refuse(value, text, "a Counter with attributes of its own")
    return [Tag.COUNTER.value, items]


def _deque(encoder: Encoder, value: collections.deque[Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    nodes = encoder.sequence(value, text, path)
    encoder.leave(value)
    return [Tag.DEQUE.value, nodes, value.maxlen]


def _elements(encoder: Encoder, values: Iterable[Any], text: str, path: Path) -> list[Node]:
    if len(path) > DEPTH_MAX:
        raise encoder.refuse(values, text, f"containers lie more than {DEPTH_MAX} deep")
    nodes = [encoder.key(value, keys.join(text, "<element>"), (*path, None)) for value in values]
    # A set has no order of its own: equal sets must give equal bytes.
    return sorted(nodes, key=msgspec.msgpack.encode)


def _set(encoder: Encoder, value: set[Any], text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    nodes = _elements(encoder, value, text, path)
    encoder.leave(value)
    return [Tag.SET.value, nodes]


def _frozenset(encoder: Encoder, value: frozenset[Any], text: str, path: Path) -> Node:
    return [Tag.FROZENSET.value, _elements(encoder, value, text, path)]


def _bytearray(encoder: Encoder, value: bytearray, text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    encoder.leave(value)
    return [Tag.BYTEARRAY.value, bytes(value)]


def _slice(encoder: Encoder, value: slice, text: str, path: Path) -> Node:
    bounds = (value.start, value.stop, value.step)
    if not all(bound is None or type(bound) is int for bound in bounds):
        raise encoder.refuse(value, text, "a slice may have integers and None only")
    return [Tag.SLICE.value, *(encoder.node(bound, text, path) for bound in bounds)]


def _range(encoder: Encoder, value: range, text: str, path: Path) -> Node:
    bounds = (value.start, value.stop, value.step)
    return [Tag.RANGE.value, *(encoder.node(bound, text, path) for bound in bounds)]


def _zone(encoder: Encoder, zone: datetime.tzinfo | None, text: str) -> Node:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        named = datetime.timezone(offset).tzname(None) != zone.tzname(None)
        return [
            Tag.TIMEZONE.value,
            offset.days,
            offset.seconds,
            offset.microseconds,
            zone.tzname(None) if named else None,
        ]
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return [Tag.ZONE.value, zone.key]
    raise encoder.refuse(zone, text, "a time zone must be a datetime.timezone or a named zoneinfo.ZoneInfo")


def _date(encoder: Encoder, value: datetime.date, text: str, path: Path) -> Node:
    return [Tag.DATE.value, value.year, value.month, value.day]


def _clock(encoder: Encoder, value: datetime.time | datetime.datetime, text: str) -> list[Node]:
    zone = _zone(encoder, value.tzinfo, text)
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, zone]


def _time(encoder: Encoder, value: datetime.time, text: str, path: Path) -> Node:
    return [Tag.TIME.value, *_clock(encoder, value, text)]


def _datetime(encoder: Encoder, value: datetime.datetime, text: str, path: Path) -> Node:
    return [Tag.DATETIME.value, value.year, value.month, value.day, *_clock(encoder, value, text)]


def _timedelta(encoder: Encoder, value: datetime.timedelta, text: str, path: Path) -> Node:
    return [Tag.TIMEDELTA.value, value.days, value.seconds, value.microseconds]


def _path(encoder: Encoder, value: pathlib.PurePath, text: str, path: Path) -> Node:
    return [Tag.PATH.value, type(value).__name__, _text(str(value))]


def _unknown(encoder: Encoder, value: Unknown, text: str, path: Path) -> Node:
    kind, name = value.kind, value.type_name
    place = {
        "dict": Tag.SUBDICT,
        "list": Tag.SUBLIST,
        "namedtuple": Tag.NAMEDTUPLE,
        "dataclass": Tag.DATACLASS,
    }
    if kind == "wire":
        return value.value
    if kind == "enum":
        member, *content = value.value
        return [Tag.ENUM.value, name, member, *(encoder.node(item, text, path) for item in content)]
    if kind in VALUE_BASES:
        body = [Tag.SUBVALUE.value, name, kind, encoder.node(value.value, text, path)]
        return [*body, *encoder.attributes(value.attributes, text, path)]
    if kind == "namedtuple":
        nodes = encoder.sequence(value.value, text, path)
        after = encoder.attributes(value.attributes, text, path)
        return [Tag.NAMEDTUPLE.value, name, list(value.extra), nodes, *after]
    if kind not in place:
        raise encoder.refuse(value, text, f"a stand-in of the unknown kind {kind!r}")
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    if kind == "list":
        body = [Tag.SUBLIST.value, name, encoder.sequence(value.value, text, path)]
    else:
        items = encoder.items(value.value, value.value.items(), text, path)
        body = [place[kind].value, name, items] + ([list(value.extra)] if kind == "dataclass" else [])
    after = encoder.attributes(value.attributes, text, path)
    encoder.leave(value)
    return [*body, *after]


def _user(encoder: Encoder, value: Any, text: str, path: Path) -> Node:
    """Enums, named tuples, dataclasses and subclasses of builtins; anything else is refused."""
    if isinstance(value, type):
        raise encoder.refuse(value, text, "a class cannot be stored")
    if isinstance(value, enum.Enum):
        return _enum(encoder, value, text)
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        nodes = encoder.sequence(tuple.__iter__(value), text, path)
        after = encoder.attributes(attributes_of(value), text, path)
        return [Tag.NAMEDTUPLE.value, type_name(type(value)), list(fields), nodes, *after]
    if isinstance(value, (dict, list)) and not isinstance(value, collections.defaultdict):
        return _subclass(encoder, value, text, path)
    if dataclasses.is_dataclass(value):
        return _dataclass(encoder, value, text, path)
    for base, read in _CONTENTS.items():
        # A struct sequence (a C type such as torch.return_types.max) is no plain tuple subclass.
        if isinstance(value, base) and not hasattr(value, "n_sequence_fields"):
            body = [
                Tag.SUBVALUE.value,
                type_name(type(value)),
                base.__name__,
                encoder.node(read(value), text, path),
            ]
            return [*body, *encoder.attributes(attributes_of(value), text, path)]
    raise encoder.refuse(
        value,
        text,
        "a value of this type cannot be stored",
        "Store plain values, tensors, dataclasses or objects with state_dict() and load_state_dict()",
    )


# The contents of a value of a subclass, read without any method that the subclass may have changed.
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def _enum(encoder: Encoder, value: enum.Enum, text: str) -> Node:
    name = value.name if type(value).__members__.get(value.name or "") is value else None
    content = value.value
    if type(content) in _ATOMS or type(content) in (int, str, bytes):
        return [Tag.ENUM.value, type_name(type(value)), name, encoder.node(content, text, ())]
    if name is None:
        raise encoder.refuse(value, text, "an enum value without a name")
    return [Tag.ENUM.value, type_name(type(value)), name]


def _subclass(encoder: Encoder, value: Any, text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    name = type_name(type(value))
    if isinstance(value, list):
        body: list[Node] = [Tag.SUBLIST.value, name, encoder.sequence(list.__iter__(value), text, path)]
    else:
        base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        view = list(base.items(value))
        body = [Tag.SUBDICT.value, name, encoder.items(dict(view), view, text, path)]
    after = encoder.attributes(attributes_of(value), text, path)
    encoder.leave(value)
    return [*body, *after]


def _dataclass(encoder: Encoder, value: Any, text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    try:
        object.__new__(type(value))
    except TypeError:
        raise encoder.refuse(value, text, "a dataclass over a C type cannot be stored") from None
    attributes = attributes_of(value)
    names = [field.name for field in dataclasses.fields(value)]
    contents = {name: attributes.pop(name) for name in names if name in attributes}
    missing = [name for name in names if name not in contents]
    items = encoder.items(contents, contents.items(), text, path)
    after = encoder.attributes(attributes, text, path)
    encoder.leave(value)
    return [Tag.DATACLASS.value, type_name(type(value)), items, missing, *after]


HANDLERS: dict[type, Handler] = {
    bytes: lambda encoder, value, text, path: value,
    dict: _dict,
    list: _list,
    tuple: _tuple,
    complex: lambda encoder, value, text, path: [Tag.COMPLEX.value, value.real, value.imag],
    bytearray: _bytearray,
    set: _set,
    frozenset: _frozenset,
    range: _range,
    slice: _slice,
    collections.OrderedDict: _ordered,
    collections.defaultdict: _defaultdict,
    collections.Counter: _counter,
    collections.deque: _deque,
    datetime.date: _date,
    datetime.time: _time,
    datetime.datetime: _datetime,
    datetime.timedelta: _timedelta,
    datetime.timezone: lambda encoder, value, text, path: _zone(encoder, value, text),
    zoneinfo.ZoneInfo: lambda encoder, value, text, path: _zone(encoder, value, text),
    Unknown: _unknown,
}
HANDLERS.update(
    dict.fromkeys(
        (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath), _path
    )
)
