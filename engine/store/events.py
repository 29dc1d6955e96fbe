"""What happened in a run, for reports and post-mortems: one JSON object a line, one file per writer.

A writer keeps its current segment in memory and replaces the file as a whole, so a crash leaves the old lines
or the old and the new ones; a full segment is left behind and the next one begun. Events are a courtesy: no
decision of the engine reads them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import BadOption
from everstep.format import names

from .asking import SMALL_BYTES_MAX, each, reading, writing

SEGMENT_BYTES_MAX = 256 << 10
"""A segment is rewritten at each flush, so it stays small."""

EVENT_BYTES_MAX = 16 << 10
"""A longer event is cut to its name and the note that it was cut."""

_SEGMENT_MARK = "~"
"""Stands between a writer's name and the number of a further segment."""

PENDING_EVENTS_MAX = 4096
"""Events kept while the storage does not take them; then the oldest are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line: ``time`` in seconds since the epoch by the writer's clock, ``kind`` ("committed", ...)."""

    time: float
    kind: str
    writer: str
    fields: dict[str, Any]


class EventLog:
    """The event file of one writer. :meth:`append` only remembers; :meth:`flush` makes durable, one task at a
    time. ``writer`` is unique in the run, down to a process's start: it begins a file of its own."""

    def __init__(self, backend: Backend, writer: str, *, clock: Callable[[], float] = time.time) -> None:
        if _SEGMENT_MARK in writer:
            raise BadOption(f"a writer's name must not contain {_SEGMENT_MARK!r}", found=writer)
        self.backend = backend
        self.writer = writer
        self.dropped = 0
        self._clock = clock
        self._segment = 0
        self._stored = b""
        self._pending: list[bytes] = []

    def append(self, kind: str, **fields: Any) -> None:
        """Remember that ``kind`` happened; values that JSON lacks are stored as text."""
        event = {"time": round(self._clock(), 6), "kind": kind, **fields}
        line = json.dumps(_strict(event), default=str, allow_nan=False).encode() + b"\n"
        if len(line) > EVENT_BYTES_MAX:
            line = json.dumps({"time": event["time"], "kind": kind, "cut_bytes": len(line)}).encode() + b"\n"
        self._pending.append(line)
        if len(self._pending) > PENDING_EVENTS_MAX:
            del self._pending[0]
            self.dropped += 1

    async def flush(self) -> None:
        """Write what was appended. On an error the events stay pending and the error is raised."""
        while self._pending:
            room = SEGMENT_BYTES_MAX - len(self._stored)
            taken, size = 0, 0
            while taken < len(self._pending) and size + len(self._pending[taken]) <= room:
                size += len(self._pending[taken])
                taken += 1
            if taken == 0:
                self._segment += 1
                self._stored = b""
                continue
            batch, self._pending = self._pending[:taken], self._pending[taken:]
            data = self._stored + b"".join(batch)
            try:
                with writing(self.backend, self._name()):
                    await self.backend.write(self._name(), data)
            except BaseException:
                self._pending = batch + self._pending
                raise
            self._stored = data

    def _name(self) -> str:
        return names.events(
            self.writer if self._segment == 0 else f"{self.writer}{_SEGMENT_MARK}{self._segment}"
        )


def _strict(value: Any) -> Any:
    """``value`` with NaN and infinities as text: bare words would make the line unreadable for strict
    parsers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


async def read_events(backend: Backend) -> tuple[list[Event], list[str]]:
    """All events of the run by time, and a text for each line or file that could not be read."""
    bad: list[str] = []

    async def one(child: str) -> list[Event]:
        name = f"{names.EVENTS}/{child}"
        try:
            with reading(backend, name):
                data = await backend.read(name, SMALL_BYTES_MAX)
        except NotFound:
            return []
        parsed = names.parse(name)
        writer = ((parsed and parsed.writer) or child).partition(_SEGMENT_MARK)[0]
        found = []
        for number, line in enumerate(data.splitlines(), 1):
            event = _parse(writer, line)
            if event is None:
                bad.append(f"{name} line {number}")
            else:
                found.append(event)
        return found

    with reading(backend, names.EVENTS):
        children = await backend.list_names(names.EVENTS)
    ours = [child for child in children if names.parse(f"{names.EVENTS}/{child}") is not None]
    lists = await each(sorted(ours), one)
    return sorted((event for events in lists for event in events), key=lambda event: event.time), bad


def _parse(writer: str, line: bytes) -> Event | None:
    try:
        fields = json.loads(line)
        return Event(float(fields.pop("time")), str(fields.pop("kind")), writer, fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
