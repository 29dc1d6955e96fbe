"""Pins hold what they name, and lose no race against rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.errors import BadOption, NoCheckpoint, Pruned
from everstep.format import names
from everstep.plan.retention import Retention
from everstep.store.pins import PIN_MARGIN_S, add_pin, find_step, list_pins, remove_pins
from everstep.store.rotate import rotate
from everstep.store.shelf import Shelf

from tests.store import store_kit

from . import kit

NOW_S = 1_800_000_000.0


async def pin_at(backend: LocalBackend, step: int, for_s: float | None = None) -> str:
    return (await add_pin(backend, (1, step), for_s=for_s, reason="why", clock=lambda: NOW_S)).id


async def plan_at(backend: LocalBackend, at_s: float) -> tuple[Any, Any, Any]:
    shelf = Shelf(clock=lambda: at_s)
    look = await shelf.look(backend)
    return shelf, look, look.plan(Retention(1))


def test_a_pin_holds_a_checkpoint_and_its_bases(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2, full)
        await kit.save(backend, 3)
        await kit.save(backend, 4)
        pin_id = await pin_at(backend, 2)
        assert (await kit.prune(backend)).removed == [(1, 3)]
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 4)}
        await remove_pins(backend, [pin_id, pin_id])
        assert await list_pins(backend) == []
        assert (await kit.prune(backend)).removed == [(1, 1), (1, 2)]

    kit.with_run(tmp_path, work)


def test_a_pin_for_a_time_ends_a_margin_later_and_is_collected(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        pin_id = await pin_at(backend, 1, 60.0)
        _, look, plan = await plan_at(backend, NOW_S + 60 + PIN_MARGIN_S - 1)
        assert plan.remove == () and look.expired == ()
        assert plan.keep[0][1].startswith("pinned: why, until 2027-01-15T08:01:00Z")
        shelf, look, plan = await plan_at(backend, NOW_S + 60 + PIN_MARGIN_S)
        assert plan.remove == ((1, 1),) and look.expired == (pin_id,)
        report = await rotate(backend, plan, is_superseded=store_kit.not_superseded, shelf=shelf, look=look)
        assert report.removed == [(1, 1)] and report.pins == [pin_id]
        assert not (tmp_path / names.pin(pin_id)).exists()

    kit.with_run(tmp_path, work)


def test_a_damaged_pin_holds_what_its_name_says(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        pin_id = await pin_at(backend, 1, 1.0)
        (tmp_path / names.pin(pin_id)).write_bytes(b"nonsense")
        (tmp_path / "pins" / "notes.txt").write_text("mine")
        _, look, plan = await plan_at(backend, NOW_S + 1e9)
        assert plan.remove == ((1, 2),) and "cannot be read" in plan.keep[0][1] and look.expired == ()
        assert [held.pin for held in await list_pins(backend)] == [None]

    kit.with_run(tmp_path, work)


def test_the_pin_comes_between_plan_and_tombstone(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1)
        await kit.save(backend, 2, full)
        await kit.save(backend, 3)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        assert plan.remove == ((1, 1), (1, 2))
        await pin_at(backend, 2)
        report = await rotate(backend, plan, is_superseded=store_kit.not_superseded)
        assert not report.removed
        assert kit.reasons(report) == {(1, 1): "step 2 stands on it", (1, 2): "pinned: why"}
        assert await kit.check(backend) == {(1, 1), (1, 2), (1, 3)}

    kit.with_run(tmp_path, work)


@pytest.mark.parametrize(
    "point", ["rotate.tombstoned", "rotate.looked", "rotate.settled", "rotate.deleted.votes"]
)
def test_the_pin_comes_after_the_tombstone(tmp_path: Path, point: str) -> None:
    """Whoever pins sees the tombstone, and says so; no pin is left that holds nothing."""

    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        told: list[str] = []

        async def pin() -> None:
            other = LocalBackend(tmp_path)
            with pytest.raises(Pruned, match="step 1"):
                await pin_at(other, 1)
            told.append("pruned")
            await other.close()

        ended = kit.on_point(point, pin)
        await kit.prune(backend)
        await ended()
        assert told == ["pruned"] and await list_pins(backend) == []
        assert (1, 2) in await kit.check(backend)

    kit.with_run(tmp_path, work)


def test_the_rotation_comes_between_pin_and_look(tmp_path: Path) -> None:
    """The pin is published, and its owner has not looked yet: the rotator sees it and takes its tombstone back."""

    async def work(backend: LocalBackend) -> None:
        for step in (1, 2):
            await kit.save(backend, step)
        plan = (await Shelf().look(backend)).plan(Retention(1))
        reports: list[Any] = []

        async def rotation() -> None:
            other = LocalBackend(tmp_path)
            reports.append(await rotate(other, plan, is_superseded=store_kit.not_superseded))
            await other.close()

        ended = kit.on_point("pin.published", rotation)
        await pin_at(backend, 1)
        await ended()
        assert not reports[0].removed and kit.reasons(reports[0]) == {(1, 1): "pinned: why"}
        assert await kit.check(backend) == {(1, 1), (1, 2)}

    kit.with_run(tmp_path, work)


def test_a_pin_of_nothing_is_refused(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        with pytest.raises(Pruned):
            await pin_at(backend, 9)
        for bad in (0, -1.0, float("nan"), float("inf"), 1e30, True, "2h"):
            with pytest.raises(BadOption, match="last for that time"):
                await add_pin(backend, (1, 1), for_s=bad)  # type: ignore[arg-type]
        assert await list_pins(backend) == []

    kit.with_run(tmp_path, work)


def test_which_checkpoint_a_step_is(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        for step in (1, 2, 3):
            await kit.save(backend, step)
        await store_kit.adopt(backend, 1, 2)
        await kit.save(backend, 3, incarnation=2)
        await kit.save(backend, 4, incarnation=2)
        assert await find_step(backend, 1) == (1, 1)
        assert await find_step(backend, 3) == (2, 3)
        assert await find_step(backend, 3, 1) == (1, 3)
        for step, incarnation in ((9, None), (4, 1)):
            with pytest.raises(NoCheckpoint, match=f"no checkpoint at step {step}"):
                await find_step(backend, step, incarnation)

    kit.with_run(tmp_path, work)


def test_a_look_reads_a_pin_once(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.save(backend, 1)
        pin_id = await pin_at(backend, 1)
        shelf = Shelf()
        assert (await shelf.look(backend)).pinned == {(1, 1): "why"}
        read: list[str] = []
        whole = backend.read

        async def counted(name: str, nbytes_max: int = 256 << 20) -> bytes:
            read.append(name)
            return await whole(name, nbytes_max)

        backend.read = counted  # type: ignore[method-assign]
        assert (await shelf.look(backend)).pinned == {(1, 1): "why"}
        assert read == []
        await remove_pins(backend, [pin_id])
        assert (await shelf.look(backend)).pinned == {}

    kit.with_run(tmp_path, work)
    assert points.hook is None
