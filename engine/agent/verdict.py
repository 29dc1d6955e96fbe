"""How a flush ended, as every rank hears it: the decision's reason and the error are made from one another,
so that a rank that only reads the abort record comes to the same verdict."""

from __future__ import annotations

from typing import Any

from everstep.errors import EverstepError, RankError, ReplicasDiffer, SaveAbandoned, SaveFailed, Superseded
from everstep.format.manifest import Abort, Decision, Manifest
from everstep.plan.agreement import REFUSED, TOLD_BYTES_MIN, equality_text

GIVEN_UP = "given up: "
SUPERSEDED = "superseded: "
"""How such a reason begins."""

DIFFER_HINT = (
    "Load the newest checkpoint to make the ranks equal again; if the tensors are not meant to be equal, do not mark "
    "them replicated="
)


def error_of(decision: Decision | None, tier: str) -> EverstepError:
    """An abort record (or nothing at all) as the error that every rank gets."""
    if not isinstance(decision, Abort):
        return SaveFailed("the step did not become durable", found=type(decision).__name__, tier=tier)
    rank = -1 if decision.rank is None else decision.rank
    fields: dict[str, Any] = {"step": decision.step, "tier": tier, "rank": rank}
    if decision.reason.startswith(SUPERSEDED):
        return Superseded(decision.reason, **fields)
    if decision.reason.startswith(REFUSED):
        return ReplicasDiffer(
            f"step {decision.step} did not become durable: {decision.reason}", hint=DIFFER_HINT, **fields
        )
    kind = SaveAbandoned if decision.reason.startswith(GIVEN_UP) else SaveFailed
    return kind(f"step {decision.step} did not become durable: {decision.reason}", **fields)


def findings(manifest: Manifest, tier: str) -> list[tuple[str, EverstepError]]:
    """What the comparison of the ranks' hashes found, as (stage, message) of progress that every trainer hears."""
    found: list[tuple[str, EverstepError]] = []
    step, facts = manifest.step, manifest.facts
    if "disagreements" in facts:
        text = f"step {step} is durable, but {REFUSED}{facts['disagreements']['text']}"
        found.append(("disagreement", ReplicasDiffer(text, hint=DIFFER_HINT, step=step, tier=tier)))
    if "apart" in facts.get("audit", {}):
        text = "the ranks count their audits apart, and compare nothing"
        error = EverstepError(text, found=facts["audit"]["apart"], hint="Open the run anew", step=step)
        found.append(("noticed", error))
    if facts.get("equal", {}).get("saves", 0) >= TOLD_BYTES_MIN:
        equal = EverstepError(equality_text(facts["equal"]), step=step, nbytes=facts["equal"]["saves"])
        found.append(("equal", equal))
    return found


def stage_of(error: EverstepError) -> str:
    """The last stage of a flush that ended with ``error``."""
    if isinstance(error, Superseded):
        return "superseded"
    return "abandoned" if isinstance(error, SaveAbandoned) else "failed"


def given_up(step: int, reason: str, tier: str) -> tuple[SaveAbandoned, str]:
    """Error and reason of a flush that was given up on purpose."""
    text = GIVEN_UP + reason
    return SaveAbandoned(f"step {step}: {text}", step=step, tier=tier), text


def superseded(incarnation: int, step: int, newest: int) -> tuple[Superseded, str]:
    """Error and reason of a flush that a newer incarnation has made pointless."""
    text = f"{SUPERSEDED}incarnation {newest} went on from before step {step} of incarnation {incarnation}"
    error = Superseded(text, found=f"incarnation {newest}", expected=f"none above {incarnation}", step=step)
    return error, text


def ranks_missing(
    step: int, world: int, voted: list[int], missing: list[int], why: str, tier: str
) -> tuple[RankError, str, int]:
    """Error, reason and the first rank to blame of a flush whose votes did not all come."""
    ranks = ", ".join(map(str, missing))
    text = f"{'rank' if len(missing) == 1 else 'ranks'} {ranks} {why}"
    error = RankError(
        f"step {step} did not become durable: {text}",
        found=f"votes of ranks {voted}",
        expected=f"votes of all {world} ranks",
        hint="Earlier checkpoints are untouched; save again",
        ranks=ranks,
        rank=missing[0],
        step=step,
        tier=tier,
    )
    return error, text, missing[0]
