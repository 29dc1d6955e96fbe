"""Ranks of one node that load the same bytes read them from storage once.

What two or more of them need is dealt out among them. Each reads and proves its share into memory that all of
them map, in rounds of bounded size, and copies from there what it needs itself, proving it again: other processes
can write to that memory. The rest every rank reads alone.

The memory is a file without a name (memfd), opened by the other ranks through /proc: nothing is left behind when
processes are killed, and ranks that cannot reach it (another pid namespace, another user, no Linux) are found at
once and read alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .backends.parallel import together
from .discovery import FALL_BACK
from .errors import EverstepError, RankError, from_wire
from .format.hashing import hexdigest
from .format.layout import Layout
from .format.vote import ImageRecord
from .memory.process import Process, boot_id
from .memory.sizes import SHARED_BYTES
from .phases import PhaseFailed, Phases
from .plan.reads import Range, Read
from .plan.shares import Clipper, ImageKey, Needs, Round, common_ranges, deal, without
from .ranks import Ranks
from .store.ahead import Ahead
from .store.blocking import run_blocking
from .store.fill import FillReport, Image, fill, images_of
from .store.pieces import FROM_OTHERS, InFlight
from .store.sources import Mapped, Source

HALVES = 2
PIECE_BYTES_MIN = 1 << 20
"""A rank's share of a round is read in this many bytes at a time at least, in parallel."""

PAGE = 4096
TOKEN_BYTES = 16
POLL_MIN_S = 0.0002
POLL_MAX_S = 0.005
LIVE_EVERY_S = 0.1
"""How often a waiting rank looks whether those it waits for still live."""
TEXT_MAX = 250
"""Most characters (of up to three bytes, as a rule) of one text of an error that is told through its page."""

LABEL = "memory shared by the node's ranks"
SHARED = "shared"
"""Kind of source: where the bytes came from, the rank says that read them."""


Bring = Callable[[Phases, Sequence[Source], Sequence[Needs], Sequence[int]], Sequence[Source]]
"""Given the sources, what each rank of the node needs from storage, and these ranks: the sources to read from. Called
by all ranks."""


@contextlib.contextmanager
def shared_fill(
    phases: Phases,
    sources: Sequence[Source],
    reads: Sequence[Read],
    targets: Mapping[int, memoryview],
    bring: Bring | None = None,
    *,
    ahead: Ahead | None = None,
    shared_bytes: int = SHARED_BYTES,
) -> Iterator[Callable[[], FillReport]]:
    """Prepare to do by all ranks together what :func:`.fill.fill` does: bytes that several ranks of one node
    need are read by one of them. Images that lie in a rank's memory already are not
    shared by it. Gives the function that fills, which all ranks call next, at most once.

    All ranks enter, whatever they need, even nothing; they talk three times, and no more while they fill. A rank's
    failure in what is shared ends it on the node's other ranks too, with the same error where that is Damaged or
    Pruned, else with a RankError that names it; a rank that ended, or made no progress within the phases' time,
    is a RankError. What a rank reads alone fails on that rank alone. The caller makes it one verdict.

    ``bring`` hears, on all ranks, what its node needs, and gives the sources to read from. What is read ``ahead`` is
    taken over by a rank that loads alone.
    """
    report = FillReport()
    if phases.world == 1:
        if bring is not None:
            needs = {key: image.ranges() for key, image in _needed(sources, reads, report).items()}
            sources = bring(phases, sources, [needs], [phases.rank])
        yield lambda: run_blocking(fill(sources, reads, targets, ahead=ahead))
        return
    with contextlib.ExitStack() as stack:

        def make() -> tuple[_Mine, Any]:
            mine = _offer(phases, sources, reads, report, shared_bytes, stack)
            return mine, mine.told

        offer, every = phases.exchange(make)
        offers = [_Offer(*told) for told in every]
        group = [rank for rank, told in enumerate(offers) if told.node and told[:2] == offer.told[:2]]
        opened = None
        if len(group) > 1 and phases.rank in group:
            opened = _open_all([offers[rank] for rank in group], offer.places, stack)
        able = phases.share(opened is not None)
        if opened is not None and not all(able[rank] for rank in group):
            opened = None
        if bring is not None:
            mine = {key: image.ranges() for key, image in offer.images.items()}
            node = (opened.needs, group) if opened is not None else ([mine], [phases.rank])
            sources = bring(phases, sources, *node)

        def fill_now() -> FillReport:
            if opened is None:
                report.add(run_blocking(fill(sources, reads, targets)))
                return report
            members = {rank: Process(offers[rank].pid, offers[rank].start_time, boot_id()) for rank in group}
            with contextlib.closing(_Board(opened, members, phases.rank, phases.timeout_s)) as board:
                _Sharing(board, offer, sources, reads, targets, report).run()
            return report

        yield fill_now


