"""``python -m everstep.agent.main``: the agent's process. Trainers start it; nobody needs to by hand."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from .journal import LmdbJournal
    from .root import OpenBackend
    from .values import AgentSettings

NICE = 10
IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call; the C library has no wrapper."""
OFFICE_LOOK_S = 2.0
"""How often the agent looks whether others can still find it."""
SETTINGS_BYTES_MAX = 1 << 20
SAID_BYTES_MAX = 2000
"""Of what is told to whoever started us: it goes into a pipe at once."""


@dataclass(frozen=True)
class StandBy:
    """What the agent of a spare node keeps snapshots with: it listens at once, and stays until it is told to end."""

    run_id: str
    secret: bytes
    host: str
    port: int
    arenas: Path
    listening: Callable[[str, int], None]
    """Called with the address once it listens there."""


def main(argv: list[str] | None = None) -> int:
    """Fork away from whoever started us, then serve until idle. Exit code 0, also when another agent is
    there."""
    # Before the imports that cost time: our parent waits for this fork.
    if "--foreground" not in (sys.argv[1:] if argv is None else argv) and os.fork() != 0:
        os._exit(0)
    import argparse

    parser = argparse.ArgumentParser(
        prog="everstep-agent", description="The background process of a run on a node."
    )
    parser.add_argument(
        "--settings", required=True, help="JSON file with the settings, or fd:N to read it from"
    )
    parser.add_argument("--ready", default="", help="fd:N, told how the start went")
    parser.add_argument("--foreground", action="store_true", help="stay a child of whoever starts it")
    parser.add_argument("--standby", action="store_true", help="wait for a line of settings, or for the end")
    parser.add_argument(
        "--load", action="append", default=[], help="a protocol whose modules are loaded meanwhile"
    )
    options = parser.parse_args(argv)
    ready = int(options.ready[3:]) if options.ready.startswith("fd:") else -1
    if options.standby:
        return _stand_by(int(options.settings[3:]), ready, options.load)
    from .values import AgentSettings

    if options.settings.startswith("fd:"):
        with open(int(options.settings[3:]), "rb") as file:
            text = file.read(SETTINGS_BYTES_MAX)
    else:
        with open(options.settings, "rb") as file:
            text = file.read(SETTINGS_BYTES_MAX)
    return run(AgentSettings.from_json(text.decode()), ready=ready)


def _stand_by(settings: int, ready: int, kinds: Sequence[str] = ()) -> int:
    """Load everything, with what backends of ``kinds`` need, say our process id, and be the agent of the settings that
    come; if the trainer ends first, so do we. A line, not the end of the pipe, tells that all has come: what the
    trainer forked may hold the pipe, too."""
    import json

    from everstep.backends.open import load_kind

    from . import places, root, server, service
    from .journal import LmdbJournal
    from .spawn import STANDING_BY, open_log
    from .values import AgentSettings

    del root, server, service, LmdbJournal
    for kind in kinds:
        with contextlib.suppress(Exception):  # whoever opens it is told
            load_kind(kind)
    with contextlib.suppress(OSError):
        os.write(ready, b"%s %d\n" % (STANDING_BY, os.getpid()))
    with open(settings, "rb") as file:
        text = file.readline(2 * SETTINGS_BYTES_MAX)
    if not text.endswith(b"\n"):
        return 0
    given = json.loads(text)
    os.environ.clear()
    os.environ.update(given["environment"])
    found = AgentSettings.from_json(given["settings"])
    log = open_log(str(found.runtime_dir / places.LOG))
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return run(found, ready=ready)


def run(
    settings: AgentSettings,
    *,
    ready: int = -1,
    open_backend: OpenBackend | None = None,
    stand_by: StandBy | None = None,
) -> int:
    """Be the agent of ``settings.runtime_dir``, unless another process is (AgentError with ``stand_by``, as trainers of
    a node that is not spare are served there). Says on the descriptor ``ready`` how the start went, and closes it."""
    starter = _Starter(ready)
    try:
        return _run(settings, starter, open_backend, stand_by)
    except BaseException as error:
        starter.hear(f"{type(error).__name__}: {error}")
        raise


