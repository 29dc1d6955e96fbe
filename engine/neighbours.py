"""The memory that a run is mended from: this node's arenas, and through their agents those of its other nodes.

Agents of other nodes are found by the run's beacons, by what this node's own agent knows, and by what those say that
answered. They are asked as they ask each other: with the run's secret, from the environment or from this node's own
agent, and TLS where that is set up. Where there is no secret nobody is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from .agent.asking import ASK_S, ask
from .agent.protocol import PeersAnswer, PeersRequest
from .agent.values import AgentSettings
from .backends.api import Backend
from .backends.errors import NotFound
from .errors import Damaged, EverstepError, PeerLost, RunError
from .format import names
from .format.manifest import Manifest
from .format.records import RunRecord, decode_run
from .memory.arena import Arena
from .memory.directory import find_arenas
from .memory.process import boot_id
from .parities import ParityStanding, look_for_parity, pin_parity
from .peers.address import split_address
from .peers.borrowing import Credentials, Neighbour, NeighbourSnapshot, snapshots_of
from .peers.described import PARITY_RANK
from .peers.loans import Lent
from .peers.secret import SECRET, SECRET_FILE, run_secret
from .places import Place
from .rebuilding import RebuiltSource
from .store.asking import reading
from .store.beacons import read_beacons
from .store.findings import Finding, Kind, Severity
from .store.holdings import look_in_memory, pin_copies
from .store.memories import Snapshot
from .store.sources import ArenaSource, Source

ASKED_AT_ONCE = 16
"""Agents of other nodes."""
NODES_MAX = 4096
"""Of one run; more are not asked."""
ASKING_S = 30.0
"""How long all of them together may take to say what they have of a checkpoint."""
ROUNDS = 2
"""Who answers may know of nodes that nobody here knew; those are asked, too."""

Key = tuple[int, int]
"""(incarnation, step)"""


class _Rebuilt:
    """Images of a node that is lost, computed; what else was in its slots ``small`` have."""

    def __init__(self, source: RebuiltSource, small: Sequence[Snapshot]) -> None:
        self.label = source.label
        self.ranks = source.ranks
        self.has = source.has
        self.read_into = source.read_into
        self.records = source.records
        self.meta = source.meta
        self._small = small

    async def layout_bytes(self, rank: int) -> bytes:
        return await next(one for one in self._small if rank in one.ranks).layout_bytes(rank)


class RunMemory:
    """A :class:`~everstep.store.memories.Memory` of the run at ``place``: arenas in ``directory``, and the agents of
    the other nodes, found through ``backends``, the run's places. Nothing is attached, and nobody asked, before it is
    needed. Belongs to one event loop; :meth:`close` it."""

    def __init__(
        self, place: Place, backends: Sequence[Backend], directory: Path, *, asking_s: float = ASKING_S
    ) -> None:
        self._place = place
        self._backends = backends
        self._directory = directory
        self._asking_s = asking_s
        self._stack = ExitStack()
        self._arenas: list[Arena] | None = None
        self._here: dict[Key, list[ArenaSource]] = {}
        self._elsewhere: dict[Key, list[Snapshot]] = {}
        self._run: RunRecord | None = None
        self._credentials: Credentials | None = None
        self._neighbours: dict[tuple[str, int], Neighbour] | None = None
        self._own: set[tuple[str, int]] = set()
        self._told: dict[str, Finding] = {}
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="everstep-neighbours")

    async def close(self) -> None:
        for neighbour in (self._neighbours or {}).values():
            neighbour.close()
        await asyncio.to_thread(self._pool.shutdown)
        self._stack.close()

    def told(self) -> list[Finding]:
        """Who could not be asked, or gave nothing any more, and why."""
        for neighbour in (self._neighbours or {}).values():
            if neighbour.error is not None:
                self._tell_lost(neighbour, neighbour.error)
        return list(self._told.values())

    # -- this node's

    async def here(self, manifest: Manifest) -> Sequence[Snapshot]:
        """Pinned until the end."""
        key = manifest.incarnation, manifest.step
        if key not in self._here:
            self._here[key] = await asyncio.to_thread(self._pin, key, manifest.world)
        return self._here[key]

    def _pin(self, key: Key, world: int) -> list[ArenaSource]:
        if self._arenas is None:
            self._arenas = []
            for info in find_arenas(self._directory):
                if info.path is not None:
                    with suppress(EverstepError, OSError):
                        self._arenas.append(self._stack.enter_context(Arena.attach(info.path)))
        found: list[ArenaSource] = []
        for run_id in dict.fromkeys(arena.info.run_id for arena in self._arenas):
            with suppress(EverstepError):
                for some in pin_copies(look_in_memory(self._arenas, run_id), key, self._stack):
                    chunk_bytes = self._arenas[0].info.chunk_bytes
                    label = "memory of this node"
                    found.append(ArenaSource(some.pins, chunk_bytes, label, world=world, lacks=some.lacks))
        return found

    # -- other nodes'

    async def elsewhere(self, manifest: Manifest) -> Sequence[Snapshot]:
        """Of those that answered first, first; then what follows from parity."""
        key = manifest.incarnation, manifest.step
        if key not in self._elsewhere:
            answers = await self._ask_all(key)
            run = self._run
            if run is None:
                return []

            def lent(neighbour: Neighbour) -> list[NeighbourSnapshot]:
                answer, world = answers[neighbour], manifest.world
                return snapshots_of(neighbour, key, answer, run.chunk_bytes, self._pool, world)

            nearest = sorted(answers, key=lambda one: one.seconds)
            snapshots = [snapshot for neighbour in nearest for snapshot in lent(neighbour)]
            own = [*snapshots, *await self._own_sources(manifest)]
            self._elsewhere[key] = [*snapshots, *self._from_parity(key, answers, own, run)]
        return self._elsewhere[key]

    async def _own_sources(self, manifest: Manifest) -> list[ArenaSource]:
        await self.here(manifest)
        return self._here[manifest.incarnation, manifest.step]

    def _from_parity(
        self,
        key: Key,
        answers: Mapping[Neighbour, Lent],
        data: Sequence[NeighbourSnapshot | ArenaSource],
        run: RunRecord,
    ) -> list[Snapshot]:
        """What can be computed of ``data`` and parity in this node's memory and that of those who answered."""
        standing, slots = ParityStanding(), dict[tuple[str, int], Source]()
        for neighbour, answer in answers.items():
            node = f"{neighbour.name} at {neighbour.host}:{neighbour.port}"
            for number, said in answer.parity:
                with suppress(Damaged):
                    standing.add(node, [[*key, number, said]])
                    copies = {PARITY_RANK: (number, ())}
                    world = data[0].world if data else 0
                    slots[node, number] = NeighbourSnapshot(
                        neighbour, key, copies, run.chunk_bytes, self._pool, world
                    )
        found = look_for_parity(self._arenas or (), run.run_id)
        pinned = pin_parity(found, key, self._stack, run.chunk_bytes)
        for one in found:
            if one.key == key and one.number in pinned:
                standing.add("", [[*key, one.number, one.described.encode()]])
                slots["", one.number] = pinned[one.number]
        rebuilt = standing.sources(key, data, slots.get)
        return [_Rebuilt(one, data) for one in rebuilt if one.chunk_bytes == run.chunk_bytes]

    async def _ask_all(self, key: Key) -> dict[Neighbour, Lent]:
        if self._neighbours is None:
            self._neighbours = {}
            await self._meet()
        asked: list[Neighbour] = []
        answers: dict[Neighbour, Lent] = {}
        for _ in range(ROUNDS):
            fresh = [one for one in self._neighbours.values() if one not in asked and one.error is None]
            asked += fresh
            answers |= await self._ask(fresh, key)
            self._add(node for lent in answers.values() for node in lent.nodes)
        return answers

    async def _ask(self, neighbours: Sequence[Neighbour], key: Key) -> dict[Neighbour, Lent]:
        """What each says that it has. Who does not answer in time is told, and not asked again."""
        loop = asyncio.get_running_loop()
        asking = {loop.run_in_executor(self._pool, one.ask, key): one for one in neighbours}
        if not asking:
            return {}
        await asyncio.wait(asking, timeout=self._asking_s)
        answers = {}
        for answer, neighbour in asking.items():
            if not answer.done():
                neighbour.give_up(PeerLost("no answer in time", found=f"{self._asking_s:g} s"))
                answer.cancel()
                continue
            error = answer.exception()
            if error is None:
                answers[neighbour] = answer.result()
            elif isinstance(error, EverstepError):
                self._tell_lost(neighbour, neighbour.error or error)
            else:
                raise error
        return answers

    async def _meet(self) -> None:
        """Find the other nodes' agents, and what proves to them that they may answer."""
        self._run = await self._read_run()
        if self._run is None:
            self._tell(names.RUN, "no place has its record whole, so no agent of another node can be asked")
            return
        told = await asyncio.to_thread(self._ask_own_agent, self._run.run_id)
        if told.address:
            self._own.add(split_address(told.address))
        secret = told.secret
        try:
            secret = run_secret() or secret
        except EverstepError as error:
            self._tell(names.LIVE, f"agents of other nodes cannot be asked: {error}")
            return
        found, silent = await self._addresses()
        found += [node for node in told.nodes if node[1:] not in self._own]
        if not found and silent:
            self._tell(
                names.LIVE,
                f"agents of other nodes cannot be asked: {silent} run, which listen to nobody, as their job's "
                "snapshots are not protected (Memory(replicas=, parity=))",
            )
        elif found and not secret:
            self._tell(
                names.LIVE,
                f"agents of other nodes ({len(found)}) cannot be asked: the run's secret is not known here (neither "
                f"{SECRET} nor {SECRET_FILE} is set, and no agent of this node has one)",
            )
        elif found:
            self._credentials = Credentials(self._run.run_id, secret, self._place.node)
            self._add(found)

    async def _read_run(self) -> RunRecord | None:
        for backend in self._backends:
            with suppress(RunError, NotFound), reading(backend, names.RUN):
                return decode_run(await backend.read(names.RUN), names.RUN)
        return None

    def _ask_own_agent(self, run_id: str) -> PeersAnswer:
        place = self._place
        directory = place.agent_dir(run_id)
        settings = AgentSettings(
            root=place.url, run_key=place.run_key, node=place.node, runtime_dir=directory
        )
        answer = None
        if directory.is_dir():
            with suppress(EverstepError):
                answer = ask(
                    settings, PeersRequest(1), PeersAnswer, lambda link, reply: reply, timeout_s=ASK_S
                )
        return answer or PeersAnswer(1, b"", "", [])

    async def _addresses(self) -> tuple[list[tuple[str, str, int]], int]:
        """Names and addresses of agents, by the beacons of all places, but for this node's; and how many listen
        nowhere."""
        me = self._place.node, boot_id()
        found: dict[tuple[str, int], str] = {}
        silent = set()
        for backend in self._backends:
            try:
                beacons, unreadable = await read_beacons(backend)
            except RunError as error:
                self._tell(names.LIVE, f"beacons cannot be read: {error}")
                continue
            for name, why in unreadable.items():
                self._tell(name, f"the agent of its node cannot be asked: {why}")
            for beacon in beacons.values():
                if (beacon.node, beacon.boot) == me:
                    continue
                if beacon.address is None:
                    silent.add((beacon.node, beacon.boot))
                    continue
                with suppress(ValueError):
                    found.setdefault(split_address(beacon.address), beacon.node)
        return [(name, *at) for at, name in found.items() if at not in self._own], len(silent)

    def _add(self, nodes: Iterable[tuple[str, str, int]]) -> None:
        assert self._neighbours is not None
        for name, host, port in nodes:
            at = host, port
            if self._credentials is None or at in self._own or at in self._neighbours:
                continue
            if len(self._neighbours) >= NODES_MAX:
                self._tell(names.LIVE, f"more than {NODES_MAX} nodes: not all are asked")
                return
            self._neighbours[at] = Neighbour(name, host, port, self._credentials)

    def _tell_lost(self, neighbour: Neighbour, error: EverstepError) -> None:
        at = f"{neighbour.host}:{neighbour.port}"
        self._tell(at, f"the agent of node {neighbour.name} could not be asked: {error}")

    def _tell(self, name: str, text: str) -> None:
        self._told.setdefault(text, Finding(Severity.INFO, Kind.PEER, name, None, None, text))
