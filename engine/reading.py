"""What one rank reads of a checkpoint: into live objects, or as plain values, from the nearest holder.

Whatever the number of ranks was at the save: what is read are the regions that the live objects hold. Loading into
live objects goes in phases that all ranks make together, so that nothing live is touched before every rank has
compared, and one rank's failure is every rank's.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import NoCheckpoint
from .format.entries import Entry, Scope, path_of
from .format.hashing import digest
from .phases import Phases
from .plan import whose
from .plan.whose import Key
from .saved import Checkpoint, Wanted
from .sharing import Bring
from .snapshot.views import no_collection
from .state.elastic import check_data, derive_rng, reshard_loader_state
from .state.merge import Saved, Skeleton, differences, merged
from .state.plan_base import Extra
from .state.restore import RestorePlan, plan_restore, plan_values
from .state.rng import RandomState
from .state.trainstate import TrainState
from .store.ahead import Ahead
from .store.fill import FillReport
from .store.sources import KINDS, Source

PROOF_BYTES_MAX = 256 << 20
"""Tensors that several ranks have for themselves are read from all of them, to see whether they are equal, up to
this much in all."""

UNCOLLECTED_BYTES = 16 << 30
"""Reading more, collections may run meanwhile: clients of stores leave garbage with each request."""

TOLD_MAX = 40
"""Differences between ranks that are told one by one."""

LOADER = "loader"
RNG = "rng"


@dataclass(frozen=True, slots=True)
class Filled:
    """What one rank's reading gave: the tier, the bytes that were copied, what was loosened, and, where plain
    values were asked for, those. ``sources`` are the bytes that were read by the kind of their holder (one of
    :data:`~.store.sources.KINDS`), ``fallbacks`` what came from another than the nearest, and why."""

    tier: str
    nbytes: int
    loosened: tuple[str, ...] = ()
    values: Any = None
    sources: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, report: FillReport, **more: Any) -> Filled:
        """``report`` is of the filling from ``checkpoint``."""
        sources = {kind: nbytes for kind, nbytes in report.kind_bytes.items() if kind in KINDS and nbytes}
        fallbacks = checkpoint.fallbacks(report)
        return cls(checkpoint.tier, report.nbytes, sources=sources, fallbacks=fallbacks, **more)


Reading = Callable[[Callable[[], Sequence[Source]], Phases], Filled]
"""Reads what a rank needs, in phases, from the holders of one checkpoint that the first argument opens, nearest
first."""


def into_state(
    state: TrainState,
    allow: Collection[str] = (),
    *,
    parts: Collection[str] | None = None,
    rank: int | None = None,
    bring: Bring | None = None,
) -> Reading:
    """Restores ``state`` in place (or ``parts`` of it); as rank ``rank`` of the save, if that is given. ``bring``: see
    :func:`.sharing.shared_fill`."""

    def read(opened: Callable[[], Sequence[Source]], phases: Phases) -> Filled:
        return _Load(state, allow, parts, rank, phases, bring).run(opened)

    return read


def as_values(rank: int, parts: Collection[str] | None, keys: Collection[str] | None = None) -> Reading:
    """Gives plain nested values on the CPU: tensors of the job whole, what is each rank's own as ``rank`` has it,
    and what ``rank`` lacks from the ranks that have it."""

    def read(opened: Callable[[], Sequence[Source]], phases: Phases) -> Filled:
        return phases.each(lambda: values_of(opened()))

    def values_of(sources: Sequence[Source]) -> Filled:
        with no_collection():
            checkpoint = Checkpoint(sources)
            _check_rank(checkpoint, rank)
            checkpoint.meta(rank)  # nothing here needs it, but a snapshot is taken whole or not at all
            saved = checkpoint.images(whose.representatives(checkpoint.layouts, rank))
            skeleton = merged(saved) if len(saved) > 1 else Skeleton.of(saved[0])
            plan = plan_values(skeleton, parts=parts, keys=keys)
            wanted = plan.wanted()
        report = checkpoint.fill(wanted, plan.sources())
        with no_collection():
            return Filled.of(checkpoint, report, values=plan.finish())

    return read


@dataclass(slots=True)
class _Load:
    """One rank's loading into live objects."""

    state: TrainState
    allow: Collection[str]
    parts: Collection[str] | None
    rank: int | None
    phases: Phases
    bring: Bring | None = None
    equal: set[Key] = field(default_factory=set)
    loose: set[Key] = field(default_factory=set)
    own: int | None = None
    """The rank at the save that this one is; None where another number of ranks wrote it."""
    first: int = 0
    """The rank at the save whose plain values this one takes."""

    def run(self, opened: Callable[[], Sequence[Source]]) -> Filled:
        ahead = Ahead()
        try:
            return self._run(opened, ahead)
        finally:
            ahead.end()

    def _run(self, opened: Callable[[], Sequence[Source]], ahead: Ahead) -> Filled:
        phases = self.phases
        with contextlib.ExitStack() as stack:
            # Each of the many objects that are made lives until the end: collections would find nothing, and look at
            # all that the trainer has.
            with no_collection():
                checkpoint, plan, unequal = self._planned(opened, ahead)

                def asked() -> tuple[Wanted, list[int | None], set[Key]]:
                    self._check(checkpoint, plan, unequal)
                    return self._asked(plan)

                fill_now = stack.enter_context(checkpoint.filling(phases, asked, self.bring, ahead))
                if sum(view.nbytes for _, view in plan.wanted()) <= UNCOLLECTED_BYTES:
                    return phases.each(lambda: self._fill(checkpoint, plan, fill_now))
            return phases.each(lambda: self._fill(checkpoint, plan, fill_now))

    def _planned(
        self, opened: Callable[[], Sequence[Source]], ahead: Ahead
    ) -> tuple[Checkpoint, RestorePlan, dict[str, list[int]]]:
        """The checkpoint, what is filled from it, which all ranks have compared, and what is still to be checked:
        values that the ranks of the save have not in common (:func:`_unequal`)."""
        phases = self.phases
        (checkpoint, plan), told = phases.exchange(lambda: self._compared(opened, ahead))
        if any(extra for extra, _ in told):
            self._settle(checkpoint, plan)
        unequal: dict[str, list[int]] = {}
        if self.own is None and checkpoint.world > 1:
            special = {part for _, parts in told for part in parts}
            unequal = phases.from_first(lambda: _unequal(checkpoint, special))
        return checkpoint, plan, unequal

    def _compared(
        self, opened: Callable[[], Sequence[Source]], ahead: Ahead
    ) -> tuple[tuple[Checkpoint, RestorePlan], Any]:
        """The checkpoint and this rank's plan; for all ranks: whether it leaves something out, and parts that are of no
        rank alone."""
        checkpoint, plan = self._compare(self._open(opened, ahead))
        return (checkpoint, plan), [bool(plan.extra), sorted(self._special())]

    def _open(self, opened: Callable[[], Sequence[Source]], ahead: Ahead) -> Checkpoint:
        """Where it is sure that this rank reads all images of its own, and nobody else does, that begins at once."""
        sources = opened()
        world = sources[0].world
        whole = self.parts is None and not self.allow and self.bring is None
        if (
            whole
            and self.phases.world == 1
            and (self.rank is not None or world == 1)
            and (self.rank or 0) < world
        ):
            ahead.begin(sources, self.rank or 0)
        return Checkpoint(sources)

    # -- comparing

    def _compare(self, checkpoint: Checkpoint) -> tuple[Checkpoint, RestorePlan]:
        if self.rank is not None:
            _check_rank(checkpoint, self.rank)
            self.first = self.own = self.rank
        elif checkpoint.world == self.phases.world:
            self.first = self.own = self.phases.rank
        else:
            self.first = whose.home(self.phases.rank, checkpoint.world)
        said = checkpoint.meta(self.first)
        if self.parts is None or LOADER in self.parts:
            check_data(self.state.data, (said.get("data") or {}).get("kind"))
        if self.own is None:
            return checkpoint, self._plan_elsewhere(checkpoint)
        [mine] = checkpoint.images([self.first])
        plan = plan_restore(self.state, Skeleton.of(mine), allow=self.allow, parts=self.parts)
        others = whose.representatives(checkpoint.layouts, self.first) if plan.missing else []
        if len(others) > 1:
            # Another partition than at the save: what is not here may be there. What this rank does not take of
            # others' they tell themselves.
            skeleton = merged(checkpoint.images(others))
            wider = plan_restore(self.state, skeleton, allow=self.allow, parts=self.parts)
            if wider.missing < plan.missing:
                wider.keep_extra({extra.where for extra in plan.extra})
                plan = wider
        return checkpoint, plan

    def _special(self) -> set[str]:
        """Live parts that are each rank's own by nature, with rules of their own at another number of ranks."""
        live = self.state.live_parts()
        return {part for part in live if part == LOADER or isinstance(live[part], RandomState)}

    def _plan_elsewhere(self, checkpoint: Checkpoint) -> RestorePlan:
        """At another number of ranks than wrote it."""
        special = self._special()
        needed = whose.representatives(checkpoint.layouts, self.first)
        taken: dict[str, int] = {}
        each: dict[str, Sequence[int]] = {}
        reshard: dict[str, Callable[[list[Any]], Any] | None] = {}
        derive: dict[str, Callable[[Any], Any]] = {}
        rank, world = self.phases.rank, self.phases.world
        if RNG in special:
            taken[RNG] = 0
            needed = [*needed, 0]
            derive[RNG] = functools.partial(derive_rng, world=world, rank=rank)
        if LOADER in special:
            reshard[LOADER] = None
            if self.state.reshard_loader is not None:
                each[LOADER] = range(checkpoint.world)
                needed = [*needed, *each[LOADER]]
                reshard[LOADER] = lambda states: reshard_loader_state(self.state, states, rank, world)
        skeleton = merged(checkpoint.images(list(dict.fromkeys(needed))), taken=taken, each=each)
        return plan_restore(
            self.state, skeleton, allow=self.allow, parts=self.parts, derive=derive, reshard=reshard
        )

    def _settle(self, checkpoint: Checkpoint, plan: RestorePlan) -> None:
        """What this rank does not take is unexpected only if no rank takes it, nor one that is equal to it."""
        layouts = checkpoint.layouts

        def names(entries: Sequence[Entry], places: Collection[str]) -> set[bytes]:
            return {_short(name) for name in whose.names_of(entries, places, layouts, self.own)}

        told = self.phases.share(sorted(names(plan.used, plan.met)))
        taken = {name for some in told for name in some}
        taken |= self.phases.each(lambda: self._copies(checkpoint, plan, taken))

        def is_taken(one: Extra) -> bool:
            entries = plan.entries_of(one)
            return names(entries, () if entries else [one.where]) <= taken

        plan.settle(is_taken)

    def _copies(self, checkpoint: Checkpoint, plan: RestorePlan, taken: Collection[bytes]) -> set[bytes]:
        """Names of what this rank has for itself and does not take, equal to what another one has for itself and
        takes: as many ranks that share the model in another way need fewer copies of what all of them had."""
        if self.own is None:
            return set()
        own = self.own
        keys = {(e.part, e.key) for extra in plan.extra for e in plan.entries_of(extra)}
        pairs = whose.twins(
            keys, checkpoint.layouts, own, lambda key, rank: _short(whose.name_of(key, rank)) in taken
        )
        return {_short(whose.name_of(key, own)) for key in _proved(checkpoint, pairs)}

    # -- proving

    def _check(self, checkpoint: Checkpoint, plan: RestorePlan, unequal: dict[str, list[int]]) -> None:
        """Raises StateMismatch for everything that differs."""
        plan.settle()
        taken = self.state.live_parts()
        for path, ranks in unequal.items():
            part = path.partition("/")[0]
            if part in taken and (self.parts is None or part in self.parts):
                told = f"another value on rank(s) {_some(ranks)} than on rank 0"
                plan.differ("ranks", f"{path}: {told}; {_WHAT_TO_DO}")
        wanted = [entry for entry, _ in plan.wanted() if entry.part != LOADER or self.own is not None]
        own = self.own is not None
        doubt = whose.doubtful(wanted, checkpoint.layouts, self.first, own=own)
        if doubt:
            self.equal = _proved(checkpoint, doubt)
            self.loose = set(doubt) - self.equal
        for part, key in sorted(self.loose):
            told = f"the own tensor of each of rank(s) {_some(sorted(doubt[part, key]))}, and not equal"
            plan.differ("ranks", f"{path_of(part, key)}: {told}; {_WHAT_TO_DO}")
        plan.raise_mismatches()

    # -- filling

    def _asked(self, plan: RestorePlan) -> tuple[Wanted, list[int | None], set[Key]]:
        wanted = plan.wanted()
        sources = plan.sources()
        readers = [self._reader(entry, source) for (entry, _), source in zip(wanted, sources, strict=True)]
        return wanted, readers, self.equal | self.loose

    def _fill(self, checkpoint: Checkpoint, plan: RestorePlan, fill_now: Callable[[], FillReport]) -> Filled:
        report = fill_now()
        with no_collection():
            loosened = plan.finish()
        if self.own is None and RNG in self._special() and self.phases.rank == 0:
            warnings.warn(
                f"everstep: step {checkpoint.step} was written by {checkpoint.world} rank(s) and is loaded by "
                f"{self.phases.world}: their random numbers are new ones, derived from those of rank 0",
                RuntimeWarning,
                stacklevel=4,
            )
        return Filled.of(checkpoint, report, loosened=tuple(loosened))

    def _reader(self, entry: Entry, source: int) -> int | None:
        """As which rank at the save an entry is read."""
        if self.own is not None:
            return self.own
        if entry.part == LOADER:
            return source
        loose = (entry.part, entry.key) in self.loose and entry.scope is not Scope.GLOBAL
        return self.first if loose else None


