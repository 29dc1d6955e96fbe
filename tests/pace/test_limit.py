"""The rate holds over any five seconds, whatever is asked for, in whatever pieces, and when it is changed."""

from __future__ import annotations

import asyncio
import itertools

from everstep.backends.limit import TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.test_wrappers import FakeTime

from .kit import within


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(3e5, 1e9),
    slices=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=20),
    takers=st.integers(1, 4),
)
def test_within_five_percent_over_any_five_seconds(rate: float, slices: list[float], takers: int) -> None:
    """Takers that always want more, in slices up to what the bucket holds."""
    time = FakeTime()
    bucket = TokenBucket(rate, time.clock, time.sleep)
    passed: list[tuple[float, int]] = []

    async def taker(shift: int) -> None:
        for share in itertools.islice(itertools.cycle(slices), shift, None):
            nbytes = max(1, int(share * bucket.nbytes_max))
            await bucket.take(nbytes)
            if time.now > 1012:
                return
            passed.append((time.now, nbytes))

    async def main() -> None:
        await asyncio.gather(*(taker(number) for number in range(takers)))

    asyncio.run(time.run(main()))
    for start, _ in passed[:: max(1, len(passed) // 60)]:
        if start <= 1007:
            found = within(passed, start, 5.0)
            assert found <= 5 * rate * 1.05
            assert found >= 5 * rate * 0.95


@settings(max_examples=40, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.floats(0.1, 3.0), st.one_of(st.none(), st.floats(1e4, 1e8))), min_size=1, max_size=8
    )
)
def test_a_changed_rate_counts_at_once_and_nothing_is_lost(
    changes: list[tuple[float, float | None]],
) -> None:
    """Between two changes no more passes than the rate of that time gives (and one bucket); whoever waits goes on."""
    time = FakeTime()
    bucket = TokenBucket(1e6, time.clock, time.sleep)
    passed: list[tuple[float, int]] = []
    eras: list[tuple[float, float | None]] = [(time.now, 1e6)]

    async def taker() -> None:
        for _ in range(400):
            await bucket.take(50_000)
            passed.append((time.now, 50_000))

    async def changer() -> None:
        for pause, rate in changes:
            await time.sleep(pause)
            bucket.bytes_per_s = rate
            eras.append((time.now, rate))
        bucket.bytes_per_s = None
        eras.append((time.now, None))

    async def main() -> None:
        await asyncio.gather(taker(), changer())

    asyncio.run(time.run(main()))
    assert len(passed) == 400
    for (began, rate), (ended, _) in itertools.pairwise(eras):
        if rate is not None:
            found = sum(nbytes for moment, nbytes in passed if began < moment < ended)
            assert found <= rate * (ended - began + 0.1) + 50_000


def test_who_waits_goes_on_when_the_limit_is_lifted() -> None:
    time = FakeTime()
    bucket = TokenBucket(1000.0, time.clock, time.sleep)

    async def main() -> None:
        waiting = asyncio.ensure_future(bucket.take(1_000_000))
        await time.sleep(2.0)
        assert not waiting.done()
        bucket.bytes_per_s = None
        await waiting
        await bucket.take(1 << 40)

    asyncio.run(time.run(main()))
    assert time.now < 1003
