"""Two rotations of one place, step by step in any order, of which one or both are cut off."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.errors import Pruned
from everstep.store.findings import Kind, Severity
from everstep.store.fsck import check as fsck
from everstep.store.pins import add_pin

from . import kit

STORIES = 40
STEP_S = 20.0
"""The longest that a process may take from one of its points to the next."""


class Killed(BaseException):
    """The process dies here."""


class Process:
    """Work on a thread of its own, which stands at each of its rotation's points until it is let go."""

    def __init__(
        self, work: Callable[[LocalBackend], Awaitable[None]], root: Path, turn: threading.Condition
    ):
        self.at = "begin"
        self.ended = False
        self.error: BaseException | None = None
        self._go: BaseException | bool | None = None
        self._turn = turn
        self._work = work
        self._root = root
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.stand("begin")
            asyncio.run(self._live())
        except BaseException as error:
            self.error = error
        with self._turn:
            self.ended = True
            self._turn.notify_all()

    async def _live(self) -> None:
        backend = LocalBackend(self._root)
        try:
            await self._work(backend)
        finally:
            await backend.close()

    def stand(self, name: str) -> None:
        with self._turn:
            self.at, self._go = name, None
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: self._go is not None, STEP_S)
            go = self._go
        if isinstance(go, BaseException):
            raise go

    def is_standing(self) -> bool:
        return self.ended or (self.at != "" and self._go is None)

    def let_go(self, how: BaseException | bool = True) -> None:
        """To its next point, or its end; a Killed: it dies where it stands."""
        with self._turn:
            self.at, self._go = "", how
            self._turn.notify_all()
            assert self._turn.wait_for(self.is_standing, STEP_S)


class Stage:
    """Runs processes, one step of one of them at a time."""

    def __init__(self, root: Path, *works: Callable[[LocalBackend], Awaitable[None]]) -> None:
        turn = threading.Condition()
        self.processes = [Process(work, root, turn) for work in works]
        points.hook = self._reached
        for process in self.processes:
            process.thread.start()
            with turn:
                assert turn.wait_for(process.is_standing, STEP_S)

    def _reached(self, name: str, detail: str) -> None:
        mine = threading.get_ident()
        for process in self.processes:
            if process.thread.ident == mine and name.startswith(("rotate.", "pin.")):
                process.stand(name)

    def until(self, process: Process, point: str) -> None:
        while process.at != point:
            assert not process.ended, f"{point} was not reached"
            process.let_go()

    def end(self) -> None:
        for process in self.processes:
            while not process.ended:
                process.let_go()
        points.hook = None
        for process in self.processes:
            process.thread.join()
            if process.error is not None and not isinstance(process.error, Killed):
                raise process.error


async def _rotation(backend: LocalBackend) -> None:
    await kit.prune(backend)


class Needing:
    """Who pins ``key`` and, where that is there still, has it loaded later; then a rotation."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.held = False

    async def __call__(self, backend: LocalBackend) -> None:
        try:
            await add_pin(backend, self.key)
            self.held = True
        except Pruned:
            pass
        await kit.prune(backend)


async def _nothing_is_deleted_of_what_stands(backend: LocalBackend) -> None:
    """A base may be buried yet, and comes back with the next rotation."""
    told = [f async for f in fsck(backend) if f.severity is Severity.DAMAGE]
    assert [finding for finding in told if finding.kind is not Kind.CHAIN] == []


async def _nothing_is_half(backend: LocalBackend) -> set[tuple[int, int]]:
    found = await kit.check(backend)
    assert [one for one in [f async for f in fsck(backend)] if one.severity is Severity.DAMAGE] == []
    return found


async def _save_some(backend: LocalBackend) -> None:
    full = await kit.save(backend, 1)
    delta = await kit.save(backend, 2, full)
    await kit.save(backend, 3, delta)
    await kit.save(backend, 4)


@pytest.mark.parametrize("numbers", range(4))
def test_in_any_order_and_cut_off_anywhere(tmp_path: Path, numbers: int) -> None:
    """What counts has its votes and images at every end, and its bases at the latest after one more rotation; what was
    pinned in time is there."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for story in range(STORIES // 4):
        root = tmp_path / str(story)
        needing = Needing((1, chance.choice([1, 2, 3])))

        async def work(
            backend: LocalBackend, story: int = story, needing: Needing = needing, root: Path = root
        ) -> None:
            await _save_some(backend)
            stage = Stage(root, _rotation, needing, *[_rotation] * chance.randint(0, 1))
            told = []
            while running := [one for one in stage.processes if not one.ended]:
                one = chance.choice(running)
                dies = chance.random() < 0.08
                told.append(f"{stage.processes.index(one)} {one.at}{' dies' if dies else ''}")
                one.let_go(Killed() if dies else True)
            stage.end()
            print(story, needing.key, needing.held, told)
            await _nothing_is_deleted_of_what_stands(backend)
            await kit.prune(backend)
            found = await _nothing_is_half(backend)
            assert (1, 4) in found and (needing.key in found or not needing.held)

        kit.with_run(root, work)


