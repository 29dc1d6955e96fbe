"""Starting the agent's process, without waiting for it.

The process is started in a session of its own, without our standard streams (launchers kill process groups
and wait for pipes), and forks once more, so that it is no child of a trainer: nobody has to reap it, and
whoever kills trees of processes does not find it. It says on a pipe how its start went.

Most of a start is Python's, which loads modules. So a process may be started before it is known of which run it is to
be the agent: it loads them, and waits for settings (:class:`Standby`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from io import FileIO

from everstep.backends.open import kind_of
from everstep.errors import AgentError

from .places import LOG, prepare
from .values import AgentSettings

START_S_MAX = 20.0
"""A start that has not reported by then has failed."""
LOG_BYTES_MAX = 4 << 20
"""A larger log is moved aside at a start."""
LOG_TAIL_BYTES = 2000
SAID_BYTES_MAX = 100
"""Of what one that stands by says."""
LOADING_VARIABLES = ("PYTHON", "LD_", "EVERSTEP_", "FSSPEC_", "SSL_", "AIOHTTP_")
"""Begins of the names of what is read when an agent's modules are loaded; all else may change till it is one."""
STANDING_BY = b"standing by"
"""What a process says, with its process id, when it only waits for its settings."""
REAP_S = 2.0

END_S = 0.5
"""From the end of the pipe to that of the process: microseconds, as a rule."""

READY = "ready"
TAKEN = "taken"
"""Another process is the agent already."""
KILLED = "killed"
"""It ended without a word."""


class Start:
    """One start under way. ``outcome`` is None until it is known, then READY, TAKEN, KILLED or what went wrong."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, log: str) -> None:
        self._process = process
        self._pipe = pipe
        self._log = log
        self._said = b""
        self._deadline = time.monotonic() + START_S_MAX
        self.outcome: str | None = None

    def fileno(self) -> int:
        """Becomes readable when there is news."""
        return self._pipe

    def look(self) -> str | None:
        """The outcome, if it is known by now; waits for no more than a process that is just ending."""
        if self.outcome is not None:
            return self.outcome
        try:
            while True:
                said = os.read(self._pipe, 4096)
                self._said += said
                if self._said.startswith(STANDING_BY):  # each is said at once, so it has come whole
                    self._said = self._said.partition(b"\n")[2]
                if not said or self._said.endswith(b"\n"):
                    break
            self.outcome = self._said.decode(errors="replace").strip() or self._silent_end()
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                self.outcome = f"it did not report within {START_S_MAX} s; {self._log_tail()}"
        return self.outcome

    def _silent_end(self) -> str:
        """What it means that nothing was said: a process that ends by itself, with a code that says so, will do it
        again; one that was killed, or that had forked already, was lost like any agent."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
        return (
            f"it ended at once, with code {code}; {self._log_tail()}"
            if code is not None and code > 0
            else KILLED
        )

    def close(self) -> None:
        """Forget about it. The process that we started has forked and ended by now; if not, it is ended."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self.outcome is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)

    def _log_tail(self) -> str:
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return f"last line of {self._log}: {lines[-1] if lines else '(empty)'}"


class Standby:
    """A process that has loaded what an agent needs, and becomes one when it is given settings. It knows no run,
    touches nothing, and ends when this object is closed or dropped, or this process ends. One thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes], settings: FileIO, ready: FileIO) -> None:
        self._process = process
        self._settings, self._ready = settings, ready
        self._loaded_with = _read_at_loading(_environment())
        self._pid: int | None = None
        self._begun: tuple[AgentSettings, Start] | None = None
        """What it was told to be, and how that goes: until someone asks, or it is closed."""
        self._end = weakref.finalize(self, _end, os.getpid(), process, settings, ready)
        _standing_by.add(self)

    @classmethod
    def begin(cls, urls: Iterable[str] = ()) -> Standby | None:
        """One more, not waited for; it loads what backends of ``urls`` need, too. None where it cannot be started:
        whoever starts an agent then is told why. None, too, in a process that a launcher calls another than the first
        of its node: that one has it (see :class:`~.link.Link` on patience), and each takes a core for a while."""
        if not sys.executable or os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        kinds = sorted({kind for url in urls if (kind := kind_of(url))})
        more = ["--standby", *[f"--load={kind}" for kind in kinds]]
        with contextlib.ExitStack() as stack:
            try:
                settings, ready = _pipe(stack), _pipe(stack)
                process = _popen(settings[0].fileno(), ready[1].fileno(), subprocess.DEVNULL, *more)
            except OSError:
                return None
            stack.pop_all()
        settings[0].close()
        ready[1].close()
        for pipe in (settings[1], ready[0]):
            os.set_blocking(pipe.fileno(), False)
        return cls(process, settings[1], ready[0])

    @property
    def pid(self) -> int | None:
        """Of the process, once it has loaded everything; None before that, and when it was lost or used."""
        if not self._end.alive:
            return None
        said = self._ready.read(SAID_BYTES_MAX)
        if said is not None:  # None: nothing new
            self._pid = int(said.split()[-1]) if said.startswith(STANDING_BY) else None
        return self._pid

    def close(self) -> None:
        """End it, unless it has become an agent. Calling it again does nothing."""
        self._end()
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None

    def become_early(self, settings: AgentSettings) -> None:
        """Have it be the agent of ``settings`` already, before anyone needs one: :meth:`become` then tells how that
        goes. Where it cannot be, whoever needs the agent is told."""
        with contextlib.suppress(AgentError, OSError):
            prepare(settings.runtime_dir)
            begun = self.become(settings, str(settings.runtime_dir / LOG))
            if begun is not None:
                self._begun = settings, begun

    def become(self, settings: AgentSettings, log: str) -> Start | None:
        """Have it be the agent of ``settings``, in this process's environment of now. None where it is gone, or loaded
        what it has with other variables: then one has to be started."""
        if self._begun is not None and self._begun[0] == settings:
            begun, self._begun = self._begun[1], None
            return begun
        environment = _environment()
        if not self._end.alive or self._loaded_with != _read_at_loading(environment):
            return None
        told = json.dumps({"settings": settings.to_json(), "environment": environment}).encode() + b"\n"
        try:
            if self._settings.write(told) != len(told):
                return None
        except OSError:
            return None
        pipe = os.dup(self._ready.fileno())
        self._end.detach()
        self._settings.close()
        self._ready.close()
        return Start(self._process, pipe, log)


