"""One seed from its start to the verdict.

``python -m tests.chaos.runner SEED...`` runs seeds by hand; ``--keep`` leaves what they wrote.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from click.testing import CliRunner
from everstep.cli.clean import clean_memory
from everstep.memory.directory import arena_dir
from everstep.memory.process import Process
from everstep.places import locate
from everstep.store.findings import Kind

from .disk import Key, damage, fill, findings, holding_images, small_disk, standing
from .job import POLICY, Settings
from .launch import Launcher
from .plan import Disturbance, Plan
from .processes import Family, kill, send
from .verify import Wiped, by_attempt, check_floors, check_numbers, completed, read_lives

SEED_S = 150.0
TORCHRUN_SEED_S = 300.0
"""Bound of one seed, from start to end."""
LAUNCHES_MAX = 25
LEFT_S = 30.0
"""How long agents may outlive a finished job: they linger, or wait for a first client."""
POLL_S = 0.02
ERROR_CHARS = 160
LEFT_BYTES_MAX = 400_000
SHM = Path("/dev/shm")


class Hung(Exception):
    """The job does not get anywhere any more."""


class Server:
    """What serves any number of seeds, one at a time: the launcher's server, and the agents' directory, whose
    name in the environment marks all processes that come of it."""

    def __init__(self, base: Path) -> None:
        self.runtime = base / "runtime"
        self.runtime.mkdir()
        self.log = base / "server.log"
        environment = {
            "EVERSTEP_RUNTIME_DIR": str(self.runtime),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.launcher = Launcher(environment, self.log)
        self.family = Family(f"EVERSTEP_RUNTIME_DIR={self.runtime}\0", self.launcher.pid)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        kill(self.family.all())
        self.launcher.close()


class Run:
    """The state of one seed's run; :func:`run_seed` drives it."""

    def __init__(self, plan: Plan, base: Path, server: Server) -> None:
        self.plan = plan
        self.base = base
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.wiped: list[Wiped] = []
        self.damaged: dict[Key, str] = {}
        self.runtime = server.runtime
        self.out = base / "out"
        self.out.mkdir()
        self.disk = base / "disk"
        self.root = self.disk / "run"
        self.mounted = False
        self.launcher = server.launcher
        self.family = server.family
        self.launches = 0
        self.job = 0
        self.began = time.monotonic()

    # -- the job

    def launch(self) -> None:
        if self.launches >= LAUNCHES_MAX:
            raise Hung(f"not done after {LAUNCHES_MAX} launches")
        name = f"l{self.launches}"
        self.launches += 1
        plan = self.plan
        settings = Settings(
            root=str(self.root),
            out=str(self.out),
            steps=plan.steps,
            copy=plan.copy,
            agent=plan.agent,
            flush_every=plan.flush_every,
            rate=plan.rate,
            step_seconds=0.012,
            graceful=plan.graceful,
        )
        log = self.base / f"{name}.log"
        self.job = self.launcher.start(name, settings.to_json(), plan.world, log, torchrun=plan.torchrun)

    def reference(self) -> None:
        """The undisturbed run, without everstep."""
        (self.base / "reference").mkdir()
        settings = Settings(root="", out=str(self.base / "reference"), steps=self.plan.steps, plain=True)
        pid = self.launcher.start(
            "reference", settings.to_json(), self.plan.world, self.base / "reference.log"
        )
        self.wait(lambda: self.launcher.ended(pid) is not None)
        assert self.launcher.ended(pid) == 0, (self.base / "reference.log").read_text()

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            if time.monotonic() - self.began > (TORCHRUN_SEED_S if self.plan.torchrun else SEED_S):
                raise Hung("the seed's time is over")
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Start again whatever ended badly, until it ends well."""
        while True:
            self.wait(lambda: self.launcher.ended(self.job) is not None)
            if self.launcher.ended(self.job) == 0:
                return
            self.note(f"launch ended with {self.launcher.ended(self.job)}")
            self.launch()

    def progress(self) -> int:
        return completed(self.out, self.plan.world)

    def note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self.began:6.2f} s, step {self.progress()}: {text}")

    # -- disturbances

    def disturb(self, what: Disturbance) -> bool:
        """Wait for its moment and do it; False if the job is over before."""
        before, since = self.progress(), time.monotonic()

        def due() -> bool:
            if self.launcher.ended(self.job) is not None:
                return True
            if what.at_end:
                return self.progress() >= self.plan.steps - 1
            if what.steps is None:
                return time.monotonic() - since >= what.delay_s
            return self.progress() >= before + what.steps

        self.wait(due)
        if self.launcher.ended(self.job) is not None:
            if self.launcher.ended(self.job) == 0:
                return False
            self.note(f"launch ended with {self.launcher.ended(self.job)}")
            self.launch()
        self.note(str(what))
        getattr(self, "do_" + what.kind.replace("-", "_"))(what)
        return True

    def one_rank(self, what: Disturbance) -> list[Process]:
        ranks = self.family.ranks(self.job)
        return [ranks[what.draw % len(ranks)]] if ranks else []

    def do_kill_rank(self, what: Disturbance) -> None:
        send(self.one_rank(what), signal.SIGKILL)

    def do_term_rank(self, what: Disturbance) -> None:
        send(self.one_rank(what), signal.SIGTERM)

    def do_stop_rank(self, what: Disturbance) -> None:
        self.stop(self.one_rank(what), what.pause_s)

    def do_kill_ranks(self, what: Disturbance) -> None:
        send(self.family.ranks(self.job), signal.SIGKILL)

    def do_kill_agent(self, what: Disturbance) -> None:
        send(self.family.agents(), signal.SIGKILL)

    def do_stop_agent(self, what: Disturbance) -> None:
        self.stop(self.family.agents(), what.pause_s)

    def do_kill_ranks_and_agent(self, what: Disturbance) -> None:
        order = [*self.family.ranks(self.job), *self.family.agents()]
        random.Random(what.draw).shuffle(order)
        send(order, signal.SIGKILL)

    def do_full_disk(self, what: Disturbance) -> None:
        if self.mounted:
            filler = fill(self.disk, what.draw % LEFT_BYTES_MAX)
            self.sleep(what.pause_s)
            filler.unlink()

    def do_term_launcher(self, what: Disturbance) -> None:
        """As a scheduler ends a job. The agent stays, and may be at work while the next launch starts."""
        send([process for process in self.family.all() if process.pid == self.job], signal.SIGTERM)
        self.wait(lambda: self.launcher.ended(self.job) is not None)
        kill(self.family.ranks(self.job))
        if what.wipe_memory:
            self.wipe_memory(what)
        self.sleep(what.pause_s if what.draw % 2 else 0.0)
        self.launch()

    def do_kill_launcher(self, what: Disturbance) -> None:
        """Its ranks go on without it, for a while beside those of the next launch."""
        left = self.family.ranks(self.job)
        kill([process for process in self.family.all() if process.pid == self.job])
        self.wait(lambda: self.launcher.ended(self.job) is not None)
        self.launch()
        self.sleep(what.pause_s)
        send(left, signal.SIGKILL)

    def do_node(self, what: Disturbance) -> None:
        kill(self.family.all())
        kill(self.family.all())  # what was being forked meanwhile
        self.wait(lambda: self.launcher.ended(self.job) is not None)
        self.check_disk(crashed=True)
        if what.wipe_memory:
            self.wipe_memory(what)
        if what.wipe_runtime:
            shutil.rmtree(self.runtime)
            self.runtime.mkdir()
        self.launch()

    def stop(self, processes: list[Process], seconds: float) -> None:
        send(processes, signal.SIGSTOP)
        try:
            self.sleep(seconds)
        finally:
            send(processes, signal.SIGCONT)

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until)

    def wipe_memory(self, what: Disturbance) -> None:
        """Note first what must survive, then damage the newest checkpoint if that is asked for."""
        keys = standing(self.root)
        good = [key for key in keys if key not in self.damaged]
        if what.damage and len(good) >= 2 and not self.family.all():
            key = good.pop()
            self.damaged[key] = damage(self.root, key, what.damage, random.Random(what.draw))
            self.note(self.damaged[key])
            if not [f for f in findings(self.root) if (f.incarnation, f.step) == key]:
                self.problems.append(f"fsck does not see what was done: {self.damaged[key]}")
        self.wiped.append(Wiped(time.time(), good[-1][1] if good else 0))
        for path in arena_dir(SHM, locate(self.root).run_key).iterdir():
            path.unlink()

    def check_disk(self, *, crashed: bool) -> None:
        """Nothing is damaged but what was. Between the last vote and the manifest a crash leaves what a lost
        manifest leaves, which fsck cannot tell apart; whoever goes on from there decides it."""
        for found in findings(self.root):
            if crashed and found.kind is Kind.UNDECIDED:
                continue
            if (found.incarnation, found.step) not in self.damaged:
                self.problems.append(f"fsck after launch {self.launches}: {found}")

    # -- the verdict

    def judge(self) -> None:
        world, steps = self.plan.world, self.plan.steps
        attempts = by_attempt(self.out, world)
        reference = [life for rank in range(world) for life in read_lives(self.base / "reference", rank)]
        self.problems += check_numbers(attempts, reference, steps, world)
        self.problems += check_floors(attempts, world, self.wiped, late=self.plan.copy == "overlap")
        keys = standing(self.root)
        if not keys or keys[-1][1] != steps:
            self.problems.append(f"the last step is not on disk: {keys}")
        self.check_disk(crashed=False)

    def check_leftovers(self) -> None:
        until = time.monotonic() + LEFT_S
        while left := self.family.all():
            if time.monotonic() > until:
                self.problems.append(f"left running: {left}, agents {self.family.agents()}")
                break
            time.sleep(POLL_S)
        kill(left)
        self.check_rotation()
        done = CliRunner().invoke(clean_memory, [str(self.root)])
        directory = SHM / arena_dir(SHM, locate(self.root).run_key).relative_to(SHM)
        stays = list(directory.iterdir())
        if done.exit_code or stays:
            self.problems.append(f"clean-memory left {stays}: {done.output}")
        shutil.rmtree(directory)

    def check_rotation(self) -> None:
        """Retention is met once all agents are gone, given-up attempts and lost branches included; what is
        damaged may stay."""
        with_images = holding_images(self.root) - set(self.damaged)
        if len(with_images) > POLICY["keep_last"]:
            self.problems.append(f"not rotated: {sorted(with_images)}, of which {standing(self.root)} count")

    def close(self) -> None:
        kill(self.family.all())

    def tails(self) -> str:
        """The ends of the logs, for a report."""
        texts = []
        agents = self.runtime.glob(f"*/{locate(self.root).run_key}-*/agent.log")
        for log in [*sorted(self.base.glob("*.log")), *agents]:
            lines = log.read_text(errors="replace").splitlines()[-40:]
            texts.append("\n".join([f"== {log.name}", *lines]))
        return "\n".join(texts)


def run_seed(seed: int, base: Path, server: Server, *, disturbances: int | None = None) -> Run:
    """Everything that the seed stands for. ``problems`` of the result is empty if all went well."""
    plan = Plan.of(seed, disturbances=disturbances)
    run = Run(plan, base, server)
    with ExitStack() as stack:
        stack.callback(run.close)
        if plan.small_disk:
            run.mounted = stack.enter_context(small_disk(run.disk))
        else:
            run.disk.mkdir()
        try:
            run.reference()
            run.began = time.monotonic()
            run.launch()
            for what in plan.disturbances:
                if not run.disturb(what):
                    break
            run.finish()
            run.judge()
        except Hung as error:
            send(run.family.ranks(run.job), signal.SIGUSR1)
            time.sleep(0.5)
            run.problems.append(f"hung: {error}")
        except Exception:
            run.problems.append(traceback.format_exc())
        else:
            run.check_leftovers()
        if run.problems and run.root.exists():
            shutil.copytree(run.root, base / "copy-of-run", dirs_exist_ok=True)
    return run


def told(run: Run) -> str:
    """One line if all went well, else everything that helps."""
    lives = [life for lives in by_attempt(run.out, run.plan.world) for life in lives if life.rank == 0]
    resumes = ", ".join(f"{life.resumed} {life.tier}" for life in lives if life.resumed)
    head = f"{run.plan}: {time.monotonic() - run.began:.1f} s, resumed from {resumes or 'nothing'}"
    errors = sorted({error[:ERROR_CHARS] for error in _errors(run)})
    if not run.problems:
        return "\n".join([f"ok   {head}", *(f"     {error}" for error in errors)])
    return "\n".join([f"FAIL {head}", *run.notes, *errors, *run.problems])


def _errors(run: Run) -> list[str]:
    """What ranks raised: most of it is what was to be expected, and worth a look nevertheless."""
    lives = [life for lives in by_attempt(run.out, run.plan.world) for life in lives]
    return [f"{life.attempt.split('.')[0]}: {life.error}" for life in lives if life.error]


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    failed = 0
    with Server(Path(tempfile.mkdtemp(prefix="chaos-server-"))) as server:
        for seed in [int(text) for text in arguments if text != "--keep"]:
            base = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
            run = run_seed(seed, base, server)
            print(told(run), flush=True)
            failed += bool(run.problems)
            if run.problems or keep:
                (base / "told.txt").write_text(told(run) + "\n" + run.tails())
                print(f"     {base}", flush=True)
            else:
                shutil.rmtree(base)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
