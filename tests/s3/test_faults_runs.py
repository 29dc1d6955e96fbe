"""A run on an S3 server: saving, committing, rotating and loading with each sort of fault at each request in turn.

After each: what can be loaded is the old set of checkpoints, or the old and the new one, and never a half; the run is
without damage, and doing it all again on a good network ends as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Iterator

import pytest
from everstep.backends.api import Backend
from everstep.backends.s3writer import PART_BYTES
from everstep.errors import EverstepError
from everstep.format.layout import Box, EntrySpec, build_layout
from everstep.format.manifest import Manifest
from everstep.store import commit
from everstep.store.catalog import list_steps, read_decision
from everstep.store.commit import next_attempt, try_commit
from everstep.store.findings import Kind as Found
from everstep.store.findings import Severity
from everstep.store.fsck import check
from everstep.store.fsck_images import Extent

from tests.store import crash_story
from tests.store import store_kit as kit

from . import stories
from .proxy import S3Proxy
from .server import S3Server
from .stories import KINDS, Kind, Place, Siblings, Truth

Keys = frozenset[tuple[int, int]]

BOUND_S = 120.0
CHUNK = 1 << 20
BIG = PART_BYTES + 5
"""Bytes of the tensor that makes an image of two parts."""

SAMPLES = 2
"""Strikes of the fast suite, of each story."""


class Story:
    """Something done to a run. ``states``: the sets of checkpoints that may be there after it was broken off; the last
    one is what is there when it has been told to be done."""

    states: tuple[Keys, ...] = ()

    async def prepare(self, backend: Backend) -> None:
        raise NotImplementedError

    async def act(self, backend: Backend) -> object:
        raise NotImplementedError


class Save(Story):
    """Two ranks' images, one of several parts, their votes, and the commit."""

    states = (frozenset({(1, 1)}), frozenset({(1, 1), (1, 2)}))

    async def prepare(self, backend: Backend) -> None:
        await kit.start_run(backend, CHUNK)
        await kit.save(backend, 1)

    async def act(self, backend: Backend) -> object:
        attempt, standing = await next_attempt(backend, 2, 1)
        if standing is not None:
            return standing
        big = EntrySpec("model", "big", "uint8", (BIG,), (Box.full((BIG,)),))
        for rank in range(kit.WORLD):
            layout = build_layout([*kit.specs(rank), *([big] if rank == 0 else [])])
            pinned = kit.snapshot(2, rank, chunk_bytes=CHUNK, layout=layout)
            await kit.flush(backend, 2, rank, attempt=attempt, pinned=pinned)
        decision = await try_commit(backend, 2, 1, attempt, kit.WORLD)
        return decision if isinstance(decision, Manifest) else None


class Rotate(Story):
    """A save, and what it makes superfluous removed."""

    states = (crash_story.OLD, crash_story.BOTH, crash_story.NEW)

    async def prepare(self, backend: Backend) -> None:
        await crash_story.before(backend)

    async def act(self, backend: Backend) -> object:
        await crash_story.story(backend)
        return "done"


class Load(Story):
    """All that is listed, loaded and compared byte by byte."""

    states = (crash_story.OLD,)

    async def prepare(self, backend: Backend) -> None:
        await crash_story.before(backend)

    async def act(self, backend: Backend) -> object:
        steps = await list_steps(backend)
        decisions = [await read_decision(backend, found) for found in steps]
        for decision in decisions:
            assert isinstance(decision, Manifest)
            await kit.load(backend, decision)
        told = frozenset(
            (decision.incarnation, decision.step) for decision in decisions if decision is not None
        )
        assert told == self.states[-1]
        return told


STORIES: dict[str, Story] = {"save": Save(), "rotate": Rotate(), "load": Load()}


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


