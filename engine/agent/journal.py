"""What the agent has promised and not yet done, in LMDB, so that the next agent goes on after a kill -9.

Entries are jobs (a rank's flush of a step that was acknowledged), mirrors (checkpoints that are owed to a further
tier), merges (deltas that are to be made fulls), uploads (how far each of them has come) and members (trainers that
registered and neither said goodbye nor were seen off). Calls may wait for the disk: they are made from one helper
thread, never from the agent's loop. Only the holder of the agent's lock opens it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import lmdb
import msgspec
from everstep.errors import AgentError
from everstep.format.hashing import hexdigest

VERSION = 3
MAP_BYTES = 64 << 20
"""Bound of the journal; an entry has a few hundred bytes, notes of an upload some hundred kilobytes at most, and all
are bounded in number."""

_KEY = struct.Struct(">QQI")
_GUARD = b"guard"

QUEUED = "queued"
STAGED = "staged"
VOTED = "voted"
"""Stages of a job: the slot is needed until its share lies in the node's own tier, if there is one, or its vote is at
the root."""


@dataclass(frozen=True)
class JobEntry:
    """A rank's flush. ``arena`` is "" for a memfd; ``root`` is b"" where the slot was not sealed yet;
    ``order`` is the place in the queue; ``process`` (pid, start time, boot) is the trainer that asked."""

    incarnation: int
    step: int
    rank: int
    run_id: str
    world: int
    arena: str
    slot: int
    generation: int
    kind: str
    attempt: int
    order: int
    process: tuple[int, int, str]
    stage: str = QUEUED
    root: bytes = b""
    tiers: tuple[str, ...] = ()
    """Names of the tiers that the checkpoint is owed to, once it is one."""
    base: tuple[int, int] | None = None
    """(incarnation, step) that a delta stands on."""
    merge: bool = False
    """Whether it is to be made a full, once it is durable."""

    @property
    def key(self) -> bytes:
        return _KEY.pack(self.incarnation, self.step, self.rank)

    @property
    def uploads(self) -> bytes:
        """How the keys of the notes on its uploads begin: as if the root were a tier without a name."""
        return self.key + hexdigest(b"").encode()


@dataclass(frozen=True)
class MirrorEntry:
    """A checkpoint that is to reach ``tier`` (by name); this node sees to ``ranks`` first."""

    tier: str
    run_id: str
    incarnation: int
    step: int
    attempt: int
    ranks: tuple[int, ...]
    base: tuple[int, int] | None = None
    """(incarnation, step) that a delta stands on."""

    @property
    def key(self) -> bytes:
        return _KEY.pack(self.incarnation, self.step, 0) + hexdigest(self.tier.encode()).encode()

    def joined(self, ranks: Iterable[int]) -> MirrorEntry:
        """The same mirror, with ``ranks`` seen to as well."""
        return replace(self, ranks=tuple(sorted({*self.ranks, *ranks})))

    @property
    def uploads(self) -> bytes:
        """How the keys of the notes on its uploads begin."""
        return self.key


@dataclass(frozen=True)
class MergeEntry:
    """A delta checkpoint that is to be made a full, by ``attempt``; this node sees to ``ranks``. Then it goes to
    ``tiers`` as one."""

    run_id: str
    incarnation: int
    step: int
    attempt: int
    world: int
    ranks: tuple[int, ...]
    tiers: tuple[str, ...]

    @property
    def key(self) -> bytes:
        return _KEY.pack(self.incarnation, self.step, 0)

    @property
    def uploads(self) -> bytes:
        """How the keys of the notes on its uploads begin: as if it were a tier with a name that none has."""
        return self.key + hexdigest(b"\0merge").encode()


Uploading = JobEntry | MirrorEntry | MergeEntry
"""What uploads belong to; their notes go with it."""


def _note_key(entry: Uploading, name: str) -> bytes:
    """Of the notes on the upload of object ``name``. LMDB's keys are short, names need not be."""
    return entry.uploads + hexdigest(name.encode()).encode()


@dataclass(frozen=True)
class GuardEntry:
    """How this node's snapshots are protected: an encoded node map, this node's position in it, the secret of the
    agents, and where this one listens."""

    nodes: bytes
    me: int
    run_id: str
    incarnation: int
    secret: bytes
    host: str
    port: int
    arenas: str
    chunk_bytes: int
    rate_bytes_per_s: float | None
    timeout_s: float
    limit_s: float


@dataclass(frozen=True)
class MemberEntry:
    """A registered trainer with an arena that has a path."""

    run_id: str
    rank: int
    world: int
    incarnation: int
    adopted: tuple[int, int] | None
    process: tuple[int, int, str]
    arena: str

    @property
    def key(self) -> bytes:
        return _KEY.pack(self.incarnation, self.rank, 0)


