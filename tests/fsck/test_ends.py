"""Repairs of several damages at once, cut off anywhere, and of places that cannot be written to."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.errors import Permanent
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.store.findings import Severity, exit_code
from everstep.store.repair_run import Mended, check_and_mend, check_only, verdict

from tests.fsck.harms import BASE_IMAGE, BASE_STATE, HARMS, STATE, VOTE
from tests.fsck.run import BASE, DELTA, Harm, Reach, flip
from tests.fsck.test_harms import ends, files, listed, said, steps_that_load
from tests.machine import engine
from tests.machine.world import Trainer
from tests.repair.mending import mend
from tests.store import store_kit as kit

ANY = Harm(lambda root: None, lambda root: set(), Reach.LEFT, Reach.LEFT, frozenset(), False, None)


def test_what_stays_damaged_is_told_after_others_were_set_aside(whole: Path, tmp_path: Path) -> None:
    """A base, which stays for its delta's sake, and a full, each with a state image of the right size."""
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    for name in (BASE_STATE, STATE):
        flip(root / name, 9)
    loaded = steps_that_load(root)
    mended = mend(root)
    assert ("damage", "damaged", BASE_STATE) in said(mended.after)
    assert [step for _, step in verdict(mended).lost] == [BASE, 4]
    assert exit_code(mended.after, repaired=bool(mended.done)) == 4
    ends(root, ANY, [], mended, loaded)


def test_what_a_whole_delta_stands_on_is_not_set_aside(tmp_path: Path) -> None:
    """Not even below a delta that is damaged itself."""
    root = tmp_path / "run"

    async def go() -> None:
        backend, trainer = LocalBackend(root), Trainer()
        await kit.start_run(backend)
        for step in (1, 2, 3, 4):
            trainer.train("dense" if step == 1 else "sparse", "", step)
            base = (1, step - 1) if step in (2, 3) else None
            held = trainer.held(f"step {step}", 1.0 / step)
            assert await engine.save(backend, [backend], (1, step), held, base, None)
        await backend.close()

    asyncio.run(go())
    for step in (1, 2):
        flip(root / f"checkpoints/{step:09d}/0001/a1/rank-00000.state.msgpack", 9)
    before = files(root)
    mended = mend(root)
    assert (mended.done, files(root)) == ([], before)
    assert [step for _, step in verdict(mended).loadable] == [3, 4]


def test_a_base_that_cannot_be_looked_for_keeps_nothing_else_from_repair(whole: Path, tmp_path: Path) -> None:
    """The run's own record, which is needed for that, is damaged, too."""
    root, tier = tmp_path / "run", tmp_path / "tier"
    shutil.copytree(whole, root)
    shutil.copytree(whole, tier)
    flip(root / names.RUN, 30)
    flip(root / names.decision(BASE, 1, 1), 40)
    flip(root / VOTE, 20)
    mended = mend(root)
    assert names.RUN in mended.failed
    assert [one.severity for one in mended.after if one.name == names.RUN] == [Severity.DAMAGE]
    mend(root, tier)
    assert steps_that_load(root) == {1, 2, 3, 4}


class Cut(BaseException):
    """What ends a repair."""


STORIES = {
    "a base and its delta are set aside": (BASE_IMAGE, False),
    "a base and its delta come back": (BASE_IMAGE, True),
    "a vote is made again": (VOTE, False),
}


@pytest.mark.parametrize("story", list(STORIES))
def test_cut_off_at_every_point_nothing_is_worse(whole: Path, tmp_path: Path, story: str) -> None:
    """What loads goes on to, no delta is listed whose base is not, and a second repair ends as an undisturbed one."""
    name, back = STORIES[story]
    first, tier = tmp_path / "first", tmp_path / "tier"
    shutil.copytree(whole, first)
    shutil.copytree(whole, tier)
    flip(first / name, -5)
    others = [tier] if back else []
    if back:
        mend(first)
    loaded = steps_that_load(first)
    end = tmp_path / "end"
    shutil.copytree(first, end)
    expected = told(mend(end, *others))
    at = 0  # of repair's own points; those of single writes are tried in tests/repair
    while True:
        root = tmp_path / f"run{at}"
        shutil.copytree(first, root)
        if not cut_off(root, others, at):
            break
        assert loaded <= steps_that_load(root), at
        assert DELTA not in listed(root) or BASE in listed(root), at
        assert told(mend(root, *others)) == expected, at
        assert steps_that_load(root) == steps_that_load(end), at
        shutil.rmtree(root)
        at += 1
    assert at > 1


def told(mended: Mended) -> set[tuple[str, str, str]]:
    """But for temporaries that a writer left that died."""
    return {one for one in said(mended.after) if one[1] != "temporary"}


def cut_off(root: Path, others: list[Path], at: int) -> bool:
    left = at

    def hook(name: str, detail: str) -> None:
        nonlocal left
        left -= name.startswith("repair.")
        if left < 0:
            raise Cut(name)

    points.hook = hook
    try:
        mend(root, *others)
    except Cut:
        return True
    finally:
        points.hook = None
    return False


class ReadOnly(LocalBackend):
    """A file system that was mounted without the right to write."""

    async def _no(self, name: str, *more: object, **how: object) -> None:
        raise Permanent(name, "[Errno 30] Read-only file system")

    write = create = open_writer = _no  # type: ignore[assignment]

    async def delete(self, names: object) -> None:
        raise Permanent("", "[Errno 30] Read-only file system")


@pytest.mark.parametrize("what", [what for what, harm in HARMS.items() if harm.silent is None])
def test_a_place_that_cannot_be_written_to_is_told_of_as_by_a_check(
    whole: Path, tmp_path: Path, what: str
) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    shutil.copytree(whole, root)
    shutil.copytree(whole, tier)
    HARMS[what].make(root)
    before = files(root)

    async def go() -> tuple[Mended, Mended]:
        backend, beside = ReadOnly(root), LocalBackend(tier)
        found = await check_only(backend)
        mended = await check_and_mend(backend, others=[beside])
        await backend.close()
        await beside.close()
        return found, mended

    found, mended = asyncio.run(go())
    assert said(mended.after) == said(found.after)
    assert (mended.done, files(root)) == ([], before)
    damage = {one.name for one in found.after if one.severity is Severity.DAMAGE}
    if damage and HARMS[what].beside in (Reach.MENDED, Reach.EQUAL):
        assert any("Read-only file system" in why for why in mended.failed.values())
