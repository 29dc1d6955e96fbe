"""What the memory tier takes, and what survives what. Pure: sizes of arenas are asked of whoever makes them, limits of
whoever can see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.errors import BadOption

from .parity import fit, parity_bytes_max
from .placement import Node, holders

ArenaBytes = Callable[[int, int], int]
"""(slots, bytes of one slot) -> bytes of the arena's file."""

GROWTH = 1.25
"""A slot that turned out too small is replaced by one of this many times the need."""


@dataclass(frozen=True, slots=True)
class Job:
    """``slot_bytes`` is the room of one slot of a rank's own arena, ``held_bytes`` that of one slot in which another
    node keeps such a snapshot, ``small_bytes`` the same where parity protects its images and only the rest is kept.
    ``device_bytes`` lie beside the tensors of a rank for each device slot. ``growth``: how many times as large the
    state may become during the run. ``parity_spare_chunks`` of each rank, and ``parity_state_bytes``, are reserved with
    parity for what does not come in whole chunks and for what a slot says of itself."""

    nodes: int
    ranks_per_node: int
    slot_bytes: int
    held_bytes: int
    small_bytes: int
    chunk_bytes: int
    slots: int = 3
    held_slots: int = 2
    replicas: int = 0
    parity: tuple[int, int] | None = None
    spares: int = 0
    device_slots: int = 0
    device_bytes: int = 0
    growth: float = 1.0
    parity_spare_chunks: int = 0
    parity_state_bytes: int = 0
    agent_bytes: int = 0
    load_bytes_node: int = 0
    load_bytes_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("ranks_per_node", 1), ("replicas", 0), ("spares", 0)):
            if getattr(self, name) < least:
                raise BadOption(
                    f"{name} is too small", found=getattr(self, name), expected=f"at least {least}"
                )
        if self.replicas and self.parity is not None:
            raise BadOption("replicas and parity exclude each other", found=(self.replicas, self.parity))
        if self.spares and not self.replicas:
            raise BadOption("spare nodes keep replicas: say how many", found=self.spares)
        if not 1 <= self.growth < float("inf"):
            raise BadOption("growth is how many times as large the state becomes", found=self.growth)

    @property
    def survives(self) -> int:
        """How many nodes may be lost at once without going back to the disk."""
        if self.parity is not None:
            return min(self.parity[1], self.nodes - 1)
        return min(self.replicas, self.nodes + self.spares - 1)


@dataclass(frozen=True, slots=True)
class Room:
    """All in bytes. ``rank_own`` and ``rank_device`` are of each rank; of a node are its ranks' own slots, what it
    keeps of other nodes' (``node_held``), its share of parity, and its agent's buffers; ``node`` is all of it.
    ``spare`` is what a spare node keeps.

    Besides ``node``, for a while: ``loading`` are the buffers of a load; ``moved`` is what former arenas take while new
    ones are made beside them (another number of ranks, ranks on other nodes, slots that do not fit); ``grown`` the
    larger arenas when the state outgrows its slots, till the next complete step lies in them. ``recovery`` is the most
    of a node at the moment of recovery: former and new arenas at once, and a load.
    """

    rank_own: int
    rank_device: int
    node_own: int
    node_held: int
    node_parity: int
    node_agent: int
    spare: int
    loading: int
    moved: int
    grown: int

    @property
    def node(self) -> int:
        return self.node_own + self.node_held + self.node_parity + self.node_agent

    @property
    def recovery(self) -> int:
        return self.node + self.moved + self.loading

    @property
    def most(self) -> int:
        """What a node may take at any moment."""
        return max(self.recovery, self.node + self.grown)

    @property
    def arenas(self) -> int:
        """Of :attr:`node` what lies in files of shared memory."""
        return self.node - self.node_agent


def plan(job: Job, arena_bytes: ArenaBytes) -> Room:
    """The room for ``job``: of the fullest node, where they differ."""
    own = arena_bytes(job.slots, job.slot_bytes)
    held, spare = _held(job)
    small = _small(job)
    held_arena = arena_bytes(job.held_slots, job.held_bytes) if job.replicas else 0
    small_arena = arena_bytes(job.held_slots, job.small_bytes) if small else 0
    parity = _parity_slot_bytes(job)
    node_held = held * held_arena + small * small_arena
    node_parity = arena_bytes(job.held_slots, parity) if parity else 0
    node_own = own * job.ranks_per_node
    grown = 0
    if job.growth > 1:
        larger = arena_bytes(job.slots, _aligned(int(job.slot_bytes * job.growth * GROWTH)))
        factor = larger / own
        grown = larger * job.ranks_per_node + int((node_held + node_parity) * factor)
    return Room(
        rank_own=own,
        rank_device=job.device_slots * job.device_bytes,
        node_own=node_own,
        node_held=node_held,
        node_parity=node_parity,
        node_agent=job.agent_bytes,
        spare=spare * held_arena + (job.agent_bytes if job.spares else 0),
        loading=job.load_bytes_node + job.load_bytes_rank * job.ranks_per_node,
        moved=node_own + node_held + node_parity,
        grown=grown,
    )


def _map(job: Job) -> list[Node]:
    found = [
        Node(f"n{at}", ranks=tuple(range(at * job.ranks_per_node, (at + 1) * job.ranks_per_node)))
        for at in range(job.nodes)
    ]
    return [*found, *(Node(f"s{at}", spare=True) for at in range(job.spares))]


