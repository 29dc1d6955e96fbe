"""Nothing of a deleted run is written into, or deleted from, the one that now lies in its place.

A user may delete a run's directory, and start anew there, while the agent of the old run is at work: the old agent's
next write would make the directory again, and its files would bear names of the new run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from everstep.backends.api import Backend, Notes, Writer
from everstep.backends.errors import NotFound
from everstep.backends.wrap import Wrapper, WriterWrapper
from everstep.errors import SaveFailed
from everstep.format import names
from everstep.format.records import RunRecord, decode_run

RUN_BYTES_MAX = 1 << 20
LOOK_S = 2.0
"""What decides anything is created if absent, and always looked before; for the rest, so long a moment between look and
change is as good as the one that a request takes."""


class SameRun(Wrapper):
    """Changes nothing unless the run under the root is ``run``, by its record; else calls ``gone`` and raises
    SaveFailed. (The moment between look and change is closed, on file systems, by a backend that is bound to its
    directory.)"""

    def __init__(self, inner: Backend, run: RunRecord, gone: Callable[[], None]) -> None:
        super().__init__(inner)
        self._run = run
        self._gone = gone
        self._trusted_until = -1.0

    async def check(self, name: str, *, now: bool = False) -> None:
        """Look, unless that was done within ``LOOK_S`` on a store where each look is a request; ``now`` always."""
        if not now and time.monotonic() < self._trusted_until:
            return
        try:
            found = decode_run(await self.inner.read(names.RUN, RUN_BYTES_MAX), names.RUN).run_id
        except NotFound:
            found = "no run"
        if found != self._run.run_id:
            self._gone()
            raise SaveFailed(
                f"{name} is not touched: the run under {self.url} is gone",
                found=found,
                expected=self._run.run_id,
            )
        if self.capabilities.flat:
            self._trusted_until = time.monotonic() + LOOK_S

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        await self.check(name)
        return _Guarded(await self.inner.open_writer(name, nbytes, notes, at_most=at_most), self, name)

    async def write(self, name: str, data: bytes) -> None:
        await self.check(name)
        await self.inner.write(name, data)

    async def create(self, name: str, data: bytes) -> None:
        await self.check(name, now=True)
        await self.inner.create(name, data)

    async def delete(self, names: Iterable[str]) -> None:
        old = list(names)
        if old:
            await self.check("an old object")
            await self.inner.delete(old)


class _Guarded(WriterWrapper):
    def __init__(self, inner: Writer, run: SameRun, name: str) -> None:
        super().__init__(inner)
        self._run = run
        self._name = name

    async def commit(self) -> None:
        await self._run.check(self._name)
        await self.inner.commit()
