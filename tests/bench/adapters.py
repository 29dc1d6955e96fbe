"""Systems that go wrong, as a user's own may: given to the harness as ``adapters:Class``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from everstep.benchmarks.harness.api import Done, Job, Pending, Session, System
from everstep.benchmarks.harness.ours import Everstep, EverstepSession

PID_FILE = "ADAPTERS_PID_FILE"


class Kept(Session):
    """Saves into this process's memory."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.saved_as: dict[int, dict[str, Any]] = {}
        print("what a system prints is no part of the result")

    def save(self, step: int) -> Pending:
        self.saved_as[step] = {name: tensor.clone() for name, tensor in self.job.state.tensors().items()}
        return Done()

    def load(self, step: int) -> None:
        for name, tensor in self.job.state.tensors().items():
            tensor.copy_(self.saved_as[step][name])


class WrongSession(Kept):
    """Loads one tensor with one number that is not right."""

    def load(self, step: int) -> None:
        super().load(step)
        next(iter(self.job.state.tensors().values())).view(-1)[-1:].add_(1)


class WrongDeltasSession(WrongSession):
    """Its deltas are fulls."""

    def save_delta(self, step: int) -> Pending:
        return self.save(step)

    def stored_bytes(self, step: int) -> int:
        return 1


class CrashSession(Kept):
    """Ends its process."""

    def save(self, step: int) -> Pending:
        print("the last words of a crash", file=sys.stderr, flush=True)
        os._exit(3)


class RaiseSession(Kept):
    """Has nothing to load."""

    def load(self, step: int) -> None:
        raise KeyError(step)


class HangSession(Kept):
    """Never comes back, and neither does a process that it has set free."""

    def save(self, step: int) -> Pending:
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        daemon = subprocess.Popen(command, start_new_session=True)
        with open(os.environ[PID_FILE], "w") as file:
            file.write(f"{os.getpid()} {daemon.pid}")
        daemon.wait()
        raise AssertionError("it was to be ended with its daemon")


class Good(System):
    name = "good"
    meaning = "memory of the process"
    works = frozenset({"save", "load"})
    session: type[Session] = Kept

    def open(self, job: Job) -> Session:
        return self.session(job)


_STAGED: dict[str, Any] = {}


class HoardSession(Kept):
    """Writes in the call, out of a copy that the process keeps for ever."""

    def save(self, step: int) -> Pending:
        for name, tensor in self.job.state.tensors().items():
            _STAGED.setdefault(name, tensor.clone()).copy_(tensor)
        return Done()

    def load(self, step: int) -> None:
        for name, tensor in self.job.state.tensors().items():
            tensor.copy_(_STAGED[name])


class Hoard(Good):
    name = "hoard"
    session = HoardSession


class Wrong(Good):
    name = "wrong"
    session = WrongSession


class WrongDeltas(Good):
    name = "wrong-deltas"
    works = frozenset({"delta"})
    session = WrongDeltasSession


class WrongStore(Good):
    name = "wrong-store"
    works = frozenset({"s3"})
    session = WrongSession


class Crash(Good):
    name = "crash"
    session = CrashSession


class Raise(Good):
    name = "raise"
    session = RaiseSession


class Hang(Good):
    name = "hang"
    session = HangSession


class Absent(Good):
    name = "absent"

    def missing(self) -> str | None:
        return "not installed: pip install absent"


class Unready(Good):
    name = "unready"
    works = frozenset({"fly"})


class OwnMemoryOnly:
    """Not a system."""


class NoPeer(Everstep):
    """everstep without another node."""

    name = "everstep-alone"

    def from_peer(self, nbytes: int, repeats: int, directory: Path) -> None:
        return None


class LostSession(EverstepSession):
    """Ends its process when the first snapshot lies in memory."""

    def save(self, step: int) -> Pending:
        super().save(step)
        os._exit(3)


class Lost(NoPeer):
    name = "everstep-lost"

    def open(self, job: Job) -> Session:
        return LostSession(job)
