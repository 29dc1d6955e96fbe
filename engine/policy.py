"""What a user sets: where snapshots live, and when what is written and kept."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from .errors import BadOption
from .peers.address import split_address
from .plan.chains import DELTA_BASES, MAX_CHAIN_MAX
from .plan.pace import TIER_RATE, parse_rate
from .plan.retention import RETENTION_FIELDS, Retention
from .plan.schedule import AUTO, Every, parse_duration, parse_every

SHARED_MEMORY = Path("/dev/shm")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

NODE_TIER = "nvme"
"""What a node's own tier is called, unless it has a name."""

SLOTS_MIN = 3
SLOTS_MAX = 64
REPLICA_RATE_MIN = 64 << 10
"""A slower sender could not be told from one that hangs."""
PARITY_NODES_MAX = 32
"""Nodes in one parity group: each of them is read when one is rebuilt."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory tier: ``slots`` snapshots of every rank in shared memory, reserved before the first step.

    ``bytes`` is the room of one slot; None estimates it from the state. ``path`` is where the arenas lie;
    None takes /dev/shm, and where that is too small, memory shared with the agent only (with a warning). With
    a path given, too little room there is an error.

    ``copy="eager"`` returns from ``step`` when the copy is done. ``copy="overlap"`` copies parameters and
    optimizer state behind the next forward and backward, and makes the next ``optimizer.step()`` wait for it.
    Whoever writes to parameters between two optimizer steps through ``.data`` evades the check for that.

    ``replicas`` is how many other nodes keep each snapshot too. What several ranks hold alike (``replicated=``, DDP,
    HSDP) they copy from their own tensors, which costs no traffic, and compare at every flush; the rest is sent by the
    agents. At most one fewer than there are nodes: more is lowered, with a warning. ``parity=(k, m)`` protects groups
    of k + m nodes against the loss of any m of them instead, with m/k of a snapshot's memory on each node where
    ``replicas`` takes whole ones. With either, training goes on with the next snapshot once the former one is protected
    on all nodes: the loss of a node costs one step (two with ``copy="overlap"``, one more for each slot above three).
    ``spares`` are addresses ("host:port") of nodes without ranks on which ``everstep spare`` runs; they keep replicas
    first. ``domain`` names what this node shares the fate of (its rack or switch; default: EVERSTEP_DOMAIN): copies lie
    in other domains where there are any. ``replica_rate_bytes_per_s`` limits what a node sends,
    ``replica_timeout_s`` how long training waits for a peer, or for an answer of its own node's agent, before it goes
    on without that protection, with a warning (at most half of ``Policy(slot_timeout_s=)``).

    ``device_slots=1`` takes each snapshot into memory reserved beside the tensors (on their device), at the speed of
    that memory, and moves it into shared memory while training goes on; ``rollback`` restores it from there. A
    snapshot is then protected one step later, as with ``copy="overlap"``.
    """

    slots: int = SLOTS_MIN
    bytes: int | None = None
    path: str | os.PathLike[str] | None = None
    copy: Literal["eager", "overlap"] = "eager"
    replicas: int = 0
    parity: tuple[int, int] | None = None
    spares: tuple[str, ...] = ()
    domain: str | None = None
    replica_rate_bytes_per_s: float | None = None
    replica_timeout_s: float = 30.0
    device_slots: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.slots) or not SLOTS_MIN <= self.slots <= SLOTS_MAX:
            raise BadOption(
                "Memory(slots=) is out of range",
                found=repr(self.slots),
                expected=f"{SLOTS_MIN} to {SLOTS_MAX}",
            )
        if self.bytes is not None and (not _is_whole(self.bytes) or self.bytes <= 0):
            raise BadOption("Memory(bytes=) must be a whole number above 0", found=repr(self.bytes))
        if not _is_whole(self.replicas) or self.replicas < 0:
            raise BadOption("Memory(replicas=) must be a whole number, at least 0", found=repr(self.replicas))
        if self.parity is not None:
            object.__setattr__(self, "parity", _parity(self.parity))
        if self.parity is not None and self.replicas:
            raise BadOption(
                "Memory(replicas=) and Memory(parity=) exclude each other", found=(self.replicas, self.parity)
            )
        object.__setattr__(self, "spares", _spares(self.spares))
        if self.spares and not self.replicas:
            raise BadOption("Memory(spares=) keep replicas: set replicas=, too", found=self.spares)
        if self.domain is not None and not isinstance(self.domain, str):
            raise BadOption("Memory(domain=) must be a text", found=repr(self.domain))
        rate = self.replica_rate_bytes_per_s
        if rate is not None and (not _is_number(rate) or rate < REPLICA_RATE_MIN):
            raise BadOption(
                "Memory(replica_rate_bytes_per_s=) is too low",
                found=repr(rate),
                expected=f"at least {REPLICA_RATE_MIN} bytes per second",
            )
        if not _is_number(self.replica_timeout_s) or not 0 < self.replica_timeout_s < float("inf"):
            raise BadOption(
                "Memory(replica_timeout_s=) must be a positive, finite number of seconds",
                found=repr(self.replica_timeout_s),
            )
        if self.device_slots not in (0, 1) or isinstance(self.device_slots, bool):
            raise BadOption(
                "Memory(device_slots=) is out of range", found=self.device_slots, expected="0 or 1"
            )
        if self.path is not None:
            object.__setattr__(self, "path", _directory(self.path))
        if self.copy not in ("eager", "overlap"):
            raise BadOption("Memory(copy=) is unknown", found=self.copy, expected="'eager' or 'overlap'")

    @property
    def copies(self) -> int:
        """How many lost nodes are to be survived."""
        return self.parity[1] if self.parity is not None else self.replicas

    @property
    def directory(self) -> Path:
        return Path(self.path) if self.path is not None else SHARED_MEMORY


