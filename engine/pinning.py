"""Pins by readers: an evaluation job holds the checkpoint that it reads from a live run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from .errors import EverstepError
from .places import locate
from .store.blocking import run_blocking
from .store.pins import add_pin, find_step, remove_pins
from .store.runs import open_run

PIN_FOR_S = 3600.0
"""How long a reader's pin holds, unless it says otherwise."""


@contextmanager
def pin(
    root: str | os.PathLike[str],
    step: int,
    *,
    for_s: float = PIN_FOR_S,
    reason: str = "a reader",
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[int]:
    """Within the block the checkpoint at ``step`` of the run at ``root`` is not removed, nor what it stands on, while
    the run goes on; gives ``step``. ``for_s`` seconds after its beginning the pin holds no more in any case: the
    process may die within the block.

    Raises NotARun, NoCheckpoint, Pruned (removed meanwhile), BadOption, CannotTell, SaveFailed (the storage cannot be
    written to).
    """
    place = locate(root, options=storage_options)

    async def add() -> str:
        backend = place.open()
        try:
            await open_run(backend)
            key = await find_step(backend, step)
            return (await add_pin(backend, key, for_s=for_s, reason=reason, who=place.node)).id
        finally:
            await backend.close()

    async def remove(pin_id: str) -> None:
        backend = place.open()
        try:
            await remove_pins(backend, [pin_id])
        finally:
            await backend.close()

    pin_id = run_blocking(add())
    try:
        yield step
    finally:
        with suppress(EverstepError):  # it ends by itself
            run_blocking(remove(pin_id))