def _held(job: Job) -> tuple[int, int]:
    """Of how many ranks the fullest node with ranks, and the fullest spare node, keeps the snapshots."""
    if not job.replicas:
        return 0, 0
    nodes = _map(job)
    counts = [0] * len(nodes)
    for at, kept_by in enumerate(holders(nodes, job.replicas)):
        for holder in kept_by:
            counts[holder] += len(nodes[at].ranks)
    return max(counts[: job.nodes]), max(counts[job.nodes :], default=0)


def _small(job: Job) -> int:
    """With parity: of how many ranks the fullest node keeps what is not in the parity."""
    if job.parity is None:
        return 0
    most = max(code.n for code in fit(_map(job), *job.parity).codes)
    return min(job.parity[1], most - 1) * job.ranks_per_node


def _parity_slot_bytes(job: Job) -> int:
    """A slot with the parity blocks of the node that has most of them. BadOption where there are too few nodes."""
    if job.parity is None:
        return 0
    of_rank = -(-job.slot_bytes // job.chunk_bytes) + job.parity_spare_chunks
    chunks = [of_rank * job.ranks_per_node]
    codes = fit(_map(job), *job.parity).codes
    return _aligned(
        max(parity_bytes_max(code, chunks, job.chunk_bytes) for code in codes) + job.parity_state_bytes
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


# -- does it fit


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound: ``free`` bytes, of which ``headroom`` are to stay free. ``files``: it bounds files of shared memory
    only, not an agent's buffers. ``held`` bytes of it are this run's own already."""

    where: str
    free: int
    headroom: int = 0
    files: bool = False
    held: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a node needs of one limit, in training and at most; ``free`` counts what the run has already."""

    where: str
    needed: int
    most: int
    free: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.free

    @property
    def fits_recovery(self) -> bool:
        return self.most <= self.free


def compare(room: Room, found: Sequence[Limit]) -> tuple[Verdict, ...]:
    """Of each limit whether the plan fits."""
    verdicts = []
    for limit in found:
        buffers = 0 if limit.files else room.node_agent
        most = max(room.moved, room.grown) + (0 if limit.files else room.loading)
        needed = room.arenas + buffers + limit.headroom
        verdicts.append(Verdict(limit.where, needed, needed + most, limit.free + limit.held))
    return tuple(verdicts)


def advice(job: Job, arena_bytes: ArenaBytes, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """What to set where the plan does not fit; each with what it would come to."""
    tight = [one for one in verdicts if not one.fits_recovery]
    if not tight:
        return ()
    most = max(one.most for one in tight)
    found = [
        f"{one.where}: give it {one.most:,} bytes ({one.needed:,} are enough while nothing is restarted elsewhere)"
        for one in tight
    ]
    found.append(
        "a container's shared memory is set by docker run --shm-size, an emptyDir with medium: Memory and a sizeLimit, "
        f"or mount -o remount,size={most} /dev/shm; a cgroup's limit counts shared memory too"
    )
    if job.slots > 3:
        found.append(f"slots=3: {plan(_with(job, slots=3), arena_bytes).node:,} bytes per node")
    if job.replicas and job.nodes > job.replicas + 1:
        m = job.replicas
        k = min(4, job.nodes - m)
        other = _with(job, replicas=0, spares=0, parity=(k, m))
        found.append(f"parity=({k}, {m}) instead: {plan(other, arena_bytes).node:,} bytes per node")
    found.append("Memory(path=...) takes another memory file system")
    return tuple(found)


def _with(job: Job, **changes: object) -> Job:
    from dataclasses import replace

    return replace(job, **changes)  # type: ignore[arg-type]


# -- what survives what

LAUNCHERS = ("torchrun", "slurm", "kubernetes")


@dataclass(frozen=True, slots=True)
class Loss:
    """What is lost, and by launcher from where the run goes on."""

    what: str
    goes_on: dict[str, str]


def survival(job: Job) -> tuple[Loss, ...]:
    """What survives what, with the memory tier that ``job`` has."""
    n = job.survives
    disk = "disk: back to the newest durable step"
    peers = "other nodes' memory: one step lost at most" if n else disk
    memory = "memory of the node: nothing lost"
    several = "other nodes' memory: one step lost at most" if n > 1 else disk
    if n == 1:
        several += ", unless they keep nothing for each other"
    return (
        Loss("a training process", dict.fromkeys(LAUNCHERS, memory)),
        Loss(
            "all training processes of a node",
            {
                "torchrun": f"{memory}; the agent also makes it durable" if job.nodes == 1 else memory,
                "slurm": f"{memory}, within the same allocation; the step's cgroup takes the agent along",
                "kubernetes": f"{memory}, if only the container is restarted and /dev/shm is an emptyDir with medium: "
                f"Memory (a container's own /dev/shm goes with it); else {peers}",
            },
        ),
        Loss("the agent", dict.fromkeys(LAUNCHERS, "training goes on; its next one takes up the journal")),
        Loss(
            "a node or pod",
            {
                "torchrun": peers,
                "slurm": f"{peers} (if the other nodes keep /dev/shm: srun --no-kill, or a requeue there)",
                "kubernetes": f"{peers}; an emptyDir goes with its pod",
            },
        ),
        Loss(f"{max(2, n)} nodes at once", dict.fromkeys(LAUNCHERS, several)),
        Loss(
            "the job's end",
            {
                "torchrun": "memory of the nodes till they are rebooted; after a kill "
                + ("the agent makes it durable" if job.nodes == 1 else "the newest durable step on disk too"),
                "slurm": "memory of the nodes; with job_container/tmpfs /dev/shm goes with the job: disk",
                "kubernetes": disk,
            },
        ),
    )
