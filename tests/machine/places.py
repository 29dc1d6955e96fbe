"""The two places of a run, as files: what is done to them by a process that may die, and what is harmed there."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from everstep.backends import points
from everstep.backends.api import Capabilities
from everstep.backends.errors import Conflict, NotFound
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, EverstepError
from everstep.format import names
from everstep.format.manifest import Decision, Manifest, decode_decision, encode_decision
from everstep.store import runs
from everstep.store.catalog import list_steps, read_numbered
from everstep.store.sources import DurableSource

from .world import WORLD, Clock, Key

ROOT, TIER = "root", "tier"
PLACES = (ROOT, TIER)

T = TypeVar("T")
Backends = dict[str, LocalBackend]


class Flat(LocalBackend):
    """An object store: a directory is there as long as an object lies in it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.capabilities = Capabilities(atomic_create=True, shared=True, flat=True)

    async def list_names(self, prefix: str = "") -> list[str]:
        cut = len(prefix) + 1 if prefix else 0
        there = [item.name[cut:] async for item in self.list(prefix)]
        return list(dict.fromkeys(name.partition("/")[0] for name in there))


class PutOnly(Flat):
    """An object store that does not know how to create a name once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.capabilities = Capabilities(atomic_create=False, shared=True, flat=True)

    async def create(self, name: str, data: bytes) -> None:
        try:
            there = await self.read(name)
        except NotFound:
            await self.write(name, data)
        else:
            if there != data:
                raise Conflict(name, "exists already, with other bytes")


KINDS: dict[str, Callable[[Path], LocalBackend]] = {"files": LocalBackend, "flat": Flat, "put": PutOnly}
ROOTS = ("files", "flat")
TIERS = ("files", "flat", "put")


class Killed(BaseException):
    """The process dies here."""


class Process:
    """Runs work on backends of its own. With ``kill_at`` the process dies at that point that is reached: the places are
    then what they were at this very moment, whatever the unwinding did."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.killed = False
        self.reached = 0
        self.clock = Clock()
        self.kinds = {ROOT: "files", TIER: "files"}

    def path(self, place: str) -> Path:
        return self.home / place

    def run(self, work: Callable[[Backends], Awaitable[T]], kill_at: int | None = None) -> T | None:
        """The result; None, and ``killed``, where it died."""
        self.killed, self.reached = False, 0
        lock = threading.Lock()
        frozen = self.home / "frozen"

        def hook(name: str, detail: str) -> None:
            with lock:
                if self.killed:
                    raise Killed(name)
                self.reached += 1
                if self.reached - 1 == kill_at:
                    self.killed = True
                    _copy(self.home, frozen)
                    raise Killed(name)

        try:
            result: T | None = self._run(work, hook)
        except (Killed, EverstepError):
            if not self.killed:
                raise
            result = None
        if self.killed:
            for place in PLACES:
                shutil.rmtree(self.path(place), ignore_errors=True)
                if (frozen / place).exists():
                    (frozen / place).rename(self.path(place))
            shutil.rmtree(frozen)
            return None
        return result

    def run_both(
        self,
        work: Callable[[Backends], Awaitable[object]],
        at: int,
        other: Callable[[Backends], Awaitable[T]],
        *,
        dies_in: int | None = None,
        other_dies_in: int | None = None,
    ) -> T | None:
        """Do ``work``, and ``other``, in another process, while ``work`` stands at its point ``at``, or, where it does
        not come so far, behind it; what ``other`` returns. With ``other_dies_in`` the other dies after so many points
        (None is returned), with ``dies_in`` the first one after so many behind the other's end: both must be work
        whose unwinding changes nothing."""
        self.killed, self.reached = False, 0
        lock = threading.Lock()
        found: list[T | None] = []
        left = {"": None, "other": other_dies_in, "behind": dies_in}
        who = ""

        def hook(name: str, detail: str) -> None:
            nonlocal who
            with lock:
                self.reached += 1
                due = self.reached - 1 == at and not who
                points_left = left[who]
                if points_left is not None:
                    left[who] = max(points_left - 1, 0)
                    if points_left == 0:
                        raise Killed(name)
                who = "other" if due else who
            if due:
                with ThreadPoolExecutor(1) as pool, suppress(Killed):
                    found.append(pool.submit(self._loop, other).result())
                found.append(None)
                who = "behind"

        with suppress(Killed):
            self._run(work, hook)
        if not found:
            found.append(self._run(other, None))
        return found[0]

    def _run(self, work: Callable[[Backends], Awaitable[T]], hook: Callable[[str, str], None] | None) -> T:
        points.hook = hook
        runs.datetime = self.clock  # type: ignore[assignment, misc]
        try:
            return self._loop(work)
        finally:
            points.hook = None
            runs.datetime = datetime  # type: ignore[misc]

    def _loop(self, work: Callable[[Backends], Awaitable[T]]) -> T:
        async def go() -> T:
            asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)  # the dead tell nothing
            backends = {place: KINDS[self.kinds[place]](self.path(place)) for place in PLACES}
            try:
                return await work(backends)
            finally:
                for backend in backends.values():
                    await backend.close()

        return asyncio.run(go())


