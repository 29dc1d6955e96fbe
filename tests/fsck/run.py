"""A run, copied and harmed again and again, and what a harm of it is."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from everstep.backends.errors import Permanent
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.store.catalog import list_step, read_decision

from tests.machine import engine
from tests.machine.world import Held, Key, Trainer
from tests.store import store_kit as kit

PACKED, BASE, DELTA, LAST = 1, 2, 3, 4
KEYS: dict[int, Key] = {PACKED: (1, 1), BASE: (1, 2), DELTA: (1, 3), LAST: (2, 4)}


class Reach(Enum):
    """What repair comes to."""

    MENDED = "mended"
    """Every object is what it was."""
    EQUAL = "equal"
    """Every step loads; a decision was made anew."""
    ASIDE = "aside"
    """What is hurt is set aside, the rest loads."""
    LEFT = "left"
    """Nothing is changed, and what was said is said again."""


Said = tuple[str, str, str]
"""Severity, kind and name of a finding."""


@dataclass(frozen=True)
class Harm:
    """``make`` harms the run at the path, ``says`` gives all that fsck must say then. ``alone`` and ``beside`` are what
    repair reaches without any other place, and with one that is whole."""

    make: Callable[[Path], None]
    says: Callable[[Path], set[Said]]
    alone: Reach
    beside: Reach
    hurts: frozenset[int]
    """The steps that fsck must say cannot be loaded any more."""
    quick: bool
    """fsck is asked for sizes and records alone."""
    silent: tuple[str, str] | None
    """The method of the backend, and the name, for which the storage gives no answer."""

    def open(self, root: Path) -> LocalBackend:
        backend = LocalBackend(root)
        if self.silent is not None:
            method, silent = self.silent
            really = getattr(backend, method)

            async def ask(name: str = "", *more: object) -> object:
                if name == silent:
                    raise Permanent(name, "no answer")
                return await really(name, *more)

            setattr(backend, method, ask)
        return backend


HARMS: dict[str, Harm] = {}


def harm(
    what: str,
    *says: Said | str,
    alone: Reach = Reach.LEFT,
    beside: Reach | None = None,
    hurts: tuple[int, ...] = (),
    quick: bool = False,
    silent: tuple[str, str] | None = None,
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register what makes the harm. A name alone stands for a damaged object; "LAYOUT" for the layout of rank 0."""

    def expected(root: Path) -> set[Said]:
        full = [("damage", "damaged", one) if isinstance(one, str) else one for one in says]
        return {(how, kind, layout_of(root) if name == "LAYOUT" else name) for how, kind, name in full}

    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        assert what not in HARMS
        HARMS[what] = Harm(make, expected, alone, beside or alone, frozenset(hurts), quick, silent)
        return make

    return register


# -- the run


@functools.cache
def held_of(step: int) -> Held:
    """What a step holds; the same each time."""
    trainer = Trainer()
    for at in range(1, step + 1):
        trainer.train("sparse" if at == DELTA else "dense", "", at)
    return trainer.held(f"step {step}", 1.0 / step)


def on(root: Path, work: Callable[[LocalBackend], Awaitable[object]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())


def make_run(root: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        await kit.start_run(backend)
        for step, key in KEYS.items():
            if step == LAST:
                await kit.adopt(backend, *KEYS[DELTA])
            base = KEYS[BASE] if step == DELTA else None
            how = "zstd" if step == PACKED else None
            assert await engine.save(backend, [backend], key, held_of(step), base, how)

    on(root, work)


def manifest_of(root: Path, step: int) -> Manifest:
    found: list[Manifest] = []

    async def read(backend: LocalBackend) -> None:
        decision = await read_decision(backend, await list_step(backend, step, KEYS[step][0]))
        assert isinstance(decision, Manifest)
        found.append(decision)

    on(root, read)
    return found[0]


def layout_of(root: Path) -> str:
    return names.layout(manifest_of(root, LAST).ranks[0].layout_hash)


# -- ways


def place(step: int) -> tuple[int, int, int]:
    return step, KEYS[step][0], 1


def flip(path: Path, at: int) -> None:
    """One bit of the byte at ``at`` (from the end, where that is negative)."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def flips(name: str, at: int) -> Callable[[Path], None]:
    return lambda root: flip(root / name, at)


def cuts(name: str) -> Callable[[Path], None]:
    return lambda root: put(root / name, (root / name).read_bytes()[:-1])


def grows(name: str) -> Callable[[Path], None]:
    return lambda root: put(root / name, (root / name).read_bytes() + b"\0")


def removes(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()