def fill_shared(
    ranks: Ranks,
    node: str,
    sources: Sequence[Source],
    reads: Sequence[Read],
    targets: Mapping[int, memoryview],
    *,
    timeout_s: float,
    shared_bytes: int = SHARED_BYTES,
) -> FillReport:
    """:func:`shared_fill` in one call, with one verdict: where a rank fails, all raise. Its own error, or one that
    names it; Damaged and Pruned are everyone's, so that all may fall back to an older step. ``node`` is the same
    text for the ranks of one node; a wait for the others is no longer than ``timeout_s`` seconds."""
    what = "reading together"
    phases = Phases(ranks, what, timeout_s=timeout_s, node=node)
    try:
        with shared_fill(phases, sources, reads, targets, shared_bytes=shared_bytes) as fill_now:
            return phases.each(fill_now)
    except PhaseFailed as failed:
        errors = failed.errors
        if all(isinstance(error, FALL_BACK) for error in errors.values()):
            raise errors.get(ranks.rank, errors[min(errors)]) from failed
        raise ranks.verdict(what, errors) from failed


# ------------------------------------------------------------------------------------------ coming together


class _Offer(NamedTuple):
    """What one rank tells the others: whose memory it could share, of which checkpoint, and where it is. An empty
    ``node``: it shares nothing."""

    node: str
    identity: str
    pid: int
    start_time: int
    fd: int
    token: str
    needs_bytes: int


class _Mine(NamedTuple):
    """What one rank keeps: what it told, the images that it needs from storage, and its memory's places."""

    told: _Offer
    images: dict[ImageKey, Image]
    places: _Places


def _offer(
    phases: Phases,
    sources: Sequence[Source],
    reads: Sequence[Read],
    report: FillReport,
    shared_bytes: int,
    stack: contextlib.ExitStack,
) -> _Mine:
    """What this rank needs, written into new memory, and the words that lead the others there."""
    images = _needed(sources, reads, report)
    encoded = msgspec.msgpack.encode([[*key, image.ranges()] for key, image in images.items()])
    first = sources[0]
    places = _Places(phases.world, first.chunk_bytes, shared_bytes)
    try:
        token = secrets.token_bytes(TOKEN_BYTES)
        fd = _create(token, encoded, places, stack)
        process = Process.current()
    except (OSError, AttributeError):  # no memfd, or no /proc
        return _Mine(_Offer("", "", 0, 0, 0, "", 0), images, places)
    # Each must be able to read whatever is dealt to it, of the same checkpoint, into the same places.
    covered = sorted(frozenset[int]().union(*(source.ranks for source in sources)))
    same = (first.incarnation, first.step, first.chunk_bytes, covered, shared_bytes, boot_id())
    place = (process.pid, process.start_time, fd, token.hex(), len(encoded))
    return _Mine(_Offer(phases.node, hexdigest(repr(same).encode()), *place), images, places)


def _needed(sources: Sequence[Source], reads: Sequence[Read], report: FillReport) -> dict[ImageKey, Image]:
    """The images that are read from storage."""
    return {
        ImageKey(image.rank, image.name, image.record.nbytes, image.record.root.hex()): image
        for image in run_blocking(images_of(sources, reads, report))
        if image.holders[0].mapped(image.rank, image.name) is None
    }


