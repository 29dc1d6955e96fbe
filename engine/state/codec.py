"""State images into values. Imports torch and numpy only where a value of theirs is decoded, and where they
are absent (or not wanted) gives stand-ins.

Decoding executes nothing that a file names, and ends: depth, sizes and references are checked; whatever does
not follow :mod:`~everstep.state.wire` raises Damaged.
"""

from __future__ import annotations

import collections
import copy
import datetime
import pathlib
import struct
import zoneinfo
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from ..errors import Damaged, UnknownFormat
from .decode_user import decode_user
from .encode import Encoder
from .registry import REGISTRY, ObjectState, Registry, Unknown
from .wire import (
    CONTAINER_LENGTHS,
    FACTORIES,
    ITEM_TAGS,
    MUTABLE,
    NODE_DEPTH_MAX,
    PARAMETER,
    REQUIRES_GRAD,
    SEQUENCE_TAGS,
    STATE_BYTES_MAX,
    STATE_VERSION,
    Node,
    Tag,
    children,
    tag_of,
)

Resolve = Callable[[int], Any]
"""From the index of an entry to what stands for it in the value."""

_ATOMS = (type(None), bool, int, float, str, bytes)
_REF, _ALIAS = int(Tag.REF), int(Tag.ALIAS)
_REFERRING = frozenset({_REF, int(Tag.ARRAY_REF), _ALIAS})


def encode_plain(parts: dict[str, Any]) -> bytes:
    """The state image of parts without tensors, as a process without torch can write it."""
    return Encoder().encode_parts(parts)


def decode_state(
    data: bytes,
    resolve: Resolve,
    registry: Registry | None = None,
    *,
    light: bool = False,
    name: str = "state",
) -> dict[str, Any]:
    """All parts of a state image. ``light``: never import torch or numpy; :class:`Unknown` stands for their
    values.

    Raises Damaged or UnknownFormat, naming ``name``.
    """
    image = StateImage(data, registry, light=light, name=name)
    decoder = image.decoder(resolve)
    return {part: decoder.value(node) for part, node in image.parts.items()}


class StateImage:
    """A parsed state image: the nodes of its parts, before any value is made of them.

    This is the *skeleton* that restoring compares with a live target. Not changed after it is made.
    """

    def __init__(
        self,
        data: bytes,
        registry: Registry | None = None,
        *,
        light: bool = False,
        name: str = "state",
    ) -> None:
        self.name = name
        self.light = light
        self.registry = registry or REGISTRY
        self.parts = _parse(data, name)
        self._containers: list[Node] | None = None

    @classmethod
    def of_nodes(cls, parts: dict[str, Node], name: str) -> StateImage:
        """An image of nodes that were made otherwise, and hold no aliases."""
        made = cls.__new__(cls)
        made.name, made.light, made.registry = name, False, REGISTRY
        made.parts, made._containers = parts, None
        return made

    def damaged(self, node: Node, why: str = "not a known node") -> Damaged:
        return Damaged(f"{self.name}: a malformed node", found=f"{why}: {_shown(node)}", name=self.name)

    def decoder(self, resolve: Resolve, *, keep_types: bool = False) -> Decoder:
        """What makes values of nodes; values made by one decoder share aliased containers. ``keep_types``:
        the state of an object comes as an :class:`ObjectState`."""
        return Decoder(self, resolve, keep_types=keep_types)

    def container(self, number: int) -> Node:
        """The node that alias ``number`` means."""
        containers = self._all_containers()
        if type(number) is not int or not 0 <= number < len(containers):
            raise Damaged(
                f"{self.name}: alias of a container that is not there", found=number, name=self.name
            )
        return containers[number]

    def _all_containers(self) -> list[Node]:
        if self._containers is None:
            self._containers = [
                node
                for part in self.parts.values()
                for node in walk(part, self.name)
                if type(node) is dict or tag_of(node) in MUTABLE
            ]
        return self._containers

    def only(self, parts: Collection[str]) -> StateImage:
        """This image with some of its parts alone."""
        made = copy.copy(self)
        made._containers = self._all_containers()
        made.parts = {part: self.parts[part] for part in parts}
        return made

    def refs(self, part: str) -> set[int]:
        """Indices of the entries that ``part`` refers to."""
        return self.refs_of(self.parts[part])

    def refs_of(self, node: Node) -> set[int]:
        """Indices of the entries that ``node`` refers to."""
        todo: list[tuple[Node, int]] = [(node, 0)]
        found, seen = set[int](), set[int]()
        while todo:
            node, depth = todo.pop()
            tag = tag_of(node)
            if tag in _REFERRING:
                if len(node) < 2 or type(node[1]) is not int:
                    raise _malformed(node, self.name)
                if tag != _ALIAS:
                    found.add(node[1])
                elif node[1] not in seen:
                    seen.add(node[1])
                    todo.append((self.container(node[1]), 0))
            elif type(node) is dict or type(node) is list:
                inside = _inside(node, self.name)
                if inside and depth >= NODE_DEPTH_MAX:
                    raise _too_deep(self.name)
                todo += [(child, depth + 1) for child in inside if type(child) not in _ATOMS]
        return found