@dataclass(frozen=True, slots=True)
class Policy:
    """When what is written and kept.

    ``snapshot_every`` and ``full_every`` are steps (an int) or a time ("90s", "10m", "2h"); None: never by
    itself.

    What stays: the ``keep_last`` newest checkpoints; every one whose step ``keep_every`` divides; one in each
    ``keep_interval`` ("6h"); the ``keep_best`` best by a metric of ``step(metrics=)`` or ``save(metrics=)`` that
    ``best`` names, with the way that is better: ``best="min:loss"``, ``"max:accuracy"`` (where it is missing or not
    finite, the checkpoint is none of the best; of equal ones the newer is better); the newest of each of the last
    ``keep_incarnations`` incarnations, also of those that were given up; what is pinned (``everstep pin``); and
    whatever these are deltas of. The rest is removed after each commit.

    ``delta_every`` (steps or time) makes the flushes between fulls *deltas*: what has changed against a durable
    checkpoint, their base, which stays as long as they need it. The first flush is a full. ``delta_base="full"``:
    against the newest full; ``"previous"``: against the newest checkpoint that is fewer than ``max_chain`` deltas away
    from a full. Once ``max_chain`` deltas stand on one full, the agent makes the newest of them a full by itself, in
    the background: so chains stay short with ``full_every=None``, too. Where it has not come to that when there are
    twice as many, the next flush is a full. What a rank cannot store against the base (its layout has changed, the base
    is damaged) it stores in full, and the next flush is a full. ``compress="zstd"`` compresses full images as well.

    ``on_slow`` says what happens when a flush is due while others are unfinished: ``"skip"`` it, ``"wait"`` in
    the training loop, or ``"supersede"`` the unfinished one. ``on_failure`` says what a failed flush does:
    ``"warn"`` (and raise after ``failures_max`` in a row; None: never) or ``"raise"`` at the next call.

    With several ranks, tensors that should be equal on all of them (``replicated=``, DDP) are stored by one rank and
    *audited*: within ``audit_every`` flushes (more where there is much to read) each of them is hashed once on every
    rank, and the hashes are compared before the commit. None: never. ``on_disagreement`` says what happens where
    they differ: ``"warn"`` commits, records it in the manifest, and warns on all ranks at the next call;
    ``"refuse"`` fails the flush with ReplicasDiffer on all ranks, and every later one until the ranks agree again.
    What differed once is looked at again at each flush. Second copies (``Memory(replicas=)``) are compared with what is
    stored at every flush in any case, by the agents.

    ``full_every="auto"`` takes the interval that loses the least time (Young, Daly), from what a full is measured to
    cost training and ``mtbf``, the mean time between failures of the job ("6h"); ten minutes until that is known. It is
    the interval between fulls, with ``delta_every`` as without: deltas come between them at their own interval, cost
    what they cost, and count for nothing in it. Where it is no longer than ``delta_every``, all flushes are fulls.

    ``max_unsaved`` is how much training may hang on memory alone: once the newest durable step is older than that, in
    steps or time ("1h"), all ranks are told at the same step, and again each time that has doubled; as a warning, or an
    error with ``on_failure="raise"``. Time counts from the opening where nothing became durable since.

    ``rate_bytes_per_s`` limits what the agent writes to the root: a number, "50%" of what the disk or network is
    measured to do, "adaptive" (as fast as training does not become slower), or None.

    ``commit_timeout_s`` bounds the wait for the other ranks' votes, which ends sooner once a rank is known to have
    ended without one, ``slot_timeout_s`` the wait of the training loop for a free slot, ``rank_timeout_s`` any wait for
    another rank, ``close_timeout_s`` the drain at the end. Every rank gives a sign of life each ``heartbeat_s``; one
    that gave none for ``heartbeat_timeout_s`` (default: four times that) is suspected.
    """

    snapshot_every: int | str | None = 1
    full_every: int | str | None = "10m"
    delta_every: int | str | None = None
    delta_base: Literal["full", "previous"] = "full"
    max_chain: int = 16
    compress: Literal["zstd"] | None = None
    keep_last: int = 3
    keep_every: int | None = None
    keep_interval: str | None = None
    keep_best: int | None = None
    best: str | None = None
    keep_incarnations: int | None = None
    on_slow: Literal["skip", "wait", "supersede"] = "skip"
    on_failure: Literal["warn", "raise"] = "warn"
    failures_max: int | None = 5
    audit_every: int | None = 10
    on_disagreement: Literal["warn", "refuse"] = "warn"
    max_unsaved: int | str | None = None
    mtbf: str | None = None
    rate_bytes_per_s: float | str | None = None
    commit_timeout_s: float = 300.0
    slot_timeout_s: float = 120.0
    rank_timeout_s: float = 300.0
    close_timeout_s: float = 1800.0
    linger_s: float = 60.0
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _retention(self)
        if self.failures_max is not None and (not _is_whole(self.failures_max) or self.failures_max < 1):
            raise BadOption(
                "Policy(failures_max=) must be a whole number, at least 1", found=repr(self.failures_max)
            )
        if self.audit_every is not None and (not _is_whole(self.audit_every) or self.audit_every < 0):
            raise BadOption(
                "Policy(audit_every=) must be a whole number of flushes, or None",
                found=repr(self.audit_every),
            )
        if self.on_disagreement not in ("warn", "refuse"):
            raise BadOption(
                "Policy(on_disagreement=) is unknown", found=self.on_disagreement, expected="warn or refuse"
            )
        if self.on_slow not in ("skip", "wait", "supersede"):
            raise BadOption(
                "Policy(on_slow=) is unknown", found=self.on_slow, expected="skip, wait or supersede"
            )
        if self.on_failure not in ("warn", "raise"):
            raise BadOption("Policy(on_failure=) is unknown", found=self.on_failure, expected="warn or raise")
        parse_rate(self.rate_bytes_per_s, "Policy(rate_bytes_per_s=)")
        if self.heartbeat_timeout_s is None:
            object.__setattr__(
                self, "heartbeat_timeout_s", 4 * self.heartbeat_s if _is_number(self.heartbeat_s) else 0
            )
        for name in (
            "heartbeat_s",
            "heartbeat_timeout_s",
            "commit_timeout_s",
            "slot_timeout_s",
            "rank_timeout_s",
            "close_timeout_s",
            "linger_s",
        ):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < float("inf"):
                raise BadOption(
                    f"Policy({name}=) must be a positive, finite number of seconds", found=repr(value)
                )
        parse_every(self.snapshot_every, "Policy(snapshot_every=)")
        _check_deltas(self)
        _check_flushes(self)

    @property
    def retention(self) -> Retention:
        """What stays at the root."""
        return _retention(self)


