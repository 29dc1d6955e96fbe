"""What an agent tells its trainers, as messages."""

from __future__ import annotations

from typing import Any

from everstep.errors import Superseded

from .protocol import News
from .values import NO_STEP, Progress


def news_of(progress: Progress) -> News:
    return News(**vars(progress))


def event_of(progress: Progress) -> dict[str, Any]:
    """The same for the run's events, which call the stage their kind."""
    own = ("stage", "tier", "kind")
    facts = {name: value for name, value in vars(progress).items() if name not in own and value is not None}
    return {**facts, "checkpoint": progress.kind} if progress.kind else facts


def superseded_news(incarnation: int, newest: int, tier: str) -> News:
    """That a newer incarnation writes the run."""
    error = Superseded(
        "a newer incarnation writes this run",
        found=f"incarnation {newest}",
        expected=f"none above {incarnation}",
    )
    return news_of(Progress(NO_STEP, incarnation, 0, tier, "superseded", error.to_wire()))