class Journal(Protocol):
    """Every method returns when what it says is on disk."""

    epoch: int
    repaired: str | None

    def jobs(self) -> list[JobEntry]: ...
    def members(self) -> list[MemberEntry]: ...
    def put_job(self, entry: JobEntry) -> None: ...
    def drop_jobs(
        self, entries: list[JobEntry], owed: Sequence[MirrorEntry] = (), merge: MergeEntry | None = None
    ) -> None: ...
    def mirrors(self) -> list[MirrorEntry]: ...
    def drop_mirror(self, entry: MirrorEntry) -> None: ...
    def merges(self) -> list[MergeEntry]: ...
    def drop_merge(self, entry: MergeEntry, owed: Sequence[MirrorEntry] = ()) -> None: ...
    def upload(self, entry: Uploading, name: str) -> bytes | None: ...
    def put_upload(self, entry: Uploading, name: str, data: bytes) -> None: ...
    def put_member(self, entry: MemberEntry) -> None: ...
    def drop_member(self, entry: MemberEntry) -> None: ...
    def guard(self) -> GuardEntry | None: ...
    def put_guard(self, entry: GuardEntry) -> None: ...
    def close(self) -> None: ...


class NoJournal:
    """The journal of an inline agent, which dies with its trainer: nothing is kept."""

    epoch = 0
    repaired: str | None = None

    def jobs(self) -> list[JobEntry]:
        return []

    def members(self) -> list[MemberEntry]:
        return []

    def put_job(self, entry: JobEntry) -> None: ...
    def drop_jobs(
        self, entries: list[JobEntry], owed: Sequence[MirrorEntry] = (), merge: MergeEntry | None = None
    ) -> None: ...
    def mirrors(self) -> list[MirrorEntry]:
        return []

    def drop_mirror(self, entry: MirrorEntry) -> None: ...
    def merges(self) -> list[MergeEntry]:
        return []

    def drop_merge(self, entry: MergeEntry, owed: Sequence[MirrorEntry] = ()) -> None: ...
    def upload(self, entry: Uploading, name: str) -> bytes | None:
        return None

    def put_upload(self, entry: Uploading, name: str, data: bytes) -> None: ...
    def put_member(self, entry: MemberEntry) -> None: ...
    def drop_member(self, entry: MemberEntry) -> None: ...
    def guard(self) -> GuardEntry | None:
        return None

    def put_guard(self, entry: GuardEntry) -> None: ...
    def close(self) -> None: ...


