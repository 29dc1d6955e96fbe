"""The model of the run in plain dicts, and what must hold after each step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.manifest import Quarantine
from everstep.plan.retention import Retention
from everstep.store.findings import Finding, Kind, Severity
from everstep.store.fsck import check
from everstep.store.pins import list_pins
from everstep.store.shelf import Shelf
from hypothesis.stateful import RuleBasedStateMachine, invariant

from . import engine
from .places import PLACES, ROOT, Backends, Place, Process
from .world import Held, Key, Pinned, Trainer, same_metrics, seconds_of

BIG = 1e300
"""Above all that is measured; not so are NaN and the infinities."""

PIN_MARGIN_S = 300
"""How much longer than it says a pin holds."""

Work = Callable[[Backends], Awaitable[Any]]


def is_record(name: str) -> bool:
    """Whether it is run.json, or the record of an incarnation."""
    return name == names.RUN or name.startswith(names.INCARNATIONS)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        home = Path("/dev/shm")
        self.home = Path(tempfile.mkdtemp(prefix="everstep-machine-", dir=home if home.is_dir() else None))
        self.process = Process(self.home)
        self.clock = self.process.clock
        self.places = {place: Place(self.home / place) for place in PLACES}
        self.trainer = Trainer()
        self.held: dict[Key, Held] = {}
        """What each checkpoint must hold, that was ever begun."""
        self.adopted: dict[int, Key | None] = {1: None}
        """By incarnation, what it went on from."""
        self.step = 0
        self.shelves = self.fresh_shelves()
        self.pins: dict[str, dict[str, Pinned]] = {place: {} for place in PLACES}
        self.pending: tuple[str, Work] | None = None
        """What the process was doing when it died, and the name of it."""
        self.open: dict[str, set[Key]] = {place: set() for place in PLACES}
        """Checkpoints of which a killed process may have left attempts without a decision, or too few decisions."""

    def teardown(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    def fresh_shelves(self) -> dict[str, Shelf]:
        """Those of a new process."""
        return {place: Shelf(clock=self.clock.time) for place in PLACES}

    # -- the model

    @property
    def incarnation(self) -> int:
        return max(self.adopted)

    def counts(self, key: Key) -> bool:
        """Whether it is part of the history of the newest incarnation."""
        at: int | None = self.incarnation
        cut = None
        while at is not None:
            if at == key[0]:
                return cut is None or key[1] <= cut
            adopted = self.adopted[at]
            if adopted is None:
                return False
            at, cut = adopted[0], adopted[1] if cut is None else min(cut, adopted[1])
        return False

    def whole(self, place: str) -> list[Key]:
        """The checkpoints at a place that count, with all their bases there."""
        standing = self.places[place].standing
        return sorted(
            key
            for key in standing
            if self.counts(key) and all(one in standing for one in self.places[place].chain(key))
        )

    def is_good(self, key: Key) -> bool:
        """Whether it must load from both places together: each level whole at one of them."""
        for place in self.places.values():
            if not place.is_whole(key):
                continue
            parent = place.standing[key].manifest.parent_key
            if parent is None or self.is_good(parent):
                return True
        return False

    def records_harmed(self, *places: str) -> bool:
        """Whether the run's own records are harmed."""
        return any(is_record(name) for place in places for name in self.places[place].harmed)

    def pinned(self, place: str) -> set[Key]:
        """What is pinned now, whether or not it is there."""
        return {pin.key for pin in self.pins[place].values() if not self.is_over(pin)}

    def is_over(self, pin: Pinned) -> bool:
        return pin.until_s is not None and self.clock.at_s >= pin.until_s + PIN_MARGIN_S

    def kept(self, place: str, retention: Retention) -> set[Key]:
        """What a rule of ``retention`` names, or a pin."""
        whole, standing = self.whole(place), self.places[place].standing
        keep = {*whole[-retention.keep_last :]}
        every, interval_s, best = retention.keep_every, retention.interval_s, retention.best
        keep |= {key for key in whole if every and key[1] % every == 0}
        if interval_s is not None:
            spaced: list[float] = []
            for key in whole:
                at_s = seconds_of(standing[key].manifest.created)
                if not spaced or abs(at_s - spaced[-1]) >= interval_s:
                    spaced.append(at_s)
                    keep.add(key)
        if best is not None and retention.keep_best is not None:
            sign = 1 if best.startswith("min") else -1
            losses = {key: self.held[key].loss for key in whole}
            finite = [(sign * loss, -key[0], -key[1]) for key, loss in losses.items() if abs(loss) < BIG]
            keep |= {(-incarnation, -step) for _, incarnation, step in sorted(finite)[: retention.keep_best]}
        return keep | (self.pinned(place) & standing.keys())

    # -- doing

    def do(
        self, name: str, work: Work, kill: int | None, touched: dict[str, set[Key]], *allowed: type
    ) -> bool:
        """Whether it was done to its end. ``allowed`` errors end it, too; any, where something is harmed."""
        harmed = any(place.harmed for place in self.places.values())
        try:
            self.process.run(work, kill)
        except EverstepError as error:
            if not harmed and not isinstance(error, allowed):
                raise
            for place, keys in touched.items():
                self.open[place] |= keys
            return False
        if self.process.killed:
            self.pending = name, work
            self.shelves = self.fresh_shelves()
            for place, keys in touched.items():
                self.open[place] |= keys
            return False
        for place, keys in touched.items():
            self.open[place] -= keys
        return True

    # -- what must hold

    def pick(self, place: str, which: int) -> Key:
        """The newest ones most."""
        keys = sorted(self.places[place].standing)
        return keys[-1 - which % len(keys)]

    def deltas(self) -> list[Key]:
        return sorted(
            key for key, seen in self.places[ROOT].standing.items() if seen.manifest.kind == "delta"
        )

    def look(self) -> None:
        async def work(backends: Backends) -> None:
            for place, backend in backends.items():
                if self.places[place].path.exists():
                    await self.places[place].look(backend)
                    self.pins[place] = {
                        held.id: Pinned(held.key, seconds_of(held.pin.expires) if held.pin.expires else None)
                        for held in await list_pins(backend)
                        if held.pin is not None
                    }

        self.process.run(work)

    def leaning(self, place: str) -> set[Key]:
        """What may be needed by attempts that are not decided."""
        return set(self.places[place].standing) if self.open[place] else set()

    def mendable(self, place: str, other: str) -> set[str]:
        """The harmed objects that the other place has right, with all that proves them."""
        here, there = self.places[place], self.places[other]

        def is_right(name: str) -> bool:
            path = there.path / name
            return name not in there.harmed and path.exists()

        def can(name: str) -> bool:
            return name not in here.harmed or (
                is_right(name) and (there.path / name).read_bytes() == here.harmed[name]
            )

        if not all(can(name) for name in here.harmed if is_record(name)):
            return set()
        found = {name for name in here.harmed if name.count("/") < 2 and can(name)}
        for key, seen in here.standing.items():
            found |= {name for name in seen.votes.values() if can(name)}
            proved = {name for name, rank in seen.images.items() if can(seen.votes[rank])}
            # Another attempt, which is whole there, has the same images, though in other objects.
            other_way = (
                key in there.standing
                and there.standing[key].manifest.attempt != seen.manifest.attempt
                and all(there.is_whole(one) for one in there.chain(key))
            )
            found |= {name for name in proved if can(name) or (other_way and not name.endswith(".packed"))}
        return found & here.harmed.keys()

    @invariant()
    def all_is_well(self) -> None:
        self.look()
        root = self.places[ROOT]
        listed = {key for place in self.places.values() for key in place.standing}
        assert listed <= self.held.keys()
        for place in PLACES:
            self.stands(place)

        async def work(backends: Backends) -> None:
            for key in sorted(listed):
                try:
                    await engine.load(list(backends.values()), key, self.held[key])
                except EverstepError as error:
                    assert not self.is_good(key), f"{key}: {error}"
            for place, backend in backends.items():
                if self.places[place].standing:
                    said = [finding async for finding in check(backend, decision_wait_s=0)]
                    self.explain(place, said)
                    self.complete(place, said)

        assert root.path.exists()
        self.process.run(work)

    def stands(self, place: str) -> None:
        """Bases of what stands do, and what is pinned."""
        at = self.places[place]
        hidden = {
            key
            for key, decision in at.decided.items()
            if decision is None or isinstance(decision, Quarantine) or at.is_doubtful(key)
        }
        for key, seen in at.standing.items():
            parent = seen.manifest.parent_key
            if at.is_doubtful(key):
                continue
            assert parent is None or parent in at.standing or parent in hidden, (
                f"{key} lacks {parent} at {place}"
            )
        for key in self.pinned(place):
            assert key in at.standing or key in hidden, f"{key} is pinned at {place}"
        for key, seen in at.standing.items():
            found = seen.manifest.metrics
            assert same_metrics(found, self.held[key].metrics), f"{key} has metrics {found} at {place}"

    def explain(self, place: str, said: list[Finding]) -> None:
        """Nothing is said to be damaged that is not."""
        at = self.places[place]
        for finding in said:
            if finding.severity is Severity.INFO or finding.severity is Severity.WARNING:
                continue
            key = finding.incarnation, finding.step
            if finding.name in at.harmed or _doubtful(at, finding.name) or at.is_doubtful(key):  # type: ignore[arg-type]
                continue
            if finding.kind is Kind.CHAIN:
                manifest = at.standing[key].manifest  # type: ignore[index]
                decision = at.decided.get(manifest.parent_key)  # type: ignore[arg-type]
                if decision is None or isinstance(decision, Quarantine):
                    continue
            unfinished = finding.kind in (Kind.UNDECIDED, Kind.MISSING) and key in self.open[place]
            if unfinished or any(
                name.startswith(finding.name + "/") for name in at.harmed
            ):  # a base's directory
                continue
            raise AssertionError(f"{place}: nothing explains {finding}")

    def complete(self, place: str, said: list[Finding]) -> None:
        """All that is damaged is said to be."""
        at = self.places[place]
        told = {finding.name for finding in said if finding.severity is Severity.DAMAGE}
        must = {name for name in at.harmed if is_record(name)}
        for key, seen in at.standing.items():
            if at.is_doubtful(key):
                continue
            must |= {name for name in (*seen.votes.values(), *seen.layouts) if name in at.harmed}
            if names.RUN in at.harmed:
                continue
            below = at.chain(key)[1:]
            whole = all(at.is_whole(one) for one in below)
            for name, rank in seen.images.items():
                if name in at.harmed and seen.votes[rank] not in at.harmed and whole:
                    must.add(name)
        assert must <= told, f"{place}: {sorted(must - told)} are damaged, and nothing is said"


def _doubtful(place: Place, name: str) -> bool:
    parsed = names.parse(name)
    if parsed is None or parsed.step is None or parsed.incarnation is None:
        return False
    return place.is_doubtful((parsed.incarnation, parsed.step))
