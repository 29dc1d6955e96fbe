"""The base of the wrappers: hands everything on. Each wrapper changes one behaviour."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from .api import Backend, Capabilities, Item, Items, Names, Notes, Writer


class Wrapper:
    """A backend that does what ``inner`` does. Closing it closes ``inner``."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        return await self.inner.read(name, nbytes_max)

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        await self.inner.read_into(name, offset, view)

    async def size(self, name: str) -> int:
        return await self.inner.size(name)

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        return await self.inner.open_writer(name, nbytes, notes, at_most=at_most)

    async def write(self, name: str, data: bytes) -> None:
        await self.inner.write(name, data)

    async def create(self, name: str, data: bytes) -> None:
        await self.inner.create(name, data)

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        async for item in self.inner.list(prefix):
            yield item

    async def list_names(self, prefix: str = "") -> Names:
        return await self.inner.list_names(prefix)

    async def delete(self, names: Iterable[str]) -> None:
        await self.inner.delete(names)

    async def displace(self, name: str, to: str) -> None:
        await self.inner.displace(name, to)

    async def leftovers(self, prefix: str = "") -> Items:
        return await self.inner.leftovers(prefix)

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        await self.inner.discard_leftovers(items)

    async def close(self) -> None:
        await self.inner.close()


class WriterWrapper:
    """A writer that does what ``inner`` does."""

    def __init__(self, inner: Writer) -> None:
        self.inner = inner

    async def write(self, view: memoryview) -> None:
        await self.inner.write(view)

    async def commit(self) -> None:
        await self.inner.commit()

    async def abort(self) -> None:
        await self.inner.abort()