def walk(node: Node, name: str = "state", depth: int = 0) -> Iterator[Node]:
    """``node`` and all nodes inside it, in the order in which they were written."""
    if depth > NODE_DEPTH_MAX:
        raise _too_deep(name)
    yield node
    if type(node) is dict or type(node) is list:
        for child in _inside(node, name):
            if type(child) in _ATOMS and depth < NODE_DEPTH_MAX:
                yield child
            else:
                yield from walk(child, name, depth + 1)


def _inside(node: Node, name: str) -> list[Node]:
    """The nodes directly inside a map or an array. Raises Damaged."""
    try:
        return list(children(node))
    except (IndexError, AttributeError, TypeError):
        raise _malformed(node, name) from None


def _malformed(node: Node, name: str) -> Damaged:
    return Damaged(f"{name}: a malformed node", found=_shown(node), name=name)


def _too_deep(name: str) -> Damaged:
    return Damaged(f"{name}: nodes lie too deep", expected=NODE_DEPTH_MAX, name=name)


def _parse(data: bytes, name: str) -> dict[str, Node]:
    if len(data) > STATE_BYTES_MAX:
        raise Damaged(f"{name}: too large", found=len(data), expected=STATE_BYTES_MAX, name=name)
    try:
        top = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        raise Damaged(f"{name}: not a state image", found=str(error), name=name) from None
    if type(top) is not dict or "v" not in top:
        raise Damaged(f"{name}: not a state image", found=type(top).__name__, expected="a map", name=name)
    if top["v"] != STATE_VERSION:
        raise UnknownFormat(
            f"{name}: an unknown version of the state image",
            found=top["v"],
            expected=STATE_VERSION,
            hint="Read it with a newer release",
            name=name,
        )
    parts = top.get("parts")
    if set(top) != {"v", "parts"} or type(parts) is not dict or not all(type(key) is str for key in parts):
        raise Damaged(f"{name}: not a state image", found=sorted(map(str, top)), name=name)
    return parts


