"""Every change of a file of the newest checkpoint is found by ``everstep.load`` and by ``everstep fsck``, by name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.damage.journey import NEW, OLD, fsck, read, write

NEWEST = f"checkpoints/{NEW:09}/0001"
FILES = {
    "run.json": None,
    "incarnations/0001.json": None,
    "layouts/": None,
    f"{NEWEST}/manifest-1.json": OLD,
    f"{NEWEST}/a1/rank-00000.vote": OLD,
    f"{NEWEST}/a1/rank-00000.state.msgpack": OLD,
    f"{NEWEST}/a1/rank-00000.model.safetensors": OLD,
    f"{NEWEST}/a1/rank-00000.optimizer.safetensors": OLD,
}
"""By file: the step that is loaded instead. None: every checkpoint needs it, so an error names it."""

SAMPLED = 12
"""Bytes changed of each file in the usual run."""
FLIPS = (0x01, 0x80, 0xFF)
LARGE_BYTES, STRIDE = 2048, 7
"""Of larger files the long run changes every 7th byte."""
DAMAGE_LEFT = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("damage")
    memory = base / "memory"
    memory.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_RUNTIME_DIR", str(base / "runtime"))
        write(base / "run", memory)
        yield base / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def path_of(run: Path, name: str) -> Path:
    if name.endswith("/"):
        (path,) = (run / name).iterdir()
        return path
    return run / name


def check(run: Path, path: Path, expected: int | None, what: str) -> None:
    """Load and fsck both find it and name the file; nothing wrong is given."""
    name = str(path.relative_to(run))
    answer = read(run)
    assert answer.step == expected, f"{what} of {name}: step {answer.step}; {answer.told}"
    assert (answer.error is None) == (expected is not None)
    assert name in answer.told, f"{what} of {name} is not named: {answer.told!r}"
    code, said = fsck(run)
    assert code == DAMAGE_LEFT, f"{what} of {name}: fsck gave {code}; {said}"
    assert name in said, f"{what} of {name}: fsck does not name it; {said}"


def flip_each(run: Path, name: str, places: list[tuple[int, int]]) -> None:
    path = path_of(run, name)
    good = path.read_bytes()
    for place, flip in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :])
        check(run, path, FILES[name], f"byte {place} ^ {flip:#x}")
    path.write_bytes(good)
    assert read(run).step == NEW
    assert fsck(run)[0] == 0


@pytest.mark.parametrize("name", FILES)
def test_some_changed_bytes(run: Path, name: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    size = path_of(run, name).stat().st_size
    places = [0, size - 1, *(numbers.randrange(size) for _ in range(SAMPLED - 2))]
    flip_each(run, name, [(place, numbers.choice(FLIPS)) for place in places])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_every_changed_byte(run: Path, name: str) -> None:
    size = path_of(run, name).stat().st_size
    if size < LARGE_BYTES:
        flip_each(run, name, [(place, flip) for place in range(size) for flip in FLIPS])
    else:
        begin = random.randrange(STRIDE)
        print("begin", begin)
        flip_each(run, name, [(place, FLIPS[place % 3]) for place in range(begin, size, STRIDE)])


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncation by 1": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "truncation to 0": lambda path: path.write_bytes(b""),
    "truncation to a half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "growth by a zero byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "growth by a newline": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "removal": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_other_sizes(run: Path, name: str, change: str) -> None:
    path = path_of(run, name)
    CHANGES[change](path)
    check(run, path, FILES[name], change)
