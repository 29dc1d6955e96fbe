"""Scripted faults, for tests of whatever stands on a backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from .api import Backend, Item, Items, Names, Notes, Writer, check_name
from .errors import BackendError, Retryable
from .wrap import Wrapper, WriterWrapper

Calls = list[tuple[str, str]]


@dataclass
class Fault:
    """What goes wrong, and when: from the ``nth`` matching call on, ``times`` times.

    A call matches if ``op`` is its operation ("read", "create", "writer.write", "writer.commit", ...; "" any)
    and ``name`` occurs in its object's name. ``error(name)`` is raised before the operation is done, or with
    ``after`` when it has been done (the answer is lost). ``mangle`` instead changes the bytes that a read
    gives (a writable view of them)."""

    op: str = ""
    name: str = ""
    nth: int = 1
    times: int = 1
    error: Callable[[str], BackendError] = field(default=lambda name: Retryable(name, "scripted fault"))
    after: bool = False
    mangle: Callable[[memoryview], None] | None = None
    met: int = 0
    """Matching calls so far."""

    def strikes(self, op: str, name: str) -> bool:
        """Counts the call if it matches; whether this one goes wrong."""
        if (self.op and op != self.op) or self.name not in name:
            return False
        self.met += 1
        return self.nth <= self.met < self.nth + self.times


class Faulty(Wrapper):
    """Does what ``script`` says, which may be changed at any time; ``calls`` lists (operation, name)."""

    def __init__(self, inner: Backend, script: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self.script = [*script]
        self.calls: Calls = []

    def meet(self, op: str, name: str) -> Struck:
        """Note a call; raises if a fault says so, else what is to go wrong later in it."""
        self.calls.append((op, name))
        struck = Struck(name, [fault for fault in self.script if fault.strikes(op, name)])
        struck.before()
        return struck

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        struck = self.meet("read", name)
        data = bytearray(await self.inner.read(name, nbytes_max))
        struck.mangle(memoryview(data))
        struck.after()
        return bytes(data)

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        struck = self.meet("read_into", name)
        await self.inner.read_into(name, offset, view)
        struck.mangle(view)
        struck.after()

    async def size(self, name: str) -> int:
        struck = self.meet("size", name)
        nbytes = await self.inner.size(name)
        struck.after()
        return nbytes

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        struck = self.meet("open_writer", name)
        writer = await self.inner.open_writer(name, nbytes, notes, at_most=at_most)
        if struck.lose_answer:
            await writer.abort()
        struck.after()
        return _FaultyWriter(writer, self, name)

    async def write(self, name: str, data: bytes) -> None:
        struck = self.meet("write", name)
        await self.inner.write(name, data)
        struck.after()

    async def create(self, name: str, data: bytes) -> None:
        struck = self.meet("create", name)
        await self.inner.create(name, data)
        struck.after()

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        struck = self.meet("list", prefix)
        async for item in self.inner.list(prefix):
            yield item
        struck.after()

    async def list_names(self, prefix: str = "") -> Names:
        struck = self.meet("list_names", prefix)
        names = await self.inner.list_names(prefix)
        struck.after()
        return names

    async def delete(self, names: Iterable[str]) -> None:
        """Each name is a call of its own, in order: a fault leaves the earlier ones deleted."""
        for name in [check_name(name) for name in names]:
            struck = self.meet("delete", name)
            await self.inner.delete([name])
            struck.after()

    async def leftovers(self, prefix: str = "") -> Items:
        struck = self.meet("leftovers", prefix)
        items = await self.inner.leftovers(prefix)
        struck.after()
        return items

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        for item in items:
            struck = self.meet("discard_leftovers", item.name)
            await self.inner.discard_leftovers([item])
            struck.after()


@dataclass
class Struck:
    """The faults that one call meets."""

    name: str
    faults: list[Fault]

    @property
    def lose_answer(self) -> bool:
        return any(fault.after for fault in self.faults)

    def before(self) -> None:
        for fault in self.faults:
            if not fault.after and fault.mangle is None:
                raise fault.error(self.name)

    def mangle(self, view: memoryview) -> None:
        for fault in self.faults:
            if fault.mangle is not None:
                fault.mangle(view)

    def after(self) -> None:
        for fault in self.faults:
            if fault.after:
                raise fault.error(self.name)


class _FaultyWriter(WriterWrapper):
    def __init__(self, inner: Writer, faults: Faulty, name: str) -> None:
        super().__init__(inner)
        self._faults = faults
        self._name = name

    async def write(self, view: memoryview) -> None:
        struck = self._faults.meet("writer.write", self._name)
        await self.inner.write(view)
        struck.after()

    async def commit(self) -> None:
        struck = self._faults.meet("writer.commit", self._name)
        await self.inner.commit()
        struck.after()

    async def abort(self) -> None:
        struck = self._faults.meet("writer.abort", self._name)
        await self.inner.abort()
        struck.after()
