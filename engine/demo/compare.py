"""Whether the disturbed run is, number for number, the undisturbed one."""

from __future__ import annotations

from dataclasses import dataclass

from .journal import Life

SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing compared: how many numbers, how many more that were computed again after a resume, and the
    first few that differ."""

    what: str
    compared: int
    again: int
    differing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.compared > 0 and not self.differing


def compare_losses(reference: list[list[Life]], disturbed: list[list[Life]], steps: int) -> Comparison:
    """Every loss that any process of the disturbed run computed, against the reference. Both are by rank."""
    compared = again = 0
    differing: list[str] = []
    for rank, (true, lives) in enumerate(zip(reference, disturbed, strict=True)):
        wanted = true[-1].losses
        seen: set[int] = set()
        for life in lives:
            for step, loss in life.losses.items():
                again += step in seen
                compared += step not in seen
                seen.add(step)
                if wanted.get(step) != loss:
                    differing.append(
                        f"rank {rank}, step {step}: {_shown(wanted.get(step))} became {_shown(loss)}"
                    )
        missing = set(range(1, steps + 1)) - seen
        differing += [f"rank {rank}, step {step}: missing" for step in sorted(missing)]
    return Comparison("losses", compared, again, tuple(differing[:SHOWN_MAX]))


def compare_ends(
    reference: list[list[Life]], disturbed: list[list[Life]], prefix: str, what: str
) -> Comparison:
    """The final live objects below ``prefix`` ("/model"), leaf by leaf, on every rank."""
    compared = 0
    differing: list[str] = []
    for rank, (true, lives) in enumerate(zip(reference, disturbed, strict=True)):
        left = _below(true[-1].fingerprints, prefix)
        right = _below(lives[-1].fingerprints, prefix)
        compared += len(left)
        for path in sorted(left.keys() | right.keys()):
            if left.get(path) != right.get(path):
                differing.append(f"rank {rank}, {path}")
    return Comparison(what, compared, 0, tuple(differing[:SHOWN_MAX]))


def _below(found: dict[str, str] | None, prefix: str) -> dict[str, str]:
    return {path: value for path, value in (found or {}).items() if path.startswith(prefix + "/")}


def _shown(loss: str | None) -> str:
    return "nothing" if loss is None else repr(float.fromhex(loss))
