"""Who writes a run, as far as it can be proved.

An incarnation's record names the writing process. That this process lives does not mean that it still writes, nor
that it writes *here*: it may have closed the run, or the run may have been copied. So a writer leaves a mark beside
the agents' directories for as long as it writes; the mark names the canonical root and the incarnation's random id.
A mark without its process, or a process without its mark, is no living writer. Once the writer only waits for what it
wrote last, the mark says so, and until when.

Of a writer on another host its node's agent tells, in the beacon that it leaves on the shared tier: it lives if that
very process is named there as living, by a beacon that is made anew while we look. Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .backends.api import Backend
from .errors import EverstepError
from .format.beacon import Beacon, BeaconRank
from .format.hashing import hexdigest
from .format.records import IncarnationRecord, Writer
from .memory.process import Process
from .places import Place
from .plan.liveness import Look, goes_on
from .store.beacons import read_beacon, read_beacons
from .store.blocking import run_blocking
from .store.runs import read_incarnations

log = logging.getLogger("everstep")

KEY_CHARS = 16

ENDING_S_MAX = 60.0
"""How long a restart waits for a former writer on its node that only ends."""
ENDING_PAUSE_S = 0.1

LOOK_INTERVALS = 2.5
"""Of a beacon, within which one that goes on is seen to."""
LOOK_S_MAX = 60.0
"""However seldom a beacon says that it comes."""
LOOKS_PER_INTERVAL = 10


def is_writing(place: Place, record: IncarnationRecord) -> bool:
    """Whether another process of this node's present boot provably writes as ``record``."""
    return process_alive(record.writer) and _path(place, record.id).exists()


def process_alive(writer: Writer) -> bool:
    """Whether the writer is a living process of this node's present boot, other than this one."""
    process = Process(pid=writer.pid, start_time=writer.start_time, boot=writer.boot)
    me = Process.current()
    return process != me and process.boot == me.boot and process.alive()


def mark(place: Place, record_id: str, former: Collection[str] = ()) -> None:
    """Say that this process writes as ``record_id``. The marks of ``former`` writers of this root go, by their records'
    ids, and those of dead processes: whoever opens the run at this very moment keeps his."""
    path = _path(place, record_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in path.parent.glob(f"{_key(place)}-*"):
            if other.name.rpartition("-")[2] in former or not _is_alive(_read(other)):
                with contextlib.suppress(FileNotFoundError):
                    other.unlink()
        _put(path, _Mark(*_me()))
    except OSError as error:
        log.warning("everstep: other processes will not see that this one writes to %s: %s", place.url, error)


def ending(place: Place, record_id: str, *, within_s: float) -> None:
    """Say that this process only waits for what it wrote last, at most so long. Another's mark stays as it is: the
    ranks of a node have one."""
    path = _path(place, record_id)
    found = _read(path)
    if found is not None and (found.pid, found.start_time) == _me():
        with contextlib.suppress(OSError):
            _put(path, _Mark(*_me(), time.monotonic() + within_s))


def ending_s(place: Place, record: IncarnationRecord) -> float | None:
    """How long ``record``'s writer, which is alive, waits for its end at most; None if it does not end."""
    found = _read(_path(place, record.id))
    if found is None or found.ends_at is None:
        return None
    return max(0.0, found.ends_at - time.monotonic())  # the clock of all processes of a boot


def await_end(place: Place, record: IncarnationRecord, patience_s: float) -> bool:
    """Wait for ``record``'s writer if it is on this node and only ends, at most ``patience_s``, and say so. Whether
    there was one."""
    left_s = ending_s(place, record)
    if left_s is None or not is_writing(place, record):
        return False
    patience_s = min(patience_s, left_s)
    warnings.warn(
        f"everstep: process {record.writer.pid}, which wrote this run, is ending: waiting up to {patience_s:.0f} s for "
        "its last snapshot to become durable",
        RuntimeWarning,
        stacklevel=2,
    )
    until = time.monotonic() + patience_s
    while is_writing(place, record) and time.monotonic() < until:
        time.sleep(ENDING_PAUSE_S)
    return True


def unmark(place: Place, record_id: str) -> None:
    """This process writes no more. The mark of another that does stays: the ranks of a node have one."""
    path = _path(place, record_id)
    found = _read(path)
    if found is not None and (found.pid, found.start_time) != _me() and _is_alive(found):
        return
    with contextlib.suppress(OSError):
        path.unlink()


class _Mark(msgspec.Struct):
    """Who writes, and, once it ends, by when it has done so: on the monotonic clock, which all processes of a boot
    share."""

    pid: int
    start_time: int
    ends_at: float | None = None


def _is_alive(found: _Mark | None) -> bool:
    return found is not None and Process(found.pid, found.start_time, Process.current().boot).alive()


def _me() -> tuple[int, int]:
    me = Process.current()
    return me.pid, me.start_time


def _put(path: Path, what: _Mark) -> None:
    """Replaced as a whole; who reads sees one or the other."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(what))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _read(path: Path) -> _Mark | None:
    """The mark; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Mark)
    except (OSError, msgspec.MsgspecError):
        return None