class Stage:
    """Runs stories through the proxy, and looks at the run past it."""

    def __init__(self, server: S3Server, proxy: S3Proxy) -> None:
        self.server, self.proxy = server, proxy
        self._near = Siblings(dataclasses.replace(server, endpoint=proxy.endpoint).storage_options)
        self._direct = Siblings(server.storage_options)

    async def close(self) -> None:
        await self._near.close()
        await self._direct.close()

    async def clean(self, story: Story) -> list[Place]:
        self.proxy.clear()
        url = self.server.url()
        await story.prepare(self._direct.at(url))
        told, error = await self._act(story, url)
        assert error is None and told is not None
        await self._look(url, story, told)
        return stories.places_of(self.proxy.requests, url)

    async def strike(self, story: Story, kind: Kind, place: Place) -> None:
        url = self.server.url()
        await story.prepare(self._direct.at(url))
        fault = kind.fault(place)
        self.proxy.clear([fault])
        told, error = await self._act(story, url)
        assert fault.struck, "the request did not come"
        await self._look(url, story, told)
        self.proxy.clear()
        told, error = await self._act(story, url)
        assert error is None and told is not None, error
        await self._look(url, story, told)

        direct = self._direct.at(url)
        await direct.discard_leftovers(await direct.leftovers())
        assert Truth(self.server, url).uploads() == []

    async def _act(self, story: Story, url: str) -> tuple[object, EverstepError | None]:
        commit._covered.clear()  # what it has seen once it does not ask for again
        backend = self._near.at(url, stories.patience_s(self.proxy))
        try:
            return await asyncio.wait_for(story.act(backend), BOUND_S), None
        except EverstepError as error:
            return None, error
        finally:
            self.proxy.release()
            await asyncio.to_thread(self.proxy.wait_quiet)

    async def _look(self, url: str, story: Story, told: object) -> None:
        direct = self._direct.at(url)
        good, bad = await kit.loadable(direct)
        assert not bad, bad
        assert frozenset(good) in (story.states[-1:] if told is not None else story.states), good
        async for finding in check(
            direct, extent=Extent(quick=True), decision_wait_s=0
        ):  # all bytes were compared before
            # Between the last vote and the manifest it looks like a lost manifest; nothing else is damage.
            assert finding.severity is not Severity.DAMAGE or finding.kind is Found.UNDECIDED, finding
            assert told is None or finding.severity is not Severity.DAMAGE, finding


@pytest.fixture
def stage(s3_server: S3Server, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stories.hasty(monkeypatch)
    return Stage(s3_server, proxy)


def play(stage: Stage, acts: Awaitable[None]) -> None:
    """Do ``acts`` and close the stage's clients."""

    async def main() -> None:
        try:
            await acts
        finally:
            await stage.close()

    asyncio.run(main())


async def strike_all(stage: Stage, name: str, pairs: list[tuple[Kind, Place]]) -> None:
    for kind, place in pairs:
        try:
            await stage.strike(STORIES[name], kind, place)
        except (Exception, pytest.fail.Exception) as error:
            seen = "\n".join(str(request) for request in stage.proxy.requests)
            raise AssertionError(f"{name}: {kind.name} at {place}: {error!r}\n{seen}") from error


@pytest.mark.parametrize("name", sorted(STORIES))
def test_some_faults_leave_old_or_new(stage: Stage, name: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)

    async def main() -> None:
        places = await stage.clean(STORIES[name])
        pairs = [(kind, place) for kind in KINDS.values() for place in places if kind.fits(place)]
        await strike_all(stage, name, random.Random(seed).sample(pairs, SAMPLES))

    play(stage, main())


def of_each_sort(places: list[Place]) -> list[Place]:
    """The first and the last of each sort of request."""
    first = {place.shape: place for place in reversed(places)}
    last = {place.shape: place for place in places}
    return [place for place in places if place in (first[place.shape], last[place.shape])]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(STORIES))
def test_each_fault_at_each_request_leaves_old_or_new(stage: Stage, name: str, kind: str) -> None:
    """At each sort of request, in the longer stories."""

    async def main() -> None:
        places = await stage.clean(STORIES[name])
        sort = KINDS[kind]
        chosen = places if name == "save" else of_each_sort(places)
        await strike_all(stage, name, [(sort, place) for place in chosen if sort.fits(place)])

    play(stage, main())
