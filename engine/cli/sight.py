"""Who is alive in a run, as this node sees it: its own arenas and agent, and the beacons of the others. Writes
nothing."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arenas import directory_of_run

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.format.beacon import Beacon, BeaconRank
    from everstep.places import Place
    from everstep.plan.liveness import Health, Signs, State

    from .survey import Survey

LOOK_S_MAX = 60.0
"""However long a run's own timeout is: a beacon is not watched for longer."""
LOOK_PAUSE_S = 0.25
YOUNG_INTERVALS = 3
"""Of beacons: by then each node of an incarnation has said something."""


@dataclass(frozen=True, slots=True)
class SeenRank:
    """One rank: on which node, what was found, and the verdict."""

    node: str
    source: str
    found: BeaconRank
    signs: Signs
    passed_s: float | None
    """How long ago ``found`` was said, at least; None: it is what stands now."""
    state: State
    why: str


@dataclass
class SeenNode:
    """One node. ``source`` is "memory" for this one, else "beacon"; ``moves`` is whether its beacon was made anew
    while we looked, None without a second look; ``still_s`` for how long it was not. ``agent`` is its agent's process
    id, None if there is none; ``error`` why its beacon could not be written."""

    node: str
    source: str
    beacon: Beacon
    agent: int | None
    moves: bool | None = None
    still_s: float = 0.0
    error: str | None = None


@dataclass
class Sight:
    """``survey`` is None where the run could not be read: ``problems`` say why."""

    url: str
    incarnation: int
    world: int | None
    survey: Survey | None
    nodes: list[SeenNode] = field(default_factory=list)
    ranks: dict[int, SeenRank] = field(default_factory=dict)
    spares: list[dict[str, Any]] = field(default_factory=list)
    """The job's spare nodes, as this node's agent says: ``spare`` (the address), ``reached``, ``step``, ``error``."""
    farther: list[dict[str, Any]] = field(default_factory=list)
    """The run's further tiers, as this node's agent says: ``name``, ``url``, ``newest``, ``owed``, ``error``, ..."""
    flushes: list[dict[str, Any]] = field(default_factory=list)
    """What is being flushed, as this node's agent says: ``step``, ``kind``, ``base``, ..."""
    merging: list[int] = field(default_factory=list)
    """Steps whose deltas are to be made fulls, as this node's agent says."""
    problems: list[str] = field(default_factory=list)

    def health(self) -> Health:
        from everstep.plan.liveness import Health, health

        found = health({rank: (seen.state, seen.signs) for rank, seen in self.ranks.items()}, self.world)
        blind = self.survey is None and found is not Health.SUSPECT
        if found is Health.CANNOT_TELL and not blind and self._is_young():
            return Health.YOUNG
        return Health.CANNOT_TELL if blind else found

    def _is_young(self) -> bool:
        """Whether ranks are out of sight only because their nodes' first beacons are still to come: a node says
        something after an interval."""
        from everstep.plan.liveness import State

        created = (
            [r.created for r in self.survey.incarnations if r.number == self.incarnation]
            if self.survey
            else []
        )
        age_s = since(created[0]) if created else None
        interval_s = max((node.beacon.interval_s for node in self.nodes), default=0.0)
        seen = all(rank.state is State.ALIVE for rank in self.ranks.values())
        return seen and age_s is not None and age_s < YOUNG_INTERVALS * interval_s


def look(run: str, memory: Path, wait_s: float | None) -> Sight:
    """The run as it is now. ``wait_s`` bounds how long beacons are watched; None: as long as their timeouts say. Raises
    NotARun."""
    from everstep.errors import EverstepError, NotARun
    from everstep.places import locate

    from .survey import survey

    place = locate(run)
    sight = Sight(place.url, 0, None, None)
    try:
        sight.survey = survey(run)
    except NotARun:
        raise
    except EverstepError as error:
        sight.problems.append(f"{type(error).__name__}: {error}")
    run_ids = [sight.survey.run.run_id] if sight.survey is not None else []
    status = _agent_status(place, run_ids)
    sight.farther = (status or {}).get("tiers") or []
    sight.spares = ((status or {}).get("guard") or {}).get("spares") or []
    sight.flushes = (status or {}).get("flushes") or []
    sight.merging = (status or {}).get("merging") or []
    here = _here(place, directory_of_run(memory, run), run_ids, status)
    mine = {(node.beacon.node, node.beacon.boot) for node in here}
    others = _others(sight, mine, place, wait_s) if sight.survey else []
    records = sight.survey.incarnations if sight.survey is not None else []
    known = [node.beacon.incarnation for node in (*here, *others)]
    sight.incarnation = max([record.number for record in records] or known or [0])
    sight.nodes = [node for node in (*here, *others) if node.beacon.incarnation == sight.incarnation]
    worlds = [record.world for record in records if record.number == sight.incarnation]
    worlds += [node.beacon.world for node in sight.nodes]
    sight.world = worlds[0] if worlds else None
    for node in sight.nodes:
        for rank in node.beacon.ranks:
            sight.ranks.setdefault(rank.rank, _seen(node, rank))
    return sight


