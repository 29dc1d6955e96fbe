"""Late copies: tensors that only an optimizer's step changes, or that are a snapshot already, are read by a thread,
while forward and backward of the next step already run."""

from __future__ import annotations

import _thread
import itertools
import operator
import threading
from collections.abc import Callable, Sequence

import torch
from everstep.errors import SaveFailed
from everstep.memory.slots import WriteSlot

from .moving import After, Runs

PIECE_BYTES = 64 << 20
"""Between pieces of about this size the thread looks whether it was cancelled."""


_version_of = operator.attrgetter("_version")
_nbytes_of = operator.attrgetter("nbytes")


class LateCopyTimeout(SaveFailed, TimeoutError):
    """A late copy was not done within the time given."""


class _Copying:
    """A copy into ``slot`` that a thread is making. Begun when it is made.

    References to the sources are held until :meth:`_join` or :meth:`cancel` has ended, no longer.

    The thread is a bare one: ``Thread.start`` waits until the new thread runs, and that one then keeps the
    interpreter lock until its first copy; so the training would wait for a millisecond.
    """

    def __init__(
        self,
        slot: WriteSlot,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        after: After,
        runs: Runs | None = None,
    ) -> None:
        self._slot = slot  # held, so that it is not given to another snapshot while the thread writes
        self._sources = list(sources)
        self._into = list(into)
        self._after = after
        self._runs = runs
        # A tensor may be given other memory meanwhile.
        self._memory = [] if runs is None else list(map(torch.Tensor.untyped_storage, self._sources))
        self._queued = threading.Event()
        self._cancelled = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        _thread.start_new_thread(self._run, ())

    def done(self) -> bool:
        """Whether the thread has ended, well or not."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Stop after the piece being copied, and wait for that; the slot's contents mean nothing then."""
        self._cancelled = True
        self._ended.wait()
        self._drop()

    def _join(self, timeout_s: float) -> None:
        if not self._ended.wait(timeout_s):
            raise LateCopyTimeout(f"a late copy was not done within {timeout_s:g} s", timeout_s=timeout_s)

    def _drop(self) -> None:
        self._sources, self._into, self._memory, self._runs = [], [], [], None

    def _run(self) -> None:
        try:
            copy = self._copy if self._runs is None else self._copy_runs(self._runs)
            for start, end in _pieces(list(map(_nbytes_of, self._sources))):
                if self._cancelled:
                    return
                copy(start, end)
            self._after.mark()
            self._queued.set()
            self._after.finish()
            self._copied()
        except BaseException as error:  # carried to whoever waits
            self._error = error
        finally:
            self._queued.set()
            self._ended.set()

    def _copy(self, start: int, end: int) -> None:
        self._after.move(self._sources[start:end], self._into[start:end])

    def _copy_runs(self, runs: Runs) -> Callable[[int, int], None]:
        begins = [0, *itertools.accumulate(runs.sizes)]

        def copy(start: int, end: int) -> None:
            for memory, at, size in zip(
                self._memory[start:end], runs.sources[start:end], runs.sizes[start:end], strict=True
            ):
                if not 0 <= at - memory.data_ptr() <= memory.nbytes() - size:
                    raise SaveFailed("memory of a tensor was given back while it was copied")
            runs.copy(begins[start], begins[end])

        return copy

    def _copied(self) -> None:
        """All bytes are in the slot."""


class LateCopy(_Copying):
    """A copy of live tensors, which must not change until it is done.

    The owner calls :meth:`wait` before anything may change the sources (or :meth:`hold`), and publishes only if nothing
    moved.
    """

    def __init__(
        self,
        slot: WriteSlot,
        names: Callable[[], Sequence[str]],
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        runs: Runs | None = None,
        versions: list[int] | None = None,
    ) -> None:
        """``names`` gives those of ``sources``, in their order; asked for only when one has moved. ``runs``: the same
        as runs of host memory, if all are. ``versions``: of all, as of now, if they were looked at already."""
        self._names = names
        self._versions = versions_of(sources) if versions is None else versions
        self._moved: list[str] | None = None
        self.held = False
        """Whether :meth:`hold` let the sources go."""
        super().__init__(slot, sources, into, After(sources if runs is None else ()), runs)

    def hold(self, timeout_s: float) -> bool:
        """Whether the sources may be changed by what the devices' current streams are given from now on: these wait
        for the copy, and the host need not. False where the host has to :meth:`wait` after all: something of it is
        not on a device, or has moved.

        LateCopyTimeout if the copies are not even queued in time. Call it as :meth:`wait`.
        """
        if not self._queued.wait(timeout_s):
            raise LateCopyTimeout(f"a late copy was not begun within {timeout_s:g} s", timeout_s=timeout_s)
        if self._error is not None or self._cancelled or any(source.is_cpu for source in self._sources):
            return False
        if self._moved is None:
            self._moved = self._look()
        self.held = not self._moved and self._after.hold()
        return self.held

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for the thread; the names of the tensors whose version counter moved since the copy was begun (up to
        :meth:`hold`, where that let them go).

        One that moved voids the snapshot: its bytes may be of two moments. Call it from the thread that
        changes the tensors: an operation still running in another thread has not counted yet.
        LateCopyTimeout; else what went wrong in the thread. Writes through ``.data`` are not counted by torch
        and not seen.
        """
        self._join(timeout_s)
        if self._moved is None and not self._cancelled:
            self._moved = self._look()
        self._drop()
        if self._error is not None:
            raise self._error
        if self._moved is None:
            raise SaveFailed("a late copy was cancelled")
        return list(self._moved)

    def _look(self) -> list[str]:
        versions = versions_of(self._sources)
        if versions == self._versions:
            return []
        rows = zip(self._names(), self._versions, versions, strict=True)
        # A tensor of several pieces has its name several times.
        return list(dict.fromkeys([name for name, before, now in rows if before != now]))


class Drain(_Copying):
    """A copy of memory that nobody changes until it is done. It publishes the slot itself."""

    def __init__(
        self,
        slot: WriteSlot,
        layout_hash: str,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
    ) -> None:
        """After what the devices' current streams hold now, which fills the sources."""
        self._layout_hash = layout_hash
        super().__init__(slot, sources, into, After(sources))

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for the thread; nothing can have moved. LateCopyTimeout; else what went wrong in the thread."""
        self._join(timeout_s)
        self._drop()
        if self._error is not None:
            raise self._error
        return []

    def _copied(self) -> None:
        self._slot.publish(self._layout_hash)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was changed. RuntimeError if one was made for inference."""
    return list(map(_version_of, tensors))


def _pieces(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Index ranges of about PIECE_BYTES each."""
    found, start, nbytes = [], 0, 0
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= PIECE_BYTES:
            found.append((start, index + 1))
            start, nbytes = index + 1, 0
    if start < len(sizes):
        found.append((start, len(sizes)))
    return found