class Decoder:
    """Makes values of the nodes of one image. Not shared between threads."""

    def __init__(self, image: StateImage, resolve: Resolve, *, keep_types: bool = False) -> None:
        self.image = image
        self.keep_types = keep_types
        self.registry = image.registry
        self.light = image.light
        self._resolve = resolve
        self._made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._wrapped: dict[tuple[int, int | str], Any] = {}
        self._depth = 0

    def value(self, node: Node) -> Any:
        """The value of ``node``. Raises Damaged."""
        kind = type(node)
        if kind in _ATOMS:
            return node
        if kind is list and len(node) == 2 and type(node[0]) is int and node[0] == _REF:
            return self._plain_tensor(node)
        if kind is not dict and tag_of(node) < 0:
            raise self.damaged(node)
        if id(node) in self._made:
            return self._made[id(node)]
        if id(node) in self._open or self._depth > NODE_DEPTH_MAX:
            raise self.damaged(node, "a node that holds itself, or lies too deep")
        self._open.add(id(node))
        self._depth += 1
        try:
            made = self.map(node) if kind is dict else self._tagged(node)
        except RecursionError:
            if self._depth > 1:
                raise
            raise self.damaged(node, "containers lie too deep for this stack") from None
        except _MALFORMED as error:
            raise self.damaged(node, f"{type(error).__name__}: {error}") from None
        finally:
            self._open.discard(id(node))
            self._depth -= 1
        if kind is dict or node[0] in MUTABLE:
            self._made[id(node)] = made
        return made

    def _plain_tensor(self, node: list[Node]) -> Any:
        """As :meth:`value` of the node that most are, which is neither mutable nor deep."""
        try:
            return self.tensor(node[1])
        except _MALFORMED as error:
            raise self.damaged(node, f"{type(error).__name__}: {error}") from None

    def damaged(self, node: Node, why: str = "not a known node") -> Damaged:
        return Damaged(
            f"{self.image.name}: a malformed node", found=f"{why}: {_shown(node)}", name=self.image.name
        )

    def map(self, node: dict[str, Node]) -> dict[str, Any]:
        if not all(type(key) is str for key in node):
            raise self.damaged(node, "a key that is no text")
        return {key: self.value(child) for key, child in node.items()}

    def items(self, items: Node) -> dict[Any, Any]:
        """The contents of a dict-like node."""
        if type(items) is dict:
            return self.map(items)
        if type(items) is not list or len(items) % 2:
            raise self.damaged(items)
        pairs = [(self.value(items[at]), self.value(items[at + 1])) for at in range(0, len(items), 2)]
        found = dict(pairs)
        if len(found) != len(pairs):
            raise self.damaged(items, "a key that occurs twice")
        return found

    def sequence(self, nodes: Node) -> list[Any]:
        if type(nodes) is not list:
            raise self.damaged(nodes)
        return [self.value(node) for node in nodes]

    def _tagged(self, node: list[Node]) -> Any:
        tag = node[0]
        if tag == Tag.REF:
            return self.tensor(*node[1:])
        if tag == Tag.ALIAS:
            return self.value(self.image.container(node[1]))
        if tag == Tag.STATE:
            _, name, content = node
            return ObjectState(str(name), self.value(content)) if self.keep_types else self.value(content)
        if tag in CONTAINER_LENGTHS:
            if len(node) not in CONTAINER_LENGTHS[tag]:
                raise self.damaged(node, f"{len(node)} elements")
            return self._container(tag, node)
        if tag in _PLAIN:
            return _PLAIN[tag](self, *node[1:])
        if tag in (Tag.TORCH, Tag.SIZE, Tag.GENERATOR, Tag.NUMPY_DTYPE, Tag.ARRAY, Tag.SCALAR, Tag.ARRAY_REF):
            return self._foreign(tag, node)
        return decode_user(self, node)

    def _container(self, tag: int, node: list[Node]) -> Any:
        if tag in SEQUENCE_TAGS:
            values = self.sequence(node[1])
            if tag == Tag.DEQUE:
                _, _, maxlen = node
                return collections.deque(values, maxlen)
            return {Tag.LIST: list, Tag.TUPLE: tuple, Tag.SET: set, Tag.FROZENSET: frozenset}[Tag(tag)](
                values
            )
        items = self.items(node[ITEM_TAGS[tag]])
        if tag == Tag.DICT:
            return items
        if tag == Tag.COUNTER:
            counter: collections.Counter[Any] = collections.Counter()
            dict.update(counter, items)
            return counter
        if tag == Tag.DEFAULTDICT:
            return collections.defaultdict(FACTORIES[node[2]] if node[2] is not None else None, items)
        ordered = collections.OrderedDict(items)
        if len(node) > 2:
            ordered.__dict__.update(self.map(node[2]))
        return ordered

    def tensor(self, index: int, flags: int = 0) -> Any:
        """What stands for entry ``index``: the same object each time it occurs with the same flags."""
        if (
            type(index) is not int
            or index < 0
            or type(flags) is not int
            or flags & ~(REQUIRES_GRAD | PARAMETER)
        ):
            raise self.damaged([index, flags])
        key: tuple[int, int | str] = (index, flags)
        if key not in self._wrapped:
            found = self._resolve(index)
            if flags and not self.light:
                from .tensors import with_flags

                found = with_flags(found, flags)
            self._wrapped[key] = found
        return self._wrapped[key]

    def _foreign(self, tag: int, node: list[Node]) -> Any:
        """A value of torch or numpy, or what stands for it where that is absent."""
        if tag == Tag.ARRAY_REF and (self.light or type(node[1]) is not int):
            return self.tensor(node[1])
        if not self.light:
            try:
                from .foreign import decode_foreign
            except ImportError:
                pass
            else:
                if tag != Tag.ARRAY_REF:
                    return decode_foreign(self, node)
                key = (node[1], repr(node[2:]))
                if key not in self._wrapped:
                    self._wrapped[key] = decode_foreign(self, node)
                return self._wrapped[key]
        names = {Tag.TORCH: f"torch:{node[1]}", Tag.SIZE: "torch:Size", Tag.GENERATOR: "torch:Generator"}
        kinds = {Tag.NUMPY_DTYPE: "numpy:dtype", Tag.ARRAY: "numpy:ndarray", Tag.SCALAR: "numpy:generic"}
        return Unknown((names | kinds)[Tag(tag)], "wire", node)


