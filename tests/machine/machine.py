"""The state machine: a trainer that saves, goes back and dies, writers that are superseded, shelves that are pruned,
harmed and repaired, on stores of several kinds; after each step what the model says must hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.errors import NoCheckpoint, Pruned, SaveAbandoned
from everstep.format import names
from everstep.plan.retention import Retention
from everstep.store.pins import add_pin, remove_pins
from everstep.store.repair_run import check_and_mend
from everstep.store.rotate import RotationReport
from everstep.store.scrub import Scrub
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.store import store_kit as kit

from . import engine
from .model import Model, Work
from .places import PLACES, ROOT, ROOTS, TIER, TIERS, Backends
from .world import Key, Pinned

SEEDS = st.integers(0, 2**16)
WHICH = st.integers(0, 11)
KILL = st.one_of(st.none(), st.none(), st.integers(0, 20), st.integers(0, 300))
"""The point, counted as they are reached, at which the process dies; most often it does not come that far."""
PLACE = st.sampled_from(PLACES)
BASE = st.sampled_from(["previous", "previous", "newest full", "previous", "full"])
CHANGE = st.sampled_from(["dense", "sparse", "none"])
LAYOUT = st.sampled_from([""] * 8 + ["grow", "drop", "rename"])
COMPRESS = st.sampled_from([None, None, "zstd"])
LOSS = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0, math.nan, math.inf, -math.inf])
AFTER_S = st.sampled_from([0, 60, 60, 700])
SKEW_S = st.sampled_from([0] * 6 + [-5000, 5000])
"""How far the clock of the writer's node is off."""
INTERVAL = "10m"
BEST = st.sampled_from([None, None, (1, "min:loss"), (2, "min:loss"), (1, "max:loss")])
RETENTION = st.builds(
    lambda last, every, interval, best, incarnations: Retention(
        last, every, interval, *(best or (None, None)), keep_incarnations=incarnations
    ),
    st.integers(1, 3),
    st.sampled_from([None, None, None, 5]),
    st.sampled_from([None, None, INTERVAL]),
    BEST,
    st.sampled_from([None, None, 1]),
)


@dataclass(frozen=True)
class Training:
    """What is done before a checkpoint is saved, and how it is stored."""

    base: str
    change: str
    layout: str
    compress: str | None
    seed: int
    loss: float
    after_s: int
    skew_s: int


SAVE = st.builds(Training, BASE, CHANGE, LAYOUT, COMPRESS, SEEDS, LOSS, AFTER_S, SKEW_S)
STEPS_GAP = 1
STANDING_MAX = 9
"""Checkpoints at the root above which nothing is saved until something was pruned."""
HARMED_MAX = 4


