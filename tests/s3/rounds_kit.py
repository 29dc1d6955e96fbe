"""Rounds: a run's uploads go through a proxy, its agent is killed at some request, and another one goes on.

A :class:`Round` says where the objects go, and when who is killed; :class:`Stage` plays it, in processes of its own for
the trainers, and keeps what the proxy saw. What must hold after it is checked past the proxy.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.agent import link, places
from everstep.backends.open import open_backend
from everstep.backends.s3 import PROBE_NAME
from everstep.backends.s3writer import PART_BYTES
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.places import locate
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_steps, read_decision

from tests.facade.kit import Forked, policy, until

from . import run_kit as kit
from .proxy import Fault, S3Proxy
from .server import S3Server
from .wire import Request

WAIT_S = 90.0
"""For whatever is owed; far more than it takes."""

IMAGE_BYTES = 4 * PART_BYTES + (3 << 20)
"""Of one rank's tensor: five parts."""

ARRIVALS_MAX = 18
"""A kill at the n-th request is at most so late: each life makes more requests than that."""

RATES = (None, None, 60 << 20, 30 << 20)
"""Bytes/s of the link."""

NAMES = ("run", "run", "a b+c%20d=é/run", "100% +=~/x y")
"""Of the place below its prefix."""


@dataclass(frozen=True)
class Kill:
    """At the arrival of the ``nth`` request. ``held``: when so many requests that are an ``operation`` have been
    answered, and the following ones are held by the network, which brings them later."""

    nth: int
    held: bool = False
    number: int = signal.SIGKILL
    operation: str = "UploadPart"


@dataclass(frozen=True)
class Round:
    where: str
    """The objects are the "root"'s or a "tier"'s."""
    world: int
    kills: tuple[Kill, ...]
    trainers_too: bool
    """Whether the last kill takes the trainers with it; others go on in their place."""
    rate: float | None
    name: str
    steps: int = 2
    """Of one life of the trainers."""
    saved_before: int = 0
    """Steps that the root has before held parts end in a kill."""

    @classmethod
    def of(cls, rng: random.Random, **given: Any) -> Round:
        kills = tuple(
            [
                Kill(rng.randint(0, 4), held=True)
                if rng.random() < 0.5
                else Kill(rng.randint(1, ARRIVALS_MAX))
                for _ in range(rng.choice((1, 1, 2)))
            ]
        )
        drawn: dict[str, Any] = {
            "where": rng.choice(("root", "tier")),
            "world": rng.choice((1, 1, 2)),
            "kills": kills,
            "trainers_too": rng.random() < 0.3,
            "rate": rng.choice(RATES),
            "name": rng.choice(NAMES),
        }
        return cls(**{**drawn, **given})


