"""A run on an S3 server: saving, committing, rotating and loading with each sort of fault at each request in turn.

After each: what can be loaded is the old set of checkpoints, or the old and the new one, and never a half; the run is
without damage, and doing it all again on a good network ends as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from everstep.backends.api import Backend
from everstep.backends.open import open_backend
from everstep.errors import EverstepError
from everstep.format.layout import Box, EntrySpec, build_layout
from everstep.format.manifest import Manifest
from everstep.store.catalog import list_steps, read_decision
from everstep.store.commit import next_attempt, try_commit
from everstep.store.findings import Kind as Found
from everstep.store.findings import Severity
from everstep.store.fsck import check

from tests.store import crash_story
from tests.store import store_kit as kit

from . import stories
from .proxy import S3Proxy
from .server import S3Server
from .stories import KINDS, Kind, Place, Truth

Keys = frozenset[tuple[int, int]]

BOUND_S = 120.0
CHUNK = 1 << 20
BIG = (11 << 20) + 5
"""Bytes of the tensor that makes an image of several parts."""

SAMPLES = 8
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
        self._near = stories.through(server, proxy.endpoint)

    async def clean(self, story: Story) -> list[Place]:
        self.proxy.clear()
        url = self.server.url()
        await self._past(url, story.prepare)
        told, error = await self._act(story, url)
        assert error is None and told is not None
        await self._look(url, story, told)
        return stories.places_of(self.proxy.requests)

    async def strike(self, story: Story, kind: Kind, place: Place) -> None:
        url = self.server.url()
        await self._past(url, story.prepare)
        fault = kind.fault(place)
        self.proxy.clear([fault])
        told, error = await self._act(story, url)
        assert fault.struck, "the request did not come"
        await self._look(url, story, told)
        self.proxy.clear()
        told, error = await self._act(story, url)
        assert error is None and told is not None, error
        await self._look(url, story, told)

        async def tidy(backend: Backend) -> None:
            await backend.discard_leftovers(await backend.leftovers())

        await self._past(url, tidy)
        assert Truth(self.server, url).uploads() == []

    async def _act(self, story: Story, url: str) -> tuple[object, EverstepError | None]:
        options = stories.impatient(self._near.storage_options)
        backend = open_backend(url, shared=True, options=options)
        try:
            return await asyncio.wait_for(story.act(backend), BOUND_S), None
        except EverstepError as error:
            return None, error
        finally:
            await asyncio.wait_for(backend.close(), BOUND_S)
            self.proxy.release()
            await asyncio.to_thread(self.proxy.wait_quiet)

    async def _past(self, url: str, act: object) -> None:
        backend = open_backend(url, shared=True, options=self.server.storage_options)
        try:
            await act(backend)  # type: ignore[operator]
        finally:
            await backend.close()

    async def _look(self, url: str, story: Story, told: object) -> None:
        async def look(backend: Backend) -> None:
            good, bad = await kit.loadable(backend)
            assert not bad, bad
            assert frozenset(good) in (story.states[-1:] if told is not None else story.states), good
            async for finding in check(backend, decision_wait_s=0):
                # Between the last vote and the manifest it looks like a lost manifest; nothing else is damage.
                assert finding.severity is not Severity.DAMAGE or finding.kind is Found.UNDECIDED, finding
                assert told is None or finding.severity is not Severity.DAMAGE, finding

        await self._past(url, look)


@pytest.fixture
def stage(s3_server: S3Server, proxy: S3Proxy) -> Stage:
    return Stage(s3_server, proxy)


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

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(STORIES))
def test_each_fault_at_each_request_leaves_old_or_new(stage: Stage, name: str, kind: str) -> None:
    async def main() -> None:
        places = await stage.clean(STORIES[name])
        sort = KINDS[kind]
        await strike_all(stage, name, [(sort, place) for place in places if sort.fits(place)])

    asyncio.run(main())
