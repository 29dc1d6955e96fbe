"""Harms of a run, by name: how each is made, what fsck must say of it, and what repair must reach.

The run has steps 1 (packed), 2 and 3 (a delta of step 2) of incarnation 1, which incarnation 2 adopted, and step 4 of
that one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from everstep.backends.files import LocalBackend
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.hashing import image_root, rank_root
from everstep.format.layout import Box, EntrySpec
from everstep.format.manifest import Manifest, Quarantine, Tombstone, decode_decision, encode_decision
from everstep.format.vote import Vote, decode_vote, encode_vote, vote_hash
from everstep.store import commit
from everstep.store.commit import abort_attempt
from everstep.store.pins import add_pin
from everstep.store.votes import gather_votes

from tests.machine import engine
from tests.machine.world import WORLD, Key, Shape, Trainer, snapshot
from tests.store import store_kit as kit

from .run import (
    BASE,
    DELTA,
    KEYS,
    LAST,
    PACKED,
    Reach,
    cuts,
    flip,
    flips,
    grows,
    harm,
    held_of,
    layout_of,
    manifest_of,
    on,
    place,
    put,
    removes,
)
from .run import HARMS as HARMS

IMAGE = names.image(*place(LAST), 0, "model")
STATE = names.state(*place(LAST), 1)
VOTE = names.vote(*place(LAST), 0)
MANIFEST = names.decision(*place(LAST))
BASE_IMAGE = names.image(*place(BASE), 1, "optimizer")
DELTA_OBJECT = names.packed(*place(DELTA), 0, "model")
PACKED_OBJECT = names.packed(*place(PACKED), 0, "optimizer")
FIRST, SECOND = names.incarnation(1), names.incarnation(2)
ALL = tuple(KEYS)
MENDED, EQUAL, ASIDE, LEFT = Reach.MENDED, Reach.EQUAL, Reach.ASIDE, Reach.LEFT

# -- the run's records

harm("a bit of run.json", names.RUN, beside=MENDED, hurts=ALL)(flips(names.RUN, 30))
harm("a bit of an incarnation's record", FIRST, beside=MENDED, hurts=ALL)(flips(FIRST, 30))
harm("a record missing below another", ("damage", "missing", FIRST), beside=MENDED, hurts=ALL)(removes(FIRST))
harm("the newest record missing", ("damage", "missing", SECOND), beside=MENDED, hurts=(LAST,))(
    removes(SECOND)
)


# -- decisions

harm("a bit of a manifest", MANIFEST, alone=EQUAL, beside=MENDED, hurts=(LAST,))(flips(MANIFEST, 40))
harm("a manifest empty", MANIFEST, alone=EQUAL, beside=MENDED, hurts=(LAST,))(
    lambda root: put(root / MANIFEST, b"")
)
harm("a manifest missing", ("damage", "undecided", MANIFEST), alone=EQUAL, beside=MENDED, hurts=(LAST,))(
    removes(MANIFEST)
)


async def _again(backend: LocalBackend) -> None:
    """Step 5, whose first attempt was given up."""
    await abort_attempt(backend, 5, 2, 1, reason="a rank failed")
    assert await engine.save(backend, [backend], (2, 5), held_of(5), None, None)


@harm("an abort record missing below a manifest", ("damage", "missing", names.decision(5, 2, 1)), alone=EQUAL)
def _gap(root: Path) -> None:
    on(root, _again)
    (root / names.decision(5, 2, 1)).unlink()


@harm("a bit of an abort record below a manifest", names.decision(5, 2, 1), alone=EQUAL)
def _passed(root: Path) -> None:
    on(root, _again)
    flip(root / names.decision(5, 2, 1), 40)


def _set_aside_once(root: Path) -> None:
    """The last step was set aside, and counts again."""
    record = Quarantine(4, 2, 2, "damaged", "2026-01-01T00:00:00Z")
    (root / names.decision(4, 2, 2)).write_bytes(encode_decision(record))
    again = replace(manifest_of_first(root), revision=3)
    (root / names.decision(4, 2, 3)).write_bytes(encode_decision(again))


def manifest_of_first(root: Path) -> Manifest:
    decision = decode_decision((root / MANIFEST).read_bytes(), MANIFEST)
    assert isinstance(decision, Manifest)
    return decision


for number, record in ((1, "manifest"), (2, "quarantine")):

    @harm(f"a bit of a {record} that was passed by a manifest", names.decision(4, 2, number), alone=EQUAL)
    def _passed_by_one(root: Path, number: int = number) -> None:
        _set_aside_once(root)
        flip(root / names.decision(4, 2, number), 40)


@harm("a decision damaged above a manifest", names.decision(4, 2, 2), alone=EQUAL, hurts=(LAST,))
def _hidden(root: Path) -> None:
    """Whatever it was, nothing was removed yet."""
    put(root / names.decision(4, 2, 2), b"{")


harm("a tombstone damaged that nothing lies below", names.decision(5, 2, 2), alone=EQUAL)(
    lambda root: put(root / names.decision(5, 2, 2), b"{")
)


@harm(
    "a full in a delta's place that was not decided",
    ("damage", "undecided", names.decision(4, 2, 2)),
    alone=EQUAL,
)
def _half_merged(root: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for rank in range(WORLD):
            pinned = snapshot((2, 4), rank, held_of(4))
            await kit.flush(backend, 4, rank, incarnation=2, attempt=2, pinned=pinned)

    on(root, work)


@harm("a removal that was cut off", ("warning", "tombstone", names.decision(1, 1, 2)))
def _half_removed(root: Path) -> None:
    tombstone = Tombstone(1, 1, 2, "retention", created="2026-01-01T00:00:00Z")
    (root / names.decision(1, 1, 2)).write_bytes(encode_decision(tombstone))
    (root / names.vote(*place(PACKED), 0)).unlink()


@harm("a tombstone that waits", ("info", "tombstone", names.decision(1, 1, 2)))
def _buried(root: Path) -> None:
    _half_removed(root)
    shutil.rmtree(root / names.attempt_dir(*place(PACKED)))
    (root / names.decision(1, 1, 1)).unlink()


@harm(
    "a checkpoint set aside", ("warning", "quarantine", names.decision(4, 2, 2)), beside=EQUAL, hurts=(LAST,)
)
def _aside(root: Path) -> None:
    record = Quarantine(4, 2, 2, "damaged", "2026-01-01T00:00:00Z")
    (root / names.decision(4, 2, 2)).write_bytes(encode_decision(record))
    flip(root / IMAGE, -5)


async def _flush_alone(backend: LocalBackend, step: int) -> None:
    await kit.flush(backend, step, 0, incarnation=2, pinned=snapshot((2, step), 0, held_of(step)))


@harm("an attempt that was given up", ("info", "leftover", names.attempt_dir(5, 2, 1)))
def _given_up(root: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await _flush_alone(backend, 5)
        await abort_attempt(backend, 5, 2, 1, reason="a rank failed")

    on(root, work)


@harm("an attempt that is not finished", ("info", "leftover", names.attempt_dir(5, 2, 1)))
def _in_flight(root: Path) -> None:
    on(root, lambda backend: _flush_alone(backend, 5))


@harm("an attempt that was never finished", ("warning", "leftover", names.attempt_dir(4, 2, 2)))
def _left(root: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        pinned = snapshot((2, 4), 0, held_of(4))
        await kit.flush(backend, 4, 0, incarnation=2, attempt=2, pinned=pinned)
        assert await engine.save(backend, [backend], (2, 5), held_of(5), None, None)

    on(root, work)


# -- chains


@harm(
    "a base missing",
    ("damage", "chain", names.checkpoint_dir(2, 1)),
    alone=ASIDE,
    beside=MENDED,
    hurts=(DELTA,),
)
def _baseless(root: Path) -> None:
    shutil.rmtree(root / names.checkpoint_dir(2, 1))


harm("a bit of a base", BASE_IMAGE, alone=ASIDE, beside=MENDED, hurts=(BASE, DELTA))(flips(BASE_IMAGE, -5))
BASE_STATE = names.state(*place(BASE), 1)
harm("a bit of a base's state image", BASE_STATE, beside=MENDED, hurts=(BASE,))(flips(BASE_STATE, 9))
harm(
    "a base's vote missing",
    ("damage", "missing", names.vote(*place(BASE), 1)),
    alone=MENDED,
    hurts=(BASE, DELTA),
)(removes(names.vote(*place(BASE), 1)))

# -- votes

BASE_VOTE = names.vote(*place(BASE), 0)


@harm("a base with the vote of its delta", BASE_VOTE, alone=MENDED, hurts=(BASE, DELTA))
def _of_its_delta(root: Path) -> None:
    (root / BASE_VOTE).write_bytes((root / names.vote(*place(DELTA), 0)).read_bytes())


harm("a bit of a vote's header", VOTE, alone=MENDED, hurts=(LAST,))(flips(VOTE, 20))
harm("a bit of a vote's index", VOTE, alone=MENDED, hurts=(LAST,))(flips(VOTE, -20))
harm("a vote cut", VOTE, alone=MENDED, hurts=(LAST,))(cuts(VOTE))
harm("a vote missing", ("damage", "missing", VOTE), alone=MENDED, hurts=(LAST,))(removes(VOTE))


@harm("a vote that is right in itself", VOTE, alone=MENDED, hurts=(LAST,))
def _another_vote(root: Path) -> None:
    vote = decode_vote((root / VOTE).read_bytes(), VOTE)
    (root / VOTE).write_bytes(encode_vote(replace(vote, meta={**vote.meta, "metrics": {"loss": 9.0}})))


@harm(
    "a vote missing and an image cut",
    ("damage", "missing", VOTE),
    IMAGE,
    alone=ASIDE,
    beside=MENDED,
    hurts=(LAST,),
)
def _unproved(root: Path) -> None:
    removes(VOTE)(root)
    cuts(IMAGE)(root)


def _voted(root: Path, changed: Callable[[Vote], Vote]) -> None:
    """Rank 0 of the last step had voted otherwise, as a writer with an error in it might, and that was committed."""
    data = encode_vote(changed(decode_vote((root / VOTE).read_bytes(), VOTE)))
    (root / VOTE).write_bytes(data)
    manifest = manifest_of(root, LAST)
    first = replace(manifest.ranks[0], vote_hash=vote_hash(data), vote_nbytes=len(data))
    (root / MANIFEST).write_bytes(encode_decision(replace(manifest, ranks=(first, *manifest.ranks[1:]))))


@harm("a vote that lacks a hash", IMAGE, alone=ASIDE, hurts=(LAST,), quick=True)
def _hash_missing(root: Path) -> None:
    def changed(vote: Vote) -> Vote:
        image = vote.images[0]
        chunks = image.chunks[:-16]
        image = replace(image, chunks=chunks, root=image_root(image.nbytes, chunks))
        images = (image, *vote.images[1:])
        return replace(vote, images=images, root=rank_root(images))

    _voted(root, changed)


# -- layouts

harm("a bit of a layout", "LAYOUT", beside=MENDED, hurts=ALL)(lambda root: flip(root / layout_of(root), -3))
harm("a layout missing", ("damage", "missing", "LAYOUT"), beside=MENDED, hurts=ALL)(
    lambda root: (root / layout_of(root)).unlink()
)
UNNEEDED = names.layout("ab" * 16)
harm("a damaged layout that nothing needs", UNNEEDED, alone=EQUAL)(
    lambda root: put(root / UNNEEDED, b"no layout")
)


class _Gap(Shape):
    """The second rank stores half of its rows."""

    def specs(self, rank: int) -> list[EntrySpec]:
        found = super().specs(rank)
        if rank == 1:
            box = found[1].boxes[0]
            found[1] = replace(found[1], boxes=(Box(box.offsets, (box.lengths[0] // 2, box.lengths[1])),))
        return found


class _Twice(Shape):
    """Both ranks store the first tensor."""

    def specs(self, rank: int) -> list[EntrySpec]:
        found = super().specs(rank)
        found[0] = replace(found[0], stored=True)
        return found


def _tiled_as(root: Path, shape: Shape) -> None:
    """A writer that did not look had committed a fifth step."""
    trainer = Trainer(shape)
    trainer.train("dense", "", 5)

    async def work(backend: LocalBackend) -> None:
        with patch.object(commit, "_coverage_objection", _nothing):
            assert await engine.save(backend, [backend], (2, 5), trainer.held("step 5", 0.1), None, None)

    on(root, work)


async def _nothing(*args: object) -> None:
    return None


FIFTH = ("damage", "damaged", names.checkpoint_dir(5, 2))
harm("a tensor that is not stored whole", FIFTH, alone=ASIDE, hurts=(5,))(
    lambda root: _tiled_as(root, _Gap())
)
harm("a tensor that is stored twice", FIFTH, alone=ASIDE, hurts=(5,))(lambda root: _tiled_as(root, _Twice()))


@harm(
    "a vote and its layout missing",
    ("damage", "missing", VOTE),
    ("damage", "missing", "LAYOUT"),
    beside=MENDED,
    hurts=ALL,
)
def _two_missing(root: Path) -> None:
    (root / layout_of(root)).unlink()
    (root / VOTE).unlink()


FIRST_STATE = names.state(*place(LAST), 0)


@harm(
    "a vote and its layout missing, and a state image cut",
    ("damage", "missing", VOTE),
    ("damage", "missing", "LAYOUT"),
    FIRST_STATE,
    beside=MENDED,
    hurts=ALL,
)
def _three(root: Path) -> None:
    _two_missing(root)
    cuts(FIRST_STATE)(root)


PACKED_VOTE, PACKED_STATE = names.vote(*place(PACKED), 0), names.state(*place(PACKED), 0)


harm("a packed image's vote missing", ("damage", "missing", PACKED_VOTE), alone=MENDED, hurts=(PACKED,))(
    removes(PACKED_VOTE)
)
DELTA_VOTE = names.vote(*place(DELTA), 0)
harm("a delta's vote missing", ("damage", "missing", DELTA_VOTE), alone=MENDED, hurts=(DELTA,))(
    removes(DELTA_VOTE)
)


@harm(
    "a delta's vote missing, and its base's",
    ("damage", "missing", BASE_VOTE),
    ("damage", "missing", DELTA_VOTE),
    alone=MENDED,
    hurts=(BASE, DELTA),
)
def _two_votes(root: Path) -> None:
    for name in (BASE_VOTE, DELTA_VOTE):
        (root / name).unlink()


BELOW = names.image(*place(BASE), 0, "model")


@harm(
    "a delta's vote missing and a bit of its base",
    ("damage", "missing", DELTA_VOTE),
    BELOW,
    alone=ASIDE,
    beside=MENDED,
    hurts=(BASE, DELTA),
)
def _delta_unproved(root: Path) -> None:
    (root / DELTA_VOTE).unlink()
    flip(root / BELOW, -5)


@harm(
    "a packed image's vote missing and a state image cut",
    ("damage", "missing", PACKED_VOTE),
    PACKED_STATE,
    alone=ASIDE,
    beside=MENDED,
    hurts=(PACKED,),
)
def _packed_unproved(root: Path) -> None:
    (root / PACKED_VOTE).unlink()
    cuts(PACKED_STATE)(root)


# -- images

harm("a bit of an image's header", IMAGE, alone=ASIDE, beside=MENDED, hurts=(LAST,))(flips(IMAGE, 3))
harm("a bit of an image's data", IMAGE, alone=ASIDE, beside=MENDED, hurts=(LAST,))(flips(IMAGE, -5))
harm("an image cut", IMAGE, alone=ASIDE, beside=MENDED, hurts=(LAST,))(cuts(IMAGE))
harm("an image grown", IMAGE, alone=MENDED, hurts=(LAST,))(grows(IMAGE))
harm("an image missing", ("damage", "missing", IMAGE), alone=ASIDE, beside=MENDED, hurts=(LAST,))(
    removes(IMAGE)
)
harm("a bit of a state image", STATE, alone=ASIDE, beside=MENDED, hurts=(LAST,))(flips(STATE, 9))
harm("a bit of a delta's payload", DELTA_OBJECT, alone=ASIDE, beside=MENDED, hurts=(DELTA,))(
    flips(DELTA_OBJECT, 2)
)
harm("a bit of a delta's footer", DELTA_OBJECT, alone=ASIDE, beside=MENDED, hurts=(DELTA,))(
    flips(DELTA_OBJECT, -1)
)
harm("a delta cut", DELTA_OBJECT, alone=ASIDE, beside=MENDED, hurts=(DELTA,))(cuts(DELTA_OBJECT))
harm("a delta missing", ("damage", "missing", DELTA_OBJECT), alone=ASIDE, beside=MENDED, hurts=(DELTA,))(
    removes(DELTA_OBJECT)
)


@harm("a bit that decoding passes by", PACKED_OBJECT, beside=MENDED)
def _not_seen(root: Path) -> None:
    """The first bit of the packed object whose change loads do not see."""
    path = root / PACKED_OBJECT
    right = path.read_bytes()

    async def work(backend: LocalBackend) -> None:
        for at in range(len(right)):
            flip(path, at)
            try:
                await engine.load([backend], KEYS[PACKED], held_of(PACKED))
            except EverstepError:
                path.write_bytes(right)
            else:
                return
        raise AssertionError("loads see every bit")

    on(root, work)


# -- gathered votes

GATHER = names.gather(*place(LAST), 0)


async def _gather(backend: LocalBackend) -> None:
    assert await gather_votes(backend, *place(LAST), range(WORLD))


@harm("a bit of gathered votes", GATHER, alone=EQUAL)
def _gather_flipped(root: Path) -> None:
    on(root, _gather)
    flip(root / GATHER, 50)


@harm("gathered votes of another attempt", GATHER, alone=EQUAL)
def _gather_of_others(root: Path) -> None:
    data = (root / VOTE).read_bytes()
    _another_vote(root)
    on(root, _gather)
    (root / VOTE).write_bytes(data)


# -- what nothing needs

ORPHAN = names.image(*place(LAST), 7, "model")
harm("an image that no vote names", ("info", "foreign", ORPHAN))(lambda root: put(root / ORPHAN, b"x"))
harm("a file that is not ours", ("info", "foreign", "notes.txt"))(lambda root: put(root / "notes.txt", b"x"))
KEPT = names.aside(MANIFEST, 1)
harm("a decision that was kept when it was made anew", ("info", "aside", KEPT))(
    lambda root: put(root / KEPT, b"x")
)
TEMPORARY = f"{names.attempt_dir(*place(LAST))}/.tmp-rank-00000.model.1.abcdef012345"
harm("what a writer left that died", ("info", "temporary", TEMPORARY))(
    lambda root: put(root / TEMPORARY, b"x")
)

# -- pins


async def _pin(backend: LocalBackend, key: Key, for_s: float | None) -> str:
    with patch("secrets.token_hex", lambda nbytes: "ab" * nbytes):
        return (await add_pin(backend, key, for_s=for_s, clock=lambda: 1_700_000_000.0)).id


EXPIRED = names.pin(names.pin_id(1, 1, "abababab"))


@harm("a pin that has expired", ("info", "pin", EXPIRED))
def _expired(root: Path) -> None:
    on(root, lambda backend: _pin(backend, (1, 1), 60.0))


@harm("a pin of what is not there", ("info", "pin", names.pin(names.pin_id(4, 2, "abababab"))))
def _of_nothing(root: Path) -> None:
    on(root, lambda backend: _pin(backend, (2, 4), None))
    shutil.rmtree(root / names.checkpoint_dir(4, 2))


@harm("a pin that cannot be read", ("damage", "pin", EXPIRED))
def _unreadable_pin(root: Path) -> None:
    on(root, lambda backend: _pin(backend, (1, 1), None))
    cuts(EXPIRED)(root)


# -- something else in an object's place


def _in_the_way(name: str) -> Callable[[Path], None]:
    """A directory in an object's place."""

    def make(root: Path) -> None:
        (root / name).unlink()
        (root / name / "x").mkdir(parents=True)

    return make