_WHAT_TO_DO = (
    "if all ranks mean the same, name the part in TrainState(replicated=...) at the save; "
    'with allow={"ranks"} each takes that of its rank modulo the number that saved'
)


def _check_rank(checkpoint: Checkpoint, rank: int) -> None:
    if rank >= checkpoint.world:
        raise NoCheckpoint(
            f"step {checkpoint.step} has no rank {rank}",
            found=f"{checkpoint.world} ranks",
            expected=f"rank {rank}",
            step=checkpoint.step,
        )


def _unequal(checkpoint: Checkpoint, special: Collection[str]) -> dict[str, list[int]]:
    """Plain values that the ranks of the save have not in common: paths, and the ranks where they differ from the
    first that has them. Reads all ranks' state images, a few at a time."""
    [first] = checkpoint.images([0])
    found: dict[str, list[int]] = {}

    def compare(one: Saved, ranks: Sequence[int]) -> None:
        parts = [part for part in one.image.parts if part not in special]
        others = (saved for rank in ranks for saved in checkpoint.read_images([rank]))
        for path, some in differences(one, others, parts).items():
            found.setdefault(path, []).extend(some)

    groups = whose.alike(checkpoint.layouts)
    for group in groups:
        [head] = checkpoint.images(group[:1])
        compare(head, group[1:])
    compare(first, [group[0] for group in groups if group[0] != 0])
    return {path: sorted(set(ranks)) for path, ranks in sorted(found.items())[:TOLD_MAX]}


