"""A checkpoint directory opened for reading: its manifest, all ranks' layouts, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.api import Backend
from ..errors import Damaged, NoCheckpoint, NotARun, StateMismatch
from ..format.entries import Entry, Scope
from ..format.layout import Layout
from ..plan.reads import plan_reads
from ..state.codec import StateImage
from ..state.tensors import dtype_named, empty, writable_bytes
from ..state.wire import Tag, tag_of
from ..store.asking import each
from ..store.blocking import run_blocking
from ..store.fill import FillReport, fill
from ..store.runs import open_run
from ..store.sources import DurableSource
from . import directory
from .values import ABOUT, STATE


class Opened:
    """Belongs to one thread at a time; :meth:`close` it."""

    def __init__(self, path: str) -> None:
        """Raises NotARun, NoCheckpoint, Damaged, UnknownFormat, CannotTell."""
        self.path = path
        self.backend: Backend = directory.open_directory(path)
        self._images: dict[int, StateImage] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what is open; may be called twice."""
        run_blocking(directory.close(self.backend))

    def _open(self) -> None:
        self.source = run_blocking(self._source())
        self.world = self.source.world
        self.layouts: list[Layout] = run_blocking(self._layouts())
        self._find_coordinator()

    async def _source(self) -> DurableSource:
        try:
            run = await open_run(self.backend)
        except NotARun as error:
            if not directory.is_stock(self.path):
                raise
            raise NotARun(
                f"{self.path} is no checkpoint of everstep",
                found="a checkpoint of torch's own writer",
                expected="what everstep.dcp.Writer wrote",
                hint="Read it with torch's FileSystemReader",
            ) from error
        found = await directory.standing(self.backend)
        if found is None:
            raise NoCheckpoint(
                f"{self.path} holds no complete checkpoint",
                found="a save that was not finished",
                hint="Load another one",
            )
        return DurableSource(self.backend, found, run.chunk_bytes)

    async def _layouts(self) -> list[Layout]:
        return await each(range(self.world), self.source.layout)

    def _find_coordinator(self) -> None:
        """The rank that knows of all tensors and values: the first, as a rule."""
        for rank in range(self.world):
            image = self.image(rank)
            if ABOUT not in image.parts or STATE not in image.parts:
                raise StateMismatch(
                    f"{self.path} is no DCP checkpoint",
                    found=f"parts {sorted(image.parts)}",
                    expected=f"parts {ABOUT} and {STATE}",
                    hint="Load a training run with everstep.load",
                )
            about = image.decoder(_no_tensor).value(image.parts[ABOUT])
            if "planner_data" in about:
                self.coordinator = rank
                self.planner_data: Any = about["planner_data"]
                self.elsewhere: dict[str, int] = about["elsewhere"]
                self.own = frozenset(about["own"])
                self.streams = frozenset(about["streams"])
                return
        raise Damaged(f"{self.path}: no rank knows of all tensors", found="none", name=self.path)

    def image(self, rank: int) -> StateImage:
        """The state image of a rank, read once."""
        if rank not in self._images:
            data = run_blocking(self.source.state(rank))
            self._images[rank] = StateImage(data, name=f"state image of rank {rank}")
        return self._images[rank]

    def tensors(self) -> dict[str, Entry]:
        """All tensors of the job, by name, each as one rank's layout has it."""
        return {
            entry.key: entry
            for layout in reversed(self.layouts)
            for entry in layout.entries
            if entry.part == STATE and entry.scope is Scope.GLOBAL
        }

    def own_tensor(self, fqn: str, rank: int) -> Entry | None:
        """The tensor that a rank keeps for itself under ``fqn``; None where that is a value, or nothing."""
        node = self.image(rank).parts[STATE].get(fqn)
        if tag_of(node) != Tag.REF:
            return None
        entry = self.layouts[rank].entries[node[1]]
        return entry if entry.key == fqn and entry.scope is Scope.RANK else None

    def values(self) -> set[str]:
        """The names of all values that all ranks share."""
        tensors = self.tensors()
        nodes = self.image(self.coordinator).parts[STATE]
        return {fqn for fqn in (*nodes, *self.elsewhere) if fqn not in tensors and fqn not in self.own}

    def value(self, fqn: str, rank: int) -> tuple[Any, bool]:
        """The value of ``fqn`` (a rank's own, or the one of all), and whether it was a stream. Raises Damaged."""
        holder = rank if fqn in self.own else self.elsewhere.get(fqn, self.coordinator)
        image = self.image(holder)
        nodes = image.parts[STATE]
        if fqn not in nodes:
            raise StateMismatch(
                f"{fqn}: rank {holder} saved no value of that name", found=sorted(nodes)[:8], rank=holder
            )
        entries = self.layouts[holder].entries
        indices = sorted(_refs(nodes[fqn]))
        tensors = {index: empty(entries[index].shape, dtype_named(entries[index].dtype)) for index in indices}
        wanted, views = [], []
        for index, tensor in tensors.items():
            view = writable_bytes(tensor)
            assert view is not None
            wanted.append(entries[index])
            views.append(view)
        self.fill(wanted, views, holder)
        value = image.decoder(lambda index: tensors[index]).value(nodes[fqn])
        return value, fqn in self.streams

    def fill(self, wanted: Sequence[Entry], views: Sequence[memoryview], rank: int) -> FillReport | None:
        """Read the boxes of ``wanted`` into ``views``, every chunk proved. ``rank``: whose own tensors are meant.
        Raises Damaged, Pruned, CannotTell, StateMismatch."""
        if not wanted:
            return None
        reads = plan_reads(wanted, self.layouts, rank)
        return run_blocking(fill([self.source], reads, dict(enumerate(views))))


def _refs(node: Any) -> set[int]:
    from ..state.codec import walk

    return {inner[1] for inner in walk(node) if tag_of(inner) in (Tag.REF, Tag.ARRAY_REF)}


def _no_tensor(index: int) -> Any:
    raise Damaged("a planner's data refers to a tensor", found=index, name=ABOUT)
