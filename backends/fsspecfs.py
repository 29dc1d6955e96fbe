"""Any file system that fsspec knows, as a backend."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from .aligned import as_bytes
from .api import Capabilities, Item, Items, Names, Notes, check_name, is_name
from .errors import BackendError, Conflict, NotFound, Permanent, Retryable, ShortRead
from .fsspecerrors import from_fs_error
from .limit import SLICE_BYTES, Gate
from .localfs import check_prefix, is_temporary_of_ours
from .parallel import answered, each, finished
from .publish import temporary_name

T = TypeVar("T")

ATOMIC_CREATE = frozenset({"gs", "gcs"})
"""Protocols whose file systems put an object only if its name is free, in one step at the server, when they are asked
to (``pipe_file(mode="create")``); versions that do not take that mode do not count."""

WHOLE_PUTS = frozenset({"memory", "gs", "gcs", "abfs", "abfss", "az", "s3", "oci", "oss"})
"""Protocols by which an object that is put in one call appears whole, or not at all. On others it is written beside
its place, and moved there."""

NODE_LOCAL = frozenset({"memory", "file", "local"})

RANGE_BYTES = 8 << 20
READS_PARALLEL = 8
LISTS_PARALLEL = 8
DELETES_PARALLEL = 16
"""Requests of one call at once, and the bytes of one read."""


class FsspecBackend:
    """Objects as files below ``url`` (``protocol://path``) of the file system that fsspec has for it.

    What the file system does asynchronously is done on fsspec's own loop, the rest on at most ``threads`` threads;
    any event loop may use it, and a forked child begins anew. Large objects are written to a temporary beside
    their place, and moved there when they are whole. Without an atomic create (see ``ATOMIC_CREATE``), :meth:`create`
    looks first and puts then. No listing is ever taken from a cache."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        threads: int = 4,
        gate: Gate | None = None,
        shown: str | None = None,
        fs: Callable[[], tuple[AbstractFileSystem, str]] | None = None,
    ) -> None:
        protocol = url.partition("://")[0]
        self.url = shown or url
        self._make = fs or (lambda: _file_system(url, self.url, options or {}))
        self._threads = threads
        self._gate = gate
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._pool: ThreadPoolExecutor | None = None
        self._whole_puts = protocol in WHOLE_PUTS
        self._fs, self._root = self._make()
        self.capabilities = Capabilities(
            atomic_create=protocol in ATOMIC_CREATE and _takes_mode(self._fs),
            shared=protocol not in NODE_LOCAL,
        )

    # -- reading ---------------------------------------------------------------------------------------

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        nbytes = await self.size(name)
        if nbytes > nbytes_max:
            raise Permanent(name, f"{nbytes} bytes, which is more than the {nbytes_max} expected at most")
        data = bytearray(nbytes)
        if nbytes:
            await self.read_into(name, 0, memoryview(data))
        return bytes(data)

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        path = self._path(check_name(name))
        data = as_bytes(view, name)
        if data.readonly:
            raise Permanent(name, "cannot be read into read-only memory")
        if offset < 0:
            raise Permanent(name, f"offset {offset}")
        nbytes = await self.size(name)
        if nbytes < offset + len(data):
            raise ShortRead(name, f"ends at {nbytes}, {len(data)} bytes were wanted from {offset} on")

        async def one(start: int) -> None:
            into = data[start : start + RANGE_BYTES]
            first = offset + start
            found = await self._do(name, "cat_file", path, start=first, end=first + len(into))
            await self._pass(len(found))
            if len(found) != len(into):
                raise Retryable(name, f"{len(found)} bytes came where {len(into)} were asked for")
            into[:] = found

        await each(range(0, len(data), RANGE_BYTES), one, limit=READS_PARALLEL)

    async def size(self, name: str) -> int:
        self._file_system().invalidate_cache()
        info = await self._do(name, "info", self._path(check_name(name)))
        if info.get("type") == "directory":
            raise NotFound(name, "a directory")
        if info.get("size") is None:
            raise Permanent(name, "this file system does not tell sizes")
        return int(info["size"])

    # -- writing ---------------------------------------------------------------------------------------

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> FsspecWriter:
        check_name(name)
        if nbytes < 0:
            raise Permanent(name, f"a size of {nbytes} bytes")
        writer = FsspecWriter(self, name, nbytes, at_most)
        await writer.start()
        return writer

    async def write(self, name: str, data: bytes) -> None:
        path = self._path(check_name(name))
        if self._whole_puts:
            await self._pass(len(data))
            await self._do(name, "pipe_file", path, data)
            await self._expect(name, len(data))
            return
        writer = await self.open_writer(name, len(data))
        try:
            await writer.write(memoryview(data))
            await writer.commit()
        finally:
            await writer.abort()

    async def create(self, name: str, data: bytes) -> None:
        path = self._path(check_name(name))
        if not self.capabilities.atomic_create:
            if not await self._holds(name, data):
                await self.write(name, data)
            return
        await self._pass(len(data))
        try:
            await self._do(name, "pipe_file", path, data, mode="create")
        except Conflict as error:
            if not await self._holds(name, data):
                raise Retryable(name, "the name was taken, and was free again a moment later") from error

    async def _holds(self, name: str, data: bytes) -> bool:
        """Whether the object is there with these bytes; Conflict if with others."""
        try:
            if await self.size(name) == len(data) and await self.read(name, len(data)) == data:
                return True
        except NotFound:
            return False
        raise Conflict(name, "exists already, with other bytes")

    async def publish(self, name: str, temporary: str, nbytes: int) -> None:
        """Move a temporary of ``nbytes`` to ``name``."""
        await self._expect(temporary, nbytes)
        source, target = self._path(temporary), self._path(name)
        if type(self._file_system()).mv is not AbstractFileSystem.mv:
            await self.run(name, lambda fs: fs.mv(source, target))
        else:
            await self._do(name, "cp_file", source, target)
            await self._do(name, "rm_file", source)
        await self._expect(name, nbytes)

    async def _expect(self, name: str, nbytes: int) -> None:
        found = await self._do(name, "info", self._path(name))
        if found.get("size") != nbytes:
            raise Retryable(name, f"{found.get('size')} bytes are there after {nbytes} were written")

    # -- names -----------------------------------------------------------------------------------------

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        async for item in self._scan(check_prefix(prefix), is_name):
            yield item

    async def list_names(self, prefix: str = "") -> Names:
        entries = await self._entries(check_prefix(prefix))
        return [last for entry in entries if is_name(last := entry.name.rpartition("/")[2])]

    async def delete(self, names: Iterable[str]) -> None:
        wanted = [check_name(name) for name in names]
        first: list[BackendError] = []

        async def one(name: str) -> None:
            try:
                await self._do(name, "rm_file", self._path(name))
            except NotFound:
                pass
            except BackendError as error:
                first.append(error)

        await each(wanted, one, limit=DELETES_PARALLEL)
        if first:
            raise first[0]

    async def displace(self, name: str, to: str) -> None:
        raise Permanent(name, "nothing is moved here; move it away by hand")

    async def leftovers(self, prefix: str = "") -> Items:
        return [item async for item in self._scan(check_prefix(prefix), is_temporary_of_ours)]

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        names = [item.name for item in items]
        for name in names:
            if not is_temporary_of_ours(name):
                raise Permanent(name, "not an unfinished temporary")
        for name in names:
            with suppress(NotFound):
                await self._do(name, "rm_file", self._path(name))

    async def _scan(self, prefix: str, wanted: Callable[[str], bool]) -> AsyncIterator[Item]:
        level = [prefix]
        while level:
            found = await each(level, self._entries, limit=LISTS_PARALLEL)
            level = []
            for entry in (entry for entries in found for entry in entries):
                if entry.directory:
                    level.extend([entry.name] if is_name(entry.name) else [])
                elif wanted(entry.name):
                    yield Item(entry.name, entry.nbytes, entry.modified)

    async def _entries(self, directory: str) -> Entries:
        """What lies in a directory; nothing if there is none."""
        path = self._path(directory)
        self._file_system().invalidate_cache()
        try:
            infos = await self._do(directory, "ls", path, detail=True)
        except NotFound:
            return []
        start = path.rstrip("/") + "/"
        return [_Entry(info, start, directory) for info in infos if str(info["name"]).startswith(start)]

    # -- how -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            await asyncio.get_running_loop().run_in_executor(None, pool.shutdown)

    async def _pass(self, nbytes: int) -> None:
        for start in range(0, nbytes if self._gate is not None else 0, SLICE_BYTES):
            assert self._gate is not None
            await self._gate.take(min(SLICE_BYTES, nbytes - start))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _file_system(self) -> AbstractFileSystem:
        if os.getpid() != self._pid:
            # The parent's is not even collected here: its sockets are watched by the parent's loop.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._fs))
            self._lock, self._pool = threading.Lock(), None
            self._fs, self._root = self._make()
            self._pid = os.getpid()
        return self._fs

    async def _do(self, name: str, method: str, *arguments: Any, **named: Any) -> Any:
        """One call of the file system."""
        fs = self._file_system()
        asynchronous = getattr(fs, "_" + method, None) if fs.async_impl else None
        if asynchronous is None or not inspect.iscoroutinefunction(asynchronous):
            return await self.run(name, lambda fs: getattr(fs, method)(*arguments, **named))
        self._check_open()
        future = asyncio.run_coroutine_threadsafe(answered(asynchronous(*arguments, **named)), fs.loop)
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:
            raise from_fs_error(error, name) from error

    async def run(self, name: str, job: Callable[[AbstractFileSystem], T]) -> T:
        """``job`` with the file system, on a thread. When the caller is cancelled, a job that has begun is waited
        for."""
        fs = self._file_system()
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="everstep-fsspec")
            future: Future[T] = self._pool.submit(job, fs)
        try:
            return await finished(future)
        except Exception as error:
            raise from_fs_error(error, name) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Permanent(self.url, "this backend is closed")


