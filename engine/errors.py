"""The errors of everstep, as one tree.

::

    EverstepError
    ├── UsageError            the call is wrong; nothing was done
    │   ├── BadOption         an option's value cannot be used
    │   ├── StepOrder         steps must go up within an incarnation
    │   ├── Closed            the checkpointer was closed
    │   ├── NotLoaded         writing to a run with checkpoints without having loaded
    │   └── ConfigChanged     another configuration than the checkpoint's
    ├── StateError            the state given, or asked for, does not fit
    │   ├── UnsupportedValue  a value that cannot be stored, by its path
    │   └── StateMismatch     checkpoint and target differ: keys, shapes, dtypes, across ranks
    ├── RunError              what lies under the root
    │   ├── NotARun           the root is no run, or lies nowhere
    │   ├── NoCheckpoint      a run, but not the checkpoint asked for
    │   ├── UnknownFormat     written by a newer format, or with unknown features
    │   ├── Damaged           bytes that are not what was written
    │   │   └── PeerLost      another node does not answer, or gives what it should not
    │   ├── Pruned            removed by rotation meanwhile
    │   └── CannotTell        the storage did not answer; there may or may not be a checkpoint
    ├── OwnershipError        who may write
    │   ├── RunInUse          another live writer holds the run
    │   └── Superseded        a newer incarnation writes the run
    ├── CapacityError         room
    │   ├── MemoryTooSmall    shared memory for the slots
    │   └── StorageFull       disk or quota
    ├── SaveFailed            a flush did not become durable
    │   ├── SaveAbandoned     given up by policy or by another rank
    │   └── ReplicasDiffer    ranks that should hold equal bytes do not
    ├── AgentError            the background process
    └── RankError             another rank failed, or did not answer in time

Every error names what was found, what was expected and what to do, carries these as fields, and survives
pickling (errors travel between ranks and processes).
"""

from __future__ import annotations

from typing import Any


class EverstepError(Exception):
    """Base of all errors that everstep raises on purpose.

    ``found``, ``expected`` and ``hint`` are short texts; every other keyword becomes an entry of ``fields``
    (step, rank, key, path, ...), readable as an attribute.
    """

    def __init__(
        self,
        message: str,
        *,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        **fields: Any,
    ) -> None:
        self.message = message
        self.found = found
        self.expected = expected
        self.hint = hint
        self.fields = fields
        super().__init__(message)

    def __str__(self) -> str:
        text = self._where() + self.message
        if self.found is not None:
            text += f"; found: {self.found}"
        if self.expected is not None:
            text += f"; expected: {self.expected}"
        if self.hint:
            text += f". {self.hint}"
        # Whoever reads only the text must learn of which file or slot it speaks.
        name = self.fields.get("name")
        return f"{name}: {text}" if name and str(name) not in text else text

    def _where(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.found, self.expected, self.hint, self.fields)

    def to_wire(self) -> dict[str, Any]:
        """The error as plain values (texts and numbers), for messages between processes."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "found": None if self.found is None else str(self.found),
            "expected": None if self.expected is None else str(self.expected),
            "hint": self.hint,
            "fields": {
                k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in self.fields.items()
            },
        }


def _rebuild(
    cls: type[EverstepError],
    message: str,
    found: object,
    expected: object,
    hint: str | None,
    fields: dict[str, Any],
) -> EverstepError:
    return cls(message, found=found, expected=expected, hint=hint, **fields)


def from_wire(wire: dict[str, Any]) -> EverstepError:
    """The error that :meth:`EverstepError.to_wire` described; an unknown type becomes its base class."""
    cls = _by_name().get(str(wire.get("type")), EverstepError)
    return _rebuild(
        cls,
        str(wire.get("message")),
        wire.get("found"),
        wire.get("expected"),
        wire.get("hint"),
        dict(wire.get("fields") or {}),
    )


class UsageError(EverstepError):
    """The call is wrong; nothing was done."""


class BadOption(UsageError, ValueError):
    """An option's value cannot be used."""


class StepOrder(UsageError, ValueError):
    """Steps must go up within an incarnation."""


class Closed(UsageError):
    """The checkpointer was closed."""


class NotLoaded(UsageError):
    """Writing to a run that has checkpoints without having loaded one, or said why not."""


class ConfigChanged(UsageError):
    """The configuration differs from the one that the checkpoint was written with."""


class StateError(EverstepError):
    """The state given, or asked for, does not fit."""


class UnsupportedValue(StateError, TypeError):
    """A value that cannot be stored; ``path`` names where it lies in the state."""


class StateMismatch(StateError):
    """Checkpoint and target, or two ranks, differ in keys, shapes, dtypes or structure."""


class RunError(EverstepError):
    """What lies under the root is not what was needed."""


class NotARun(RunError, FileNotFoundError):
    """The root is no run, or cannot be one."""


class NoCheckpoint(RunError, LookupError):
    """A run, but without the checkpoint that was asked for."""


class _OfAnObject(RunError):
    """``name`` says of which file or slot; the text begins with it unless the message has it already."""

    def _where(self) -> str:
        name = self.fields.get("name")
        return f"{name}: " if name and str(name) not in self.message else ""


class UnknownFormat(_OfAnObject):
    """Written by a format version, or with a required feature, that this release does not know."""


class Damaged(_OfAnObject):
    """Bytes that are not what was written; ``name`` says of which file or slot."""


class PeerLost(Damaged):
    """Another node does not answer in time, hangs up, or gives what it should not. Of a node whose memory is read it
    is one holder less, as if its bytes were damaged: the next one serves, or the step is passed over."""


class Pruned(RunError):
    """The checkpoint was removed by rotation while it was read."""


class CannotTell(RunError):
    """The storage did not answer properly: there may or may not be a checkpoint. Never a fresh start."""


class OwnershipError(EverstepError):
    """Who may write."""


class RunInUse(OwnershipError):
    """Another writer of this run is alive."""


class Superseded(OwnershipError):
    """A newer incarnation writes the run; this one may not go on."""


class CapacityError(EverstepError):
    """Not enough room."""


class MemoryTooSmall(CapacityError):
    """Shared memory has no room for the slots."""


class StorageFull(CapacityError, OSError):
    """A disk or quota is full."""


class SaveFailed(EverstepError):
    """A flush did not become durable; ``step`` and ``tier`` name it. Earlier checkpoints are untouched."""


class SaveAbandoned(SaveFailed):
    """A flush was given up, by policy or because another rank could not finish its part."""


class ReplicasDiffer(SaveFailed):
    """Ranks that should hold equal bytes of a tensor do not: silent corruption, or a promise that does not hold. The
    text names the tensors and the ranks."""


class AgentError(EverstepError):
    """The background process could not be started or reached, or it died."""


class RankError(EverstepError):
    """Another rank failed or did not answer in time; ``ranks`` names which."""


def _by_name() -> dict[str, type[EverstepError]]:
    found: dict[str, type[EverstepError]] = {}
    todo: list[type[EverstepError]] = [EverstepError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