def _seen(node: SeenNode, rank: BeaconRank) -> SeenRank:
    from everstep.plan.liveness import Signs, judge

    if node.source == "memory":
        storage = None if node.agent is None else node.error is None
        signs = Signs(rank.beat_age_s, rank.alive, None, storage)
    elif node.moves is None:
        signs = Signs(process=None) if rank.alive else Signs(rank.beat_age_s, False)
    else:
        age = None if rank.beat_age_s is None else rank.beat_age_s + node.still_s
        # What a beacon that stands still says of a living process is not known to be so any more.
        alive = rank.alive if node.moves or not rank.alive else None
        signs = Signs(age, alive, node.moves)
    state, why = judge(signs, node.beacon.timeout_s)
    passed_s = None if node.source == "memory" or node.moves else node.still_s
    return SeenRank(node.node, node.source, rank, signs, passed_s, state, why)


def since(created: str) -> float | None:
    """The seconds since a moment that a record names, by its writer's clock and this one's."""
    try:
        then = datetime.datetime.fromisoformat(created.replace("Z", "+00:00"))
        return max(0.0, (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds())
    except (ValueError, TypeError):
        return None


# -- this node


def _here(place: Place, arenas: Path, run_ids: list[str], status: dict[str, Any] | None) -> list[SeenNode]:
    """This node, if anything of the run is here: its arenas first, for they are there without an agent too."""
    ranks, incarnation, world = _in_arenas(arenas, run_ids)
    said = None if status is None else _beacon_in(status)
    if said is not None and said.incarnation >= incarnation:
        known = {rank.rank: rank for rank in said.ranks}
        # A trainer without a file in memory is known to the agent only.
        same = ranks if said.incarnation == incarnation else {}
        beacon = replace(said, ranks=tuple({**known, **same}[rank] for rank in sorted({**known, **same})))
    elif ranks:
        beacon = _beacon_of(place, incarnation, world, ranks)
    else:
        return []
    live = (status or {}).get("live") or {}
    agent = None if status is None else int(status["pid"])
    return [SeenNode(place.node, "memory", beacon, agent, error=live.get("error"))]


def _in_arenas(directory: Path, run_ids: list[str]) -> tuple[dict[int, BeaconRank], int, int]:
    """What this node's arenas say of the ranks of the newest incarnation that owns one, that incarnation, and its
    number of ranks. Arenas that were given back have no rank."""
    from everstep.agent.beacon import describe_rank
    from everstep.errors import EverstepError
    from everstep.memory.arena import Arena
    from everstep.memory.directory import find_arenas
    from everstep.memory.header import Kind

    owned = [
        info
        for info in find_arenas(directory, Kind.OWN)
        if info.owner is not None and info.incarnation and (not run_ids or info.run_id in run_ids)
    ]
    newest = max((info.incarnation for info in owned), default=0)
    ranks: dict[int, BeaconRank] = {}
    world = 0
    for info in owned:
        if info.incarnation != newest or info.path is None or info.owner is None:
            continue
        try:
            with Arena.attach(info.path) as arena:
                one = describe_rank(info.rank, info.owner, arena, newest, alive=info.owner.alive())
        except (EverstepError, OSError):
            continue
        ranks[info.rank] = _fresher(ranks.get(info.rank), one)
        world = max(world, info.world)
    return ranks, newest, world


def _fresher(one: BeaconRank | None, other: BeaconRank) -> BeaconRank:
    """Of a rank whose arena was replaced by a larger one both are there for a while: the one that it beats in counts,
    with the newest snapshot of both."""
    if one is None:
        return other
    never = float("inf")
    ages = [never if rank.beat_age_s is None else rank.beat_age_s for rank in (one, other)]
    newer = one if ages[0] <= ages[1] else other
    snapshots = [rank.snapshot for rank in (one, other) if rank.snapshot is not None]
    return replace(newer, snapshot=max(snapshots, default=None))


def _agent_status(place: Place, run_ids: list[str]) -> dict[str, Any] | None:
    from everstep.agent.asking import ask_status
    from everstep.agent.values import AgentSettings

    directories = [place.agent_dir(run_id) for run_id in run_ids]
    if not directories and place.runtime_base.is_dir():
        directories = sorted(place.runtime_base.glob(f"{place.run_key}-*"))
    for directory in directories:
        status = ask_status(
            AgentSettings(root=place.url, run_key=place.run_key, node=place.node, runtime_dir=directory)
        )
        if status is not None:
            return status
    return None


def owed_steps(place: Place, run_id: str) -> set[int]:
    """Steps that this node's agent, if there is one, has still to copy to further tiers."""
    tiers = (_agent_status(place, [run_id]) or {}).get("tiers") or []
    return {step for tier in tiers for step in tier.get("owed") or []}


def _beacon_in(status: dict[str, Any]) -> Beacon | None:
    from everstep.format.beacon import Beacon, BeaconRank
    from everstep.format.typed import build, decoding

    body = (status.get("live") or {}).get("beacon")
    if body is None:
        return None
    return decoding("the agent's status", lambda: build(Beacon, body, {"ranks": BeaconRank}))


def _beacon_of(place: Place, incarnation: int, world: int, ranks: dict[int, BeaconRank]) -> Beacon:
    """What an agent would say, were there one that knows these ranks."""
    import socket

    from everstep.agent.values import AgentSettings
    from everstep.format.beacon import Beacon
    from everstep.memory.process import Process

    me = Process.current()
    settings = AgentSettings(
        root=place.url, run_key=place.run_key, node=place.node, runtime_dir=place.runtime_base
    )
    return Beacon(
        node=place.node,
        host=socket.gethostname(),
        boot=me.boot,
        agent_pid=0,
        agent_start=0,
        count=0,
        interval_s=settings.heartbeat_s,
        timeout_s=settings.heartbeat_timeout_s,
        incarnation=incarnation,
        world=world,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        complete=None,
        durable=None,
        durable_age_s=None,
        queue=0,
    )


# -- other nodes


def _others(sight: Sight, here: set[tuple[str, str]], place: Place, wait_s: float | None) -> list[SeenNode]:
    """The beacons of the other nodes, watched until each was made anew, or for their timeouts."""
    from everstep.errors import EverstepError

    try:
        first = _read(sight, place)
        newest = (
            max((record.number for record in sight.survey.incarnations), default=0) if sight.survey else 0
        )
        nodes = {
            name: SeenNode(beacon.node, "beacon", beacon, beacon.agent_pid)
            for name, beacon in first.items()
            if beacon.incarnation >= newest and (beacon.node, beacon.boot) not in here
        }
        waiting = {name for name, node in nodes.items() if node.beacon.ranks}
        if not any(node.beacon.living for node in nodes.values()) and not here:
            waiting = set()  # nobody is said to live: the wait would prove nothing
        bound = [min(nodes[name].beacon.timeout_s * 1.05, LOOK_S_MAX) for name in waiting]
        limit_s = max(bound, default=0.0) if wait_s is None else wait_s
        began = time.monotonic()
        while waiting and time.monotonic() - began < limit_s:
            time.sleep(LOOK_PAUSE_S)
            now = _read(sight, place)
            for name in list(waiting):
                node, beacon = nodes[name], now.get(name)
                if beacon is None or (beacon.agent, beacon.count) != (node.beacon.agent, node.beacon.count):
                    nodes[name] = replace(node, beacon=beacon or replace(node.beacon, ranks=()), moves=True)
                    waiting.discard(name)
                else:
                    nodes[name] = replace(node, moves=False, still_s=time.monotonic() - began)
        return [nodes[name] for name in sorted(nodes)]
    except EverstepError as error:
        sight.problems.append(f"{type(error).__name__}: {error}")
        return []


def _read(sight: Sight, place: Place) -> dict[str, Beacon]:
    from everstep.store.beacons import read_beacons
    from everstep.store.blocking import run_blocking

    async def read() -> tuple[dict[str, Beacon], dict[str, EverstepError]]:
        backend = place.open()
        try:
            return await read_beacons(backend)
        finally:
            await backend.close()

    found, unreadable = run_blocking(read())
    for name, error in unreadable.items():
        text = f"{name}: {error}"
        if text not in sight.problems:
            sight.problems.append(text)
    return found
