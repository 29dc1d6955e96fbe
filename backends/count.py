"""Counting what passes, for tests, benchmarks and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable

from .api import Backend, Item, Items, Names, Notes, Writer
from .wrap import Wrapper, WriterWrapper


class Counting(Wrapper):
    """Counts calls by operation name (``operations``; a writer's as ``writer.write`` and so on), and the
    bytes of the calls that succeeded."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.reset()

    def reset(self) -> None:
        self.operations: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        self.operations["read"] += 1
        data = await self.inner.read(name, nbytes_max)
        self.bytes_read += len(data)
        return data

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self.operations["read_into"] += 1
        await self.inner.read_into(name, offset, view)
        self.bytes_read += view.nbytes

    async def size(self, name: str) -> int:
        self.operations["size"] += 1
        return await self.inner.size(name)

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        self.operations["open_writer"] += 1
        return _CountingWriter(await self.inner.open_writer(name, nbytes, notes, at_most=at_most), self)

    async def write(self, name: str, data: bytes) -> None:
        self.operations["write"] += 1
        await self.inner.write(name, data)
        self.bytes_written += len(data)

    async def create(self, name: str, data: bytes) -> None:
        self.operations["create"] += 1
        await self.inner.create(name, data)
        self.bytes_written += len(data)

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        self.operations["list"] += 1
        async for item in self.inner.list(prefix):
            yield item

    async def list_names(self, prefix: str = "") -> Names:
        self.operations["list_names"] += 1
        return await self.inner.list_names(prefix)

    async def delete(self, names: Iterable[str]) -> None:
        self.operations["delete"] += 1
        await self.inner.delete(names)

    async def leftovers(self, prefix: str = "") -> Items:
        self.operations["leftovers"] += 1
        return await self.inner.leftovers(prefix)

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        self.operations["discard_leftovers"] += 1
        await self.inner.discard_leftovers(items)


class _CountingWriter(WriterWrapper):
    def __init__(self, inner: Writer, totals: Counting) -> None:
        super().__init__(inner)
        self._totals = totals

    async def write(self, view: memoryview) -> None:
        self._totals.operations["writer.write"] += 1
        await self.inner.write(view)
        self._totals.bytes_written += view.nbytes

    async def commit(self) -> None:
        self._totals.operations["writer.commit"] += 1
        await self.inner.commit()

    async def abort(self) -> None:
        self._totals.operations["writer.abort"] += 1
        await self.inner.abort()
