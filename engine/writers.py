"""Who writes a run, as far as this node can prove it.

An incarnation's record names the writing process. That this process lives does not mean that it still writes, nor
that it writes *here*: it may have closed the run, or the run may have been copied. So a writer leaves a mark beside
the agents' directories for as long as it writes; the mark names the canonical root and the incarnation's random id.
A mark without its process, or a process without its mark, is no living writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from .format.hashing import hexdigest
from .format.records import IncarnationRecord, Writer
from .memory.process import Process
from .places import Place

log = logging.getLogger("everstep")

KEY_CHARS = 16


def is_writing(place: Place, record: IncarnationRecord) -> bool:
    """Whether another process of this node's present boot provably writes as ``record``."""
    return process_alive(record.writer) and _path(place, record.id).exists()


def process_alive(writer: Writer) -> bool:
    """Whether the writer is a living process of this node's present boot, other than this one."""
    process = Process(pid=writer.pid, start_time=writer.start_time, boot=writer.boot)
    me = Process.current()
    return process != me and process.boot == me.boot and process.alive()


def mark(place: Place, record_id: str) -> None:
    """Say that this process writes as ``record_id``; the marks of former writers of this root go."""
    path = _path(place, record_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in path.parent.glob(f"{_key(place)}-*"):
            with contextlib.suppress(FileNotFoundError):
                other.unlink()
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        log.warning("everstep: other processes will not see that this one writes to %s: %s", place.url, error)


def unmark(place: Place, record_id: str) -> None:
    """This process writes no more."""
    with contextlib.suppress(OSError):
        _path(place, record_id).unlink()


def _path(place: Place, record_id: str) -> Path:
    return place.runtime_base / "writers" / f"{_key(place)}-{record_id}"


def _key(place: Place) -> str:
    return hexdigest(place.url.encode())[:KEY_CHARS]