class FsspecWriter:
    """A temporary that is moved to its place when it is whole."""

    def __init__(self, backend: FsspecBackend, name: str, nbytes: int, at_most: bool = False) -> None:
        self._backend = backend
        self._name = name
        self._temporary = temporary_name(name)
        self._nbytes = nbytes  # with at_most a bound, until it is known
        self._at_most = at_most
        self._taken = 0
        self._file: Any = None
        self._ended = False

    async def start(self) -> None:
        path = self._backend._path(self._temporary)

        def opened(fs: AbstractFileSystem) -> Any:
            try:
                return fs.open(path, "wb")
            except FileNotFoundError:
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                return fs.open(path, "wb")

        self._file = await self._backend.run(self._name, opened)

    async def write(self, view: memoryview) -> None:
        self._check()
        data = as_bytes(view, self._name)
        try:
            if self._taken + len(data) > self._nbytes:
                raise Permanent(self._name, f"more than the {self._nbytes} bytes that were announced")
            await self._backend._pass(len(data))
            if len(data):
                await self._backend.run(self._name, lambda fs: self._file.write(data))
        except BaseException:
            await self.abort()
            raise
        self._taken += len(data)

    async def commit(self) -> None:
        self._check()
        try:
            if self._at_most:
                self._nbytes = self._taken
            if self._taken != self._nbytes:
                raise Permanent(
                    self._name, f"{self._taken} bytes were written of the {self._nbytes} announced"
                )
            await self._backend.run(self._name, lambda fs: self._file.close())
            await self._backend.publish(self._name, self._temporary, self._nbytes)
        except BaseException:
            await self.abort()
            raise
        self._ended = True

    async def abort(self) -> None:
        """Leave no trace; what cannot be removed now is a leftover."""
        if self._ended:
            return
        self._ended = True
        path = self._backend._path(self._temporary)

        def remove(fs: AbstractFileSystem) -> None:
            # Closing makes the temporary whole, which it need not be: it is removed.
            with suppress(Exception):
                self._file.close()
            with suppress(FileNotFoundError):
                fs.rm_file(path)

        with suppress(BackendError):
            await self._backend.run(self._name, remove)

    def _check(self) -> None:
        if self._ended:
            raise Permanent(self._name, "this writer has ended")


