"""Every call of the S3 backend with each sort of fault at each of its requests in turn.

What must hold after: objects are as before or whole, and whole if that was told; the error is of the right class and
comes within a bound; the same call on a good network does what it is for, and nothing unfinished stays behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from everstep.backends.api import Backend
from everstep.backends.open import open_backend

from . import stories
from .proxy import S3Proxy
from .server import S3Server
from .stories import KINDS, STORIES, Kind, Place, Story, Truth

BOUND_S = 90.0
"""Within which a call ends whatever its network does, with a client that gives a silent server up after a second."""

SAMPLES = 24
"""Strikes of the fast suite."""

MAY_FAIL_UNTOLD = ("AbortMultipartUpload", "ListMultipartUploads", "ListParts")
"""Calls that only tidy up: what they do not do is left for `discard_leftovers`."""


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


class Stage:
    """Runs stories through the proxy, each on a prefix of its own."""

    def __init__(self, server: S3Server, proxy: S3Proxy) -> None:
        self.server, self.proxy = server, proxy
        self._near = stories.through(server, proxy.endpoint)

    def open(self, url: str) -> Backend:
        return open_backend(url, options=stories.impatient(self._near.storage_options))

    async def _act(self, story: Story, url: str) -> tuple[object, BaseException | None]:
        backend = self.open(url)
        try:
            return await asyncio.wait_for(stories.outcome(lambda: story.act(backend)), BOUND_S)
        finally:
            await asyncio.wait_for(backend.close(), BOUND_S)
            self.proxy.release()
            await asyncio.to_thread(self.proxy.wait_quiet)

    async def clean(self, story: Story) -> list[Place]:
        """A run on a good network: its requests."""
        self.proxy.clear()
        truth = Truth(self.server, self.server.url())
        story.prepare(truth)
        told, error = await self._act(story, truth.url)
        assert error is None, error
        story.check(truth, told, None)
        assert truth.uploads() == []
        return stories.places_of(self.proxy.requests)

    async def strike(self, story: Story, kind: Kind, place: Place, *, goes_on: bool = False) -> None:
        truth = Truth(self.server, self.server.url())
        story.prepare(truth)
        fault = kind.fault(place, goes_on=goes_on)
        self.proxy.clear([fault])
        told, error = await self._act(story, truth.url)
        assert fault.struck, "the request did not come"
        story.check(truth, told, error)
        if goes_on:
            self._judge(kind, place, error)
        else:
            assert error is None or isinstance(error, kind.once), repr(error)
        await self._mend(story, truth)

    def _judge(self, kind: Kind, place: Place, error: BaseException | None) -> None:
        """Of a fault that goes on."""
        if error is None:
            assert not kind.always or place.operation in MAY_FAIL_UNTOLD, "not told"
        else:
            assert isinstance(error, kind.always), repr(error)

    async def _mend(self, story: Story, truth: Truth) -> None:
        """The same call again, on a good network, and a look for what was left behind."""
        self.proxy.clear()
        told, error = await self._act(story, truth.url)
        assert error is None, repr(error)
        story.check(truth, told, None)
        backend = self.open(truth.url)
        try:
            await backend.discard_leftovers(await backend.leftovers())
        finally:
            await backend.close()
        assert truth.uploads() == []


@pytest.fixture
def stage(s3_server: S3Server, proxy: S3Proxy) -> Stage:
    return Stage(s3_server, proxy)


async def strike_all(stage: Stage, pairs: list[tuple[Story, Kind, Place]], *, goes_on: bool = False) -> None:
    for story, kind, place in pairs:
        try:
            await stage.strike(story, kind, place, goes_on=goes_on)
        except (Exception, pytest.fail.Exception) as error:
            seen = "\n".join(str(request) for request in stage.proxy.requests)
            when = ", going on" if goes_on else ""
            raise AssertionError(f"{story.name}: {kind.name} at {place}{when}: {error!r}\n{seen}") from error


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_good_network(stage: Stage, name: str) -> None:
    places = asyncio.run(stage.clean(STORIES[name]))
    assert places and not any("Bucket" in place.operation for place in places), places


def test_some_faults_leave_all_or_nothing(stage: Stage) -> None:
    """Each sort of fault once at least, at stories and requests that a seed draws."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)

    async def main() -> None:
        clean = {name: await stage.clean(story) for name, story in STORIES.items()}
        kinds = [
            *KINDS.values(),
            *draw.sample(sorted(KINDS.values(), key=lambda kind: kind.name), SAMPLES - len(KINDS)),
        ]
        pairs = []
        for kind in kinds:
            fitting = [
                (STORIES[name], kind, place)
                for name, places in clean.items()
                for place in places
                if kind.fits(place)
            ]
            if fitting:
                pairs.append(draw.choice(fitting))
        await strike_all(stage, pairs)

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("goes_on", [False, True], ids=["once", "going-on"])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(STORIES))
def test_each_fault_at_each_request(stage: Stage, name: str, kind: str, goes_on: bool) -> None:
    async def main() -> None:
        story, sort = STORIES[name], KINDS[kind]
        places = await stage.clean(story)
        await strike_all(
            stage, [(story, sort, place) for place in places if sort.fits(place)], goes_on=goes_on
        )

    asyncio.run(main())
