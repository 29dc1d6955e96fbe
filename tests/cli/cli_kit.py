"""Runs to look at, and the command line in processes of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from everstep.cli.arenas import directory_of_run
from everstep.cli.main import main
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION, HASH_ID
from everstep.format.manifest import Manifest, RankRecord, encode_decision
from everstep.format.records import IncarnationRecord, RunRecord, Writer, encode_incarnation, encode_run
from everstep.memory.arena import Arena
from everstep.memory.header import Kind as ArenaKind
from everstep.memory.process import Process
from everstep.places import locate

MADE_STEPS = (1, 2, 3, 4)
ADOPTED_STEP = 2
LATER_STEP = 5
"""What the fixture ``made_run`` holds: steps 1 to 4, then from step 2 on step 5."""

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from everstep.cli.main import main
main(prog_name="everstep")
"""
"""The command line where neither torch nor numpy can be imported."""


@dataclass(frozen=True)
class Said:
    """What a command said, and the processor time it took."""

    code: int
    out: str
    err: str
    cpu_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(text: str) -> Any:
    raise AssertionError(f"bare {text} is no strict JSON")


def everstep(
    *args: str | Path, blocked: bool = False, fresh: bool = False, env: dict[str, str] | None = None
) -> Said:
    """Run the command line in a process of its own: a fork of this one, or one that begins ``fresh``, as a user's does,
    so that its processor time counts."""
    if not blocked and not fresh:
        return _forked([str(arg) for arg in args], env or {})
    start = ["-c", BLOCKED] if blocked else ["-m", "everstep.cli"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *start, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=100,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Said(done.returncode, done.stdout, done.stderr, cpu_s)


def _forked(args: list[str], env: dict[str, str]) -> Said:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            _become(args, env, out, err)
        _, status, used = os.wait4(pid, 0)
        out.seek(0)
        err.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Said(code, out.read(), err.read(), used.ru_utime + used.ru_stime)


def _become(args: list[str], env: dict[str, str], out: IO[str], err: IO[str]) -> NoReturn:
    code: Any = 1
    try:
        signal.alarm(100)
        sys.stdout, sys.stderr = out, err
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.environ.update(env)
        main(args, prog_name="everstep")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        out.flush()
        err.flush()
        os._exit(code if isinstance(code, int) else 1)


def incarnation(number: int, adopted: tuple[int, int] | None = None) -> IncarnationRecord:
    return IncarnationRecord(
        number=number,
        id=f"{number:016x}",
        parent=adopted[0] if adopted else None,
        adopted_incarnation=adopted[0] if adopted else None,
        adopted_step=adopted[1] if adopted else None,
        fresh=None if adopted else "there was nothing",
        world=1,
        mesh={"data": 1},
        config_hash=None,
        config=None,
        config_changes={},
        config_reason=None,
        loosened=(),
        writer=Writer("somewhere", "boot", 1, 2),
        created="2026-01-01T00:00:00Z",
    )


def manifest(step: int, incarnation: int, world: int = 1, **changes: Any) -> Manifest:
    zero = "0" * 32
    ranks = tuple(RankRecord(rank, zero, 100, zero, 4096, 100, 4096) for rank in range(world))
    fields: dict[str, Any] = {
        "step": step,
        "incarnation": incarnation,
        "attempt": 1,
        "kind": "full",
        "world": world,
        "mesh": {"data": world},
        "ranks": ranks,
        "parts": {"model": {"class": "Model"}},
        "config_hash": None,
        "libraries": {},
        "metrics": {"loss": 0.5},
        "created": "2026-01-01T00:00:00Z",
    }
    return Manifest(**{**fields, **changes})


def put(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def bare_run(root: Path, *incarnations: IncarnationRecord, manifests: list[Manifest]) -> Path:
    """A run of records and manifests alone: enough to be listed."""
    run = RunRecord("ab" * 16, FORMAT_VERSION, (), HASH_ID, 1 << 20, "2026-01-01T00:00:00Z")
    put(root, names.RUN, encode_run(run))
    for record in incarnations:
        put(root, names.incarnation(record.number), encode_incarnation(record))
    for one in manifests:
        put(root, names.decision(one.step, one.incarnation, one.attempt), encode_decision(one))
    return root


def arena_with_snapshot(
    memory: Path, root: Path, *, step: int, rank: int = 0, kind: ArenaKind = ArenaKind.OWN
) -> Arena:
    """An arena of this process, with one snapshot."""
    directory = directory_of_run(memory, str(root))
    directory.mkdir(parents=True, mode=0o700, exist_ok=True)
    place = locate(root)
    arena = Arena.create(
        directory,
        run_key=place.run_key,
        node=place.node,
        rank=rank,
        world=1,
        slot_bytes=1 << 16,
        chunk_bytes=4096,
        kind=kind,
    )
    arena.take(Process.current(), run_id="ab" * 16, incarnation=1, world=1)
    slot = arena.begin(1, step, complete=None)
    assert slot is not None
    slot.place([("state", 10)])
    slot.publish("0" * 32)
    return arena