def _shown(node: Node) -> str:
    try:
        return repr(node)[:80]
    except RecursionError:
        return type(node).__name__


_MALFORMED = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    UnicodeError,
    struct.error,
)


def _bigint(decoder: Decoder, data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _integers(*values: Any) -> None:
    if not all(value is None or type(value) is int for value in values):
        raise ValueError("expected integers")


def _range(decoder: Decoder, *bounds: Node) -> range:
    return range(*(decoder.value(bound) for bound in bounds))


def _slice(decoder: Decoder, *bounds: Node) -> slice:
    values = [decoder.value(bound) for bound in bounds]
    _integers(*values)
    return slice(*values)


def _timezone(
    decoder: Decoder, days: int, seconds: int, microseconds: int, name: str | None
) -> datetime.timezone:
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _zone(decoder: Decoder, key: str) -> Any:
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        # This machine's time zone database lacks it.
        return Unknown("zoneinfo:ZoneInfo", "wire", [Tag.ZONE.value, key])


def _zoned(decoder: Decoder, kind: type, fields: tuple[Any, ...], fold: int, zone: Node) -> Any:
    tzinfo = decoder.value(zone)
    if isinstance(tzinfo, Unknown):
        tag = Tag.TIME if kind is datetime.time else Tag.DATETIME
        return Unknown(f"datetime:{kind.__name__}", "wire", [tag.value, *fields, fold, zone])
    return kind(*fields, tzinfo=tzinfo, fold=fold)


def _path(decoder: Decoder, kind: str, text: Node) -> Any:
    classes: dict[str, type[pathlib.PurePath]] = {
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        "PosixPath": pathlib.PosixPath,
        "WindowsPath": pathlib.WindowsPath,
    }
    try:
        return classes[kind](decoder.value(text))
    except NotImplementedError:
        # The concrete class of another system.
        return Unknown(f"pathlib:{kind}", "wire", [Tag.PATH.value, kind, text])


_PLAIN: dict[int, Callable[..., Any]] = {
    Tag.BIGINT: _bigint,
    Tag.COMPLEX: lambda decoder, real, imag: complex(real, imag),
    Tag.BYTEARRAY: lambda decoder, data: bytearray(memoryview(data)),
    Tag.TEXT: lambda decoder, data: data.decode("utf-8", "surrogatepass"),
    Tag.RANGE: _range,
    Tag.SLICE: _slice,
    Tag.DATE: lambda decoder, year, month, day: datetime.date(year, month, day),
    Tag.TIME: lambda decoder, h, m, s, us, fold, zone: _zoned(
        decoder, datetime.time, (h, m, s, us), fold, zone
    ),
    Tag.DATETIME: lambda decoder, y, mo, d, h, m, s, us, fold, zone: _zoned(
        decoder, datetime.datetime, (y, mo, d, h, m, s, us), fold, zone
    ),
    Tag.TIMEDELTA: lambda decoder, days, seconds, microseconds: datetime.timedelta(
        days, seconds, microseconds
    ),
    Tag.TIMEZONE: _timezone,
    Tag.ZONE: _zone,
    Tag.PATH: _path,
}
