"""What fsck says of each harm, and what repair reaches."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.manifest import Manifest, Tombstone, encode_decision
from everstep.store.catalog import list_steps, read_decision
from everstep.store.findings import Finding, Kind, Severity, exit_code
from everstep.store.fsck_images import Extent
from everstep.store.repair_run import Mended, check_and_mend, check_only, verdict

from tests.fsck.harms import DELTA_OBJECT, FIRST, HARMS, IMAGE, MANIFEST, STATE, VOTE
from tests.fsck.run import KEYS, Harm, Reach, flip, held_of, layout_of, on
from tests.machine import engine
from tests.store import store_kit as kit

EVERY = pytest.mark.parametrize("what", list(HARMS))


def look(root: Path, harm: Harm, *others: Path, mend: bool = False) -> Mended:
    async def go() -> Mended:
        backend, beside = harm.open(root), [LocalBackend(other) for other in others]
        try:
            if mend:
                return await check_and_mend(backend, others=beside)
            return await check_only(backend, extent=Extent(quick=harm.quick))
        finally:
            for one in (backend, *beside):
                await one.close()

    return asyncio.run(go())


def said(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(one.severity.value, one.kind.value, one.name) for one in findings}


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and names.QUARANTINE not in str(path) and names.EVENTS not in str(path)
    }


_loads: dict[str, frozenset[int]] = {}


def steps_that_load(root: Path) -> set[int]:
    """Bit for bit. Where the same files were loaded before, what came of it."""
    seen = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        seen.update(f"{path.relative_to(root)} {path.is_file()} {len(data)}\n".encode() + data)
    key = seen.hexdigest()
    if key not in _loads:
        _loads[key] = frozenset(_load_all(root))
    return set(_loads[key])


def _load_all(root: Path) -> set[int]:
    async def go() -> set[int]:
        backend, found = LocalBackend(root), set()
        for step, key in KEYS.items():
            try:
                await engine.load([backend], key, held_of(step))
            except (EverstepError, IndexError):
                continue
            found.add(step)
        await backend.close()
        return found

    return asyncio.run(go())


@EVERY
def test_fsck_says_it_and_nothing_else(whole: Path, tmp_path: Path, what: str) -> None:
    root, harm = tmp_path / "run", HARMS[what]
    shutil.copytree(whole, root)
    says = harm.says(root)
    harm.make(root)
    found = look(root, harm)
    assert said(found.after) == says
    severities = {Severity(how) for how, _, _ in says}
    aside = any(kind == Kind.QUARANTINE.value for _, kind, _ in says)
    damage = aside or Severity.DAMAGE in severities
    code = 4 if damage else 8 if Severity.CANNOT_TELL in severities else 0
    assert exit_code(found.after) == code
    told = verdict(found)
    assert {step for _, step in told.lost} == harm.hurts
    if Severity.CANNOT_TELL not in severities:
        assert {step for _, step in told.loadable} <= steps_that_load(root) | {5}


def reaches(whole: Path, root: Path, harm: Harm, reach: Reach, mended: Mended, before: object) -> None:
    left = {one for one in said(mended.after) if one[0] in ("damage", "cannot-tell")}
    if reach is Reach.LEFT:
        assert mended.done == []
        assert files(root) == before
        assert said(mended.after) == harm.says(whole)
        return
    assert not left
    if reach is Reach.MENDED:
        assert files(root) == files(whole)
        assert len({one.name for one in mended.done}) == len(harm.says(whole))
    elif reach is Reach.EQUAL:
        assert steps_that_load(root) == set(KEYS)
        assert mended.done
    else:
        assert {step for _, step in verdict(mended).lost} == harm.hurts
        assert set(KEYS) - steps_that_load(root) <= harm.hurts | {2}
        assert before == {name: data for name, data in files(root).items() if name in before}  # type: ignore[operator]


def listed(root: Path) -> set[int]:
    """The steps that ``ls`` lists."""
    found: set[int] = set()

    async def work(backend: LocalBackend) -> None:
        for one in await list_steps(backend):
            try:
                decision = await read_decision(backend, one)
            except EverstepError:
                continue
            found.update([one.step] if isinstance(decision, Manifest) else [])

    on(root, work)
    return found


def ends(root: Path, harm: Harm, others: list[Path], mended: Mended, loaded: set[int]) -> None:
    """What must be so after every repair: it took nothing away, what is said to load does, and there is no more to do,
    again and again."""
    loads = steps_that_load(root) | ({5} & listed(root))
    assert loaded <= loads
    told = verdict(mended)
    kinds = {parsed.kind for one in mended.after if one.hurts and (parsed := names.parse(one.name))}
    if not kinds & {names.Kind.RUN, names.Kind.INCARNATION}:  # without which this test can load
        assert {step for _, step in told.loadable} == loads & listed(root)
    damage = [one for one in mended.after if one.severity in (Severity.DAMAGE, Severity.CANNOT_TELL)]
    assert damage or listed(root) <= loads
    places = [root, *others]
    before = [files(place) for place in places]
    again = look(root, harm, *others, mend=True)
    assert again.done == [], "a second repair has nothing to do"
    assert [files(place) for place in places] == before
    assert said(again.after) == said(mended.after) == said(look(root, harm).after)
    assert verdict(again) == told
    assert mended.done or again.failed.items() <= mended.failed.items()


CASES = [
    pytest.param(what, alone, id=f"{what}, {'alone' if alone else 'beside'}")
    for what, harm in HARMS.items()
    for alone in (True, False)
    if harm.silent is None
]


@pytest.mark.parametrize(("what", "alone"), CASES)
def test_what_repair_reaches(whole: Path, tmp_path: Path, what: str, alone: bool) -> None:
    root, tier, harm = tmp_path / "run", tmp_path / "tier", HARMS[what]
    shutil.copytree(whole, root)
    harm.make(root)
    before, loaded = files(root), steps_that_load(root)
    if not alone:
        shutil.copytree(whole, tier)
    others = [] if alone else [tier]
    mended = look(root, harm, *others, mend=True)
    reaches(whole, root, harm, harm.alone if alone else harm.beside, mended, before)
    if ("cannot-tell", "cannot-tell") not in {one[:2] for one in said(mended.after)}:
        ends(root, harm, others, mended, loaded)
    assert alone or files(tier) == files(whole)


def test_a_whole_run_has_no_findings(whole: Path) -> None:
    harm = Harm(lambda root: None, lambda root: set(), Reach.LEFT, Reach.LEFT, frozenset(), False, None)
    assert look(whole, harm).after == []
    assert steps_that_load(whole) == set(KEYS)


def test_what_was_set_aside_for_want_of_its_base_comes_back(whole: Path, tmp_path: Path) -> None:
    root, tier, harm = tmp_path / "run", tmp_path / "tier", HARMS["a base missing"]
    shutil.copytree(whole, root)
    harm.make(root)
    look(root, harm, mend=True)
    assert steps_that_load(root) == {1, 4}
    shutil.copytree(whole, tier)
    mended = look(root, harm, tier, mend=True)
    assert said(mended.after) == set()
    assert steps_that_load(root) == set(KEYS)


def test_a_base_that_was_removed_here_is_not_brought_back(whole: Path, tmp_path: Path) -> None:
    """While its tombstone stands."""
    root, tier, harm = tmp_path / "run", tmp_path / "tier", HARMS["a base missing"]
    shutil.copytree(whole, root)
    shutil.copytree(whole, tier)
    harm.make(root)
    grave = root / names.decision(2, 1, 2)
    grave.parent.mkdir(parents=True)
    grave.write_bytes(encode_decision(Tombstone(2, 1, 2, "retention", created="2026-01-01T00:00:00Z")))
    mended = look(root, harm, tier, mend=True)
    assert verdict(mended).lost == ((1, 3),)
    assert "was removed" in mended.failed[names.checkpoint_dir(2, 1)]
    assert sorted(grave.parent.iterdir()) == [grave]


def test_a_chain_comes_back_from_its_full_one_on(tmp_path: Path) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"
    harm = HARMS["a base missing"]

    async def work(backend: LocalBackend) -> None:
        await kit.start_run(backend)
        for step in (1, 2, 3):
            held = held_of(step)
            assert await engine.save(
                backend, [backend], (1, step), held, (1, step - 1) if step > 1 else None, None
            )

    on(root, work)
    shutil.copytree(root, tier)
    for step in (1, 2):
        shutil.rmtree(root / names.checkpoint_dir(step, 1))
    mended = look(root, harm, tier, mend=True)
    assert said(mended.after) == set()
    assert files(root) == files(tier)


@pytest.mark.parametrize("name", [names.RUN, FIRST, MANIFEST, VOTE, STATE, DELTA_OBJECT, "LAYOUT"])
def test_nothing_is_taken_that_is_wrong(whole: Path, tmp_path: Path, name: str) -> None:
    """What is missing here is damaged there, so that it is read well and fits in size."""
    root, tier = tmp_path / "run", tmp_path / "tier"
    shutil.copytree(whole, root)
    shutil.copytree(whole, tier)
    name = layout_of(whole) if name == "LAYOUT" else name
    if name == names.RUN:
        flip(root / name, 30)
    else:
        (root / name).unlink()
    if name == VOTE:  # else it is made anew from its images
        flip(root / IMAGE, -5)
        flip(tier / IMAGE, -5)
        HARMS["a vote that is right in itself"].make(tier)
    else:
        flip(tier / name, 40)
    wrong = (tier / name).read_bytes()
    harm = HARMS["an image missing"]
    look(root, harm, tier, mend=True)
    assert not (root / name).exists() or (root / name).read_bytes() != wrong
