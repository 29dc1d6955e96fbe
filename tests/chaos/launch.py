"""The launcher: a process that has imported torch once and forks, for each launch, what stands in for
torchrun, which forks the ranks and starts all of them again when one fails.

``python -m tests.chaos.launch`` reads one JSON request a line and answers each with one line. It adopts what
its children leave behind (ranks whose launcher was killed, agents), so that nothing stays a zombie.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE_S = 1.5
"""From SIGTERM to SIGKILL for the ranks that are left when one failed."""
RESTARTS_MAX = 8
POLL_S = 0.02
STORE_S = 15.0
PR_SET_CHILD_SUBREAPER = 36


class Launcher:
    """The asking side. ``environment`` marks every process that comes of it."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                cwd=Path(__file__).parents[2],
                env={**os.environ, **environment},
            )
        self.pid = self._process.pid

    def start(self, name: str, settings: str, world: int, log: Path, *, torchrun: bool = False) -> int:
        """Launch the job; the process id of what stands in for torchrun (or of torchrun)."""
        asked = {"name": name, "settings": settings, "world": world, "log": str(log), "torchrun": torchrun}
        return int(self._ask(asked)["pid"])

    def ended(self, pid: int) -> int | None:
        """Exit code of a launch, None while it runs; minus the signal that killed it."""
        code: int | None = self._ask({"ended": pid})["code"]
        return code

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def serve() -> None:
    """Answer until the asking side goes away."""
    _warm_up()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    codes: dict[int, int] = {}
    for line in sys.stdin:
        _reap(codes)
        asked = json.loads(line)
        if "ended" in asked:
            answer: dict[str, Any] = {"code": codes.get(asked["ended"])}
        else:
            answer = {"pid": _launch(asked)}
        print(json.dumps(answer), flush=True)
    _reap(codes)
    os._exit(0)  # the interpreter's own end takes seconds with torch loaded


def _warm_up() -> None:
    """Load what a first step loads late, without starting threads: they would not survive a fork."""
    for module in ("torch", "torch._dynamo", "everstep.checkpointer", "tests.chaos.job"):
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.optim.AdamW([weight]).step()


def _reap(codes: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        codes[pid] = os.waitstatus_to_exitcode(status)


def _launch(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in ((0, null), (1, log), (2, log)):
        os.dup2(fd, number)
    code = 1
    try:
        if asked["torchrun"]:
            _exec_torchrun(asked)
        code = _attempts(asked)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exec_torchrun(asked: dict[str, Any]) -> None:
    path = Path(asked["log"]).with_suffix(".json")
    path.write_text(asked["settings"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [
        f"--nproc-per-node={asked['world']}",
        f"--max-restarts={RESTARTS_MAX}",
        "--monitor-interval=0.1",
    ]
    command += ["-m", "tests.chaos.job", str(path), asked["name"]]
    os.execv(command[0], command)


def _attempts(asked: dict[str, Any]) -> int:
    """Start the ranks, all again when one fails. As torchrun: SIGTERM is passed on, and ends it."""
    ranks: dict[int, int] = {}

    def terminated(number: int, frame: Any) -> None:
        _end(ranks)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, terminated)
    for attempt in range(RESTARTS_MAX + 1):
        name = f"{asked['name']}.{attempt}"
        for rank in range(asked["world"]):
            ranks[rank] = _fork_rank(asked, rank, name)
        if _watch(ranks):
            return 0
        print(f"attempt {name} failed", file=sys.stderr, flush=True)
    return 1


def _watch(ranks: dict[int, int]) -> bool:
    """Until all ranks ended well, or one did not; the others are ended then."""
    while ranks:
        for rank, pid in list(ranks.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            del ranks[rank]
            if status != 0:
                _end(ranks)
                return False
        time.sleep(POLL_S)
    return True


def _end(ranks: dict[int, int]) -> None:
    for pid in ranks.values():
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while ranks:
        for rank, pid in list(ranks.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del ranks[rank]
        if ranks and time.monotonic() > until:
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
        time.sleep(POLL_S)


def _fork_rank(asked: dict[str, Any], rank: int, attempt: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        _rank(asked, rank, attempt)
        code = 0
    except BaseException as error:
        # As the interpreter does for an unhandled error; exit handlers look at it.
        sys.last_value = error
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(asked: dict[str, Any], rank: int, attempt: str) -> None:
    import torch.distributed as dist

    from . import job

    settings = job.Settings(**json.loads(asked["settings"]))
    port_file = Path(settings.out) / f"port-{attempt}"
    timeout = timedelta(seconds=STORE_S)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", _free_port(), asked["world"], True, timeout, wait_for_workers=False
        )
        unfinished = port_file.with_suffix(".new")
        unfinished.write_text(str(store.port))
        unfinished.rename(port_file)
    else:
        until = time.monotonic() + STORE_S
        while not port_file.exists():
            if time.monotonic() > until:
                raise TimeoutError("rank 0 opened no store")
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), asked["world"], False, timeout)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=asked["world"],
        timeout=timedelta(seconds=job.RANK_TIMEOUT_S),
    )
    job.run(settings, attempt)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    serve()