def _copy(home: Path, dest: Path) -> None:
    dest.mkdir()
    for place in PLACES:
        if (home / place).exists():
            shutil.copytree(home / place, dest / place, copy_function=_copy_file)


def _copy_file(source: str, dest: str) -> None:
    try:
        shutil.copyfile(source, dest)
    except FileNotFoundError:  # another thread is at work
        Path(dest).unlink(missing_ok=True)


@dataclass
class Seen:
    """A checkpoint that counts at a place, as it was when nothing of it was harmed. ``objects``: the names of all that
    it needs but its base."""

    manifest: Manifest
    decision: str
    votes: dict[int, str]
    images: dict[str, int]
    """With the rank of each."""
    layouts: frozenset[str]

    @property
    def objects(self) -> frozenset[str]:
        return frozenset([*self.votes.values(), *self.images]) | self.layouts


@dataclass
class Place:
    """What is known of one place. ``harmed``: the right bytes of each object that was harmed, by name."""

    path: Path
    harmed: dict[str, bytes] = field(default_factory=dict)
    standing: dict[Key, Seen] = field(default_factory=dict)
    decided: dict[Key, Decision | None] = field(default_factory=dict)
    """The decision that counts, of every checkpoint's directory; None: there is none, or it cannot be read."""
    _known: dict[tuple[Key, int], Seen] = field(default_factory=dict)
    """By attempt, as first seen: nothing is harmed that was not seen before."""

    async def look(self, backend: LocalBackend) -> None:
        """Bring ``standing``, ``decided`` and ``harmed`` up to date."""
        self.decided = {}
        standing = {}
        for found in await list_steps(backend):
            try:
                numbered = await read_numbered(backend, found)
            except Damaged:
                numbered = None
            number, decision = numbered or (0, None)
            self.decided[found.key] = decision
            if isinstance(decision, Manifest):
                known = found.key, decision.attempt
                if known not in self._known and self.is_doubtful(found.key):
                    continue
                if known not in self._known:
                    self._known[known] = await _see(backend, decision)
                name = names.decision(*found.place, number)
                standing[found.key] = replace(self._known[known], manifest=decision, decision=name)
        self.standing = standing
        self.harmed = {name: data for name, data in self.harmed.items() if self.is_harmed(name, data)}

    def is_harmed(self, name: str, right: bytes) -> bool:
        parsed = names.parse(name)
        assert parsed is not None
        path = self.path / name
        if parsed.step is not None and parsed.incarnation is not None:
            directory = self.path / names.checkpoint_dir(parsed.step, parsed.incarnation)
            if not directory.exists() or not any(directory.iterdir()):
                return False
        data = path.read_bytes() if path.exists() else b""
        if data == right:
            return False
        return parsed.kind is not names.Kind.DECISION or not _is_same_decision(data, right, name)

    def harm(self, name: str, data: bytes | None) -> None:
        path = self.path / name
        self.harmed.setdefault(name, path.read_bytes())
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    def is_doubtful(self, key: Key) -> bool:
        """Whether one of its decisions is harmed: what seems to count may be a former attempt, of which nothing is
        left."""
        prefix = names.checkpoint_dir(key[1], key[0]) + "/manifest"
        return any(name.startswith(prefix) for name in self.harmed)

    def is_whole(self, key: Key) -> bool:
        """Whether it counts, and nothing of it is harmed but perhaps its base."""
        seen = self.standing.get(key)
        return seen is not None and not seen.objects & self.harmed.keys() and not self.is_doubtful(key)

    def chain(self, key: Key) -> list[Key]:
        """The checkpoint and its bases, as far as they stand here."""
        found = [key]
        while found[-1] in self.standing:
            parent = self.standing[found[-1]].manifest.parent_key
            if parent is None:
                break
            found.append(parent)
        return found


def _is_same_decision(data: bytes, right: bytes, name: str) -> bool:
    """Whether it says the same, made at another time."""
    try:
        found, wanted = decode_decision(data, name), decode_decision(right, name)
    except EverstepError:
        return False
    if isinstance(found, Manifest) and isinstance(wanted, Manifest):
        # By their bytes: a metric that is NaN differs from itself.
        return encode_decision(replace(found, created=wanted.created)) == encode_decision(wanted)
    return found == wanted


async def _see(backend: LocalBackend, manifest: Manifest) -> Seen:
    place = manifest.step, manifest.incarnation, manifest.attempt
    source = DurableSource(backend, manifest, 1)
    images: dict[str, int] = {}
    for rank in range(WORLD):
        vote = await source.vote_of(rank)
        images.update({image.object_name(*place, rank): rank for image in vote.images})
    return Seen(
        manifest,
        "",
        {rank: names.vote(*place, rank) for rank in range(WORLD)},
        images,
        frozenset(names.layout(record.layout_hash) for record in manifest.ranks),
    )