def _proved(checkpoint: Checkpoint, doubt: Mapping[Key, whose.Holders]) -> set[Key]:
    """The keys of ``doubt`` whose tensors are equal on all their ranks: by their images' hashes, else by content."""
    layouts = checkpoint.layouts
    roots = checkpoint.roots(whose.images_of(doubt, layouts))
    equal = whose.equal_by_image(doubt, layouts, roots)
    left = {
        key: holders
        for key, holders in doubt.items()
        if key not in equal and len({(e.dtype, e.shape, e.boxes) for e in holders.values()}) == 1
    }
    if sum(entry.nbytes for holders in left.values() for entry in holders.values()) > PROOF_BYTES_MAX:
        return equal
    wanted, readers = [], []
    for holders in left.values():
        for rank, entry in holders.items():
            wanted.append((entry, memoryview(bytearray(entry.nbytes))))
            readers.append(rank)
    checkpoint.fill(wanted, readers)
    views = iter(view for _, view in wanted)
    for key, holders in left.items():
        first, *others = [next(views) for _ in holders]
        if all(view == first for view in others):
            equal.add(key)
    return equal


def _short(name: str) -> bytes:
    """What stands for a name where ranks tell each other many."""
    return digest(name.encode(errors="surrogatepass"))[:8]


def _some(ranks: Sequence[int]) -> str:
    return f"{list(ranks[:8])}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
