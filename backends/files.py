"""Local (and shared) file systems as a backend."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from .api import Capabilities, Item, Items, Names, Notes, check_name
from .door import Door
from .errors import Permanent
from .filewriter import FileWriter
from .localfs import LocalFiles, check_prefix, is_temporary_of_ours
from .parallel import finished

T = TypeVar("T")

THREADS_MAX = 64
"""Threads that one backend may be given."""

DELETE_NAMES_MAX = 256
"""Names removed by one job, so that reads and writes get their turn between."""


class LocalBackend:
    """Objects as files below ``root``, which need not exist before the first write.

    Every call is one job (a listing: several) on at most ``threads`` threads of this object's own, started
    when first needed; so any event loop may use it, several as well. A cancelled call ends when its job has
    ended: no thread touches a caller's memory after the call. It belongs to the process that made it: in a
    forked child every call raises Permanent. :meth:`close` waits for what runs.

    ``shared`` says that all nodes see this root (a network file system); it cannot be found out here."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        door: Door | None = None,
        threads: int = 4,
        shared: bool = False,
    ) -> None:
        if not 1 <= threads <= THREADS_MAX:
            raise Permanent(str(root), f"{threads} threads; 1 to {THREADS_MAX} can be had")
        self.root = Path(os.path.abspath(os.fspath(root)))
        self.url = self.root.as_uri()
        self.capabilities = Capabilities(atomic_create=True, shared=shared, direct_io=True)
        self._files = LocalFiles(door or Door(self.root))
        self._threads = threads
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _pool and _closed
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        return await self._run(lambda: self._files.read(name, nbytes_max))

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        await self._run(lambda: self._files.read_into(name, offset, view))

    async def size(self, name: str) -> int:
        return await self._run(lambda: self._files.size(name))

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> LocalWriter:
        opened: list[FileWriter] = []
        try:
            await self._run(lambda: opened.append(self._files.open_writer(name, nbytes, at_most)))
        except asyncio.CancelledError:
            for writer in opened:
                await self._run(writer.abort)
            raise
        return LocalWriter(self, opened[0])

    async def write(self, name: str, data: bytes) -> None:
        await self._run(lambda: self._files.write(name, data))

    async def create(self, name: str, data: bytes) -> None:
        await self._run(lambda: self._files.create(name, data))

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        async for item in self._scan(prefix, temporaries=False):
            yield item

    async def list_names(self, prefix: str = "") -> Names:
        return await self._run(lambda: self._files.list_names(prefix))

    async def delete(self, names: Iterable[str]) -> None:
        await self._delete([check_name(name) for name in names])

    async def displace(self, name: str, to: str) -> None:
        await self._run(lambda: self._files.displace(name, to))

    async def leftovers(self, prefix: str = "") -> Items:
        return [item async for item in self._scan(prefix, temporaries=True)]

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        names = [item.name for item in items]
        for name in names:
            if not is_temporary_of_ours(name):
                raise Permanent(name, "not an unfinished temporary")
        await self._delete(names)

    async def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            await asyncio.get_running_loop().run_in_executor(None, pool.shutdown)
        self._files.close()

    async def _scan(self, prefix: str, temporaries: bool) -> AsyncIterator[Item]:
        pending = [(check_prefix(prefix), 0)]
        while pending:
            for item in await self._run(lambda: self._files.scan(pending, temporaries)):
                yield item

    async def _delete(self, names: Names) -> None:
        left = iter(names)
        while lot := tuple(islice(left, DELETE_NAMES_MAX)):
            await self._run(partial(self._files.delete, lot))

    async def _run(self, job: Callable[[], T]) -> T:
        """Do ``job`` on the pool. When the caller is cancelled, a job that has begun is waited for."""
        return await finished(self._executor().submit(job))

    def _executor(self) -> ThreadPoolExecutor:
        if os.getpid() != self._pid:
            raise Permanent(
                self.url, f"this backend belongs to process {self._pid}; open another one after a fork"
            )
        with self._lock:
            if self._closed:
                raise Permanent(self.url, "this backend is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="everstep-files")
            return self._pool


class LocalWriter:
    """The writer that :meth:`LocalBackend.open_writer` gives."""

    def __init__(self, backend: LocalBackend, writer: FileWriter) -> None:
        self._run = backend._run
        self._writer = writer

    async def write(self, view: memoryview) -> None:
        await self._run(lambda: self._writer.write(view))

    async def commit(self) -> None:
        await self._run(self._writer.commit)

    async def abort(self) -> None:
        if not self._writer.ended:
            await self._run(self._writer.abort)
