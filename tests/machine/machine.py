"""The state machine: a trainer that saves, goes back and dies, shelves that are pruned, harmed and repaired; and a
model of what must be there after each step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError, NoCheckpoint, Pruned, SaveAbandoned
from everstep.format import names
from everstep.format.manifest import Quarantine
from everstep.plan.retention import Retention
from everstep.store.findings import Finding, Kind, Severity
from everstep.store.fsck import check
from everstep.store.pins import add_pin, list_pins, remove_pins
from everstep.store.repair_run import check_and_mend
from everstep.store.scrub import Scrub
from everstep.store.shelf import Shelf
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.store import store_kit as kit

from . import engine
from .places import PLACES, ROOT, TIER, Backends, Place, Process
from .world import Held, Key, Trainer

SEEDS = st.integers(0, 2**16)
WHICH = st.integers(0, 11)
KILL = st.one_of(st.none(), st.none(), st.integers(0, 20), st.integers(0, 300))
"""The point, counted as they are reached, at which the process dies; most often it does not come that far."""
PLACE = st.sampled_from(PLACES)
BASE = st.sampled_from(["previous", "previous", "newest full", "previous", "full"])
CHANGE = st.sampled_from(["dense", "sparse", "none"])
LAYOUT = st.sampled_from([""] * 8 + ["grow", "drop", "rename"])
COMPRESS = st.sampled_from([None, None, "zstd"])
SAVE = st.tuples(BASE, CHANGE, LAYOUT, COMPRESS, SEEDS)
STEPS_GAP = 1
STANDING_MAX = 9
"""Checkpoints at the root above which nothing is saved until something was pruned."""
HARMED_MAX = 4

Work = Callable[[Backends], Awaitable[Any]]


def is_record(name: str) -> bool:
    """Whether it is run.json, or the record of an incarnation."""
    return name == names.RUN or name.startswith(names.INCARNATIONS)


class Checkpoints(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        home = Path("/dev/shm")
        self.home = Path(tempfile.mkdtemp(prefix="everstep-machine-", dir=home if home.is_dir() else None))
        self.process = Process(self.home)
        self.places = {place: Place(self.home / place) for place in PLACES}
        self.trainer = Trainer()
        self.held: dict[Key, Held] = {}
        """What each checkpoint must hold, that was ever begun."""
        self.adopted: dict[int, Key | None] = {1: None}
        """By incarnation, what it went on from."""
        self.step = 0
        self.shelves = {place: Shelf() for place in PLACES}
        self.pins: dict[str, dict[str, Key]] = {place: {} for place in PLACES}
        self.pending: tuple[str, Work] | None = None
        """What the process was doing when it died, and the name of it."""
        self.open: dict[str, set[Key]] = {place: set() for place in PLACES}
        """Checkpoints of which a killed process may have left attempts without a decision, or too few decisions."""

        async def start(backends: Backends) -> None:
            await kit.start_run(backends[ROOT])

        self.process.run(start)

    def teardown(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

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
            self.shelves = {place: Shelf() for place in PLACES}
            for place, keys in touched.items():
                self.open[place] |= keys
            return False
        for place, keys in touched.items():
            self.open[place] -= keys
        return True

    # -- rules

    @precondition(lambda self: len(self.places[ROOT].standing) < STANDING_MAX)
    @rule(base=BASE, change=CHANGE, layout=LAYOUT, compress=COMPRESS, seed=SEEDS, kill=KILL)
    def save(
        self, base: str, change: str, layout: str, compress: str | None, seed: int, kill: int | None
    ) -> None:
        self.save_one(base, change, layout, compress, seed, kill)

    @initialize(saves=st.lists(SAVE, min_size=1, max_size=4))
    def begin(self, saves: list[tuple[str, str, str, str | None, int]]) -> None:
        self.train(saves)

    @precondition(lambda self: len(self.places[ROOT].standing) < STANDING_MAX)
    @rule(saves=st.lists(SAVE, min_size=2, max_size=4))
    def train(self, saves: list[tuple[str, str, str, str | None, int]]) -> None:
        for one in saves:
            self.save_one(*one, None)

    def save_one(
        self, base: str, change: str, layout: str, compress: str | None, seed: int, kill: int | None
    ) -> None:
        self.look()
        self.step += STEPS_GAP
        self.trainer.train(change, layout, seed)
        key = self.incarnation, self.step
        held = self.held[key] = self.trainer.held(f"incarnation {key[0]} step {key[1]}")
        bases = self.whole(ROOT)
        if base == "newest full":
            bases = [one for one in bases if self.places[ROOT].standing[one].manifest.kind == "full"]
        of = bases[-1] if bases and base != "full" else None

        async def work(backends: Backends) -> None:
            places = list(backends.values())
            made = await engine.save(backends[ROOT], places, key, held, of, compress)
            assert made is not None, f"{key} was given up"

        self.do(f"save {key} on {of}", work, kill, {ROOT: {key}})

    @precondition(lambda self: self.pending is not None)
    @rule(kill=KILL)
    def go_on(self, kill: int | None) -> None:
        """The agent is started again, and does what it was about to do."""
        assert self.pending is not None
        name, work = self.pending
        self.pending = None
        self.do(name, work, kill, {}, SaveAbandoned, NoCheckpoint, Pruned)

    @precondition(lambda self: self.deltas())
    @rule(which=WHICH, kill=KILL)
    def merge(self, which: int, kill: int | None) -> None:
        deltas = self.deltas()
        key = deltas[-1 - which % len(deltas)]

        async def work(backends: Backends) -> None:
            made = await engine.merge(backends[ROOT], list(backends.values()), key)
            assert made is None or made.kind == "full"

        if self.do(f"merge {key}", work, kill, {ROOT: {key}}):
            self.look()
            # What was given up meanwhile is not made anew.
            assert self.places[ROOT].standing[key].manifest.kind == "full" or not self.counts(key)

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(which=WHICH, kill=KILL)
    def mirror(self, which: int, kill: int | None) -> None:
        chain = self.places[ROOT].chain(self.pick(ROOT, which))[::-1]

        async def work(backends: Backends) -> None:
            await engine.mirror(backends[ROOT], backends[TIER], chain)

        # What was pruned at the tier does not come back there.
        self.do(f"mirror {chain}", work, kill, {TIER: set(chain)}, SaveAbandoned, NoCheckpoint)

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(
        place=PLACE,
        last=st.integers(1, 3),
        every=st.sampled_from([None, None, None, 5]),
        incarnations=st.sampled_from([None, None, 1]),
        kill=KILL,
    )
    def prune(
        self, place: str, last: int, every: int | None, incarnations: int | None, kill: int | None
    ) -> None:
        if not self.places[place].path.exists():
            return
        writer = self.incarnation
        retention = Retention(last, keep_every=every, keep_incarnations=incarnations)

        async def work(backends: Backends) -> None:
            await engine.prune(backends[place], self.shelves[place], retention, writer)

        whole, standing = self.whole(place), self.places[place].standing
        keep = {*whole[-last:], *(key for key in whole if every and key[1] % every == 0)}
        keep |= {key for key in self.pins[place].values() if key in standing}
        done = self.do(f"prune {place} {retention}", work, kill, {})
        self.look()
        left = self.places[place].standing.keys()
        assert keep <= left, f"{sorted(keep - left)} had to stay"
        if done and not self.places[place].harmed:
            needed = {one for key in left if key in keep for one in self.places[place].chain(key)}
            late = {key for key in left - needed if key in whole and not incarnations}
            assert not late - self.leaning(place), f"{sorted(late)} had to go"

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(which=WHICH, place=PLACE, kill=KILL)
    def pin(self, which: int, place: str, kill: int | None) -> None:
        if not self.places[place].standing:
            return
        key = self.pick(place, which)

        async def work(backends: Backends) -> None:
            await add_pin(backends[place], key)

        self.do(f"pin {key}", work, kill, {}, Pruned)

    @precondition(lambda self: any(self.pins.values()))
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        place = next(place for place in PLACES if self.pins[place])
        pin = sorted(self.pins[place])[which % len(self.pins[place])]

        async def work(backends: Backends) -> None:
            await remove_pins(backends[place], [pin])

        self.process.run(work)

    @precondition(lambda self: any(self.is_good(key) for key in self.places[ROOT].standing))
    @rule(which=WHICH)
    def roll_back(self, which: int) -> None:
        """A new process that goes on from a checkpoint that counts."""
        good = [key for key in self.whole(ROOT) if self.is_good(key)]
        if not good or self.records_harmed(ROOT):
            return
        key = good[-1 - which % min(len(good), 3)]

        async def work(backends: Backends) -> None:
            await kit.adopt(backends[ROOT], *key)

        self.process.run(work)
        self.adopted[self.incarnation + 1] = key
        self.step = key[1]
        self.trainer.take(self.held[key])
        self.pending = None
        self.shelves = {place: Shelf() for place in PLACES}

    @precondition(lambda self: sum(len(place.harmed) for place in self.places.values()) < HARMED_MAX)
    @rule(
        which=WHICH,
        place=PLACE,
        what=st.sampled_from(
            ["image"] * 4 + ["vote"] * 3 + ["layout", "decision", "decision", "record", "run"]
        ),
        object_=st.integers(0, 50),
        how=st.sampled_from(["flip", "cut", "remove"]),
        seed=SEEDS,
        then=st.sampled_from(["", "alone", "beside", "beside"]),
    )
    def harm(self, which: int, place: str, what: str, object_: int, how: str, seed: int, then: str) -> None:
        """Then, mostly, it is repaired."""
        at = self.places[place]
        if not at.standing:
            return
        seen = at.standing[self.pick(place, which)]
        found = {
            "image": sorted(seen.images),
            "vote": sorted(seen.votes.values()),
            "layout": sorted(seen.layouts),
            "decision": [seen.decision],
            "record": [names.incarnation(number) for number in self.adopted],
            "run": [names.RUN],
        }[what]
        name = found[object_ % len(found)]
        path = at.path / name
        data = path.read_bytes() if path.exists() else b""
        # Without the run's records hardly anything can be done: they are harmed only where they can be mended.
        other = self.places[TIER if place == ROOT else ROOT]
        if not data or (
            what in ("record", "run") and (name in other.harmed or not (other.path / name).exists())
        ):
            return
        if how == "flip" or what in ("record", "run"):
            spot = seed % len(data)
            at.harm(name, data[:spot] + bytes([data[spot] ^ 0x10]) + data[spot + 1 :])
        else:
            at.harm(name, data[: seed % len(data)] if how == "cut" else None)
        if then:
            self.all_is_well()
            self.mend(place, then == "beside", None)

    @precondition(lambda self: any(place.harmed for place in self.places.values()))
    @rule(place=PLACE, beside=st.booleans(), kill=KILL)
    def repair(self, place: str, beside: bool, kill: int | None) -> None:
        self.mend(place, beside, kill)

    def mend(self, place: str, beside: bool, kill: int | None) -> None:
        other = TIER if place == ROOT else ROOT
        if not self.places[place].standing:
            return

        async def work(backends: Backends) -> None:
            await check_and_mend(backends[place], others=[backends[other]] if beside else [])

        wanted = self.mendable(place, other) if beside else set()
        if self.do(f"repair {place}", work, kill, {}):
            self.look()
            left = wanted & self.places[place].harmed.keys()
            assert not left, f"{sorted(left)} could be mended from {other}"
            if not self.places[place].harmed:
                self.open[place] = set()

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(place=PLACE)
    def scrub(self, place: str) -> None:
        if not self.places[place].standing or self.records_harmed(place):
            return

        async def work(backends: Backends) -> None:
            scrubbed = await Scrub(backends[place], every_s=1e9).run(once=True)
            said = [finding for one in scrubbed for finding in one.damage]
            self.explain(place, said)

        self.process.run(work)

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
                    self.pins[place] = {held.id: held.key for held in await list_pins(backend)}

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
        for place in PLACES:
            self.stands(place)
        listed = {key for place in self.places.values() for key in place.standing}
        assert listed <= self.held.keys()

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
        for key in self.pins[place].values():
            assert key in at.standing or key in hidden, f"{key} is pinned at {place}"

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