class Checkpoints(Model):
    @initialize(
        root=st.sampled_from(ROOTS), tier=st.sampled_from(TIERS), saves=st.lists(SAVE, min_size=1, max_size=4)
    )
    def begin(self, root: str, tier: str, saves: list[Training]) -> None:
        self.process.kinds = {ROOT: root, TIER: tier}

        async def start(backends: Backends) -> None:
            await kit.start_run(backends[ROOT])

        self.process.run(start)
        self.train(saves)

    @precondition(lambda self: len(self.places[ROOT].standing) < STANDING_MAX)
    @rule(one=SAVE, kill=KILL)
    def save(self, one: Training, kill: int | None) -> None:
        self.save_one(one, kill)

    @precondition(lambda self: len(self.places[ROOT].standing) < STANDING_MAX)
    @rule(saves=st.lists(SAVE, min_size=2, max_size=4))
    def train(self, saves: list[Training]) -> None:
        for one in saves:
            self.save_one(one, None)

    def save_one(self, one: Training, kill: int | None) -> None:
        key, work = self.saving(one)

        async def must(backends: Backends) -> None:
            assert await work(backends) is not None, f"{key} was given up"

        self.do(f"save {key}", must, kill, {ROOT: {key}})

    def saving(self, one: Training) -> tuple[Key, Work]:
        """The next step, and what saves it; the manifest, or None where it was given up."""
        self.look()
        self.step += STEPS_GAP
        self.clock.at_s += one.after_s
        self.trainer.train(one.change, one.layout, one.seed)
        key = self.incarnation, self.step
        held = self.held[key] = self.trainer.held(f"incarnation {key[0]} step {key[1]}", one.loss)
        bases = self.whole(ROOT)
        if one.base == "newest full":
            bases = [at for at in bases if self.places[ROOT].standing[at].manifest.kind == "full"]
        of = bases[-1] if bases and one.base != "full" else None

        async def work(backends: Backends) -> object:
            self.clock.skew_s = one.skew_s
            try:
                return await engine.save(backends[ROOT], list(backends.values()), key, held, of, one.compress)
            finally:
                self.clock.skew_s = 0

        return key, work

    @rule(seconds=st.sampled_from([1, 60, 290, 310, 4000]))
    def wait(self, seconds: int) -> None:
        self.clock.at_s += seconds

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
        if self.do(f"merge {key}", self.merging(key), kill, {ROOT: {key}}):
            self.look()
            # What was given up meanwhile is not made anew.
            assert self.places[ROOT].standing[key].manifest.kind == "full" or not self.counts(key)

    def merging(self, key: Key) -> Work:
        async def work(backends: Backends) -> None:
            made = await engine.merge(backends[ROOT], list(backends.values()), key)
            assert made is None or made.kind == "full"

        return work

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(which=WHICH, kill=KILL)
    def mirror(self, which: int, kill: int | None) -> None:
        chain = self.places[ROOT].chain(self.pick(ROOT, which))[::-1]

        async def work(backends: Backends) -> None:
            await engine.mirror(backends[ROOT], backends[TIER], chain)

        # What was pruned at the tier does not come back there.
        self.do(f"mirror {chain}", work, kill, {TIER: set(chain)}, SaveAbandoned, NoCheckpoint)

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(place=PLACE, retention=RETENTION, kill=KILL)
    def prune(self, place: str, retention: Retention, kill: int | None) -> None:
        if not self.places[place].path.exists():
            return
        keep, whole = self.kept(place, retention), self.whole(place)
        done = self.do(f"prune {place} {retention}", self.pruning(place, retention), kill, {})
        self.look()
        left = self.places[place].standing.keys()
        assert keep <= left, f"{sorted(keep - left)} had to stay"
        if done and not self.places[place].harmed:
            needed = {one for key in left if key in keep for one in self.places[place].chain(key)}
            late = {key for key in left - needed if key in whole and not retention.keep_incarnations}
            assert not late - self.leaning(place), f"{sorted(late)} had to go"
            assert not any(map(self.is_over, self.pins[place].values())), "what has expired had to go"

    def pruning(self, place: str, retention: Retention) -> Work:
        writer, shelf = self.incarnation, self.shelves[place]

        async def work(backends: Backends) -> RotationReport:
            return await engine.prune(backends[place], backends[ROOT], shelf, retention, writer)

        return work

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(
        place=PLACE,
        first=RETENTION,
        second=RETENTION,
        at=st.integers(0, 40),
        dies_in=KILL,
        other_dies_in=KILL,
    )
    def prune_twice(
        self,
        place: str,
        first: Retention,
        second: Retention,
        at: int,
        dies_in: int | None,
        other_dies_in: int | None,
    ) -> None:
        """The agent's rotation, and an operator's prune while it is at work; each may die."""
        if not self.places[place].path.exists() or self.places[place].harmed or self.records_harmed(ROOT):
            return
        keep = self.kept(place, first) & self.kept(place, second)
        mine = self.pruning(place, first)
        self.shelves = self.fresh_shelves()
        if self.process.kinds[place] == "put":  # nothing that two decide at once is safe there
            dies_in = other_dies_in = None
        self.process.run_both(
            mine, at, self.pruning(place, second), dies_in=dies_in, other_dies_in=other_dies_in
        )
        self.look()
        left = self.places[place].standing.keys()
        assert keep <= left, f"{sorted(keep - left)} had to stay"

    @precondition(lambda self: self.places[ROOT].standing)
    @rule(which=WHICH, place=PLACE, for_s=st.sampled_from([None, 30, 600]), kill=KILL)
    def pin(self, which: int, place: str, for_s: int | None, kill: int | None) -> None:
        if not self.places[place].standing:
            return
        key = self.pick(place, which)

        async def work(backends: Backends) -> None:
            await add_pin(backends[place], key, for_s=for_s, clock=self.clock.time)

        before = set(self.pins[place])
        if self.do(f"pin {key}", work, kill, {}, Pruned):
            self.look()
            until_s = None if for_s is None else self.clock.at_s + for_s
            added = [pin for name, pin in self.pins[place].items() if name not in before]
            assert added == [Pinned(key, until_s)]

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
        self.become(key)

    @precondition(lambda self: self.places[ROOT].standing and not self.places[ROOT].harmed)
    @rule(
        which=WHICH,
        doing=st.sampled_from(["save", "prune", "prune", "merge"]),
        one=SAVE,
        retention=RETENTION,
        at=st.integers(0, 60),
    )
    def take_over(self, which: int, doing: str, one: Training, retention: Retention, at: int) -> None:
        """While a writer is at work, another one goes on from a checkpoint that counts. The first then is superseded,
        but does not know it."""
        good = [key for key in self.whole(ROOT) if self.is_good(key)]
        deltas = self.deltas()
        if not good or (doing == "merge" and not deltas):
            return
        adopted = good[-1 - which % min(len(good), 3)]
        if doing == "save":
            key, work = self.saving(one)
            self.open[ROOT].add(key)
        elif doing == "merge":
            key = deltas[-1 - which % len(deltas)]
            work = self.merging(key)
            self.open[ROOT].add(key)
        else:
            work = self.pruning(ROOT, retention)
        writer = self.incarnation
        adopted = self.adopt_while(work, at, adopted)
        assert set(self.places[ROOT].chain(adopted)) <= self.places[ROOT].standing.keys(), (
            f"{adopted} was adopted, and went"
        )
        self.goes_on_unaware(writer, one, retention)
        self.become(adopted)

    def adopt_while(self, work: Work, at: int, key: Key) -> Key:
        """Adopt ``key`` when ``work`` has reached its point ``at``; where it is gone by then, the newest that counts,
        as a further incarnation. What was adopted and stood still."""
        writer = self.incarnation

        async def adopt(backends: Backends) -> bool:
            await kit.adopt(backends[ROOT], *key)
            return await engine.standing(backends[ROOT], key) is not None

        stood = self.process.run_both(work, at, adopt)
        assert stood is not None
        self.look()
        self.adopted[writer + 1] = key
        if stood:
            return key
        left = self.whole(ROOT)
        assert left, f"{key} was gone when it was adopted, and nothing else is there"
        key = left[-1]
        assert self.process.run(adopt)
        self.adopted[writer + 2] = key
        return key

    def goes_on_unaware(self, writer: int, one: Training, retention: Retention) -> None:
        """The superseded writer removes nothing, and nothing that it saves counts."""
        before = set(self.places[ROOT].standing)
        beyond = self.step + 100
        key = writer, beyond
        held = self.held[key] = self.trainer.held("of a superseded writer", one.loss)

        async def work(backends: Backends) -> None:
            report = await engine.prune(backends[ROOT], backends[ROOT], self.shelves[ROOT], retention, writer)
            assert report.superseded and not report.removed
            made = await engine.save(backends[ROOT], [backends[ROOT]], key, held, None, None)
            assert made is None, f"{key} was committed by a superseded writer"

        self.open[ROOT].add(key)
        self.process.run(work)
        self.look()
        assert before <= self.places[ROOT].standing.keys(), "a superseded writer removed something"

    def become(self, key: Key) -> None:
        """The process that goes on from ``key``."""
        self.step = key[1]
        self.trainer.take(self.held[key])
        self.pending = None
        self.shelves = self.fresh_shelves()

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
