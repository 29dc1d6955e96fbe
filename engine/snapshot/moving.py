"""The copy itself, on any device.

Torch splits every larger tensor over all its threads and waits for them after each: with some hundred tensors
on a machine whose cores others use too (loaders, the agent), those waits take ten times as long as the copy.
So batches of whole tensors are dealt out to a few threads instead, each of which copies alone, and nobody
waits but once. Host tensors that are plain runs of bytes are copied as such (:mod:`everstep.memory.copying`), past the
caches; torch copies the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from everstep.memory.copying import COMPILED, Words, copy_range

BATCH_BYTES = 16 << 20
"""What a thread takes at a time: large enough that asking for more costs nothing (also where another thread
keeps the interpreter lock for its 5 ms), small enough to even out."""
ALONE_ITEMS = 32768
"""Tensors below this number of items torch copies in the calling thread alone."""
THREADS_MAX = 16
"""More do not add memory bandwidth."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(source, destination)."""

B = TypeVar("B")

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Others may have no memory of their own."""
_dtype_of = operator.attrgetter("dtype")
_is_cpu = operator.attrgetter("is_cpu")
_nbytes_of = operator.attrgetter("nbytes")


class Runs:
    """Runs of bytes in host memory, by address, and where each goes. Only where ``COMPILED``. Whoever makes it knows
    that they are right, and keeps the memory."""

    def __init__(self, into: Words, sources: Words, sizes: Words) -> None:
        """``sizes`` in bytes, as many as addresses."""
        self.into, self.sources, self.sizes = into, sources, sizes
        self.nbytes = sum(sizes)

    def copy(self, begin: int, end: int) -> None:
        """Bytes of all runs, as if they lay one behind the other, by the calling thread. The interpreter lock is not
        held."""
        copy_range(self.into, self.sources, self.sizes, begin, end)

    def move(self, begin: int = 0, threads: int | None = None) -> None:
        """Copy all from byte ``begin`` on; ``threads`` as in :func:`move`."""
        ranges = [(at, at + BATCH_BYTES) for at in range(begin, self.nbytes, BATCH_BYTES)]
        _share(
            ranges,
            lambda some: self.copy(*some),
            min(threads or torch.get_num_threads(), THREADS_MAX, len(ranges)),
        )


def move(
    sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, threads: int | None = None
) -> None:
    """Copy each source into the host tensor beside it (of its shape); all bytes are there when this returns.

    ``threads`` (default: as many as torch uses) share the work; 1: the calling thread does it, without
    torch's help. The interpreter lock is not held while bytes move.
    """
    if not sources:
        return
    elsewhere = devices(sources)
    if COMPILED and not elsewhere:
        sources, into = _move_rows(sources, into, threads)
        if not sources:
            return
    if not elsewhere and max(to.numel() for to in into) < ALONE_ITEMS:
        _copy(sources, into)
        return
    pairs = list(zip(sources, into, strict=True))
    if elsewhere:
        _copy_pairs([pair for pair in pairs if not pair[0].is_cpu], non_blocking=True)
        pairs = [pair for pair in pairs if pair[0].is_cpu]
    batched = list(_batches(pairs))

    def copy_alone(batch: Pairs) -> None:
        with _alone():
            _copy_pairs(batch)

    _share(batched, copy_alone, min(threads or torch.get_num_threads(), THREADS_MAX, len(batched)))
    synchronize(sources)


def _move_rows(
    sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], threads: int | None
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Copy what lies on the host as a run of bytes; what does not is left."""
    left: list[list[torch.Tensor]] = [[], []]
    with torch._C.DisableTorchFunction():
        if not _plain(sources, into):
            are = [_plain([source], [to]) for source, to in zip(sources, into, strict=True)]
            left = [list(itertools.compress(some, map(operator.not_, are))) for some in (sources, into)]
            sources, into = (list(itertools.compress(some, are)) for some in (sources, into))
        targets, froms = (array("Q", list(map(torch.Tensor.data_ptr, some))) for some in (into, sources))
        Runs(targets, froms, array("Q", list(map(_nbytes_of, into)))).move(threads=threads)
    return left[0], left[1]


