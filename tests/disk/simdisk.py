"""A simulated disk: a door that works on a real directory and knows what of it would survive a power loss.

::

    sim = SimDisk(root)                       # what lies there now counts as durable
    backend = LocalBackend(root, door=sim.door)
    ...                                       # every operation is recorded in sim.ops
    for k in range(len(sim.ops) + 1):
        sim.crash(dest, op_index=k)           # the disk after the first k operations and a power loss

The model is the strict reading of POSIX. Of a file survives what it held at its last fsync (nothing, if there
was none: an empty file), whatever its name. Of a directory survive the entries that it had at its last fsync;
an entry is a name and the file or directory behind it. The root itself is durable. With a ``seed`` some of
what was not synced survives as well: any subset of the entries' changes (those of one rename within a
directory together), any blocks of the unsynced bytes, any length between.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from everstep.backends.door import Door, File
from everstep.backends.points import reach

Unsynced = Literal["lost", "zeros", "kept"]
Change = tuple[tuple[str, int | None], ...]

BLOCK = 4096
ROOT = 0


@dataclass(frozen=True)
class Op:
    """One operation; ``text`` is for people, ``apply`` for the model."""

    text: str
    apply: Callable[[State], None]

    def __str__(self) -> str:
        return self.text


@dataclass
class FileNode:
    data: bytearray = field(default_factory=bytearray)
    kept: bytes = b""
    """What the last fsync made durable."""


@dataclass
class DirNode:
    entries: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    """What leads from ``kept`` to ``entries``."""

    def change(self, *changes: tuple[str, int | None]) -> None:
        self.changes.append(changes)
        _apply(self.entries, changes)


class State:
    """All nodes, by number; a number is never used twice."""

    def __init__(self) -> None:
        self.nodes: dict[int, FileNode | DirNode] = {ROOT: DirNode()}

    def file(self, number: int) -> FileNode:
        node = self.nodes[number]
        assert isinstance(node, FileNode)
        return node

    def dir(self, number: int) -> DirNode:
        node = self.nodes[number]
        assert isinstance(node, DirNode)
        return node

    def find(self, name: str) -> int:
        number = ROOT
        for part in name.split("/") if name else ():
            number = self.dir(number).entries[part]
        return number

    def place(self, name: str) -> tuple[int, str]:
        """The directory's number, and the last part."""
        directory, _, last = name.rpartition("/")
        return self.find(directory), last


class SimDisk:
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.door = SimDoor(self)
        self.ops: list[Op] = []
        self.restart()

    def restart(self) -> None:
        """Forget what was recorded; what lies in the directory now counts as durable. No file may be open."""
        self.ops.clear()
        self._numbers = itertools.count(1)
        self._baseline = self._load()
        self.now = copy.deepcopy(self._baseline)
        self._replayed = (0, copy.deepcopy(self._baseline))

    def fresh(self) -> int:
        """A number for a new node."""
        return next(self._numbers)

    def crash(
        self,
        dest: str | os.PathLike[str],
        seed: int | None = None,
        *,
        op_index: int | None = None,
        unsynced: Unsynced = "lost",
    ) -> Path:
        """Make ``dest`` the disk after the first ``op_index`` operations (None: all) and a power loss.

        Without a seed, what was not synced is lost; of file contents that is with ``"zeros"`` only the bytes,
        not the length, and with ``"kept"`` nothing is lost at all (the death of a process)."""
        state = self._replay(len(self.ops) if op_index is None else op_index)
        survivors = _Survivors(state, None if seed is None else random.Random(seed), unsynced)
        survivors.write(ROOT, Path(dest))
        return Path(dest)

    def record(self, text: str, apply: Callable[[State], None]) -> None:
        self.ops.append(Op(text, apply))
        apply(self.now)

    def _replay(self, count: int) -> State:
        """The state after ``count`` operations; going on from the last one asked for where that is
        possible."""
        done, state = self._replayed
        if done > count:
            done, state = 0, copy.deepcopy(self._baseline)
        for op in self.ops[done:count]:
            op.apply(state)
        self._replayed = (count, state)
        return state

    def _load(self) -> State:
        state = State()
        for directory, names, files in os.walk(self.root):
            at = state.find("" if directory == self.root else os.path.relpath(directory, self.root))
            for name in names:
                _add(state, at, name, DirNode(), self.fresh())
            for name in files:
                data = Path(directory, name).read_bytes()
                _add(state, at, name, FileNode(bytearray(data), data), self.fresh())
        for node in state.nodes.values():
            if isinstance(node, DirNode):
                node.kept, node.changes = dict(node.entries), []
        return state