class _Places:
    """Where things lie in the memory: the token, one page of words for each rank, the halves, the needs."""

    def __init__(self, world: int, chunk_bytes: int, shared_bytes: int) -> None:
        self.half_bytes = max(shared_bytes // HALVES // PAGE * PAGE, chunk_bytes)
        self.halves = PAGE * (1 + world)
        self.needs = self.halves + HALVES * self.half_bytes

    def words(self, member: int) -> int:
        return PAGE * (1 + member)


def _create(token: bytes, needs: bytes, places: _Places, stack: contextlib.ExitStack) -> int:
    """A memory file that nobody can shrink; only what is used of it takes memory."""
    fd = os.memfd_create("everstep-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.ftruncate(fd, places.needs + len(needs))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.pwrite(fd, token, 0)
    at = 0
    while at < len(needs):
        at += os.pwrite(fd, needs[at:], places.needs + at)
    return fd


class _Opened(NamedTuple):
    """What the ranks of the node need, in their order, and the memory of the first of them, mapped."""

    needs: list[Needs]
    places: _Places
    memory: mmap.mmap


def _open_all(offers: Sequence[_Offer], places: _Places, stack: contextlib.ExitStack) -> _Opened | None:
    """Read all needs and map the memory of the first; None where anything of it is out of reach."""
    needs: list[Needs] = []
    memory = None
    try:
        for offer in offers:
            with _open(offer) as fd:
                needs.append(_decode_needs(os.pread(fd, offer.needs_bytes, places.needs)))
                if memory is None:
                    memory = mmap.mmap(fd, places.needs)
    except (OSError, ValueError, msgspec.DecodeError):
        if memory is not None:
            memory.close()
        return None
    assert memory is not None
    stack.callback(_close, memory)
    memory.madvise(mmap.MADV_DONTFORK)
    return _Opened(needs, places, memory)


@contextlib.contextmanager
def _open(offer: _Offer) -> Iterator[int]:
    """The memory that ``offer`` tells of. ValueError where something else is found under its place."""
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError("not a memory file of this user")
        if os.pread(fd, TOKEN_BYTES, 0) != bytes.fromhex(offer.token):
            raise ValueError("another process's memory")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("memory that may be cut off")
        yield fd
    finally:
        os.close(fd)


def _decode_needs(encoded: bytes) -> dict[ImageKey, list[Range]]:
    rows = msgspec.msgpack.decode(encoded, type=list[tuple[int, str, int, str, list[Range]]])
    return {ImageKey(*row[:4]): row[4] for row in rows}


def _close(memory: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an interrupted fill still holds a view; its end frees the memory
        memory.close()


# ------------------------------------------------------------------------------------------------- rounds


class _Board:
    """The memory that the node's ranks share, and one page for each of them: two words (turns done, or FAILED, and
    the size of the error), then the error. Each rank writes its own page only."""

    FAILED = (1 << 64) - 1

    def __init__(self, opened: _Opened, members: Mapping[int, Process], rank: int, timeout_s: float) -> None:
        self.needs = opened.needs
        self.half_bytes = opened.places.half_bytes
        self._group = list(members)
        self._processes = list(members.values())
        self.me = self._group.index(rank)
        self.readers = len(members)
        self._timeout_s = timeout_s
        self._places = opened.places
        self.heard: EverstepError | None = None
        """What :meth:`wait` raised: a failure of others."""
        self._view = memoryview(opened.memory)
        self._words = self._view[: opened.places.halves].cast("Q")

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._words.release()
            self._view.release()

    def half(self, turn: int) -> memoryview:
        """The memory of round ``turn``."""
        at = self._places.halves + turn % HALVES * self.half_bytes
        return self._view[at : at + self.half_bytes]

    def _word(self, member: int) -> int:
        return self._places.words(member) // 8

    def done(self, turn: int) -> None:
        """Tell that this rank has done ``turn``."""
        self._words[self._word(self.me)] = turn

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank goes no further, and why."""
        encoded = msgspec.msgpack.encode(_short(error))[: PAGE - 16]
        begin = self._places.words(self.me)
        self._view[begin + 16 : begin + 16 + len(encoded)] = encoded
        self._words[begin // 8 + 1] = len(encoded)
        self._words[begin // 8] = self.FAILED

    def wait(self, turn: int) -> None:
        """Until all ranks have done ``turn``. Raises what one of them failed of, and RankError where one ended or
        did not get there in time."""
        began = looked = time.monotonic()
        pause = POLL_MIN_S
        while True:
            late = [m for m in range(self.readers) if self._words[self._word(m)] < turn]
            failed = [m for m in range(self.readers) if self._words[self._word(m)] == self.FAILED]
            if failed:
                self.heard = self._failure(failed[0])
                raise self.heard
            if not late:
                return
            now = time.monotonic()
            if now - looked > LIVE_EVERY_S:
                looked = now
                gone = [member for member in late if not self._processes[member].alive()]
                if gone:
                    self.heard = self._silent(gone, "their processes ended")
                    raise self.heard
            if now - began > self._timeout_s:
                self.heard = self._silent(late, f"no progress within {self._timeout_s:g} s")
                raise self.heard
            time.sleep(pause)
            pause = min(pause * 2, POLL_MAX_S)

    def _silent(self, members: Sequence[int], found: str) -> RankError:
        ranks = [self._group[member] for member in members]
        return RankError(
            f"reading together: rank(s) {ranks} did not read their share",
            found=found,
            hint="Look at those ranks' logs.",
            ranks=ranks,
        )

    def _failure(self, member: int) -> EverstepError:
        begin = self._places.words(member)
        nbytes = min(self._words[begin // 8 + 1], PAGE - 16)
        try:
            error = from_wire(msgspec.msgpack.decode(bytes(self._view[begin + 16 : begin + 16 + nbytes])))
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
            error = EverstepError("an error that could not be told")
        if isinstance(error, FALL_BACK):
            return error
        rank = self._group[member]
        failure = RankError(
            f"reading together failed on rank(s) [{rank}]: {type(error).__name__}: {error}",
            ranks=[rank],
            error=type(error).__name__,
        )
        failure.__cause__ = error
        return failure


def _short(error: BaseException) -> dict[str, Any]:
    """The error as plain values that fit into a page."""
    if not isinstance(error, EverstepError):
        error = EverstepError(f"{type(error).__name__}: {error}")
    wire = error.to_wire()
    texts = {
        key: value[:TEXT_MAX] if isinstance(value, str) else value
        for key, value in wire.items()
        if key != "fields"
    }
    name = wire["fields"].get("name")
    return {**texts, "fields": {} if name is None else {"name": str(name)[:TEXT_MAX]}}


class _Sharing:
    """One rank's part: its shares read, what it needs copied, and the rest read alone."""

    def __init__(
        self,
        board: _Board,
        mine: _Mine,
        sources: Sequence[Source],
        reads: Sequence[Read],
        targets: Mapping[int, memoryview],
        report: FillReport,
    ) -> None:
        self._board = board
        self._images = mine.images
        self._sources = sources
        self._targets = targets
        self._report = report
        self._common = common_ranges(board.needs)
        self._rounds = deal(self._common, board.readers, sources[0].chunk_bytes, board.half_bytes)
        self._by_image = {key: image.reads for key, image in mine.images.items() if key in self._common}
        shared = {(key.rank, key.name) for key in self._by_image}
        self._alone = [read for read in reads if (read.rank, read.image) not in shared]

    def run(self) -> None:
        """All rounds, then what only this rank needs."""
        try:
            self._together()
        except BaseException as error:
            if error is not self._board.heard:  # the others see for themselves what became of a third
                self._board.fail(error)
            raise
        rest = [
            part
            for key, reads in self._by_image.items()
            for part in _clipped(reads, without(self._images[key].ranges(), self._common[key]))
        ]
        self._report.add(run_blocking(fill(self._sources, rest, self._targets, headers=False)))
        self._report.add(run_blocking(fill(self._sources, self._alone, self._targets)))

    def _together(self) -> None:
        clippers = {key: Clipper(reads) for key, reads in self._by_image.items()}
        for turn in range(len(self._rounds) + 1):
            work = []
            if turn < len(self._rounds):
                work.append(self._read(self._rounds[turn], self._board.half(turn)))
            if turn > 0:
                work.append(self._copy(self._rounds[turn - 1], self._board.half(turn - 1), clippers))
            for report in run_blocking(together(work)):
                self._report.add(report)
            self._board.done(turn + 1)
            if turn < len(self._rounds):
                self._board.wait(turn + 1)

    async def _read(self, round_: Round, half: memoryview) -> FillReport:
        """Read this rank's shares into the memory."""
        shares = [
            Read(0, share.image.rank, share.image.name, share.begin, share.end - share.begin, share.at)
            for share in round_
            if share.reader == self._board.me
        ]
        pieces = FROM_OTHERS.pieces
        most = InFlight(pieces, max(PIECE_BYTES_MIN, sum(read.nbytes for read in shares) // pieces))
        report = await fill(self._sources, shares, {0: half}, most=most, headers=False)
        report.nbytes = 0  # nothing has come to its place yet
        return report

    async def _copy(
        self, round_: Round, half: memoryview, clippers: Mapping[ImageKey, Clipper]
    ) -> FillReport:
        """Copy what this rank needs out of the memory; where it is not what was read, from the sources."""
        windows: dict[ImageKey, _Window] = {}
        for share in round_:
            if share.image in clippers:
                window = windows.setdefault(share.image, _Window(half.toreadonly()))
                window.add(share.begin, share.end, share.at)
        reads = [
            part
            for key, window in windows.items()
            for begin, end in window.ranges()
            for part in clippers[key].take(begin, end)
        ]
        records = {(key.rank, key.name): self._images[key].record for key in windows}
        memory = _RoundSource(self._sources, windows, records)
        return await fill([memory, *self._sources], reads, self._targets, headers=False)


def _clipped(reads: Sequence[Read], ranges: Sequence[Range]) -> list[Read]:
    clipper = Clipper(reads)
    return [part for begin, end in ranges for part in clipper.take(begin, end)]


class _Window:
    """The parts of one image that are in the round's memory; sliced by offsets in the image, inside one part."""

    def __init__(self, half: memoryview) -> None:
        self._half = half
        self._parts: list[tuple[int, int, int]] = []

    def add(self, begin: int, end: int, at: int) -> None:
        if self._parts and self._parts[-1][1] == begin:
            first = self._parts.pop()
            self._parts.append((first[0], end, first[2]))
        else:
            self._parts.append((begin, end, at))

    def ranges(self) -> list[Range]:
        return [(begin, end) for begin, end, _ in self._parts]

    def __getitem__(self, where: slice) -> memoryview:
        index = bisect_right(self._parts, where.start, key=lambda part: part[0]) - 1
        begin, _, at = self._parts[index]
        return self._half[at + where.start - begin : at + where.stop - begin]


class _RoundSource:
    """The round's memory as a source: images of which only some chunks are there."""

    kind = SHARED

    def __init__(
        self,
        sources: Sequence[Source],
        windows: Mapping[ImageKey, _Window],
        records: Mapping[tuple[int, str], ImageRecord],
    ) -> None:
        first = sources[0]
        self.label = LABEL
        self.step = first.step
        self.incarnation = first.incarnation
        self.world = first.world
        self.chunk_bytes = first.chunk_bytes
        self._sources = sources
        self._records = records
        self._windows = {(key.rank, key.name): window for key, window in windows.items()}
        self.ranks = frozenset(rank for rank, _ in self._windows)

    async def meta(self, rank: int) -> dict[str, Any]:
        return await self._sources[0].meta(rank)

    async def layout(self, rank: int) -> Layout:
        return await self._sources[0].layout(rank)

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return {image: record for (r, image), record in self._records.items() if r == rank}

    async def state(self, rank: int) -> bytes:
        return await self._sources[0].state(rank)

    def has(self, rank: int, image: str) -> bool:
        return (rank, image) in self._windows

    async def check_image(self, rank: int, image: str) -> None:
        """Nothing to ask: what is there is proved chunk by chunk."""

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        view[:] = self._windows[rank, image][offset : offset + len(view)]

    def mapped(self, rank: int, image: str) -> Mapped | None:
        return self._windows.get((rank, image))

    def locate(self, rank: int, image: str) -> str:
        return f"{LABEL}, image {image} of rank {rank}"

    async def confirm(self) -> None:
        """Nothing to ask: a round's memory stays until all ranks have copied."""