def _plain(sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> bool:
    """Whether each pair is two runs of the same bytes."""
    tensor = torch.Tensor
    return (
        _PLAIN_TYPES.issuperset(map(type, sources))
        and _PLAIN_TYPES.issuperset(map(type, into))
        and all(map(operator.is_, map(_dtype_of, sources), map(_dtype_of, into)))
        and all(map(operator.eq, map(_nbytes_of, sources), map(_nbytes_of, into)))
        and all(map(tensor.is_contiguous, sources))
        and all(map(tensor.is_contiguous, into))
        and not any(map(tensor.is_neg, sources))
        and not any(map(tensor.is_conj, sources))
        and not any(map(tensor._is_zerotensor, sources))
    )


def devices(tensors: Sequence[torch.Tensor]) -> set[torch.device]:
    """The devices other than the host that hold any of them."""
    if all(map(_is_cpu, tensors)):  # as a rule, and thousands
        return set()
    return {tensor.device for tensor in tensors if not tensor.is_cpu}


class After:
    """What the devices' current streams hold at this moment, for copies that another thread makes behind it: on streams
    of their own, so that what the current streams are given meanwhile runs beside them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._begin: dict[torch.device, Any] = {}
        for device in devices(tensors):
            module = torch.get_device_module(device)
            event = module.Event()
            event.record(module.current_stream(device))
            self._begin[device] = event
        self._streams: dict[torch.device, Any] = {}
        self._end: dict[torch.device, Any] = {}

    def move(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Copy each source into the host tensor beside it, by the calling thread alone. Those on the host are copied
        when this returns; those on devices are queued (where the host memory is not pinned, they are copied too)."""
        if all(map(_is_cpu, sources)):
            move(sources, into, threads=1)
            return
        here = [pair for pair in zip(sources, into, strict=True) if pair[0].is_cpu]
        elsewhere = [pair for pair in zip(sources, into, strict=True) if not pair[0].is_cpu]
        for device in devices([source for source, _ in elsewhere]):
            with torch.get_device_module(device).stream(self._stream(device)):
                _copy_pairs([pair for pair in elsewhere if pair[0].device == device], non_blocking=True)
        move([source for source, _ in here], [to for _, to in here], threads=1)

    def mark(self) -> None:
        """All copies have been queued: :meth:`hold` and :meth:`finish` speak of these."""
        for device, stream in self._streams.items():
            event = torch.get_device_module(device).Event()
            event.record(stream)
            self._end[device] = event

    def hold(self) -> bool:
        """Let the devices' current streams wait for what was marked, but not the host. False if the copies use no
        device: then there is nothing that could wait for them but the host."""
        for device, event in self._end.items():
            torch.get_device_module(device).current_stream(device).wait_event(event)
        return bool(self._end)

    def finish(self) -> None:
        """Wait, on the host, until the bytes of what was marked are there. The interpreter lock is not held."""
        for event in self._end.values():
            event.synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            stream = torch.get_device_module(device).Stream(device)
            if device in self._begin:
                stream.wait_event(self._begin[device])
            self._streams[device] = stream
        return self._streams[device]


def beside(sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """Copy each source into the tensor of its shape and dtype beside it, which may lie on any device.

    Host tensors are copied when this returns; where a device takes part the copies are queued on its current stream,
    fused where both tensors are on it: whatever that stream is given later sees them done.
    """
    host: Pairs = []
    fused: dict[tuple[torch.device, torch.dtype], Pairs] = {}
    for source, to in zip(sources, into, strict=True):
        if source.device != to.device or not (source.is_cpu or to.is_contiguous()):
            _copy_pairs([(source, to)], non_blocking=True)
        elif not source.is_cpu:
            fused.setdefault((to.device, to.dtype), []).append((source, to))
        elif to.is_contiguous():
            host.append((source, to))
        else:
            _copy_pairs([(source, to)])
    for pairs in fused.values():  # torch fuses copies of one device and dtype
        _copy_pairs(pairs, non_blocking=True)
    move([source for source, _ in host], [to for _, to in host])


def synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until what the current streams of the tensors' devices hold is done; an error of a device is raised."""
    for device in devices(tensors):
        torch.get_device_module(device).current_stream(device).synchronize()


def capturing() -> bool:
    """Whether the current stream's work is being recorded into a CUDA graph instead of done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _copy(sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    # Neither a device context nor a tensor subclass may have a say in where bytes go.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        torch._foreach_copy_(list(into), list(sources), non_blocking=non_blocking)


def _copy_pairs(pairs: Pairs, non_blocking: bool = False) -> None:
    _copy([source for source, _ in pairs], [to for _, to in pairs], non_blocking)


def _batches(pairs: Pairs) -> Iterator[Pairs]:
    batch: Pairs = []
    nbytes = 0
    for source, to in pairs:
        size = to.numel() * to.element_size()
        if size > BATCH_BYTES and source.is_contiguous():
            yield from ([piece] for piece in _cut(source, to))
            continue
        batch.append((source, to))
        nbytes += size
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _cut(source: torch.Tensor, to: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of one large tensor."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        items = BATCH_BYTES // to.element_size()
        yield from zip(torch.split(source.view(-1), items), torch.split(to.view(-1), items), strict=True)


def _share(batches: list[B], act: Callable[[B], None], threads: int) -> None:
    """Let ``threads`` threads take batches until none is left (one: the calling thread); raise what went wrong in
    any."""
    errors: list[BaseException] = []
    todo = batches[::-1]

    def work() -> None:
        try:
            while (batch := _next(todo)) is not None:
                act(batch)
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)
            todo.clear()

    if threads <= 1:
        work()
    else:
        workers = [threading.Thread(target=work, name="everstep-copy") for _ in range(threads)]
        for worker in workers:
            worker.start()
        _join(workers, todo)
    if errors:
        raise errors[0]


def _next(todo: list[B]) -> B | None:
    try:
        return todo.pop()
    except IndexError:
        return None


def _join(workers: list[threading.Thread], todo: list[B]) -> None:
    try:
        for worker in workers:
            worker.join()
    except BaseException:  # an interrupt: nobody may go on writing into a slot that is given up now
        todo.clear()
        for worker in workers:
            while worker.is_alive():
                with contextlib.suppress(KeyboardInterrupt):
                    worker.join()
        raise


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Torch copies in the calling thread only. ``torch.set_num_threads`` would do so for later threads of the
    user's too, so the thread's own setting of the OpenMP runtime is changed instead."""
    threads = torch.get_num_threads()  # also makes torch set the thread up; later it leaves the setting alone
    for runtime in _runtimes():
        runtime.omp_set_num_threads(1)
    try:
        yield
    finally:
        for runtime in _runtimes():
            runtime.omp_set_num_threads(threads)


@functools.lru_cache(maxsize=1)
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    """The OpenMP runtimes in this process; none where torch was built without: then it splits as it likes."""
    found = []
    with contextlib.suppress(OSError):
        paths = re.findall(r"/\S*lib(?:g|i|)omp\S*\.so\S*", Path("/proc/self/maps").read_text())
        for path in sorted(set(paths)):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                _ = library.omp_set_num_threads
                found.append(library)
    return tuple(found)
