"""``agent="inline"``: the same service on a thread of the trainer, over a socket pair. For debugging, and
where no process of its own can be had. It dies with the trainer, so it keeps no journal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from .journal import NoJournal
from .root import OpenBackend, open_root
from .server import Server
from .service import Service
from .values import AgentSettings

JOIN_S = 5.0
IDLE_LOOK_S = 0.01


class InlineAgent:
    """The thread ends when the trainer's end of ``socket`` is closed and nothing is left to do, or with the
    process. ``error`` is what ended it early."""

    def __init__(self, settings: AgentSettings, open_backend: OpenBackend = open_root) -> None:
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.error: BaseException | None = None
        self._settings = settings
        self._open_backend = open_backend
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-agent", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = JOIN_S, *, finish: bool = False) -> None:
        """End the thread, whatever is left to do; with ``finish`` what is left (rotation) has ``timeout_s``."""
        loop, service = self._loop, self._service
        if loop is None or service is None or not self._thread.is_alive():
            self._thread.join(timeout_s)
            return
        if finish:
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                asyncio.run_coroutine_threadsafe(_leave_when_idle(service), loop)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(service.leave)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._theirs.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = service = Service(self._settings, NoJournal(), self._open_backend)
        server = Server(service, None)
        server.adopt(self._theirs)
        service.start()
        await service.stopped.wait()
        server.close()
        await service.close()


async def _leave_when_idle(service: Service) -> None:
    while not service.idle:
        await asyncio.sleep(IDLE_LOOK_S)
    service.leave()