READ = {
    "run.json": names.RUN,
    "a record": FIRST,
    "a manifest": MANIFEST,
    "a vote": VOTE,
    "an image": IMAGE,
}
harm("a directory for run.json", names.RUN, beside=MENDED, hurts=ALL)(_in_the_way(names.RUN))
harm("a directory for a record", FIRST, beside=MENDED, hurts=ALL)(_in_the_way(FIRST))
harm("a directory for a manifest", MANIFEST, alone=EQUAL, beside=MENDED, hurts=(LAST,))(_in_the_way(MANIFEST))
harm("a directory for a vote", VOTE, alone=MENDED, hurts=(LAST,))(_in_the_way(VOTE))
harm("a directory for an image", IMAGE, alone=ASIDE, beside=MENDED, hurts=(LAST,))(_in_the_way(IMAGE))


# -- no answer

for what, name in READ.items():
    how = "read_into" if name == IMAGE else "read"
    harm(f"no answer for {what}", ("cannot-tell", "cannot-tell", name), silent=(how, name))(lambda root: None)


UNANSWERED = {
    "the records": ("list_names", names.INCARNATIONS),
    "the checkpoints": ("list_names", names.CHECKPOINTS),
    "the pins": ("list_names", names.PINS),
    "what writers left": ("leftovers", ""),
}
for what, silent in UNANSWERED.items():
    harm(f"no answer for {what}", ("cannot-tell", "cannot-tell", silent[1]), silent=silent)(lambda root: None)
harm(
    "no answer for a layout that nothing needs",
    ("cannot-tell", "cannot-tell", UNNEEDED),
    silent=("read", UNNEEDED),
)(lambda root: put(root / UNNEEDED, b"x"))
harm("no answer for gathered votes", ("cannot-tell", "cannot-tell", GATHER), silent=("read", GATHER))(
    lambda root: on(root, _gather)
)


OPEN_VOTE = names.vote(5, 2, 1, 0)


@harm(
    "no answer for the vote of an attempt",
    ("cannot-tell", "cannot-tell", OPEN_VOTE),
    silent=("read", OPEN_VOTE),
)
def _no_vote(root: Path) -> None:
    _in_flight(root)
