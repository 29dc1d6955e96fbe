"""Where the run is killed: each named point of the code, and what must be on disk at that instant."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.sources import sources

STEP = 4
"""The step in whose snapshot, flush or commit the run dies. Steps before it that were saved: 2."""
ROTATING = 6
"""The save after which step 2 is removed."""

DIRECTORY = f"{STEP:09}/0001"
REMOVED = "000000002/0001"


@dataclass(frozen=True)
class Kill:
    """``durable``: the steps with a manifest that counts at the instant of the kill; None where background work may
    or may not have got there."""

    point: str
    detail: str
    durable: tuple[int, ...] | None
    count: int = 1

    def __str__(self) -> str:
        return f"{self.point}:{self.detail}" + (f":{self.count}" if self.count > 1 else "")


BEFORE: tuple[int, ...] = (2,)
AFTER: tuple[int, ...] = (2, STEP)
MODEL = f"{DIRECTORY}/a1/.tmp-rank-00000.model"
IMAGE = f"{DIRECTORY}/a1/rank-00000.model"
VOTE = f"{DIRECTORY}/a1/rank-00000.vote"
MANIFEST = f"{DIRECTORY}/manifest-1"

KILLS = [
    # before there is anything
    Kill("arena.reserve.before", "", ()),
    Kill("arena.name.before", "", ()),
    Kill("take.locked", "1", ()),
    Kill("owner.locked", "1", ()),
    Kill("link.before", "run.json", ()),
    Kill("link.after", "run.json", ()),
    Kill("link.before", "incarnations/0001", ()),
    Kill("link.after", "incarnations/0001", ()),
    # a snapshot
    Kill("slot.begin", str(STEP), BEFORE),
    Kill("slot.mid_copy", str(STEP), BEFORE),
    Kill("slot.copied", str(STEP), BEFORE),
    Kill("slot.publish.before", str(STEP), BEFORE),
    Kill("slot.publish.locked", str(STEP), BEFORE),
    Kill("slot.publish.after", str(STEP), BEFORE),
    # its flush
    Kill("agent.accepted", str(STEP), BEFORE),
    Kill("pin.locked", str(STEP), BEFORE),
    Kill("agent.begun", str(STEP), BEFORE),
    Kill("mkdir.before", DIRECTORY, BEFORE),
    Kill("mkdir.after", DIRECTORY, BEFORE),
    Kill("open.before", MODEL, BEFORE),
    Kill("open.after", MODEL, BEFORE),
    Kill("fallocate.before", MODEL, BEFORE),
    Kill("fallocate.after", MODEL, BEFORE),
    Kill("write.before", MODEL, BEFORE),
    Kill("write.after", MODEL, BEFORE),
    Kill("flush.image.first", IMAGE, BEFORE),
    Kill("truncate.before", MODEL, BEFORE),
    Kill("truncate.after", MODEL, BEFORE),
    Kill("fsync.before", MODEL, BEFORE),
    Kill("fsync.after", MODEL, BEFORE),
    Kill("rename.before", IMAGE, BEFORE),
    Kill("rename.after", IMAGE, BEFORE),
    Kill("fsyncdir.before", f"{DIRECTORY}/a1", BEFORE),
    Kill("fsyncdir.after", f"{DIRECTORY}/a1", BEFORE),
    Kill("flush.image.done", IMAGE, BEFORE),
    Kill("seal.before", str(STEP), BEFORE),
    Kill("seal.locked", str(STEP), BEFORE),
    Kill("seal.after", "", BEFORE, count=2),
    Kill("vote.before", VOTE, BEFORE),
    Kill("link.before", VOTE, BEFORE),
    Kill("link.after", VOTE, BEFORE),
    Kill("vote.after", VOTE, BEFORE),
    Kill("agent.voted", str(STEP), BEFORE),
    # the commit
    Kill("agent.commit.before", str(STEP), BEFORE),
    Kill("manifest.before", MANIFEST, BEFORE),
    Kill("fsync.before", f"{DIRECTORY}/.tmp-manifest-1", BEFORE),
    Kill("fsync.after", f"{DIRECTORY}/.tmp-manifest-1", BEFORE),
    Kill("link.before", MANIFEST, BEFORE),
    Kill("link.after", MANIFEST, AFTER),
    Kill("manifest.after", MANIFEST, AFTER),
    Kill("agent.committed", str(STEP), AFTER),
    Kill("agent.settled", str(STEP), AFTER),
    # rotation after the third save
    Kill("agent.rotate.before", "1", (2, 4, 6), count=3),
    Kill("link.before", f"{REMOVED}/manifest-2", (2, 4, 6)),
    Kill("link.after", f"{REMOVED}/manifest-2", (4, 6)),
    Kill("rotate.tombstoned", REMOVED, (4, 6)),
    Kill("rotate.looked", REMOVED, (4, 6)),
    Kill("link.after", f"{REMOVED}/manifest-3", (4, 6)),
    Kill("rotate.settled", REMOVED, (4, 6)),
    Kill("unlink.before", f"{REMOVED}/a1/rank-00000.vote", (4, 6)),
    Kill("unlink.after", f"{REMOVED}/a1/rank-00000.vote", (4, 6)),
    Kill("rotate.deleted.votes", REMOVED, (4, 6)),
    Kill("unlink.after", f"{REMOVED}/a1/rank-00000.model", (4, 6)),
    Kill("rotate.deleted.images", REMOVED, (4, 6)),
    Kill("rmdir.before", f"{REMOVED}/a1", (4, 6)),
    Kill("rmdir.after", f"{REMOVED}/a1", (4, 6)),
    Kill("unlink.before", f"{REMOVED}/manifest-1", (4, 6)),
    Kill("unlink.after", f"{REMOVED}/manifest-1", (4, 6)),
    Kill("rotate.deleted.decisions", REMOVED, (4, 6)),
]

_S3 = "an upload by parts: tests/s3/test_run_life.py"
_MIRROR = "a copy to another place: tests/mirror/test_crash.py"
_DELTA = "deltas and synthetic fulls: tests/delta"
_REPAIR = "an operator's, cut off at each of them: tests/repair/test_repair.py"
_PEERS = "between agents of several nodes: tests/peers and tests/nodes"
ELSEWHERE = {
    "pin.published": "an operator's or reader's: tests/shelves/test_pins.py",
    "rotate.put_back": "of what somebody came to need meanwhile: tests/shelves/test_two_rotations.py",
    "rotate.deleted.tombstone": "a tombstone stays for an hour: tests/store/test_crash.py",
    "flush.packed.before": _DELTA,
    **dict.fromkeys([f"merge.{what}" for what in ("begun", "voted", "decided", "told", "settled")], _DELTA),
    **dict.fromkeys(("merge.image.done", "merge.vote.before"), _DELTA),
    **dict.fromkeys([f"repair.put.{at}" for at in ("before", "after")], _REPAIR),
    **dict.fromkeys([f"repair.image.{at}" for at in ("piece", "done")], _REPAIR),
    "repair.pin.before": "an operator's, cut off there: tests/repair/test_pins.py",
    **dict.fromkeys(("repair.aside", "repair.quarantine.before", "repair.release.before"), _REPAIR),
    "keeper.begun": _PEERS,
    "keeper.grown": _PEERS,
    "keeper.kept.before": _PEERS,
    "keeper.outgrown": _PEERS,
    "keeper.piece": _PEERS,
    "keeper.sealed": _PEERS,
    "peers.offered": _PEERS,
    "peers.sending": _PEERS,
    "peers.sent.before": _PEERS,
    **dict.fromkeys(("agent.staged", "agent.upload"), "a tier of the node's own: tests/nvme"),
    **dict.fromkeys(("mirror.rank", "mirror.ranks", "mirror.settled"), "further tiers: tests/tiers"),
    **dict.fromkeys([f"mirror.image.{at}" for at in ("piece", "done")], _MIRROR),
    **dict.fromkeys(
        [f"mirror.{what}.{at}" for what in ("vote", "manifest") for at in ("before", "after")], _MIRROR
    ),
    **dict.fromkeys(("s3.upload.after", "s3.part.after", "s3.complete.before", "s3.complete.after"), _S3),
}
"""Points that this run does not reach, and where they are tested."""


def points_of_the_code() -> set[str]:
    """The names of all points: literal ones, and those that the door makes of its operations."""
    found = set()
    for source in sources():
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            called, name = ast.unparse(node.func).rpartition(".")[2], node.args[0].value
            if called == "reach":
                found.add(name)
            elif called == "_step":
                found |= {f"{name}.before", f"{name}.after"}
    return found