async def _pinned_late(backend: LocalBackend, root: Path) -> tuple[Needing, Stage]:
    """Two rotations and a reader: one has looked, and the reader has published its pin behind that."""
    for step in (1, 2):
        await kit.save(backend, step)
    needing = Needing((1, 1))
    stage = Stage(root, _rotation, _rotation, needing)
    stage.until(stage.processes[0], "rotate.looked")
    stage.until(stage.processes[2], "pin.published")
    return needing, stage


@pytest.mark.parametrize("dies", [False, True])
def test_who_comes_late_to_put_it_back_does_not(tmp_path: Path, dies: bool) -> None:
    """It saw the checkpoint whole, and pinned, under the tombstone of another, who has looked already. Who deletes may
    die behind the votes."""

    async def work(backend: LocalBackend) -> None:
        needing, stage = await _pinned_late(backend, tmp_path)
        first, second, _ = stage.processes
        stage.until(second, "rotate.looked")
        stage.until(first, "rotate.deleted.votes")
        if dies:
            first.let_go(Killed())
        stage.until(second, "rotate.put_back")
        second.let_go(Killed())
        assert await _nothing_is_half(backend) == {(1, 2)}
        stage.end()
        assert not needing.held
        await kit.prune(backend)
        assert await _nothing_is_half(backend) == {(1, 2)}
        assert await kit.gone(backend, (1, 1))

    kit.with_run(tmp_path, work)


def test_who_comes_late_to_delete_it_does_not(tmp_path: Path) -> None:
    """Another saw the pin, and put it back."""

    async def work(backend: LocalBackend) -> None:
        needing, stage = await _pinned_late(backend, tmp_path)
        second = stage.processes[1]
        stage.until(second, "rotate.put_back")
        second.let_go(Killed())
        stage.end()
        assert needing.held
        assert await _nothing_is_half(backend) == {(1, 1), (1, 2)}

    kit.with_run(tmp_path, work)


def test_what_another_puts_back_keeps_its_bases(tmp_path: Path) -> None:
    """Whoever puts the delta back has looked when its bases stood; they are buried since, and nothing needed them."""

    async def work(backend: LocalBackend) -> None:
        await _save_some(backend)
        needing = Needing((1, 3))
        stage = Stage(tmp_path, _rotation, _rotation, needing)
        first, second, third = stage.processes
        stage.until(first, "rotate.tombstoned")
        stage.until(third, "pin.published")
        stage.until(second, "rotate.looked")
        third.let_go()  # it finds the tombstone, and takes its pin back
        first.let_go()
        first.let_go()  # the bases are buried
        stage.until(second, "rotate.put_back")
        stage.until(first, "rotate.looked")
        second.let_go(Killed())
        third.let_go(Killed())
        stage.end()
        assert await _nothing_is_half(backend) == {(1, 1), (1, 2), (1, 3), (1, 4)}

    kit.with_run(tmp_path, work)
