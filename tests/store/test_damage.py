"""Every change of any file of a checkpoint is found, by name: by fsck and by whoever loads."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, EverstepError, UnknownFormat
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.store.catalog import complete_undecided, list_steps, read_decision
from everstep.store.findings import Finding, Severity, exit_code
from everstep.store.fsck import check
from everstep.store.fsck_images import Extent
from everstep.store.runs import open_run, read_incarnations, require_records

from tests.store import store_kit as kit

STEP = 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint; copied, never changed."""
    root = tmp_path_factory.mktemp("whole") / "run"
    kit.make_run(root, STEP)
    return root


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def damage_found(backend: LocalBackend, quick: bool = False) -> list[Finding]:
    bad = []
    async for finding in check(backend, extent=Extent(quick=quick), decision_wait_s=0):
        if finding.severity is Severity.DAMAGE:
            bad.append(finding)
    return bad


async def load_error(backend: LocalBackend) -> EverstepError | None:
    """The error of the way that a load goes: run, records, choice, bytes; None if it all went well."""
    try:
        await open_run(backend)
        records = await read_incarnations(backend)
        steps = await list_steps(backend)
        require_records(records, [found.incarnation for found in steps])
        for found in steps:
            decision = await read_decision(backend, found)
            if decision is None:
                lost = await complete_undecided(backend, found)
                name = names.decision(found.step, found.incarnation, lost[0]) if lost else "?"
                return Damaged("no decision", name=name)
            assert isinstance(decision, Manifest)
            await kit.load(backend, decision)
    except EverstepError as error:
        return error
    return None


def assert_found(root: Path, name: str, what: str) -> None:
    async def look() -> None:
        backend = LocalBackend(root)
        try:
            bad = await damage_found(backend)
        except UnknownFormat as error:  # a change of the very word that names the run's hash or version
            assert error.fields["name"] == name == names.RUN
        else:
            assert name in [finding.name for finding in bad], f"fsck missed {what} of {name}: {bad}"
            assert all(finding.hurts for finding in bad if finding.name == name)
            assert exit_code(bad) == 4
        error = await load_error(backend)
        assert error is not None, f"load missed {what} of {name}"
        assert error.fields.get("name") == name, f"load names {error.fields} for {what} of {name}"
        await backend.close()

    asyncio.run(look())


def positions(name: str, nbytes: int, seed: int) -> Iterator[int]:
    """All in the long version; else the ends, every chunk, and a few at random."""
    numbers = random.Random(f"{name}{seed}")
    yield from sorted(
        {0, nbytes - 1, *range(0, nbytes, kit.CHUNK), *(numbers.randrange(nbytes) for _ in range(4))}
    )


def test_a_whole_run_has_no_findings(whole: Path) -> None:
    async def look() -> None:
        backend = LocalBackend(whole)
        assert [finding async for finding in check(backend)] == []
        assert await load_error(backend) is None
        await backend.close()

    asyncio.run(look())


def test_removal_truncation_and_growth_of_every_file_are_found_by_name(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    for name in files_of(whole):
        path, data = root / name, (whole / name).read_bytes()
        path.unlink()
        assert_found(root, name, "removal")
        for changed in (data[:-1], b"", data + b"\0", data + b"\n"):
            path.write_bytes(changed)
            assert_found(root, name, f"{len(changed)} of {len(data)} bytes")
        path.write_bytes(data)


def test_changed_bytes_are_found_by_name(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    for name in files_of(whole):
        path, data = root / name, bytearray((whole / name).read_bytes())
        for at in list(positions(name, len(data), seed))[:12]:
            data[at] ^= 1 << seed % 8
            path.write_bytes(data)
            assert_found(root, name, f"byte {at}")
            data[at] ^= 1 << seed % 8
        path.write_bytes(data)


@pytest.mark.long
def test_every_byte_of_every_small_file_matters(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    for name in files_of(whole):
        path, data = root / name, bytearray((whole / name).read_bytes())
        small = len(data) <= 8 << 10 and "safetensors" not in name
        for at in range(len(data)) if small else positions(name, len(data), 1):
            data[at] ^= 1 << at % 8
            path.write_bytes(data)
            assert_found(root, name, f"byte {at}")
            data[at] ^= 1 << at % 8
        path.write_bytes(data)


def test_swapped_files_of_equal_size_are_found(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    first = names.image(STEP, 1, 1, 0, "model")
    second = names.state(STEP, 1, 1, 0)
    other = names.state(STEP, 1, 1, 1)
    one, two = (root / second).read_bytes(), (root / other).read_bytes()
    assert len(one) == len(two)
    (root / second).write_bytes(two)
    assert_found(root, second, "swap")
    (root / second).write_bytes(one)
    image = (root / first).read_bytes()
    (root / first).write_bytes(image[: kit.CHUNK] + image[kit.CHUNK * 2 :] + image[kit.CHUNK : kit.CHUNK * 2])
    assert_found(root, first, "swapped chunks")


def test_another_checkpoint_under_the_same_names_is_not_the_manifests(whole: Path, tmp_path: Path) -> None:
    """An old manifest with newer votes and images, all of them whole."""
    root, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole, root)

    async def make() -> None:
        backend = LocalBackend(other)
        await kit.start_run(backend)
        for rank in range(2):
            pinned = kit.snapshot(STEP, rank)
            pinned.data["image:model"][-1] ^= 1
            await kit.flush(backend, STEP, rank, pinned=pinned)
        await backend.close()

    asyncio.run(make())
    attempt = names.attempt_dir(STEP, 1, 1)
    shutil.copytree(other / attempt, root / attempt, dirs_exist_ok=True)
    assert_found(root, names.vote(STEP, 1, 1, 0), "another vote")


def test_quick_finds_sizes_and_leaves_bytes_unread(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    name = names.image(STEP, 1, 1, 0, "model")
    data = bytearray((root / name).read_bytes())
    data[-1] ^= 1
    (root / name).write_bytes(data)

    async def look() -> None:
        backend = LocalBackend(root)
        assert await damage_found(backend, quick=True) == []
        (root / name).write_bytes(data + b"x")
        assert [finding.name for finding in await damage_found(backend, quick=True)] == [name]
        await backend.close()

    asyncio.run(look())
