"""Talking to an S3 server: one client for each process and event loop, made when first needed.

s3fs reads the options and makes the client (botocore's chain of credentials, endpoint, region); the requests are
made here, each with limits in time, repeated where that can help, and with errors of this package only. Nothing is
kept from one answer to the next.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import botocore.handlers
import botocore.loaders
from aiobotocore.session import AioSession
from s3fs import S3FileSystem
from s3fs.utils import ParamKwargsHelper

from .errors import Permanent, UnknownOption
from .limit import Gate
from .retry import repeat
from .s3body import Flow
from .s3errors import Expired, Stale, Unreachable, from_s3_error
from .s3options import CONNECTIONS_MAX, session_options
from .s3sums import header_of, md5
from .s3writer import Room

T = TypeVar("T")

log = logging.getLogger("everstep.backends")

REQUESTS_MAX = CONNECTIONS_MAX
"""Requests of one backend in flight at once, in one loop."""

TRIES_MAX = 8
WAIT_S_FIRST = 0.1
WAIT_S_MAX = 10.0
"""Tries of one request, and seconds between them (see :func:`.retry.repeat`)."""

METHODS = ("put_object", "get_object", "create_multipart_upload", "upload_part", "list_objects_v2")
"""Those that know all that can go with requests."""

RENEW_S = 5.0
"""Seconds for which credentials that were just read anew, and are refused, are not read once more."""

LOADERS_MAX = 4
"""Places of further interfaces (AWS_DATA_PATH) whose contents are kept."""

HASH_THREADS = 2
"""Threads that take checksums, for all loops of one backend."""

Attempt = Callable[["Line", Flow], Coroutine[Any, Any, T]]


class Line:
    """A client of one loop. Every call is one request."""

    def __init__(self, fs: S3FileSystem, client: Any, extra: Mapping[str, Any]) -> None:
        self.fs = fs
        self.client = client
        self._extra = extra
        self._known = ParamKwargsHelper(client)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request, as botocore gives it. Options that go with every request (who pays, how the
        server encrypts) are put in where the method knows them."""
        wanted = self._known.filter_dict(method, {**self._extra, **arguments})
        answer: dict[str, Any] = await getattr(self.client, method)(**wanted)
        return answer

    async def close(self) -> None:
        with suppress(Exception):
            await self.client.close()


