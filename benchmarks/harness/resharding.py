"""Saved by some ranks, loaded cold by fewer and by more, in processes of their own."""

from __future__ import annotations

from .measuring import EQUAL, REPEATS_S, Bench, drop, opened

STEP = 1


def reshard(bench: Bench) -> None:
    """``first_durable`` of the save; then, in further launches, ``load_at_N`` for each number of ranks. Raises Mismatch
    where bytes come back changed."""
    if bench.options.get("loads_only"):
        _loads(bench)
        return
    with opened(bench) as session:
        bench.found.add("first_durable", bench.timed(lambda: session.save(STEP).wait()))
        bench.found.notes += session.notes()


def _loads(bench: Bench) -> None:
    expected = bench.state.hashes()  # contents follow from the place in the whole
    with opened(bench, bench.directory) as session:
        for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
            bench.state.scramble()
            bench.first_only(lambda: drop(bench))
            bench.found.add(f"load_at_{bench.world}", bench.timed(lambda: session.load(STEP)))
            bench.require_equal(expected, f"load {number} by {bench.world} ranks")
    bench.found.checked = EQUAL


__all__ = ["reshard"]
