"""DeepSpeed's fast writer (FastPersist): its FastCheckpointEngine with libaio, O_DIRECT and two buffers.

It compiles its writer when it is first used, which takes minutes: ``python -m
everstep.benchmarks.harness.rivals.fastpersist`` does that beforehand. It fsyncs the file, not its directory. On a
machine without GPU it refuses to begin, for an operation that a writer asks for and uses only with a patched torch;
DeepSpeed's own builder of that operation works there, too, and is put in its place.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import absent, copy_tree

BUFFER_BYTES = 256 << 20
BLOCK_BYTES = 8 << 20
QUEUE_DEPTH = 32
PARALLEL = 1
FILE = "state.pt"
HEADER = Path("/usr/include/libaio.h")
BUILD = "python -m everstep.benchmarks.harness.rivals.fastpersist"


OPERATIONS = ("pin_memory", "async_io", "utils")


def built() -> bool:
    """Whether the writer is compiled already (for any torch of this Python). One with a lock is on its way, or its
    compiler was killed: torch would wait for that for ever."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions"))
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    places = [*root.glob(f"{python}_*"), root]
    return any(all(_whole(place / name, name) for name in OPERATIONS) for place in places)


def _whole(place: Path, name: str) -> bool:
    return (place / f"{name}.so").exists() and not (place / "lock").exists()


def unable() -> str | None:
    """Why the writer cannot be compiled; None if it can."""
    if gone := absent("deepspeed", "ninja"):
        return gone
    if not HEADER.exists():
        return "its writer needs libaio: apt-get install libaio-dev"
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "its writer is compiled when first used: apt-get install g++"
    return None


def _path_to_ninja() -> None:
    """torch takes the first ninja in PATH. It must always be the same one: another's log makes it compile anew."""
    here = os.path.dirname(sys.executable)
    if os.path.exists(os.path.join(here, "ninja")):
        os.environ["PATH"] = os.pathsep.join((here, os.environ.get("PATH", os.defpath)))


def _engine() -> Any:
    from deepspeed.io import fast_file_writer
    from deepspeed.ops.op_builder.utils import UtilsBuilder
    from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine

    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"  # torch pins nothing without a GPU
    fast_file_writer.UtilsBuilder = UtilsBuilder
    UtilsBuilder().load()
    config = SimpleNamespace(
        checkpoint_config={
            "checkpoint_serialization": True,
            "writer": {
                "type": "FAST",
                "io_buffer_size": BUFFER_BYTES,
                "io_buffer_double": True,
                "show_statistics": False,
                "data_parallel": None,
                "decoupled": False,
                "io_multiplier": 1,
            },
        },
        aio_config={
            "use_gds": False,
            "block_size": BLOCK_BYTES,
            "queue_depth": QUEUE_DEPTH,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": PARALLEL,
        },
    )
    alone = SimpleNamespace(world_size=1, rank=0, global_rank=0, local_rank=0)
    return FastCheckpointEngine(config, alone, False)


class FastPersistSession(Session):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        _path_to_ninja()
        self._engine = _engine()

    def save(self, step: int) -> Pending:
        self.path(step).mkdir()
        self._engine.save(self.job.state.tree(), str(self.path(step) / FILE))
        return Done()

    def load(self, step: int) -> None:
        loaded = self._engine.load(str(self.path(step) / FILE), map_location="cpu")
        copy_tree(self.job.state.tree(), loaded)

    def notes(self) -> list[str]:
        return ["its writer fsyncs the file, not its directory"]


class DeepSpeedFast(System):
    name = "deepspeed-fast"
    meaning = "DeepSpeed's fast checkpoint engine: torch.save through libaio and O_DIRECT"
    works = frozenset({"save", "load"})
    package = "deepspeed"

    def missing(self) -> str | None:
        return unable() or (
            None
            if built()
            else f"its writer is not compiled (minutes; remove a lock that a killed compiler left): {BUILD}"
        )

    def open(self, job: Job) -> Session:
        return FastPersistSession(job)


def main() -> None:
    """Compile the writer."""
    if why := unable():
        sys.exit(why)
    _path_to_ninja()
    _engine()
    print("compiled")


if __name__ == "__main__":
    main()

__all__ = ["DeepSpeedFast"]
