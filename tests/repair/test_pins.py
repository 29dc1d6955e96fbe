"""Repair removes pins that hold nothing and never will, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import Tombstone, encode_decision
from everstep.store import fsck
from everstep.store.findings import Kind, Severity
from everstep.store.pins import PIN_MARGIN_S, add_pin, list_pins, remove_pins
from everstep.store.repair_run import check_and_mend, check_only

from tests.repair.damages import flip
from tests.shelves import kit
from tests.store import store_kit

KEY = (1, 1)
"""Of the checkpoint that is pinned."""
CHECKPOINT = names.checkpoint_dir(1, 1)


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)


def bury(root: Path) -> None:
    (root / names.decision(1, 1, 2)).write_bytes(encode_decision(Tombstone(1, 1, 2, "retention", "")))


def without_votes(root: Path) -> None:
    bury(root)
    for rank in range(kit.WORLD):
        (root / names.vote(1, 1, 1, rank)).unlink()


def tombstone_alone(root: Path) -> None:
    without_votes(root)
    shutil.rmtree(root / names.attempt_dir(1, 1, 1))
    (root / names.decision(1, 1, 1)).unlink()


def nothing(root: Path) -> None:
    shutil.rmtree(root / CHECKPOINT)


def nothing_of_a_former_incarnation(root: Path) -> None:
    nothing(root)


def damaged_manifest(root: Path) -> None:
    flip(40)(root / names.decision(1, 1, 1))


def damaged_image(root: Path) -> None:
    flip(-5)(root / names.image(1, 1, 1, 0, "model"))


def whole(root: Path) -> None:
    return None


STATES: dict[Callable[[Path], None], tuple[bool, bool]] = {
    whole: (False, False),
    damaged_manifest: (False, False),
    damaged_image: (False, False),
    bury: (True, False),
    without_votes: (True, True),
    tombstone_alone: (True, True),
    nothing: (True, False),
    nothing_of_a_former_incarnation: (True, True),
}
"""Whether a pin goes that has expired, and one that has not."""


async def mend(backend: LocalBackend, *others: LocalBackend) -> list[str]:
    """The pins that were removed."""
    mended = await check_and_mend(backend, others=others)
    gone = [one.name for one in mended.done if "pin" in one.name]
    assert all("was removed" in one.how for one in mended.done if one.name in gone)
    assert not {one.name for one in mended.after} & set(gone)
    assert set(gone) & {names.pin(held.id) for held in await list_pins(backend)} == set()
    return gone


async def pinned(backend: LocalBackend, expired: bool) -> str:
    """The pin of the first of two steps."""
    for step in (1, 2):
        await kit.save(backend, step)
    long_ago = {"for_s": 60.0, "clock": lambda: PIN_MARGIN_S} if expired else {}
    return names.pin((await add_pin(backend, KEY, **long_ago)).id)  # type: ignore[arg-type]


def in_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    kit.with_run(root, work)


@pytest.mark.parametrize("state", list(STATES), ids=lambda state: state.__name__)
@pytest.mark.parametrize("expired", [True, False])
def test_what_goes(tmp_path: Path, state: Callable[[Path], None], expired: bool) -> None:
    async def work(backend: LocalBackend) -> None:
        name = await pinned(backend, expired)
        if state is nothing_of_a_former_incarnation:
            await store_kit.adopt(backend, 1, 2)
        state(tmp_path)
        goes = STATES[state][0 if expired else 1]
        assert await mend(backend) == ([name] if goes else [])
        assert (tmp_path / name).exists() is not goes
        assert await mend(backend) == []

    in_run(tmp_path, work)


@pytest.mark.parametrize("state", [without_votes, nothing_of_a_former_incarnation])
def test_it_stays_while_another_place_has_the_checkpoint(
    tmp_path: Path, state: Callable[[Path], None]
) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"

    async def work(backend: LocalBackend) -> None:
        name = await pinned(backend, expired=False)
        await store_kit.adopt(backend, 1, 2)
        shutil.copytree(root, tier)
        state(root)
        beside = LocalBackend(tier)
        assert await mend(backend, beside) == []
        shutil.rmtree(tier / CHECKPOINT)
        assert await mend(backend, beside) == [name]
        await beside.close()

    in_run(root, work)


@pytest.mark.parametrize("state", list(STATES), ids=lambda state: state.__name__)
def test_one_that_cannot_be_read_is_damage_and_holds_what_is_there(
    tmp_path: Path, state: Callable[[Path], None]
) -> None:
    async def work(backend: LocalBackend) -> None:
        name = await pinned(backend, expired=True)
        if state is nothing_of_a_former_incarnation:
            await store_kit.adopt(backend, 1, 2)
        state(tmp_path)
        flip(40)(tmp_path / name)
        goes = STATES[state][1]
        mended = await check_and_mend(backend)
        told = [(one.severity, one.hurts) for one in mended.after if one.kind is Kind.PIN]
        assert (told, (tmp_path / name).exists()) == (
            ([], False) if goes else ([(Severity.DAMAGE, "")], True)
        )
        assert goes or "unpin" in mended.failed[name]
        await remove_pins(backend, [name.rpartition("/")[2].removesuffix(".json")])
        assert not [one for one in (await check_only(backend)).after if one.kind is Kind.PIN]

    in_run(tmp_path, work)


def test_it_is_written_anew_where_another_place_has_it(tmp_path: Path) -> None:
    root, tier = tmp_path / "run", tmp_path / "tier"

    async def work(backend: LocalBackend) -> None:
        name = await pinned(backend, expired=False)
        shutil.copytree(root, tier)
        before = (root / name).read_bytes()
        (root / name).write_bytes(b"")
        beside = LocalBackend(tier)
        mended = await check_and_mend(backend, others=[beside])
        assert [one.name for one in mended.done] == [name] and (root / name).read_bytes() == before
        await beside.close()

    in_run(root, work)


def test_cut_off_before_a_pin_is_removed_the_next_repair_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(BaseException):
        pass

    def hook(name: str, detail: str) -> None:
        if name == "repair.pin.before":
            raise Cut(detail)

    async def work(backend: LocalBackend) -> None:
        name = await pinned(backend, expired=True)
        without_votes(tmp_path)
        with monkeypatch.context() as patched, pytest.raises(Cut, match=name):
            patched.setattr(points, "hook", hook)
            await mend(backend)
        assert (tmp_path / name).exists()
        assert await mend(backend) == [name]

    in_run(tmp_path, work)