class _Entry:
    """One entry of a directory."""

    __slots__ = ("directory", "modified", "name", "nbytes")

    def __init__(self, info: Mapping[str, Any], start: str, directory: str) -> None:
        last = str(info["name"])[len(start) :].rstrip("/")
        self.name = f"{directory}/{last}" if directory else last
        self.directory = info.get("type") == "directory"
        self.nbytes = int(info.get("size") or 0)
        when = info.get("mtime") or info.get("LastModified") or info.get("updated") or info.get("created")
        moment = when.timestamp() if isinstance(when, datetime) else when
        self.modified = float(moment) if isinstance(moment, (int, float)) else None


Entries = list[_Entry]


def _file_system(url: str, shown: str, options: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    """The file system of ``url`` and the path there; nobody else's, and without a cache where it can do without."""
    protocol = url.partition("://")[0]
    try:
        known = fsspec.get_filesystem_class(protocol)
        cacheless = {"use_listings_cache": False} if issubclass(known, AsyncFileSystem) else {}
        fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **{**cacheless, **options})
    except (ImportError, ValueError) as error:
        raise Permanent(shown, f"no backend for {protocol!r}, or not supported here: {error}") from None
    except Exception as error:
        raise from_fs_error(error, shown) from error
    return fs, path.rstrip("/")


def _takes_mode(fs: AbstractFileSystem) -> bool:
    pipe = getattr(fs, "_pipe_file", fs.pipe_file)
    return "mode" in inspect.signature(pipe).parameters
