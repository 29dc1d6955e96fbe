"""everstep as a system: eager snapshots, and snapshots that are copied behind the next step."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .api import Job, Pending, Session, System

if TYPE_CHECKING:
    import everstep

KEEP = 2
KEY_FILE = "run-key"
"""Of a run in a store: what names its memory, for who cleans up."""
LINGER_S = 5.0
QUIET_S = 60.0
"""Bound of the wait for rotation."""
EVENTS_S = 10.0
"""Bound of the wait for the run's events."""
POLL_S = 0.05
NEVER = (0, 0.0, 0.0)
FLUSH_EVERY = 3
"""Steps between flushes in a training loop; one is skipped while the former is still on its way."""


class EverstepSession(Session):
    """One run, ``directory/run``, and its Checkpointer. Loads are those of a user who comes later: the one-call load,
    or a job's where there are several ranks."""

    overlap = False

    def __init__(self, job: Job) -> None:
        import everstep

        super().__init__(job)
        self.root = str(job.options.get("url") or job.directory / "run")
        state = job.state
        if state.module is not None:
            self.trained = everstep.TrainState(model=state.module, optimizer=state.optimizer, rng=False)
        else:
            self.trained = everstep.TrainState(rng=False, state=state.tensors())
        self._agent: int | None = None
        self._begun = NEVER
        """Step, time of the call, and seconds until its return, of the last save."""
        self._recovered: list[dict[str, Any]] = []
        self._ckpt: everstep.Checkpointer | None = None
        if "url" in job.options and job.rank == 0:
            self._note_key()
        if not job.options.get("loads_only"):
            self._ckpt = self._opened()
            self._ckpt.load(self.trained)

    def _note_key(self) -> None:
        from everstep.places import locate

        (self.job.directory / KEY_FILE).write_text(locate(self.root).run_key)

    def _opened(self) -> everstep.Checkpointer:
        import everstep

        loop, deltas, device = (
            bool(self.job.options.get(name)) for name in ("every_step", "deltas", "device_slot")
        )
        policy = everstep.Policy(
            snapshot_every=1,
            full_every=FLUSH_EVERY if loop else 1 if self.overlap else None,
            on_slow="skip" if loop else "wait",
            delta_every=1 if deltas else None,
            keep_last=KEEP,
            linger_s=LINGER_S,
        )
        memory = everstep.Memory(copy="overlap" if self.overlap else "eager", device_slots=int(device))
        return everstep.Checkpointer(self.root, memory=memory, policy=policy)

    @property
    def ckpt(self) -> everstep.Checkpointer:
        if self._ckpt is None:
            raise RuntimeError("the saves of this session have ended")
        return self._ckpt

    def save(self, step: int) -> Pending:
        at, begun = time.time(), time.perf_counter()
        handle = self.ckpt.step(step, self.trained) if self.overlap else None
        if handle is None:
            handle = self.ckpt.save(step, self.trained)
        self._begun = (step, at, time.perf_counter() - begun)
        self._agent = self.ckpt.agent_pid
        return handle

    def save_delta(self, step: int) -> Pending:
        handle = self.ckpt.step(step, self.trained)
        if handle is None:
            raise RuntimeError(f"no delta was due at step {step}")
        return handle

    def stored_bytes(self, step: int) -> int:
        from ..delta_runs import stored_bytes

        return stored_bytes(Path(self.root), step)

    def rollback(self) -> None:
        self.ckpt.rollback(reason="measured")

    def snapshot(self, step: int) -> None:
        self._former = self.ckpt.step(step, self.trained) or self._former
        self._agent = self.ckpt.agent_pid

    def path(self, step: int) -> Path:
        return self.job.directory / "run" / "checkpoints" / f"{step:09d}"

    def forget(self, step: int) -> None:
        """The policy keeps two; their removal is waited for, so that it does not run beside the next measurement."""
        if "url" in self.job.options or self.job.rank:
            return
        until = time.monotonic() + QUIET_S
        while len(self._steps_with_images()) > KEEP and time.monotonic() < until:
            time.sleep(POLL_S)

    def _steps_with_images(self) -> set[str]:
        checkpoints = self.job.directory / "run" / "checkpoints"
        return {image.relative_to(checkpoints).parts[0] for image in checkpoints.rglob("*.safetensors")}

    def saved(self) -> None:
        self._leave(keep=False)

    def _leave(self, *, keep: bool) -> None:
        """End the session and its agent; ``keep``: what lies in memory stays, as if the processes had been killed."""
        from ..common import end_agent, end_run

        if self._ckpt is not None:
            ckpt, self._ckpt = self._ckpt, None
            ckpt.close(flush=False)
        self._meet()
        end_agent(self._agent) if keep else end_run(self.root, self._agent)
        self._agent = None
        self._meet()

    def _meet(self) -> None:
        if self.job.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def load(self, step: int) -> None:
        import everstep

        if self.job.world == 1:
            everstep.load(self.root, step=step, into=self.trained)
            return
        with everstep.Checkpointer(self.root, memory=None, agent="inline") as ckpt:
            ckpt.load(self.trained, step=step)
            ckpt.close(flush=False)

    def lose(self, tier: str) -> None:
        """A new Checkpointer for what the former one left in memory, or on disk alone."""
        self._leave(keep=tier == "memory")
        self._begun = NEVER
        self._ckpt = self._opened()

    def recover(self, tier: str) -> None:
        begun = time.perf_counter()
        self.ckpt.load(self.trained)
        took = time.perf_counter() - begun
        found = self.ckpt.recovery
        if found is None or found.tier != tier or found.skipped:
            raise RuntimeError(f"recovered from {found and found.tier}, not from {tier}: {found}")
        self._recovered = [
            {"phase": "load", "begin_s": 0.0, "end_s": found.seconds},
            {"phase": "reserve", "begin_s": found.seconds, "end_s": took},
        ]

    def timelines(self) -> dict[str, list[dict[str, Any]]]:
        lines = {"recovery": self._recovered} if self._recovered else {}
        step, at, took = self._begun
        if self._ckpt is not None and step and self.job.rank == 0:
            lines["save"] = self._save_line(step, at, took)
        return lines

    def _save_line(self, step: int, at: float, took: float) -> list[dict[str, Any]]:
        """From the run's events, by this machine's clock. The commit begins when all ranks' images are durable."""
        until = time.monotonic() + EVENTS_S
        while True:
            times = self._stages(step)
            if "committed" in times or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        line = [{"phase": "snapshot", "begin_s": 0.0, "end_s": took}]
        if "written" in times and "committed" in times:
            written, committed = times["written"] - at, times["committed"] - at
            line.append({"phase": "flush", "begin_s": took, "end_s": written})
            line.append({"phase": "commit", "begin_s": written, "end_s": committed})
        return line

    def _stages(self, step: int) -> dict[str, float]:
        """The time at which each stage of the step was reached last."""
        from everstep.places import locate
        from everstep.store.blocking import run_blocking
        from everstep.store.events import read_events

        backend = locate(self.root).open_root()
        try:
            events, _ = run_blocking(read_events(backend))
        finally:
            run_blocking(backend.close())
        return {event.kind: event.time for event in events if event.fields.get("step") == step}

    def close(self) -> None:
        with suppress(Exception):
            self._leave(keep=False)


