"""What an agent says of itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from everstep.memory.process import Process

from . import protocol

if TYPE_CHECKING:
    from .service import Service


def describe(service: Service, epoch: int, seconds: float) -> dict[str, Any]:
    """For people who look, and for tests: plain values. ``seconds`` is how long it has run."""
    flushes = [] if service.pipeline is None else service.pipeline.flushes()
    return {
        "pid": Process.current().pid,
        "protocol": protocol.PROTOCOL,
        "epoch": epoch,
        "root": service.settings.root,
        "node": service.settings.node,
        "idle": service.idle,
        "seconds": seconds,
        "live": service.beacons.status(),
        "trainers": [
            {"rank": m.rank, "incarnation": m.incarnation, "pid": m.process.pid, "here": m.here}
            for m in service.members.all()
        ],
        "flushes": [
            {
                "step": f.step,
                "incarnation": f.incarnation,
                "attempt": f.attempt,
                "kind": "delta" if f.is_delta else "full",
                "base": next((job.entry.base[1] for job in f.jobs.values() if job.entry.base), None),
                "ranks": {str(rank): job.entry.stage for rank, job in f.jobs.items()},
            }
            for f in flushes
        ],
        "tiers": service.tiers.status(),
        "merging": service.tiers.merging(),
        "bases": {} if service.pipeline is None else asdict(service.pipeline.basing.read),
        "pace": service.pacing.status(),
        "guard": service.protection.status(),
    }