class SimDoor(Door):
    """Does everything for real and tells the disk's model, under one lock, so that the order of the record is
    that of the system calls. Points are reached outside of it: a hook may hold one thread and let others go
    on, or raise after an operation that was done."""

    def __init__(self, sim: SimDisk) -> None:
        super().__init__(sim.root)
        self._sim = sim
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # by open descriptor
        self._local = threading.local()

    @contextmanager
    def _step(self, op: str, name: str) -> Iterator[None]:
        note: Callable[[], None] | None = self._local.__dict__.pop("note", None)
        reach(f"{op}.before", name)
        with self._lock:
            yield
            if note is not None:
                note()
        reach(f"{op}.after", name)

    def open(self, name: str, flags: int, mode: int = 0o666) -> File:
        number: list[int] = []

        def note() -> None:
            now = self._sim.now
            directory, last = now.place(name)
            if last not in now.dir(directory).entries:
                fresh = self._sim.fresh()
                self._record(f"create {name}", lambda state: _add(state, directory, last, FileNode(), fresh))
            number.append(now.find(name))
            if flags & os.O_TRUNC:
                self._on_file(f"truncate {name} to 0", number[0], lambda node: _resize(node, 0))

        self._local.note = note
        file = super().open(name, flags, mode)
        self._numbers[file.fd] = number[0]
        return file

    def open_dir(self, name: str) -> File:
        with self._lock:
            directory = super().open_dir(name)
            if not name.startswith("/"):
                self._numbers[directory.fd] = self._sim.now.find(name)
            return directory

    def close(self, file: File) -> None:
        with self._lock:
            self._numbers.pop(file.fd, None)
            super().close(file)

    def write(self, file: File, view: memoryview, offset: int) -> int:
        data = bytes(view)

        def put(node: FileNode) -> None:
            _resize(node, max(len(node.data), offset + len(data)))
            node.data[offset : offset + len(data)] = data

        self._note_file(file, f"write {len(data)} bytes at {offset} of {file.name}", put)
        count = super().write(file, view, offset)
        assert count == len(data), "the simulation knows whole writes only"
        return count

    def truncate(self, file: File, nbytes: int) -> None:
        self._note_file(file, f"truncate {file.name} to {nbytes}", lambda node: _resize(node, nbytes))
        super().truncate(file, nbytes)

    def fallocate(self, file: File, nbytes: int) -> None:
        self._note_file(
            file, f"fallocate {file.name}", lambda node: _resize(node, max(len(node.data), nbytes))
        )
        super().fallocate(file, nbytes)

    def fsync(self, file: File) -> None:
        def keep(node: FileNode) -> None:
            node.kept = bytes(node.data)

        self._note_file(file, f"fsync {file.name}", keep)
        super().fsync(file)

    def fsync_dir(self, directory: File) -> None:
        number = self._numbers.get(directory.fd)

        def apply(state: State) -> None:
            assert number is not None
            node = state.dir(number)
            node.kept, node.changes = dict(node.entries), []

        if number is not None:
            self._local.note = lambda: self._record(f"fsync directory {directory.name or '.'}", apply)
        super().fsync_dir(directory)

    def rename(self, source: str, target: str) -> None:
        def note() -> None:
            number = self._sim.now.find(source)
            (old, old_last), (new, new_last) = self._sim.now.place(source), self._sim.now.place(target)

            def apply(state: State) -> None:
                if old == new:
                    state.dir(old).change((old_last, None), (new_last, number))
                else:
                    state.dir(new).change((new_last, number))
                    state.dir(old).change((old_last, None))

            self._record(f"rename {source} to {target}", apply)

        self._local.note = note
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        def note() -> None:
            number, (directory, last) = self._sim.now.find(source), self._sim.now.place(target)
            self._record(
                f"link {source} to {target}", lambda state: state.dir(directory).change((last, number))
            )

        self._local.note = note
        super().link(source, target)

    def mkdir(self, name: str) -> None:
        def note() -> None:
            directory, last = self._sim.now.place(name)
            fresh = self._sim.fresh()
            self._record(f"mkdir {name}", lambda state: _add(state, directory, last, DirNode(), fresh))

        if name and not name.startswith("/"):
            self._local.note = note
        super().mkdir(name)

    def unlink(self, name: str) -> None:
        self._local.note = lambda: self._gone("unlink", name)
        super().unlink(name)

    def rmdir(self, name: str) -> None:
        self._local.note = lambda: self._gone("rmdir", name)
        super().rmdir(name)

    def _gone(self, what: str, name: str) -> None:
        directory, last = self._sim.now.place(name)
        self._record(f"{what} {name}", lambda state: state.dir(directory).change((last, None)))

    def _note_file(self, file: File, text: str, change: Callable[[FileNode], None]) -> None:
        number = self._numbers[file.fd]
        self._local.note = lambda: self._on_file(text, number, change)

    def _on_file(self, text: str, number: int, change: Callable[[FileNode], None]) -> None:
        self._record(text, lambda state: change(state.file(number)))

    def _record(self, text: str, apply: Callable[[State], None]) -> None:
        self._sim.record(text, apply)