def _check_deltas(policy: Policy) -> None:
    if policy.delta_base not in DELTA_BASES:
        raise BadOption(
            "Policy(delta_base=) is unknown", found=policy.delta_base, expected=" or ".join(DELTA_BASES)
        )
    if not _is_whole(policy.max_chain) or not 1 <= policy.max_chain <= MAX_CHAIN_MAX:
        raise BadOption(
            "Policy(max_chain=) is out of range",
            found=repr(policy.max_chain),
            expected=f"1 to {MAX_CHAIN_MAX}",
        )
    if policy.compress not in (None, "zstd"):
        raise BadOption("Policy(compress=) is unknown", found=policy.compress, expected="'zstd' or None")
    delta = parse_every(policy.delta_every, "Policy(delta_every=)")
    full = None if policy.full_every == AUTO else parse_every(policy.full_every, "Policy(full_every=)")
    if delta is not None and full is not None and not _shorter(delta, full):
        raise BadOption(
            "Policy(delta_every=) is no shorter than the interval between fulls",
            found=(policy.delta_every, policy.full_every),
            expected="deltas between fulls",
        )


def _shorter(one: Every, other: Every) -> bool:
    """Whether that is so, or cannot be told: of steps and time."""
    if one.steps is not None and other.steps is not None:
        return one.steps < other.steps
    return one.seconds is None or other.seconds is None or one.seconds < other.seconds


