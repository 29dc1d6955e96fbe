"""What an adapter of a checkpoint engine is, for the harness and for users who write their own.

A *system* is one engine in one mode. Its adapter is a subclass of :class:`System`, found by the entry point group
``everstep.benchmark_systems`` or given as ``--system package.module:Class``::

    class Mine(System):
        name, meaning = "mine", "my engine"
        works = frozenset({"save", "load"})

        def open(self, job):
            return MySession(job)

Each session lives in a process of its own. Nothing here imports torch.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WORKS = frozenset({"save", "async", "load", "ranks", "s3", "recover", "delta", "rollback"})
"""What a system may say that it can do: save; go on writing when ``save`` has returned; load into existing tensors;
both with several ranks (gloo, DTensors); with an s3:// root; come back from memory after its process has died; save
what changed since a former step; go back to the newest snapshot in memory of the tensors' own devices."""


class State(Protocol):
    """A training state, made by a workload. Its tensors stay the same objects from beginning to end."""

    module: nn.Module | None
    optimizer: Optimizer | None
    """One whose step changes nothing (but runs hooks), unless the workload is ``training``."""
    nbytes: int
    """Of this rank's tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """Flat: dotted name to live tensor, always in the same order."""
        ...

    def tree(self) -> dict[str, Any]:
        """A nested state dict of live tensors, as a user would save it: ``{"model": ..., "optimizer": ...}``."""
        ...

    def change(self) -> None:
        """Make it the state of another step: every tensor changes, cheaply."""
        ...

    def scramble(self) -> None:
        """Overwrite all of it, so that a load that does nothing is found."""
        ...

    def hashes(self) -> list[str]:
        """One for each tensor's bytes, in the order of :meth:`tensors`."""
        ...


@dataclass(frozen=True)
class Job:
    """What a session is opened for. ``directory`` is the system's alone, on all ranks the same, and empty at first.
    With ``world`` > 1 the default process group (gloo) is there already. ``options``: what the workload asks for:

    - ``"every_step"``: true where :meth:`Session.snapshot` will be called after every step of a training loop;
    - ``"nodes"``: 2 where a copy in another (simulated) node's memory is asked for;
    - ``"url"``: the s3:// root to use instead of ``directory``;
    - ``"loads_only"``: true where others have saved, and only :meth:`Session.load` is called;
    - ``"deltas"``: true where :meth:`Session.save_delta` is called, in turn with ``save``;
    - ``"device_slot"``: true where :meth:`Session.rollback` will be called.
    """

    directory: Path
    state: State
    rank: int = 0
    world: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


class Pending(Protocol):
    """A save on its way."""

    def wait(self) -> None:
        """Return when the system says that it is written: all of it, on all ranks. Raises what went wrong."""
        ...


class Done:
    """What the save of a system that writes before it returns gives back."""

    def wait(self) -> None:
        """Nothing."""