def weights(seed: int, rank: int, step: int) -> torch.Tensor:
    """What rank ``rank`` has to save at ``step``."""
    generator = torch.Generator().manual_seed(seed * 10_000 + rank * 1000 + step)
    return torch.randint(0, 1 << 62, (IMAGE_BYTES // 8,), generator=generator)


@dataclass
class Struck:
    """One kill: how many requests had come, and which of them were not answered yet."""

    after: int
    open: frozenset[int]


class Killer:
    """Sees each request as it comes, on the proxy's thread."""

    def __init__(self, proxy: S3Proxy, kills: tuple[Kill, ...], agent: Callable[[], int | None]) -> None:
        self.struck: list[Struck] = []
        self.also: list[int] = []
        """Processes that the last kill takes along."""
        self._proxy = proxy
        self._agent = agent
        self._left = list(kills)
        self._lock = threading.Lock()
        self._met = 0
        self._before: list[Request] = []
        self._killed: int | None = None
        self.armed = False

    @property
    def over(self) -> bool:
        return not self._left

    def __call__(self, request: Request) -> bool:
        """Whether the request is held."""
        with self._lock:
            if not self.armed or not self._left:
                return False
            kill = self._left[0]
            if kill.held:
                probes = request.operation == "UploadPart" and not request.is_part
                if request.operation != kill.operation or probes:
                    return False
                if len(self._before) >= kill.nth:
                    return True
                self._before.append(request)
                return False
            self._met += 1
            if self._met >= kill.nth:
                self._kill(kill)
            return False

    def look(self) -> bool:
        """Kill where requests are held and the ones before them were answered; whether nothing is left to kill."""
        with self._lock:
            kill = self._left[0] if self._left else None
            if kill is None or not kill.held or len(self._before) < kill.nth:
                return kill is None
            if self._proxy.stalled.is_set() and all(one.status == 200 for one in self._before):
                self._kill(kill)
            return not self._left

    def _kill(self, kill: Kill) -> None:
        pid = self._agent()
        if pid is None or pid == self._killed:  # none is there yet, or no other one
            return
        for one in (pid, *(self.also if len(self._left) == 1 else ())):
            os.kill(one, kill.number)
        self._killed = pid
        requests = list(self._proxy.requests)
        self.struck.append(
            Struck(len(requests), frozenset(one.number for one in requests if one.status is None))
        )
        del self._left[0]
        self._met, self._before = 0, []
        self._proxy.stalled.clear()
        self._proxy.release()


class Stage:
    """Where one round is played. ``root`` is where the run lies, ``url`` where its objects are."""

    def __init__(self, server: S3Server, proxy: S3Proxy, directory: Path, plan: Round, seed: int) -> None:
        self.server, self.proxy, self.plan, self.seed = server, proxy, plan, seed
        self.directory = directory
        self.url = f"{server.url()}/{plan.name}"
        self.root = self.url if plan.where == "root" else str(directory / "run")
        self.options = {**server.storage_options, "endpoint_url": proxy.endpoint}
        self.place = locate(self.root, options=self.options if plan.where == "root" else None)
        proxy.clear()
        proxy.link.bytes_per_s = plan.rate
        self.killer = Killer(proxy, plan.kills, self.agent)
        proxy.faults = [Fault("stall", when=self.killer, times=1 << 30)]
        self._lives: list[list[Forked]] = []

    # -- the agent

    def agent(self) -> int | None:
        """The process that serves the run on this node."""
        for directory in self.place.runtime_base.glob(f"{self.place.run_key}-*"):
            sock = places.connect(directory)
            if sock is not None:
                with contextlib.closing(sock):
                    size = struct.calcsize("3i")
                    return int(
                        struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
                    )
        return None

    # -- the trainers

    def start(self, *, patience_s: float | None = None) -> list[Forked]:
        """All ranks of a life; ``patience_s``: with a stopped agent."""
        number = len(self._lives)
        ranks = [
            Forked(lambda say, rank=rank: self._life(say, rank, number, patience_s))  # type: ignore[misc]
            for rank in range(self.plan.world)
        ]
        self._lives.append(ranks)
        return ranks

    def _life(self, say: Callable[..., None], rank: int, number: int, patience_s: float | None) -> None:
        warnings.simplefilter("ignore")
        if patience_s is not None:
            link.PING_S = link.SILENCE_S_MAX = link.STOPPED_S_MAX = patience_s
        if self.plan.world > 1:
            store = self.directory / f"store-{number}"
            wait = timedelta(seconds=WAIT_S)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=self.plan.world, timeout=wait
            )
        ckpt = self._opened()
        state = {"w": torch.zeros(IMAGE_BYTES // 8, dtype=torch.int64)}
        start = ckpt.load(state) or 0
        assert not start or torch.equal(state["w"], weights(self.seed, rank, start)), (
            f"step {start} is another"
        )
        say("loaded", start)
        handles = []
        for step in range(start + 1, start + 1 + self.plan.steps):
            state["w"].copy_(weights(self.seed, rank, step))
            ckpt.step(step, state)
            handles.append(ckpt.save(step, state))
            handles[-1].wait(timeout_s=WAIT_S)
            if number and self.plan.where == "tier":  # with what was owed before, more would wait than may
                handles[-1].wait("far", timeout_s=WAIT_S)
            say("saved", step)
        for handle in handles if self.plan.where == "tier" else ():
            handle.wait("far", timeout_s=WAIT_S)
        say("arrived")
        ckpt.close()
        say("closed", start + self.plan.steps)

    def _opened(self) -> everstep.Checkpointer:
        made = policy(
            keep_last=100, linger_s=1.0, failures_max=None, rank_timeout_s=WAIT_S, close_timeout_s=WAIT_S
        )
        if self.plan.where == "root":
            return everstep.Checkpointer(self.root, policy=made, storage_options=self.options)
        tier = everstep.Tier(self.url, name="far", keep_last=100, storage_options=self.options)
        return everstep.Checkpointer(self.root, policy=made, tiers=[tier])

    def stop(self) -> None:
        self.proxy.release()
        for ranks in self._lives:
            for rank in ranks:
                rank.stop()

    # -- playing

    def play(self, *, patience_s: float | None = None) -> int:
        """All of it, until nobody is left; the last step."""
        ranks = self.start(patience_s=patience_s)
        for rank in ranks:
            assert rank.line() == "loaded 0"
        if self.plan.trainers_too:
            self.killer.also = [rank.pid for rank in ranks]
        self.killer.armed = True
        for step in range(1, self.plan.saved_before + 1):
            for rank in ranks:
                assert rank.line() == f"saved {step}"
        until(self.killer.look, "the kills", WAIT_S)
        if self.plan.trainers_too:
            for rank in ranks:
                rank.stop()
            ranks = self.start()
        ends = [rank.end() for rank in ranks]
        assert all(code == 0 for code, _ in ends), ends
        until(lambda: self.agent() is None, "the agent has ended", WAIT_S)
        return int(ends[0][1][-1].split()[1])


# -- what must hold


def sent_again(requests: list[Request], struck: list[Struck]) -> list[str]:
    """Parts that were sent once more though they had been answered, and no kill came between request and answer."""
    excused = {number for one in struck for number in one.open}
    done: set[tuple[str, int | None]] = set()
    found = []
    for request in requests:
        if not request.is_part:
            continue
        which = request.key, request.part
        if which in done:
            found.append(str(request))
        if request.status == 200 and request.number not in excused:
            done.add(which)
    return found


def manifests(url: str, server: S3Server | None = None) -> list[Manifest]:
    """What counts at a place, read past the proxy."""

    async def read() -> list[Manifest]:
        options = server.storage_options if server is not None else None
        backend = open_backend(url, shared=True, options=options)
        try:
            found = [await read_decision(backend, step) for step in await list_steps(backend)]
        finally:
            await backend.close()
        return [one for one in found if isinstance(one, Manifest)]

    return run_blocking(read())


def of_run(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Without what writers say of themselves: a killed agent's beacon, too, stays for a later incarnation to sweep."""
    said = (names.EVENTS, names.LIVE, PROBE_NAME)
    return {name: data for name, data in tree.items() if name.split("/")[0] not in said}


def files(root: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return of_run(found)


def at_server(server: S3Server, url: str) -> dict[str, bytes]:
    return of_run(dict(kit.objects(server, url)))


def orphans(tree: dict[str, bytes], counting: list[Manifest]) -> list[str]:
    """Ranks' objects of attempts that do not count."""
    kept = tuple([names.attempt_dir(one.step, one.incarnation, one.attempt) + "/" for one in counting])
    return [
        name
        for name in tree
        if (parsed := names.parse(name)) is not None and parsed.rank is not None and not name.startswith(kept)
    ]


def remove(server: S3Server, url: str) -> None:
    """All objects below ``url``: a hundred rounds would fill a disk."""
    client, prefix = server.client(), url.partition("://")[2].partition("/")[2]
    for name in kit.names(server, url):
        client.delete_object(Bucket=server.bucket, Key=f"{prefix}/{name}")


@contextlib.contextmanager
def staged(server: S3Server, proxy: S3Proxy, directory: Path, plan: Round, seed: int) -> Iterator[Stage]:
    stage = Stage(server, proxy, directory, plan, seed)
    try:
        yield stage
    except BaseException:
        print("\n".join(str(request) for request in proxy.requests))
        print("struck:", stage.killer.struck)
        for log in sorted(directory.rglob("agent.log")):
            print(log.read_text()[-6000:])
        raise
    finally:
        stage.stop()
        with contextlib.suppress(ProcessLookupError):
            if (pid := stage.agent()) is not None:
                os.kill(pid, signal.SIGKILL)
        remove(server, stage.url)


def seed_of(number: int) -> int:
    """Of round ``number``: a new one each time, unless the environment names the first one's."""
    first = os.environ.get("EVERSTEP_ROUNDS_SEED")
    seed = int(first) + number if first else random.SystemRandom().randrange(1 << 30)
    print(f"EVERSTEP_ROUNDS_SEED={seed}")
    return seed
