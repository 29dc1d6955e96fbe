"""Repair: what it reaches for each damage, alone and beside a tier; that it can be cut off anywhere."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.manifest import Abort, Manifest, encode_decision
from everstep.store import fsck, fsck_images, proving, sources
from everstep.store.catalog import list_step, read_decision
from everstep.store.findings import Finding, Severity, exit_code
from everstep.store.repair_run import Mended, check_and_mend, check_only, verdict
from everstep.store.rotate import rotate

from tests.disk.simdisk import SimDisk
from tests.repair.damages import DAMAGES, IMAGE, LAYOUT, MANIFEST, STEP, VOTE, Damage, Reach, flip, remove
from tests.repair.mending import mend
from tests.store import store_kit as kit


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at work who might decide an attempt meanwhile."""
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)


EVERY = pytest.mark.parametrize("what", list(DAMAGES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 to 3; copied, never changed."""
    root = tmp_path_factory.mktemp("whole") / "run"
    kit.make_run(root, *range(1, STEP + 1))
    return root


def target_of(root: Path, name: str) -> Path:
    if name != LAYOUT:
        return root / name

    async def find() -> str:
        backend = LocalBackend(root)
        manifest = await read_decision(backend, await list_step(backend, STEP, 1))
        assert isinstance(manifest, Manifest)
        await backend.close()
        return names.layout(manifest.ranks[0].layout_hash)

    return root / asyncio.run(find())


def harmed(whole: Path, root: Path, damage: Damage) -> str:
    """A copy of the run, harmed; the name of the object."""
    shutil.copytree(whole, root)
    path = target_of(root, damage.name)
    damage.act(path)
    return str(path.relative_to(root))


def look(root: Path, step: int | None = None) -> Mended:
    async def go() -> Mended:
        backend = LocalBackend(root)
        try:
            return await check_only(backend, step=step)
        finally:
            await backend.close()

    return asyncio.run(go())


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.kind.value, f.name) for f in findings if f.severity is Severity.DAMAGE]


def files(root: Path) -> dict[str, bytes]:
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_file() and not name.startswith(names.QUARANTINE) and ".tmp-" not in name:
            found[name] = path.read_bytes()
    return found


def steps_that_load(root: Path) -> set[int]:
    async def go() -> set[int]:
        backend = LocalBackend(root)
        good, _ = await kit.loadable(backend)
        await backend.close()
        return {step for _, step in good}

    return asyncio.run(go())


def assert_said(root: Path, name: str, damage: Damage) -> None:
    said = look(root)
    assert (damage.kind, name) in bad(said.after), said.after
    assert exit_code(said.after) == 4
    told = verdict(said)
    if damage.alone in (Reach.LEFT,) or damage.kind == "undecided" or name == MANIFEST:
        return
    assert told.lost == ((1, STEP),)
    assert told.loadable == ((1, 1), (1, 2))


@EVERY
def test_fsck_says_what_is_hurt_and_what_still_loads(whole: Path, tmp_path: Path, what: str) -> None:
    name = harmed(whole, tmp_path / "run", DAMAGES[what])
    assert_said(tmp_path / "run", name, DAMAGES[what])


@pytest.mark.parametrize("name", [MANIFEST, VOTE, IMAGE])
def test_a_directory_in_the_place_of_an_object_is_called_so_and_kept(
    whole: Path, tmp_path: Path, name: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    shutil.copytree(whole, tmp_path / "far")
    (root / name).unlink()
    (root / name / "inner").mkdir(parents=True)
    (root / name / "inner" / "theirs").write_text("a person's")
    [said] = [finding for finding in look(root).after if finding.name == name]
    assert "a directory" in said.message and "fsck --repair" in said.message
    mended = mend(root, tmp_path / "far")
    assert bad(mended.after) == [] and files(root) == files(whole)
    kept = root / names.aside(name, 1) / "inner" / "theirs"
    assert kept.read_text() == "a person's"
    assert exit_code(look(root).after) == 0


def assert_reached(whole: Path, root: Path, mended: Mended, reach: Reach, name: str) -> None:
    damage = bad(mended.after)
    if reach is Reach.MENDED:
        assert damage == [], mended
        assert files(root) == files(whole)
        assert [one.name for one in mended.done] == [name]
    elif reach is Reach.EQUAL:
        assert damage == [], mended
        assert set(files(root)) == set(files(whole))
        assert {n for n, data in files(root).items() if files(whole)[n] != data} <= {name}
    elif reach is Reach.ASIDE:
        assert damage == [], mended
        assert steps_that_load(root) == {1, 2}
        kept = files(root)
        assert set(kept) - set(files(whole)) == {names.decision(STEP, 1, 2)}
        assert verdict(mended).lost == ((1, STEP),)
        return
    else:
        assert (mended.done, damage != []) == ([], True)
        assert name in mended.failed
        return
    assert steps_that_load(root) == {1, 2, 3}
    assert bad(look(root).after) == []


@EVERY
def test_what_repair_reaches_alone(whole: Path, tmp_path: Path, what: str) -> None:
    root, damage = tmp_path / "run", DAMAGES[what]
    name = harmed(whole, root, damage)
    assert_reached(whole, root, mend(root), damage.alone, name)


@EVERY
def test_what_repair_reaches_beside_a_tier_that_is_whole(whole: Path, tmp_path: Path, what: str) -> None:
    root, tier, damage = tmp_path / "run", tmp_path / "tier", DAMAGES[what]
    name = harmed(whole, root, damage)
    shutil.copytree(whole, tier)
    assert_reached(whole, root, mend(root, tier), damage.beside, name)
    assert files(tier) == files(whole)


def test_two_damaged_copies_make_a_whole_one(whole: Path, tmp_path: Path) -> None:
    """Of either the chunks that the other lacks."""
    root, tier = tmp_path / "run", tmp_path / "tier"
    harmed(whole, root, Damage(flip(3), IMAGE, "damaged", Reach.MENDED))
    harmed(whole, tier, Damage(flip(-5), IMAGE, "damaged", Reach.MENDED))
    mended = mend(root, tier)
    assert files(root) == files(whole)
    assert [(one.name, str(tmp_path) in one.how) for one in mended.done] == [(IMAGE, True)]
    mend(tier, root)
    assert files(tier) == files(whole)


def test_another_run_is_no_holder(whole: Path, tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    harmed(whole, root, DAMAGES["a bit of an incarnation's record"])

    async def make() -> None:
        backend = LocalBackend(other)
        await kit.start_run(backend)
        await kit.save(backend, 1)
        await backend.close()

    asyncio.run(make())
    assert mend(root, other).done == []


def test_a_vote_that_cannot_be_proved_is_not_made_up(whole: Path, tmp_path: Path) -> None:
    """With the vote gone and a bit of its image wrong, nothing has the hash that the manifest names."""
    root = tmp_path / "run"
    harmed(whole, root, DAMAGES["a vote missing"])
    flip(-5)(root / IMAGE)
    assert_reached(whole, root, mend(root), Reach.ASIDE, VOTE)


def test_what_is_set_aside_comes_back_once_a_tier_has_it(whole: Path, tmp_path: Path) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    harmed(whole, root, DAMAGES["an image cut"])
    mend(root)
    assert steps_that_load(root) == {1, 2}
    again = mend(root)
    assert (again.done, bad(again.after)) == ([], [])
    shutil.copytree(whole, tier)
    mended = mend(root, tier)
    assert steps_that_load(root) == {1, 2, 3}
    assert (root / IMAGE).read_bytes() == (whole / IMAGE).read_bytes()
    assert [one.name for one in mended.done] == [IMAGE, names.decision(STEP, 1, 2)]
    assert bad(look(root).after) == []


def test_the_only_checkpoint_is_not_set_aside(whole: Path, tmp_path: Path) -> None:
    """Parts of it may be good, and there is nothing else."""
    root = tmp_path / "run"
    harmed(whole, root, DAMAGES["an image cut"])
    for step in (1, 2):
        shutil.rmtree(root / names.step_dir(step))
    mended = mend(root)
    assert bad(mended.after) == [("damaged", IMAGE)]
    assert "no other checkpoint" in mended.failed[names.checkpoint_dir(STEP, 1)]
    assert mended.done == []


def test_rotation_neither_counts_nor_removes_what_is_set_aside(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    harmed(whole, root, DAMAGES["an image cut"])
    mend(root)

    async def turn() -> None:
        backend = LocalBackend(root)
        await rotate(backend, await kit.plan_for(backend), is_superseded=kit.not_superseded)
        await backend.close()

    asyncio.run(turn())
    assert steps_that_load(root) == {2}
    assert (root / names.vote(STEP, 1, 1, 0)).exists()
    assert (root / names.image(STEP, 1, 1, 1, "model")).exists()


# -- cut off anywhere


STORY = ("an image cut", "a vote missing", "a bit of a manifest", "a bit of an incarnation's record")


def many(whole: Path, root: Path) -> None:
    """Several damages at once, over the steps."""
    shutil.copytree(whole, root)
    remove(root / names.vote(1, 1, 1, 0))
    flip(40)(root / names.decision(2, 1, 1))
    flip(-5)(root / IMAGE)
    flip(30)(root / names.incarnation(1))


class Cut(BaseException):
    """What ends a repair."""


def cut_off(whole: Path, tmp_path: Path, at: int) -> bool:
    """Whatever the point, a second repair ends as an undisturbed one does; False where there is no such point."""
    tier, root = tmp_path / "tier", tmp_path / f"run{at}"
    many(whole, root)
    left = at

    def hook(name: str, detail: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cut(name)

    points.hook = hook
    try:
        mend(root, tier)
    except Cut:
        pass
    else:
        return False
    finally:
        points.hook = None
    mended = mend(root, tier)
    assert bad(mended.after) == []
    assert files(root) == files(whole), at
    return True


def test_cut_off_at_some_points_and_gone_on_with(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "tier")
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    for at in random.Random(seed).sample(range(30), 4):
        assert cut_off(whole, tmp_path, at)


@pytest.mark.long
def test_cut_off_at_every_point_and_gone_on_with(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "tier")
    count = 0
    while cut_off(whole, tmp_path, count):
        count += 1
    assert count > 30


def recorded(whole: Path, root: Path, tier: Path | None) -> SimDisk:
    many(whole, root)
    sim = SimDisk(root)

    async def go() -> None:
        backend = LocalBackend(root, door=sim.door)
        others = [LocalBackend(tier)] if tier else []
        await check_and_mend(backend, others=others)
        for one in (backend, *others):
            await one.close()

    asyncio.run(go())
    return sim


@pytest.mark.parametrize("alone", [False, True])
def test_power_loss_at_some_operations(whole: Path, tmp_path: Path, alone: bool) -> None:
    power_loss(whole, tmp_path, alone, 10)


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
def test_power_loss_at_every_operation(whole: Path, tmp_path: Path, alone: bool) -> None:
    power_loss(whole, tmp_path, alone, None)


def power_loss(whole: Path, tmp_path: Path, alone: bool, count: int | None) -> None:
    """No step that loads before does not load after, and repairing again ends as ever."""
    tier = tmp_path / "tier"
    shutil.copytree(whole, tier)
    sim = recorded(whole, tmp_path / "run", None if alone else tier)
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    every = range(len(sim.ops) + 1)
    for index in every if count is None else sorted(numbers.sample(every, min(count, len(every)))):
        root = tmp_path / "crashed"
        sim.crash(root, numbers.choice((None, seed + index)), op_index=index)
        mended = mend(root, tier)
        assert bad(mended.after) == [], index
        assert steps_that_load(root) == {1, 2, 3}, index
        shutil.rmtree(root)


# -- canaries


def _no_chunk_is_bad(*args: object) -> list[tuple[int, bytes]]:
    return []


def _fine(*args: object, **more: object) -> None:
    return None


async def _none_is_complete(*args: object) -> tuple[int, ...]:
    return ()


SWITCHES = {
    "hashes of chunks": (
        (fsck_images, sources, proving),
        "bad_chunks",
        _no_chunk_is_bad,
        "a bit of an image's data",
    ),
    "sizes of images": ((sources, proving), "check_size", _fine, "an image grown"),
    "votes without a decision": ((fsck,), "complete_undecided", _none_is_complete, "a manifest missing"),
}


@pytest.mark.parametrize("switch", list(SWITCHES))
def test_a_check_that_is_switched_off_is_missed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    modules, check, replacement, what = SWITCHES[switch]
    hit = [module for module in modules if hasattr(module, check)]
    assert hit
    for module in hit:
        monkeypatch.setattr(module, check, replacement)
    name = harmed(whole, tmp_path / "run", DAMAGES[what])
    with pytest.raises((AssertionError, EverstepError)):
        assert_said(tmp_path / "run", name, DAMAGES[what])


@pytest.mark.parametrize("what", ["a vote missing", "a bit of a vote's header"])
@pytest.mark.parametrize("other", ["a layout missing", "a bit of a layout"])
def test_a_damaged_vote_does_not_hide_that_of_its_layout(
    whole: Path, tmp_path: Path, what: str, other: str
) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    name = harmed(whole, root, DAMAGES[other])
    DAMAGES[what].act(root / VOTE)
    for step in (1, 2):  # whose votes lead to the same layout
        shutil.rmtree(root / names.step_dir(step))
    assert {(DAMAGES[other].kind, name), (DAMAGES[what].kind, VOTE)} <= set(bad(look(root).after))
    shutil.copytree(whole, tier)
    assert bad(mend(root, tier).after) == []
    assert (root / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("how", ["a manifest missing", "a bit of a manifest"])
def test_what_a_tier_gave_up_is_not_given_up_here(whole: Path, tmp_path: Path, how: str) -> None:
    """The tier's decision at the same name is about the tier alone."""
    root, tier = tmp_path / "run", tmp_path / "tier"
    harmed(whole, root, DAMAGES[how])
    shutil.copytree(whole, tier)
    (tier / MANIFEST).write_bytes(encode_decision(Abort(STEP, 1, 1, "the tier was too slow")))
    assert bad(mend(root, tier).after) == []
    assert steps_that_load(root) == {1, 2, 3}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_manifest_and_a_damaged_vote_give_nothing_up(
    whole: Path, tmp_path: Path, beside: bool, rank: int
) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    harmed(whole, root, DAMAGES["a manifest missing"])
    flip(20)(root / names.vote(STEP, 1, 1, rank))
    before = files(root)
    assert ("undecided", MANIFEST) in bad(look(root).after)
    shutil.copytree(whole, tier)
    mend(root, *([tier] if beside else []))
    assert files(root) == (files(whole) if beside else before)
