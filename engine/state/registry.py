"""User classes by name: those that were registered, and those that are already imported. Nothing is ever
imported because a file names it, and no constructor runs.

A class that is not known comes back as :class:`Unknown`, which says its type, holds its plain contents, and
can be saved again unchanged.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import BadOption

C = TypeVar("C", bound=type)

VALUE_BASES: dict[str, type] = {
    cls.__name__: cls for cls in (str, int, float, complex, bytes, tuple, frozenset)
}
"""Immutable builtins whose subclasses can be stored."""


@dataclass(slots=True)
class Unknown:
    """Stands for a value whose class is not known here. ``kind`` is how it was stored ("dataclass", ...),
    ``value`` its plain contents: a dict for dict-like kinds, a list of fields and values for named tuples."""

    type_name: str
    kind: str
    value: Any
    attributes: dict[str, Any] = field(default_factory=dict)
    extra: Any = None

    def __hash__(self) -> int:
        return hash((self.type_name, self.kind))


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What ``state_dict()`` of an object gave, with the name of the object's type."""

    type_name: str
    value: Any


def type_name(cls: type) -> str:
    """``module:qualified name`` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


class Registry:
    """Which classes may come back from a file. Guarded by nothing: register at import time."""

    def __init__(self) -> None:
        self._known: dict[str, type] = {}

    def register(self, cls: C, name: str | None = None) -> C:
        """Let ``cls`` come back for values stored under ``name`` (its own name, if not given); a decorator
        too.

        Raises BadOption if another class has that name.
        """
        key = name or type_name(cls)
        if self._known.setdefault(key, cls) is not cls:
            raise BadOption(
                "two classes registered under one name", found=cls, expected=self._known[key], name=key
            )
        return cls

    def find(self, name: str, kind: str) -> type | None:
        """The class stored as ``name`` if it is known and is what ``kind`` says, else None."""
        cls = self._known.get(name) or _imported(name)
        return cls if cls is not None and _is_kind(cls, kind) else None


REGISTRY = Registry()
"""The registry used where none is given."""

register = REGISTRY.register
"""Let a class come back from files though it is not imported by the name that they have for it."""


def slot_names(cls: type) -> list[str]:
    """Names of all slots that ``cls`` and its bases declare."""
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                found.append(name)
    return found


def attributes_of(value: object) -> dict[str, Any]:
    """The instance attributes of ``value``, from its dict and its slots, without running a property."""
    found = dict(getattr(value, "__dict__", ()))
    for name in slot_names(type(value)):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return found


def set_attributes(value: object, attributes: dict[str, Any]) -> bool:
    """Put ``attributes`` back without running a setter; False if the class has no place for one of them."""
    slots = set(slot_names(type(value)))
    plain = getattr(value, "__dict__", None)
    for name, content in attributes.items():
        if name in slots:
            object.__setattr__(value, name, content)
        elif plain is not None:
            plain[name] = content
        else:
            return False
    return True


def _imported(name: str) -> type | None:
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    # vars() and not getattr(): a module's own __getattr__ may import.
    found: Any = module
    for step in qualname.split("."):
        space = getattr(found, "__dict__", None) if found is module or isinstance(found, type) else None
        if space is None or step not in space:
            return None
        found = space[step]
    return found if isinstance(found, type) and type_name(found) == name else None


def _is_kind(cls: type, kind: str) -> bool:
    if kind == "namedtuple":
        return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
    if kind == "dataclass":
        return dataclasses.is_dataclass(cls)
    bases: dict[str, type] = {"enum": enum.Enum, "dict": dict, "list": list, **VALUE_BASES}
    base = bases.get(kind)
    return base is not None and cls is not base and issubclass(cls, base)
