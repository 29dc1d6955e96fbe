"""Starting the agent's process, without waiting for it.

The process is started in a session of its own, without our standard streams (launchers kill process groups
and wait for pipes), and forks once more, so that it is no child of a trainer: nobody has to reap it, and
whoever kills trees of processes does not find it. It says on a pipe how its start went.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from everstep.errors import AgentError

from .places import LOG, prepare
from .values import AgentSettings

START_S_MAX = 20.0
"""A start that has not reported by then has failed."""
LOG_BYTES_MAX = 4 << 20
"""A larger log is moved aside at a start."""
LOG_TAIL_BYTES = 2000
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
            said = os.read(self._pipe, 4096)
            self._said += said
            if said and not self._said.endswith(b"\n"):
                return None
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


def start(settings: AgentSettings) -> Start:
    """Start an agent for ``settings``. Raises AgentError if not even that can be done."""
    prepare(settings.runtime_dir)
    if not sys.executable:
        raise AgentError("no Python executable to start the agent with", hint='Use agent="inline"')
    log = settings.runtime_dir / LOG
    settings_fd = _pipe_with(settings.to_json().encode())
    ready, ready_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    log_fd = _open_log(str(log))
    command = [sys.executable, "-m", "everstep.agent.main"]
    command += ["--settings", f"fd:{settings_fd}", "--ready", f"fd:{ready_child}"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(settings_fd, ready_child),
            start_new_session=True,
            cwd="/",
            env=_environment(),
        )
    except OSError as error:
        os.close(ready)
        raise AgentError(
            "the agent's process cannot be started", found=str(error), hint='Or use agent="inline"'
        ) from None
    finally:
        for fd in (settings_fd, ready_child, log_fd):
            os.close(fd)
    return Start(process, ready, str(log))


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


def _open_log(path: str) -> int:
    with contextlib.suppress(OSError):
        if os.stat(path).st_size > LOG_BYTES_MAX:
            os.replace(path, path + ".1")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


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