_standing_by: weakref.WeakSet[Standby] = weakref.WeakSet()


def _forget_in_child() -> None:
    """They end with the process that has them, whatever it forked: no child may keep a pipe open."""
    for standby in list(_standing_by):
        standby._end.detach()
        standby._settings.close()
        standby._ready.close()


os.register_at_fork(after_in_child=_forget_in_child)


def _end(owner: int, process: subprocess.Popen[bytes], settings: FileIO, ready: FileIO) -> None:
    settings.close()
    ready.close()
    if os.getpid() == owner:  # it may not have forked yet
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    return stack.enter_context(FileIO(reading, "r")), stack.enter_context(FileIO(writing, "w"))


def start(settings: AgentSettings, standby: Standby | None = None) -> Start:
    """Start an agent for ``settings``, out of ``standby`` if that is there still. Raises AgentError if not even that
    can be done."""
    prepare(settings.runtime_dir)
    if standby is not None:
        begun = standby.become(settings, str(settings.runtime_dir / LOG))
        if begun is not None:
            return begun
    if not sys.executable:
        raise AgentError("no Python executable to start the agent with", hint='Use agent="inline"')
    log = settings.runtime_dir / LOG
    settings_fd = _pipe_with(settings.to_json().encode())
    ready, ready_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    log_fd = open_log(str(log))
    try:
        process = _popen(settings_fd, ready_child, log_fd)
    except OSError as error:
        os.close(ready)
        raise AgentError(
            "the agent's process cannot be started", found=str(error), hint='Or use agent="inline"'
        ) from None
    finally:
        for fd in (settings_fd, ready_child, log_fd):
            os.close(fd)
    return Start(process, ready, str(log))


def _popen(settings_fd: int, ready_fd: int, log_fd: int, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "everstep.agent.main"]
    command += ["--settings", f"fd:{settings_fd}", "--ready", f"fd:{ready_fd}", *more]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(settings_fd, ready_fd),
        start_new_session=True,
        cwd="/",
        env=_environment(),
    )


def _pipe_with(data: bytes) -> int:
    """A pipe's reading end that holds ``data``: settings are far smaller than a pipe's buffer."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.write(writing, data) != len(data):
            raise AgentError("the settings are too large", found=len(data))
    except BlockingIOError:
        raise AgentError("the settings are too large", found=len(data)) from None
    finally:
        os.close(writing)
    os.set_blocking(reading, True)
    return reading


def open_log(path: str) -> int:
    """The agent's log, to be added to."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size > LOG_BYTES_MAX:
            os.replace(path, path + ".1")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _read_at_loading(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(LOADING_VARIABLES)}


def _environment() -> dict[str, str]:
    """Ours, but for what would mislead the agent: it runs in "/", and test points are set for it by their
    own name."""
    env = dict(os.environ)
    env.pop("EVERSTEP_POINTS", None)
    points = env.pop("EVERSTEP_AGENT_POINTS", None)
    if points:
        env["EVERSTEP_POINTS"] = points
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(p) for p in env["PYTHONPATH"].split(os.pathsep) if p
        )
    return env
