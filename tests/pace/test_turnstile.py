"""Who goes first: recovery, then what is durable nowhere, then mirrors; and nobody starves."""

from __future__ import annotations

import asyncio
import itertools

from everstep.agent.turnstile import PASSED_OVER_S, TURN_S, Lane, Turnstile, Urgency
from everstep.plan.pace import Fixed
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.test_wrappers import FakeTime

from .kit import within

SLICE = 100_000


class Traffic:
    """Lanes that send as fast as they may until a time, and what passed in each."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.turnstile = Turnstile(self.time.clock, self.time.sleep)
        self.passed: dict[str, list[tuple[float, int]]] = {}

    def lane(self, name: str, urgency: Urgency, rate: float | None) -> Lane:
        self.passed[name] = []
        return self.turnstile.lane(name, urgency, Fixed(rate))

    async def send(self, lane: Lane, start: float, end: float, link: float = 1e7) -> None:
        await self.time.sleep(start)
        while self.time.now < 1000 + end:
            await lane.take(SLICE)
            self.passed[lane.name].append((self.time.now, SLICE))
            await self.time.sleep(SLICE / link)


def test_a_mirror_stands_back_for_the_only_copy_and_goes_on_after_it() -> None:
    async def main(traffic: Traffic) -> None:
        root = traffic.lane("root", Urgency.ONLY_COPY, None)
        mirror = traffic.lane("mirror", Urgency.MIRROR, 1e6)
        await asyncio.gather(traffic.send(mirror, 0, 60), traffic.send(root, 10, 40))

    traffic = Traffic()
    asyncio.run(traffic.time.run(main(traffic)))
    mirror, root = traffic.passed["mirror"], traffic.passed["root"]
    assert within(mirror, 1002, 5) >= 0.95 * 5e6
    assert within(mirror, 1010.2, 8.5) == 0
    share = within(mirror, 1011, 28) / 28e6
    assert 0 < share <= 1.2 * TURN_S / (PASSED_OVER_S + TURN_S), "a short turn now and then"
    assert within(mirror, 1042, 5) >= 0.95 * 5e6
    assert within(root, 1010, 30) >= 0.95 * 3e8, "it stands back for nobody"


def test_recovery_goes_before_all() -> None:
    async def main(traffic: Traffic) -> None:
        root = traffic.lane("root", Urgency.ONLY_COPY, None)

        async def recover() -> None:
            await traffic.time.sleep(5)
            traffic.turnstile.recovering = True
            await traffic.time.sleep(30)
            traffic.turnstile.recovering = False

        await asyncio.gather(traffic.send(root, 0, 50), recover())

    traffic = Traffic()
    asyncio.run(traffic.time.run(main(traffic)))
    root = traffic.passed["root"]
    assert within(root, 1005.3, 8.5) == 0
    assert 0 < within(root, 1005, 30) <= 1e7 * 30 * 0.15
    assert within(root, 1036, 5) >= 0.9 * 5e7


@settings(max_examples=20, deadline=None)
@given(
    rates=st.lists(st.one_of(st.none(), st.floats(1e6, 5e7)), min_size=1, max_size=3),
    recovering=st.booleans(),
    root=st.booleans(),
)
def test_no_lane_is_silent_for_long(rates: list[float | None], recovering: bool, root: bool) -> None:
    """Whatever else goes on: a server that hangs up on silent connections has no reason to."""

    async def main(traffic: Traffic) -> None:
        traffic.turnstile.recovering = recovering
        work = [
            traffic.send(traffic.lane(f"mirror {number}", Urgency.MIRROR, rate), 0, 40, 1e6)
            for number, rate in enumerate(rates)
        ]
        if root:
            work.append(traffic.send(traffic.lane("root", Urgency.ONLY_COPY, None), 0, 40, 1e6))
        await asyncio.gather(*work)

    traffic = Traffic()
    asyncio.run(traffic.time.run(main(traffic)))
    for name, passed in traffic.passed.items():
        moments = [1000.0, *(moment for moment, _ in passed), 1040.0]
        silent = max(b - a for a, b in itertools.pairwise(moments))
        assert silent <= PASSED_OVER_S + 2, name


def test_a_lane_that_is_closed_holds_nobody_up() -> None:
    async def main(traffic: Traffic) -> None:
        root = traffic.lane("root", Urgency.ONLY_COPY, None)
        mirror = traffic.lane("mirror", Urgency.MIRROR, None)
        await root.take(1)
        assert traffic.turnstile.ahead_of(mirror) and not traffic.turnstile.ahead_of(root)
        root.close()
        assert not traffic.turnstile.ahead_of(mirror)

    traffic = Traffic()
    asyncio.run(traffic.time.run(main(traffic)))