def _check_flushes(policy: Policy) -> None:
    every = policy.full_every
    full = None if every == AUTO else parse_every(every, "Policy(full_every=)")
    delta = parse_every(policy.delta_every, "Policy(delta_every=)")
    mtbf_s = parse_duration(policy.mtbf, "Policy(mtbf=)")
    if (every == AUTO) != (mtbf_s is not None):
        raise BadOption(
            'Policy(full_every="auto") and Policy(mtbf=) belong together',
            found=(every, policy.mtbf),
            expected='mtbf="6h", say: the mean time between failures of the whole job',
        )
    unsaved = parse_every(policy.max_unsaved, "Policy(max_unsaved=)")
    between = delta or full
    if unsaved is None or between is None:
        return
    if (unsaved.steps or 0) <= (between.steps or 0) and (unsaved.seconds or 0) <= (between.seconds or 0):
        raise BadOption(
            "Policy(max_unsaved=) is no longer than the interval between flushes",
            found=(policy.max_unsaved, policy.delta_every or every),
            expected="time for a flush, and for one that fails, on top of it",
        )


@dataclass(frozen=True)
class Tier:
    """A further place for checkpoints, behind the run's root: ``url`` is a path or a URL as fsspec knows them
    (``s3://bucket/run``), ``storage_options`` what opens it (never logged or stored; credentials are better left to the
    environment). The node's agent copies to it what has become durable at the root, while training goes on.

    ``name`` is what handles and ``everstep status`` call it (default: the URL's scheme). ``every`` says which flushes
    go there: each n-th, the first included, or one in each interval ("1h"); an explicit ``save`` and the last
    snapshot at ``close`` always do. ``keep_last``, ``keep_every``, ``keep_interval``, ``keep_best`` with ``best``,
    and ``keep_incarnations`` are this tier's own retention, as in ``Policy``. ``rate`` limits what a node sends to
    it: bytes per second, a share of what the way there is measured to do, "adaptive" (as fast as training does not
    become slower), or None.

    ``scope="node"`` is a directory of each node's own (NVMe) between memory and a root that is slow, at most one,
    named "nvme": every flush is written there first, which frees its slot, and uploaded to the root from there, also
    after the agent died or the node was rebooted. Its retention (``keep_last``, ``keep_every``) removes nothing newer
    than the newest checkpoint at the root, nor the bases of deltas that stay.
    """

    url: str | os.PathLike[str]
    name: str = ""
    every: int | str = 1
    keep_last: int = 3
    keep_every: int | None = None
    keep_interval: str | None = None
    keep_best: int | None = None
    best: str | None = None
    keep_incarnations: int | None = None
    rate: float | str | None = TIER_RATE
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    scope: Literal["shared", "node"] = "shared"

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)) or not os.fspath(self.url):
            raise BadOption("Tier(url=) must be a path or a URL", found=repr(self.url))
        if self.scope not in ("shared", "node"):
            raise BadOption("Tier(scope=) is unknown", found=repr(self.scope), expected="'shared' or 'node'")
        scheme = _SCHEME.match(os.fspath(self.url))
        name = self.name or (NODE_TIER if self.scope == "node" else scheme.group(1) if scheme else "file")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadOption(
                "Tier(name=) cannot be used", found=repr(name), expected="up to 64 letters, digits, _ and -"
            )
        object.__setattr__(self, "name", name)
        parse_every(self.every, "Tier(every=)")
        if self.scope == "node" and (self.every != 1 or (scheme and scheme.group(1).lower() != "file")):
            raise BadOption(
                'Tier(scope="node") is a local directory that every flush passes through',
                found=f"{os.fspath(self.url)}, every={self.every!r}",
                expected="a path, and no every=",
            )
        if self.every is None:
            raise BadOption(
                "Tier(every=) cannot be used", found=None, expected="a number of flushes, or a time"
            )
        kept = _retention(self)
        if self.scope == "node" and kept != Retention(kept.keep_last, kept.keep_every):
            raise BadOption(
                'Tier(scope="node") keeps the last ones, and every n-th',
                found=repr(kept),
                expected="keep_last= and keep_every=; the others are for the root and for further tiers",
            )
        parse_rate(self.rate, "Tier(rate=)")
        if not isinstance(self.storage_options, Mapping):
            raise BadOption(
                "Tier(storage_options=) must be a mapping", found=type(self.storage_options).__name__
            )

    @property
    def retention(self) -> Retention:
        """What stays there."""
        return _retention(self)