class LmdbJournal:
    """``epoch`` numbers the agents that opened this journal; ``repaired`` says what was wrong with one that
    had to be set aside (its jobs are lost; the trainers' own lists of unfinished flushes bring back what
    still lives)."""

    def __init__(self, path: Path) -> None:
        self.repaired: str | None = None
        try:
            self._open(path)
        except (lmdb.Error, msgspec.MsgspecError, AgentError) as error:
            self.repaired = f"{type(error).__name__}: {error}"
            _set_aside(path)
            self._open(path)

    def _open(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        # No lock file of LMDB's own: the agent's lock admits one process, and a killed reader leaves
        # nothing stale.
        self._env = lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=6, lock=False, mode=0o600)
        try:
            # One transaction: each would wait for the disk by itself, and a trainer waits for all of them.
            with self._env.begin(write=True) as txn:
                self._meta = self._env.open_db(b"meta", txn=txn)
                self._jobs = self._env.open_db(b"jobs", txn=txn)
                self._members = self._env.open_db(b"members", txn=txn)
                self._mirrors = self._env.open_db(b"mirrors", txn=txn)
                self._uploads = self._env.open_db(b"uploads", txn=txn)
                self._merges = self._env.open_db(b"merges", txn=txn)
                data = txn.get(b"state", _encode({"v": VERSION, "epoch": 0}), db=self._meta)
                known = msgspec.msgpack.decode(data)
                if known["v"] != VERSION:
                    raise AgentError("a journal of another version", found=known["v"], expected=VERSION)
                self.epoch = int(known["epoch"]) + 1
                txn.put(b"state", _encode({"v": VERSION, "epoch": self.epoch}), db=self._meta)
            self.jobs()
            self.members()
            self.mirrors()
            self.merges()
            self.guard()
        except BaseException:
            self._env.close()
            raise

    def jobs(self) -> list[JobEntry]:
        """In the order in which they were accepted."""
        with self._env.begin(db=self._jobs) as txn:
            found = [msgspec.convert(_decode(value), JobEntry) for _, value in txn.cursor()]
        return sorted(found, key=lambda entry: entry.order)

    def members(self) -> list[MemberEntry]:
        with self._env.begin(db=self._members) as txn:
            return [msgspec.convert(_decode(value), MemberEntry) for _, value in txn.cursor()]

    def put_job(self, entry: JobEntry) -> None:
        self._put(self._jobs, entry.key, entry)

    def drop_jobs(
        self, entries: list[JobEntry], owed: Sequence[MirrorEntry] = (), merge: MergeEntry | None = None
    ) -> None:
        """Forget these; one that was replaced by a later attempt meanwhile stays. With them is remembered what is
        ``owed``, and what is to be merged, from now on: no crash comes between."""
        with self._env.begin(write=True, db=self._jobs) as txn:
            for entry in entries:
                value = txn.get(entry.key)
                if value is not None and _decode(value)["attempt"] <= entry.attempt:
                    txn.delete(entry.key)
                    self._drop_uploads(txn, entry)
            self._put_owed(txn, owed)
            if merge is not None:
                txn.put(merge.key, _encode(merge), db=self._merges)

    def _put_owed(self, txn: Any, owed: Sequence[MirrorEntry]) -> None:
        for mirror in owed:
            known = txn.get(mirror.key, db=self._mirrors)
            former = () if known is None else msgspec.convert(_decode(known), MirrorEntry).ranks
            txn.put(mirror.key, _encode(mirror.joined(former)), db=self._mirrors)

    def mirrors(self) -> list[MirrorEntry]:
        """By incarnation and step."""
        with self._env.begin(db=self._mirrors) as txn:
            return [msgspec.convert(_decode(value), MirrorEntry) for _, value in txn.cursor()]

    def drop_mirror(self, entry: MirrorEntry) -> None:
        """It is there, or will not be; so are its uploads. A later attempt that is owed meanwhile stays."""
        with self._env.begin(write=True, db=self._mirrors) as txn:
            value = txn.get(entry.key)
            if value is not None and _decode(value)["attempt"] <= entry.attempt:
                txn.delete(entry.key)
                self._drop_uploads(txn, entry)

    def merges(self) -> list[MergeEntry]:
        """By incarnation and step."""
        with self._env.begin(db=self._merges) as txn:
            return [msgspec.convert(_decode(value), MergeEntry) for _, value in txn.cursor()]

    def drop_merge(self, entry: MergeEntry, owed: Sequence[MirrorEntry] = ()) -> None:
        """It is over; what is ``owed`` from now on is remembered with that."""
        with self._env.begin(write=True, db=self._merges) as txn:
            txn.delete(entry.key)
            self._drop_uploads(txn, entry)
            self._put_owed(txn, owed)

    def _drop_uploads(self, txn: Any, entry: Uploading) -> None:
        cursor = txn.cursor(db=self._uploads)
        found = cursor.set_range(entry.uploads)
        while found and cursor.key().startswith(entry.uploads):
            found = cursor.delete()

    def upload(self, entry: Uploading, name: str) -> bytes | None:
        """What :meth:`put_upload` said last."""
        with self._env.begin(db=self._uploads) as txn:
            value = txn.get(_note_key(entry, name))
            return None if value is None else bytes(value)

    def put_upload(self, entry: Uploading, name: str, data: bytes) -> None:
        """How far the upload of object ``name`` has come, in the writer's own words."""
        try:
            with self._env.begin(write=True, db=self._uploads) as txn:
                txn.put(_note_key(entry, name), data)
        except lmdb.Error as error:
            raise AgentError("the agent's journal cannot be written", found=str(error)) from None

    def put_member(self, entry: MemberEntry) -> None:
        self._put(self._members, entry.key, entry)

    def drop_member(self, entry: MemberEntry) -> None:
        with self._env.begin(write=True, db=self._members) as txn:
            txn.delete(entry.key)

    def guard(self) -> GuardEntry | None:
        """What :meth:`put_guard` said last."""
        with self._env.begin(db=self._meta) as txn:
            value = txn.get(_GUARD)
        return None if value is None else msgspec.convert(_decode(value), GuardEntry)

    def put_guard(self, entry: GuardEntry) -> None:
        self._put(self._meta, _GUARD, entry)

    def close(self) -> None:
        self._env.close()

    def _put(self, db: Any, key: bytes, entry: JobEntry | MemberEntry | GuardEntry) -> None:
        try:
            with self._env.begin(write=True, db=db) as txn:
                txn.put(key, _encode(entry))
        except lmdb.Error as error:
            raise AgentError("the agent's journal cannot be written", found=str(error)) from None


class Notebook:
    """Notes on one upload, in ``journal``; ``journaled`` runs a call of it in its thread."""

    def __init__(
        self, journal: Journal, journaled: Callable[..., Awaitable[Any]], entry: Uploading, name: str
    ) -> None:
        self._journal = journal
        self._journaled = journaled
        self._of = entry, name

    def load(self) -> bytes | None:
        return self._journal.upload(*self._of)

    async def save(self, data: bytes) -> None:
        await self._journaled(self._journal.put_upload, *self._of, data)


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _decode(value: bytes) -> dict[str, Any]:
    found = msgspec.msgpack.decode(value)
    if not isinstance(found, dict):
        raise AgentError("a journal entry is no map", found=type(found).__name__)
    return found


def _set_aside(path: Path) -> None:
    """Keep one damaged journal for whoever wants to look; older ones go."""
    old = path.with_name(f"{path.name}.damaged")
    if old.exists():
        for name in os.listdir(old):
            (old / name).unlink()
        old.rmdir()
    if path.exists():
        os.rename(path, old)