@dataclass
class _Survivors:
    """What of a state is still there after a power loss."""

    state: State
    rng: random.Random | None
    unsynced: Unsynced
    _files: dict[int, Path] = field(default_factory=dict)

    def write(self, number: int, dest: Path) -> None:
        dest.mkdir()
        for name, child in sorted(self._entries(self.state.dir(number)).items()):
            path = dest / name
            if isinstance(self.state.nodes[child], DirNode):
                self.write(child, path)
            elif child in self._files:
                os.link(self._files[child], path)
            else:
                path.write_bytes(self._content(self.state.file(child)))
                self._files[child] = path

    def _entries(self, node: DirNode) -> dict[str, int]:
        if self.unsynced == "kept":
            return node.entries
        entries = dict(node.kept)
        for change in self._chosen(node.changes):
            _apply(entries, change)
        return entries

    def _chosen(self, changes: list[Change]) -> list[Change]:
        if self.rng is None:
            return []
        manner = self.rng.choice(("none", "all", "some", "first"))
        if manner == "some":
            return [change for change in changes if self.rng.random() < 0.5]
        if manner == "first":
            return changes[: self.rng.randint(0, len(changes))]
        return changes if manner == "all" else []

    def _content(self, node: FileNode) -> bytes:
        if self.unsynced == "kept":
            return bytes(node.data)
        if self.rng is None and self.unsynced == "zeros":
            return node.kept[: len(node.data)].ljust(len(node.data), b"\0")
        if self.rng is None or node.data == node.kept:
            return node.kept
        low, high = sorted((len(node.kept), len(node.data)))
        nbytes = self.rng.choice((len(node.kept), len(node.data), self.rng.randint(low, high)))
        content = bytearray(node.kept[:nbytes].ljust(nbytes, b"\0"))
        for start in range(0, nbytes, BLOCK):
            if self.rng.random() < 0.5:
                block = node.data[start : min(start + BLOCK, nbytes)]
                content[start : start + len(block)] = block
        return bytes(content)


def _apply(entries: dict[str, int], change: Change) -> None:
    for name, number in change:
        if number is None:
            entries.pop(name, None)
        else:
            entries[name] = number


def _add(state: State, directory: int, name: str, node: FileNode | DirNode, number: int) -> None:
    # A copy: the same operation is replayed for many states.
    state.nodes[number] = copy.deepcopy(node)
    state.dir(directory).change((name, number))


def _resize(node: FileNode, nbytes: int) -> None:
    if nbytes <= len(node.data):
        del node.data[nbytes:]
    else:
        node.data.extend(bytes(nbytes - len(node.data)))