class _Loop:
    """What belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.requests = asyncio.Semaphore(REQUESTS_MAX)
        self.making = asyncio.Lock()
        self.room = Room()
        self.line: Line | None = None
        self.former: Line | None = None
        self.renewed_at = float("-inf")


class S3Client:
    """Requests to one server. May be used from several event loops; in a forked child it begins anew, and leaves the
    parent's connections alone."""

    def __init__(self, url: str, options: Mapping[str, Any], gate: Gate | None = None) -> None:
        self.url = url
        self.gate = gate
        self._options = session_options(url, options)
        self._extra = dict(options.get("s3_additional_kwargs") or {})
        if options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"
        # Each request is watched for that (Flow); aiohttp would set a timer anew with every packet.
        self.stall_s = float(self._options["config_kwargs"].pop("read_timeout"))
        self._options["config_kwargs"]["read_timeout"] = None
        self._lock = threading.Lock()  # guards what follows
        self._pid = os.getpid()
        self._loops: list[_Loop] = []
        self._hashing: ThreadPoolExecutor | None = None
        self._closed = False
        self._unreachable = False

    async def do(self, name: str, attempt: Attempt[T], *, tries_max: int = TRIES_MAX) -> T:
        """Do ``attempt``, repeated where that can help. Raises the backends' errors only, ``name`` in them."""
        own = self._own()
        renewed = False

        async def once() -> T:
            nonlocal renewed
            line = await self._line(own, name)
            try:
                return await self._ask(own, line, name, attempt)
            except Stale:
                if renewed:
                    raise
                renewed = True
                return await self._ask(own, line, name, attempt)
            except Expired:
                if renewed or (line is own.line and time.monotonic() - own.renewed_at < RENEW_S):
                    raise
                renewed = True
                line = await self._line(own, name, instead_of=line)
                return await self._ask(own, line, name, attempt)

        return await repeat(once, tries_max=tries_max, wait_s_first=WAIT_S_FIRST, wait_s_max=WAIT_S_MAX)

    async def _ask(self, own: _Loop, line: Line, name: str, attempt: Attempt[T]) -> T:
        async with own.requests:
            flow = Flow(self.gate)
            try:
                answer = await flow.watched(name, attempt(line, flow), self.stall_s)
            except Exception as error:
                told = from_s3_error(error, name)
                if isinstance(told, Unreachable):
                    self._tell_unreachable(told)
                raise told from error
            self._unreachable = False
            return answer

    def _tell_unreachable(self, error: Unreachable) -> None:
        """Whoever waits must know for what; once, until the server has answered."""
        if not self._unreachable:
            self._unreachable = True
            waits = [min(WAIT_S_FIRST * 2**index, WAIT_S_MAX) for index in range(TRIES_MAX - 1)]
            log.warning(
                "%s: %s; each request is tried %d times, for up to %.0f s and the time that connecting takes",
                *(self.url, error.cause, TRIES_MAX, sum(waits)),
            )

    async def call(self, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One plain request, repeated where that can help."""
        return await self.do(name, lambda line, flow: line.call(method, **arguments))

    def room(self) -> Room:
        """Where the parts of this loop's writers wait."""
        return self._own().room

    async def hashed(self, take: Callable[[memoryview], bytes], view: memoryview) -> bytes:
        """The checksum that ``take`` takes of ``view``, on a thread where that is worth it."""
        if len(view) <= 64 << 10:
            return take(view)
        with self._lock:
            if self._hashing is None:
                self._hashing = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="everstep-sums")
            pool = self._hashing
        job = asyncio.get_running_loop().run_in_executor(pool, take, view)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await asyncio.wait({job})  # the caller's memory is not looked at after the call
            raise

    async def close(self) -> None:
        """Close this loop's connections, and let nothing begin any more."""
        if os.getpid() != self._pid:
            return
        running = asyncio.get_running_loop()
        for own in self._loops:
            if own.loop is running:
                await own.room.close()
        with self._lock:
            self._closed = True
            loops, self._loops = self._loops, []
            hashing, self._hashing = self._hashing, None
        if hashing is not None:
            hashing.shutdown(wait=False)
        for own in loops:
            for line in (own.line, own.former):
                if line is not None and own.loop is running:
                    await line.close()

    def _own(self) -> _Loop:
        """What belongs to the running loop of this process."""
        running = asyncio.get_running_loop()
        if os.getpid() != self._pid:
            self._begin_anew()
        with self._lock:
            if self._closed:
                raise Permanent(self.url, "this backend is closed")
            for own in self._loops:
                if own.loop is running:
                    return own
            self._loops = [own for own in self._loops if not own.loop.is_closed()]
            own = _Loop(running)
            self._loops.append(own)
            return own

    def _begin_anew(self) -> None:
        """In a forked child. The parent's clients must not even be collected here: closing their connections would
        take them out of the parent's loop, whose kernel object a fork shares."""
        for own in self._loops:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))
        self._lock, self._loops, self._hashing = threading.Lock(), [], None
        self._pid = os.getpid()

    async def _line(self, own: _Loop, name: str, instead_of: Line | None = None) -> Line:
        """The loop's client, made if there is none; a new one, which reads the credentials again, if it still is
        ``instead_of``. Requests on the former one may end."""
        async with own.making:
            if own.line is None or own.line is instead_of:
                try:
                    fresh = await self._connect()
                except Exception as error:
                    raise from_s3_error(error, name) from error
                if own.former is not None:
                    await own.former.close()
                own.former, own.line = own.line, fresh
                if instead_of is not None:
                    own.renewed_at = time.monotonic()
            return own.line

    async def _connect(self) -> Line:
        try:
            fs = S3FileSystem(asynchronous=True, skip_instance_cache=True, **self._options)
            fs.session = fs.session or _session(fs.kwargs)
            client = await fs.set_session()
        except (TypeError, KeyError, ValueError) as error:
            raise Permanent(self.url, f"storage options that are not understood: {error}") from error
        for name in self._extra:
            if not any(ParamKwargsHelper(client).filter_dict(method, {name: 1}) for method in METHODS):
                raise UnknownOption(self.url, f"{name!r} in s3_additional_kwargs, which no request has")
        events = client.meta.events
        # Waiting for the server's leave to send a body costs a round trip, and hangs where none is given.
        events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        events.register("before-sign.s3.DeleteObjects", _add_md5)
        return Line(fs, client, self._extra)


def _session(options: Mapping[str, Any]) -> AioSession:
    """As s3fs makes it, but what botocore knows of the services' interfaces, megabytes of JSON, is read once in a
    process."""
    session = AioSession(**options)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.lru_cache(maxsize=LOADERS_MAX)
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    return botocore.loaders.create_loader(data_path)


def load_interfaces() -> None:
    """Read now what the first client would read."""
    loader = _loader(AioSession().get_config_variable("data_path"))
    for kind in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", kind)
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data_with_path(name)


def _add_md5(request: Any, **_: Any) -> None:
    """Deletions need a checksum; MD5 is what every server knows."""
    for header in [
        name for name in request.headers if name.lower().startswith(("x-amz-checksum-", "x-amz-sdk-ch"))
    ]:
        del request.headers[header]
    body = request.data if isinstance(request.data, bytes) else str(request.data or "").encode()
    del request.headers["Content-MD5"]
    request.headers["Content-MD5"] = header_of(md5(body))
