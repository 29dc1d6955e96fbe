"""Nodes of user classes into instances, without running a constructor; or into :class:`Unknown`."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from .registry import VALUE_BASES, Unknown, set_attributes
from .wire import ATTRIBUTE_TAGS, Node, Tag

if TYPE_CHECKING:
    from .codec import Decoder


def decode_user(decoder: Decoder, node: list[Node]) -> Any:
    """The value of a node whose tag names a user class; Damaged for any other node."""
    tag, name = node[0], node[1] if len(node) > 1 else None
    if tag not in _DECODERS or type(name) is not str:
        raise decoder.damaged(node)
    place = ATTRIBUTE_TAGS.get(tag)
    has_attributes = place is not None and len(node) > place
    attributes = decoder.map(node[-1]) if has_attributes else {}
    return _DECODERS[tag](decoder, name, attributes, *(node[2:-1] if has_attributes else node[2:]))


def _finish(made: Any, attributes: dict[str, Any], stand_in: Unknown) -> Any:
    return made if set_attributes(made, attributes) else stand_in


def _enum(decoder: Decoder, name: str, attributes: dict[str, Any], member: str | None, *content: Node) -> Any:
    values = [decoder.value(item) for item in content]
    stand_in = Unknown(name, "enum", [member, *values])
    cls = decoder.registry.find(name, "enum")
    if cls is None or not issubclass(cls, enum.Enum):
        return stand_in
    if member is not None:
        found = cls.__members__.get(member)
    elif issubclass(cls, enum.Flag):
        try:
            found = cls(*values)
        except (ValueError, TypeError):
            return stand_in
    else:
        found = None
    same = found is not None and (
        not values or (type(found.value), found.value) == (type(values[0]), values[0])
    )
    return found if same or _both_nan(found, values) else stand_in


def _both_nan(member: Any, values: list[Any]) -> bool:
    return member is not None and bool(values) and member.value != member.value and values[0] != values[0]


def _namedtuple(
    decoder: Decoder, name: str, attributes: dict[str, Any], fields: list[str], nodes: Node
) -> Any:
    values = decoder.sequence(nodes)
    stand_in = Unknown(name, "namedtuple", values, attributes, list(fields))
    cls: Any = decoder.registry.find(name, "namedtuple")
    if cls is None or list(cls._fields) != list(fields) or len(values) != len(fields):
        return stand_in
    return _finish(tuple.__new__(cls, values), attributes, stand_in)


def _dataclass(
    decoder: Decoder, name: str, attributes: dict[str, Any], contents: Node, missing: list[str]
) -> Any:
    values = decoder.map(contents)
    stand_in = Unknown(name, "dataclass", values, attributes, list(missing))
    cls: Any = decoder.registry.find(name, "dataclass")
    # A class that has other fields now is another class: its new fields would have no value.
    if cls is None or {field.name for field in dataclasses.fields(cls)} != {*values, *missing}:
        return stand_in
    return _finish(_blank(cls), {**values, **attributes}, stand_in)


def _blank(cls: Any) -> Any:
    return object.__new__(cls)


def _subdict(decoder: Decoder, name: str, attributes: dict[str, Any], items: Node) -> Any:
    values = decoder.items(items)
    stand_in = Unknown(name, "dict", values, attributes)
    cls: Any = decoder.registry.find(name, "dict")
    if cls is None or issubclass(cls, collections.defaultdict):
        return stand_in
    base: Any = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    made = base.__new__(cls)
    for key, value in values.items():
        base.__setitem__(made, key, value)
    return _finish(made, attributes, stand_in)


def _sublist(decoder: Decoder, name: str, attributes: dict[str, Any], nodes: Node) -> Any:
    values = decoder.sequence(nodes)
    stand_in = Unknown(name, "list", values, attributes)
    cls: Any = decoder.registry.find(name, "list")
    if cls is None:
        return stand_in
    made = list.__new__(cls)
    list.extend(made, values)
    return _finish(made, attributes, stand_in)


def _subvalue(decoder: Decoder, name: str, attributes: dict[str, Any], kind: str, node: Node) -> Any:
    value = decoder.value(node)
    base: Any = VALUE_BASES[kind]
    if type(value) is not base:
        raise decoder.damaged(node, f"expected a {kind}")
    stand_in = Unknown(name, kind, value, attributes)
    cls: Any = decoder.registry.find(name, kind)
    if cls is None or issubclass(cls, enum.Enum) or hasattr(cls, "n_sequence_fields"):
        return stand_in
    return _finish(base.__new__(cls, value), attributes, stand_in)


_DECODERS: dict[int, Any] = {
    Tag.ENUM: _enum,
    Tag.NAMEDTUPLE: _namedtuple,
    Tag.DATACLASS: _dataclass,
    Tag.SUBDICT: _subdict,
    Tag.SUBLIST: _sublist,
    Tag.SUBVALUE: _subvalue,
}