class Session(ABC):
    """One process's use of a system."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._former: Pending | None = None

    @abstractmethod
    def save(self, step: int) -> Pending:
        """Save the state as it is now. Returns when the trainer may go on computing (but for :meth:`settle`)."""

    def settle(self) -> None:  # noqa: B027
        """Called just before the optimizer changes the state: wait for what must be done by then. What this takes
        counts as blocking, as does what hooks in the optimizer's step take."""

    def saved(self) -> None:  # noqa: B027
        """All saves are done and written, only loads follow: end what would run beside them, and let go of copies in
        memory, so that loads read the files. Not timed; default: nothing."""

    @abstractmethod
    def load(self, step: int) -> None:
        """The values of ``step`` into the existing tensors of ``job.state``, ready to use: copied, not mapped."""

    def save_delta(self, step: int) -> Pending:
        """Save what changed since the step that was saved in full last (where the job has ``"deltas"``)."""
        raise NotImplementedError(f"{type(self).__name__} saves no deltas")

    def stored_bytes(self, step: int) -> int:
        """How much was written for the tensors of ``step``."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what it has written")

    def rollback(self) -> None:
        """The newest snapshot back into the state, from the devices (where the job has ``"device_slot"``)."""
        raise NotImplementedError(f"{type(self).__name__} has no snapshots on devices")

    def snapshot(self, step: int) -> None:
        """What is done after each step of a training loop. Default: a save, once the former one is written."""
        self.drain()
        self._former = self.save(step)

    def drain(self) -> None:
        """Return when nothing of former snapshots is on its way any more; not timed."""
        former, self._former = self._former, None
        if former is not None:
            former.wait()

    def path(self, step: int) -> Path:
        """Where ``step`` lies, or is to be."""
        return self.job.directory / str(step)

    def forget(self, step: int) -> None:
        """Remove the files of ``step``; not timed."""
        if self.job.rank == 0:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def lose(self, tier: str) -> None:
        """Be as after the death of the process, with the newest save in ``tier`` (one of ``System.tiers``) as the
        nearest place that is left; not timed."""
        raise NotImplementedError(f"{type(self).__name__} cannot lose what lies nearer than {tier}")

    def recover(self, tier: str) -> None:
        """After :meth:`lose`: the newest step's values into the state. Raises if they did not come from ``tier``."""
        raise NotImplementedError(f"{type(self).__name__} cannot recover from {tier}")

    def timelines(self) -> dict[str, list[dict[str, Any]]]:
        """``{"save": [...], "recovery": [...]}``: the phases of the last ones, each ``{"phase", "begin_s", "end_s"}``
        in seconds from the call (:data:`~.results.PHASES`), as far as the system knows them. Asked after the saves,
        and again after loads."""
        return {}

    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        return []

    def close(self) -> None:  # noqa: B027
        """End all that the session started. Its files are removed by the harness."""


class System(ABC):
    """An engine in one mode; one object serves all of a process's sessions."""

    name: ClassVar[str]
    """Small letters and dashes: ``engine`` or ``engine-mode``; modes of one engine share the first word."""
    meaning: ClassVar[str]
    """One line."""
    works: ClassVar[frozenset[str]]
    """See :data:`WORKS`. A system without ``"save"`` has :meth:`Session.save` all the same, to make what it loads."""
    syncs: ClassVar[bool] = False
    """It fsyncs what it writes, files and directories, before it says that it is written."""
    verifies: ClassVar[bool] = False
    """A load proves what it loads."""
    defers: ClassVar[bool] = False
    """Copying goes on after ``save`` has returned: the harness computes, as a step would, before ``settle``."""
    tiers: ClassVar[tuple[str, ...]] = ()
    """What :meth:`Session.recover` knows of "memory" and "disk"."""
    slots: ClassVar[bool] = False
    """Its staging memory lies in everstep's arenas, which are counted apart."""
    by_default: ClassVar[bool] = True
    """False: only measured where it is asked for by name, for another mode of its engine outdoes it."""
    package: ClassVar[str] = ""
    """The distribution whose version is told."""

    def missing(self) -> str | None:
        """Why it cannot run here ("not installed: pip install X"), None if it can. Quick: imports nothing large."""
        return None

    def version(self) -> str:
        """The package's version, "" if there is none."""
        from importlib import metadata

        try:
            return metadata.version(self.package) if self.package else ""
        except metadata.PackageNotFoundError:
            return ""

    def from_peer(self, nbytes: int, repeats: int, directory: Path) -> dict[str, dict[str, Any]] | None:
        """How long it takes to get ``nbytes`` back from another node's memory, between processes that this starts and
        ends itself: ``{"works": {"peer_recovery": seconds}, "floors": {"gloo": seconds}, "timelines": ...}``; None: it
        cannot."""
        return None

    def clean(self, directory: Path) -> None:  # noqa: B027
        """Remove what a session in ``directory`` whose processes were killed left elsewhere (shared memory). Called
        after each worker, in another process, when all its processes are gone."""

    @abstractmethod
    def open(self, job: Job) -> Session:
        """A session; called once in a process, on all ranks, before the first save."""


__all__ = ["Done", "Job", "Pending", "Session", "State", "System", "WORKS"]
