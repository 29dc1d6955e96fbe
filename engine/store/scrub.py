"""Proving a run again and again, in the background: the checkpoint that was not proved for longest comes next.

What was proved when is in the run's event log, so that a scrub goes on where another one stopped, on whatever machine.
What was found damaged is proved again by the next one, until it is whole.
Nothing else reads it: a lost log costs a pass.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.errors import CannotTell, NoCheckpoint

from .catalog import list_steps
from .events import Event, EventLog, read_events
from .findings import Finding, Severity
from .fsck import Seen, check
from .fsck_images import Extent
from .runs import open_run

log = logging.getLogger("everstep.store")

SCRUBBED = "scrubbed"
"""Kind of the event of one checkpoint that was proved."""

FINDINGS_MAX = 20
"""Findings that an event tells one by one."""

PAUSE_S_MAX = 60.0
"""Between two looks whether something is due."""

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """One checkpoint, proved: the damage found, and the bytes that were read."""

    key: Key
    findings: tuple[Finding, ...]
    proved_bytes: int
    seconds: float

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple([f for f in self.findings if f.severity is Severity.DAMAGE])


def proved_at(events: list[Event]) -> dict[Key, float]:
    """When each checkpoint was proved last, by the clock of whoever did. One that was damaged then is left out: it is
    due until it is proved whole, or gone."""
    found: dict[Key, float] = {}
    damaged: set[Key] = set()
    for event in events:
        step, incarnation = event.fields.get("step"), event.fields.get("incarnation")
        if event.kind == SCRUBBED and isinstance(step, int) and isinstance(incarnation, int):
            key = incarnation, step
            if event.time < found.get(key, 0.0):
                continue
            found[key] = event.time
            (damaged.add if event.fields.get("damage") else damaged.discard)(key)
    return {key: at for key, at in found.items() if key not in damaged}


def next_due(keys: list[Key], proved: Mapping[Key, float], every_s: float, now_s: float) -> Key | None:
    """The checkpoint to prove next: one that never was, or is damaged, the newest first, for it is what a restart
    needs; then the one whose proof is oldest, once it is older than ``every_s``. A proof from the future counts as
    made now."""
    never = [key for key in keys if key not in proved]
    if never:
        return max(never, key=lambda key: (key[1], key[0]))
    due = [key for key in keys if now_s - min(proved[key], now_s) >= every_s]
    return min(due, key=lambda key: (proved[key], key), default=None)


@dataclass(slots=True)
class Scrub:
    """``every_s``: how old a proof may become; ``bytes_per_s``: the most that is read. ``told`` hears of each
    checkpoint."""

    backend: Backend
    every_s: float
    bytes_per_s: float | None = None
    told: Callable[[Scrubbed], None] = lambda scrubbed: None
    clock: Callable[[], float] = time.time
    _proved: dict[Key, float] = field(default_factory=dict)

    async def run(self, *, once: bool) -> list[Scrubbed]:
        """Prove what is due, one checkpoint at a time; with ``once`` until nothing is, each at most once, and
        what was proved is returned. Otherwise until cancelled. Raises CannotTell, NotARun, Damaged (run.json),
        UnknownFormat."""
        await open_run(self.backend)
        events = EventLog(self.backend, f"scrub-{os.getpid()}-{secrets.token_hex(4)}", clock=self.clock)
        self._proved = proved_at((await read_events(self.backend))[0])
        done: list[Scrubbed] = []
        passed: set[Key] = set()
        while True:
            keys = [key for key in await self._keys() if not (once and key in passed)]
            key = next_due(keys, self._proved, self.every_s, self.clock())
            if key is None:
                if once:
                    return done
                await asyncio.sleep(min(self.every_s, PAUSE_S_MAX))
                continue
            scrubbed = await self._prove(key)
            self._proved[key] = self.clock()
            passed.add(key)
            if scrubbed is None:  # rotation was faster
                continue
            events.append(SCRUBBED, **_fields(scrubbed))
            await events.flush()
            self.told(scrubbed)
            if once:
                done.append(scrubbed)

    async def _keys(self) -> list[Key]:
        return [step.key for step in await list_steps(self.backend) if step.decisions]

    async def _prove(self, key: Key) -> Scrubbed | None:
        began = time.monotonic()
        seen = Seen()
        extent = Extent(bytes_per_s=self.bytes_per_s)
        try:
            found = [
                finding
                async for finding in check(self.backend, step=key[1], extent=extent, seen=seen)
                if finding.incarnation in (key[0], None)
            ]
        except NoCheckpoint:
            return None
        unanswered = [finding for finding in found if finding.severity is Severity.CANNOT_TELL]
        if unanswered:
            raise CannotTell(unanswered[0].message, name=unanswered[0].name)
        if key not in seen.manifests and not any(f.severity is Severity.DAMAGE for f in found):
            return None
        return Scrubbed(key, tuple(found), seen.proved_bytes, time.monotonic() - began)


def _fields(scrubbed: Scrubbed) -> dict[str, object]:
    return {
        "step": scrubbed.key[1],
        "incarnation": scrubbed.key[0],
        "proved_bytes": scrubbed.proved_bytes,
        "seconds": round(scrubbed.seconds, 3),
        "damage": len(scrubbed.damage),
        "findings": [
            {"kind": f.kind.value, "name": f.name, "message": f.message}
            for f in scrubbed.damage[:FINDINGS_MAX]
        ],
    }