def _path(place: Place, record_id: str) -> Path:
    return place.runtime_base / "writers" / f"{_key(place)}-{record_id}"


def _key(place: Place) -> str:
    return hexdigest(place.url.encode())[:KEY_CHARS]


@dataclass(frozen=True, slots=True)
class Seen:
    """A writer on another host, alive. ``age_s`` is how old its last beat was when its agent said so."""

    host: str
    pid: int
    age_s: float | None


class Lookout:
    """Looks whether a run's newest writer lives on another host. A beacon that stands still costs the time of some of
    its intervals, once: :meth:`begin` is called before something that takes time anyhow, such as a load."""

    def __init__(self, backend: Backend, known: dict[int, IncarnationRecord] | None = None) -> None:
        """``known``: see :func:`~.store.runs.read_incarnations`."""
        self._backend = backend
        self._known = known
        self._began = time.monotonic()
        self._first: dict[str, Beacon] = {}

    def begin(self) -> None:
        """The first look, if the newest writer was on another host. Errors are left to those who need to read."""
        with contextlib.suppress(EverstepError):
            records = run_blocking(read_incarnations(self._backend, self._known))
            if records and is_elsewhere(records[-1].writer):
                self._began, self._first = time.monotonic(), self._look()

    def sees(self, record: IncarnationRecord) -> Seen | None:
        """The writer of ``record``, if it lives on another host. May wait, see above."""
        if not is_elsewhere(record.writer):
            return None
        if not self._first:
            self._began = time.monotonic()
        for name, beacon in self._look().items():
            if _living(beacon, record) is not None:
                seen = self._watch(name, beacon, record)
                if seen is not None:
                    return seen
        return None

    def _watch(self, name: str, now: Beacon | None, record: IncarnationRecord) -> Seen | None:
        looks = [_look_of(self._first.get(name)), _look_of(now)]
        if now is None:
            return None
        pause = min(now.interval_s, LOOK_S_MAX) / LOOKS_PER_INTERVAL
        until = self._began + min(LOOK_INTERVALS * now.interval_s, LOOK_S_MAX)
        while now is not None and (rank := _living(now, record)) is not None:
            if goes_on(looks):
                return Seen(now.host, rank.pid, rank.beat_age_s)
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            try:
                now = run_blocking(read_beacon(self._backend, name))
            except EverstepError:
                return None
            looks.append(_look_of(now))
        return None

    def _look(self) -> dict[str, Beacon]:
        try:
            return run_blocking(read_beacons(self._backend))[0]
        except EverstepError as error:
            log.warning("everstep: whether a writer lives on another host cannot be seen: %s", error)
            return {}


def is_elsewhere(writer: Writer) -> bool:
    """Whether the writer is, or was, on another host than this, or in another boot of it."""
    return (writer.host, writer.boot) != (socket.gethostname(), Process.current().boot)


def _living(beacon: Beacon, record: IncarnationRecord) -> BeaconRank | None:
    """The record's writer, as a living rank of the beacon. An agent that lingers without its trainers has none."""
    writer = record.writer
    if (beacon.incarnation, beacon.boot) != (record.number, writer.boot):
        return None
    found = (r for r in beacon.living if (r.pid, r.start_time) == (writer.pid, writer.start_time))
    return next(found, None)


def _look_of(beacon: Beacon | None) -> Look:
    return Look(None, 0) if beacon is None else Look(beacon.agent, beacon.count)
