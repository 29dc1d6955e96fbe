"""A node sends to others no faster than it may, all its connections together, and evenly."""

from __future__ import annotations

import threading
import time

import pytest
from everstep.errors import BadOption, Closed
from everstep.peers.rate import BUCKET_S, Rate
from everstep.peers.stream import PIECE_BYTES

MIB = 1 << 20


def test_over_any_time_no_more_than_the_rate_and_one_bucket() -> None:
    """Several threads, a clock that is real: every stretch from the start is looked at."""
    rate = Rate(20 * MIB)
    taken: list[tuple[float, int]] = []
    lock = threading.Lock()
    began = time.monotonic()

    def sender() -> None:
        for _ in range(8):
            rate.take(rate.slice_bytes // 4)
            with lock:
                taken.append((time.monotonic() - began, rate.slice_bytes // 4))

    threads = [threading.Thread(target=sender) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = 0
    for at, nbytes in sorted(taken):
        total += nbytes
        assert total <= 20 * MIB * (at + BUCKET_S) + rate.slice_bytes
    assert total == 24 * (2 * MIB // 4)
    assert time.monotonic() - began >= (total - 2 * MIB) / (20 * MIB)


def test_what_was_not_used_is_lost_but_for_the_bucket() -> None:
    now = 100.0
    rate = Rate(10 * MIB, clock=lambda: now)
    rate.take(MIB)  # the bucket is full at first
    now += 3600
    rate.take(MIB)  # and again, but no fuller
    rate.close()
    with pytest.raises(Closed):  # it would have had to wait
        rate.take(1)
    assert rate._paid_until > now


def test_without_a_rate_nobody_waits() -> None:
    rate = Rate(None)
    for _ in range(1000):
        rate.take(1 << 40)
    assert rate.slice_bytes == PIECE_BYTES
    rate.close()
    with pytest.raises(Closed):
        rate.take(1)


def test_closing_wakes_whoever_waits() -> None:
    rate = Rate(MIB)
    waiting = threading.Event()
    refused: list[Closed] = []

    def sender() -> None:
        waiting.set()
        try:
            rate.take(1000 * MIB)
        except Closed as error:
            refused.append(error)

    thread = threading.Thread(target=sender)
    thread.start()
    waiting.wait()
    rate.close()
    thread.join(5)
    assert len(refused) == 1


@pytest.mark.parametrize("wrong", [0, -1, 1000, float("inf"), float("nan")])
def test_a_rate_that_could_not_be_told_from_a_stuck_peer_is_refused(wrong: float) -> None:
    with pytest.raises(BadOption, match=f"{wrong} bytes/s"):
        Rate(wrong)