def _run(
    settings: AgentSettings, starter: _Starter, open_backend: OpenBackend | None, stand_by: StandBy | None
) -> int:
    import asyncio
    import logging

    from everstep.errors import AgentError

    from . import places
    from .journal import LmdbJournal
    from .root import open_root
    from .spawn import READY, TAKEN

    form = f"%(asctime)s agent {os.getpid()} %(levelname)s %(message)s"
    logging.basicConfig(format=form, level=logging.INFO)
    places.prepare(settings.runtime_dir)
    lock = places.elect(settings.runtime_dir)
    if lock is None and stand_by is not None:
        raise AgentError(
            "another agent serves this run on this node",
            found=str(settings.runtime_dir),
            expected="a node without trainers of the run",
            hint="Wait until it has ended; simulated nodes need names of their own (--node)",
        )
    if lock is None:
        starter.hear(TAKEN)
        return 0
    listener = places.listen(settings.runtime_dir)
    journal = LmdbJournal(settings.runtime_dir / places.JOURNAL)

    def started() -> None:
        starter.hear(READY)

    asyncio.run(_serve(settings, lock, listener, journal, open_backend or open_root, started, stand_by))
    logging.getLogger("everstep.agent").info("leaving")
    os.close(lock)
    return 0


async def _serve(
    settings: AgentSettings,
    lock: int,
    listener: socket.socket,
    journal: LmdbJournal,
    open_backend: OpenBackend,
    ready: Callable[[], None],
    stand_by: StandBy | None,
) -> None:
    import asyncio
    import logging
    import signal

    from . import places
    from .server import Server
    from .service import Service
    from .waiting import happened

    log = logging.getLogger("everstep.agent")
    inode = (settings.runtime_dir / places.SOCKET).stat().st_ino
    loop = asyncio.get_running_loop()
    _step_back()  # not before: till here training may wait for us, and no thread was started
    service = Service(settings, journal, open_backend)
    server = Server(service, listener)
    loop.add_signal_handler(signal.SIGTERM, service.drain)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    loop.add_signal_handler(signal.SIGINT, service.drain if stand_by is not None else lambda: None)
    try:
        if stand_by is not None:
            service.stays = True
            arenas = stand_by.arenas
            stand_by.listening(
                *await service.protection.stand_by(
                    stand_by.run_id, stand_by.secret, stand_by.host, stand_by.port, arenas
                )
            )
    except BaseException:
        server.close()
        await service.close()
        raise
    service.start()
    log.info("serving %s (epoch %d)", settings.root, journal.epoch)
    ready()
    while not service.stopped.is_set():
        await happened(service.stopped, OFFICE_LOOK_S)
        if not places.in_office(settings.runtime_dir, lock, inode):
            log.error("lock or socket was removed or replaced; leaving")
            service.leave()
    # The name goes before the lock: whoever holds the lock next makes its own.
    if places.in_office(settings.runtime_dir, lock, inode):
        with contextlib.suppress(OSError):
            (settings.runtime_dir / places.SOCKET).unlink()
    server.close()
    await service.close()


@functools.cache
def _step_back() -> None:
    """Training comes first: low CPU and I/O priority, for this thread and those that it starts. As far as
    allowed."""
    import ctypes
    import platform

    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, IOPRIO_BEST_EFFORT_LOWEST)


class _Starter:
    """Whoever started us, and hears once how it went; he may have died since."""

    def __init__(self, ready: int) -> None:
        self._ready = ready

    def hear(self, text: str) -> None:
        ready, self._ready = self._ready, -1
        if ready >= 0:
            with contextlib.suppress(OSError):
                os.write(ready, text.encode()[:SAID_BYTES_MAX] + b"\n")
            os.close(ready)


if __name__ == "__main__":
    sys.exit(main())