class OverlapSession(EverstepSession):
    overlap = True


class Everstep(System):
    name = "everstep"
    meaning = "everstep, snapshots copied in the call"
    works = frozenset({"save", "async", "load", "ranks", "s3", "recover", "delta", "rollback"})
    syncs = True
    verifies = True
    slots = True
    tiers: ClassVar[tuple[str, ...]] = ("memory", "disk")
    package = "everstep"

    def open(self, job: Job) -> Session:
        return EverstepSession(job)

    def from_peer(self, nbytes: int, repeats: int, directory: Path) -> dict[str, dict[str, Any]] | None:
        from ..common import Samples
        from ..memory_tier import replicate_and_recover

        sent, back = replicate_and_recover(nbytes, repeats, directory)
        taken, there = (Samples(sent.seconds[name]).median for name in ("snapshot", "replication"))
        line = [
            {"phase": "snapshot", "begin_s": 0.0, "end_s": taken},
            {"phase": "replicate", "begin_s": taken, "end_s": taken + there},
        ]
        return {
            "timelines": {"save": line},
            "works": {"replicate": sent.seconds["replication"], "peer_recovery": back.seconds["peer_call"]},
            "floors": {"gloo": sent.seconds["gloo"]},
        }

    def clean(self, directory: Path) -> None:
        from ..common import end_run, free_memory

        key = directory / KEY_FILE
        if key.exists():
            free_memory(key.read_text())
        for root in (directory / part / "run" for part in ("", "memory", "device")):
            if root.exists():
                end_run(root, None)


class EverstepOverlap(Everstep):
    name = "everstep-overlap"
    meaning = "everstep, snapshots copied behind the next forward and backward"
    works = frozenset({"save", "async", "load", "ranks"})
    defers = True
    tiers = ()

    def open(self, job: Job) -> Session:
        return OverlapSession(job)
