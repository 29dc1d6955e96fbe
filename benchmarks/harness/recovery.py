"""Back after the death of the process: from its own memory, from another node's, from disk."""

from __future__ import annotations

from functools import partial

from .measuring import EQUAL, Bench, drop, opened

SAVES = 3
"""Each of everstep's slots is written once."""


def recover(bench: Bench) -> None:
    """``first_memory_recovery`` and ``memory_recovery``, ``disk_recovery``, and ``peer_recovery`` where the system has
    such a way. Raises Mismatch where bytes come back changed."""
    found = bench.found
    with opened(bench) as session:
        for step in range(1, 1 + SAVES):
            bench.state.change()
            session.save(step).wait()
        expected = bench.state.hashes()
        for tier in bench.system.tiers:
            for number in range(bench.repeats + (tier == "memory")):
                session.lose(tier)
                bench.state.scramble()
                if tier == "disk":
                    bench.first_only(lambda: drop(bench))
                took = bench.timed(partial(session.recover, tier))
                bench.require_equal(expected, f"recovery {number + 1} from {tier}")
                first = tier == "memory" and number == 0
                found.add(f"first_{tier}_recovery" if first else f"{tier}_recovery", took)
            if tier == "memory":
                found.timelines |= session.timelines()
        found.notes += session.notes()
    if bench.rank == 0:
        between = bench.system.from_peer(bench.state.nbytes, bench.repeats, bench.directory)
        for work, seconds in (between or {}).get("works", {}).items():
            found.works.setdefault(work, []).extend(seconds)
        for floor, seconds in (between or {}).get("floors", {}).items():
            found.floors.setdefault(floor, []).extend(seconds)
    found.checked = EQUAL


__all__ = ["recover"]