def _retention(owner: Policy | Tier) -> Retention:
    """Raises BadOption, naming the option."""
    try:
        return Retention(**{name: getattr(owner, name) for name in RETENTION_FIELDS})
    except BadOption as error:
        option = f"{type(owner).__name__}({error.fields['option']}=)"
        raise BadOption(
            f"{option} cannot be used", found=error.found, expected=error.expected, option=option
        ) from None


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parity(given: object) -> tuple[int, int]:
    numbers = [one if _is_whole(one) else 0 for one in given] if isinstance(given, (tuple, list)) else []
    if len(numbers) != 2 or min(numbers) < 1 or sum(numbers) > PARITY_NODES_MAX:
        raise BadOption(
            "Memory(parity=) must be two whole numbers (k, m): any m of k + m nodes may be lost",
            found=repr(given),
            expected=f"each at least 1, together at most {PARITY_NODES_MAX}",
        )
    return numbers[0], numbers[1]


def _spares(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, (tuple, list)):
        raise BadOption("Memory(spares=) must be a list of addresses", found=repr(given))
    for one in given:
        try:
            port = split_address(one)[1] if isinstance(one, str) else 0
        except ValueError:
            port = 0
        if not port:
            raise BadOption("Memory(spares=) names no address", found=repr(one), expected="host:port")
    return tuple(given)


def _directory(path: object) -> Path:
    """Absolute: the agent, a process of its own, opens it too."""
    if (
        not isinstance(path, (str, os.PathLike))
        or not isinstance(os.fspath(path), str)
        or not os.fspath(path)
    ):
        raise BadOption("Memory(path=) must be a path", found=repr(path))
    found = Path(os.fspath(path)).absolute()
    if not found.is_dir():
        raise BadOption(
            "Memory(path=) must be a directory", found=f"{found}: no directory", hint="Make it first"
        )
    return found
