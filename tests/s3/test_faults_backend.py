"""Every call of the S3 backend with each sort of fault at each of its requests in turn.

What must hold after: objects are as before or whole, and whole if that was told; the error is of the right class and
comes within a bound; the same call on a good network does what it is for, and nothing unfinished stays behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Iterator

import pytest

from . import stories
from .proxy import S3Proxy
from .server import S3Server
from .stories import KINDS, STORIES, Kind, Place, Siblings, Story, Truth

BOUND_S = 90.0
"""Within which a call ends whatever its network does, with a client that gives a silent server up after a second."""

MAY_FAIL_UNTOLD = ("AbortMultipartUpload", "ListMultipartUploads", "ListParts")
"""Calls that only tidy up: what they do not do is left for `discard_leftovers`."""

BEGIN_AND_END = ("CreateMultipartUpload", "AbortMultipartUpload", "ListParts")
"""Calls whose lost answer may leave an upload that nobody knows of, to be found by `leftovers`."""


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


class Stage:
    """Runs stories through the proxy, each on a prefix of its own."""

    def __init__(self, server: S3Server, proxy: S3Proxy) -> None:
        self.server, self.proxy = server, proxy
        self.near = Siblings(dataclasses.replace(server, endpoint=proxy.endpoint).storage_options)

    async def _act(self, story: Story, url: str) -> tuple[object, BaseException | None]:
        backend = self.near.at(url, stories.patience_s(self.proxy))
        try:
            return await asyncio.wait_for(stories.outcome(lambda: story.act(backend)), BOUND_S)
        finally:
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
        return stories.places_of(self.proxy.requests, truth.url)

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
        if not goes_on and story.name in ("upload", "abort") and place.operation not in BEGIN_AND_END:
            assert truth.uploads() == [], "an upload was left behind"
        await self._mend(story, truth)

    def _judge(self, kind: Kind, place: Place, error: BaseException | None) -> None:
        """Of a fault that goes on."""
        if error is None:
            assert not kind.harms or place.operation in MAY_FAIL_UNTOLD, "not told"
        else:
            assert isinstance(error, kind.always), repr(error)

    async def _mend(self, story: Story, truth: Truth) -> None:
        """The same call again, on a good network, and a look for what was left behind."""
        self.proxy.clear()
        told, error = await self._act(story, truth.url)
        assert error is None, repr(error)
        story.check(truth, told, None)
        backend = self.near.at(truth.url)
        await backend.discard_leftovers(await backend.leftovers())
        assert truth.uploads() == []


@pytest.fixture
def stage(s3_server: S3Server, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stories.hasty(monkeypatch)
    return Stage(s3_server, proxy)


def play(stage: Stage, acts: Awaitable[None]) -> None:
    """Do ``acts`` and close the stage's client."""

    async def main() -> None:
        try:
            await acts
        finally:
            await stage.near.close()

    asyncio.run(main())


async def strike_all(stage: Stage, pairs: list[tuple[Story, Kind, Place]], *, goes_on: bool = False) -> None:
    for story, kind, place in pairs:
        try:
            await stage.strike(story, kind, place, goes_on=goes_on)
        except (Exception, pytest.fail.Exception) as error:
            seen = "\n".join(str(request) for request in stage.proxy.requests)
            when = ", going on" if goes_on else ""
            raise AssertionError(f"{story.name}: {kind.name} at {place}{when}: {error!r}\n{seen}") from error


def test_some_faults_leave_all_or_nothing(stage: Stage) -> None:
    """With a good network, and each sort of fault once, at stories and requests that a seed draws."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)

    async def main() -> None:
        clean = [(story, await stage.clean(story)) for story in STORIES.values()]
        for story, places in clean:
            assert places and not any("Bucket" in place.operation for place in places), (story.name, places)
        pairs = []
        for kind in KINDS.values():
            fitting = [
                (story, kind, place) for story, places in clean for place in places if kind.fits(place)
            ]
            if fitting:
                pairs.append(draw.choice(fitting))
        await strike_all(stage, pairs)

    play(stage, main())


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

    play(stage, main())
