"""A load that is asked to mend brings what its node's ranks read into the node's tier, downloaded once, and reads it
from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exchange.conftest import job, nodes, root
from tests.exchange.kit import Job
from tests.facade.kit import Training, forget_memory, opened, same_bits, until
from tests.restore.counted import Make, load, read_by, replicated, save, sharded, stored
from tests.tiers.conftest import quick_turns

from .conftest import node
from .kit import near as near_tier
from .kit import staged

__all__ = ["job", "node", "nodes", "quick_turns", "root"]

IMAGES = (".safetensors", ".msgpack")


@pytest.fixture
def near(tmp_path: Path) -> Callable[[str], Path]:
    return lambda node: tmp_path / f"nvme-{node}"


def images(root: Path, step: int = 1) -> dict[str, int]:
    return stored(root, step, IMAGES[0])


def same_files(left: Path, right: Path, step: int) -> bool:
    """Whether what ``left`` has of the step is, byte for byte, what ``right`` has, but for decisions."""

    def files(place: Path) -> dict[str, bytes]:
        found = (place / "checkpoints" / f"{step:09d}").rglob("*")
        return {
            str(p.relative_to(place)): p.read_bytes()
            for p in found
            if p.is_file() and not p.name.startswith("manifest")
        }

    return files(left) == files(right) != {}


@pytest.mark.parametrize("make", [replicated, sharded])
@pytest.mark.parametrize(("wrote", "loads"), [(2, 2), (3, 2), (2, 3), (2, 1)])
def test_a_node_downloads_every_byte_once(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path], make: Make, wrote: int, loads: int
) -> None:
    save(job, nodes[0], make, wrote)
    places = [nodes[0]] * loads
    loaded = load(root, places, make, near=near, mend=True)
    assert read_by(loaded) == images(root)
    assert {kind for one in loaded for kind in one.recovery.sources} == {"node"}
    assert same_files(near(nodes[0]), root, 1)
    if wrote == loads:
        assert read_by(loaded, IMAGES[1]) == stored(root, 1, IMAGES[1])
        assert read_by(loaded, ".vote") == stored(root, 1, ".vote")

    again = load(root, places, make, near=near, mend=True)
    assert not any("/a1/" in name for one in again for name in one.root), "records and decisions only"
    plainly = load(root, places, make, near=near)
    assert not any("/a1/" in name for one in plainly for name in one.root)
    assert not any(one.warned for one in [*loaded, *again, *plainly])


def test_two_nodes_that_hold_all_alike_download_it_once_each(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path]
) -> None:
    save(job, nodes[0], replicated, 4)
    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    loaded = load(root, places, replicated, near=near, mend=True)
    for place, mine in ((nodes[0], loaded[:2]), (nodes[1], loaded[2:])):
        assert read_by(mine) == images(root)
        assert same_files(near(place), root, 1)
    again = load(root, places, replicated, near=near)
    assert not any("/a1/" in name for one in again for name in one.root)


@pytest.mark.parametrize("wrote", [4, 2])
def test_a_node_brings_what_it_needs_most_of(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path], wrote: int
) -> None:
    """Shards of its own ranks; of the share that has the small tensor which all take, only that is read."""
    save(job, nodes[0], sharded, wrote)
    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    loaded = load(root, places, sharded, near=near, mend=True)
    first, second = read_by(loaded[:2]), read_by(loaded[2:])
    small = next(name for name in images(root) if "small" in name)
    assert first | second == images(root) and first.keys() & second.keys() == {small}
    half = [f"rank-{rank:05d}" for rank in range(wrote)]
    for place, ranks in ((nodes[0], half[: wrote // 2]), (nodes[1], half[wrote // 2 :])):
        votes = sorted(path.stem for path in near(place).rglob("*.vote"))
        assert votes == ranks
    again = load(root, places, sharded, near=near)
    assert read_by(again[:2]) == {} and read_by(again[2:]).keys() == {small}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["image", "state", "vote", "cut short", "half of it", "layout"])
def test_what_is_damaged_in_the_nodes_tier_is_mended(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path], fault: str
) -> None:
    nvme, places = near(nodes[0]), [nodes[0]] * 2
    save(job, nodes[0], replicated, 2)
    load(root, places, replicated, near=near, mend=True)
    bad = sorted(
        nvme.rglob(
            {"image": "*.safetensors", "state": "*.msgpack", "vote": "*.vote"}.get(fault, "*.safetensors")
        )
    )
    if fault == "cut short":
        bad[1].write_bytes(bad[1].read_bytes()[:-9])
    elif fault == "half of it":  # a kill in the middle: no vote yet
        bad[1].unlink()
        next(nvme.rglob("rank-00001.vote")).unlink()
    else:
        flip(next((nvme / "layouts").iterdir()) if fault == "layout" else bad[1])
    loaded = load(root, places, replicated, near=near, mend=True)
    assert same_files(nvme, root, 1)
    rewritten = {bad[1].relative_to(nvme).as_posix()} if "." in bad[1].name and fault != "layout" else set()
    read = {name for one in loaded for name in one.root if "/a1/" in name}
    assert read - {name for name in read if name.endswith(".vote")} == {
        name for name in rewritten if not name.endswith(".vote")
    }
    assert {kind for one in loaded for kind in one.recovery.sources} == {"node"}
    again = load(root, places, replicated, near=near)
    assert not any("/a1/" in name for one in again for name in one.root) and not any(
        one.warned for one in again
    )


def test_the_directory_of_another_run_is_left_alone(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path]
) -> None:
    save(job, nodes[0], replicated, 2)
    near(nodes[0]).mkdir()
    shutil.copy(root / "run.json", near(nodes[0]) / "run.json")
    shutil.rmtree(root)
    save(job, nodes[0], replicated, 2)
    before = sorted(near(nodes[0]).rglob("*"))
    loaded = load(root, [nodes[0]] * 2, replicated, near=near, mend=True)
    assert read_by(loaded) == images(root) and sorted(near(nodes[0]).rglob("*")) == before
    assert any("another run is there" in text for text in loaded[0].warned)


def test_a_job_that_only_loads_keeps_to_the_tiers_retention(
    job: Job, root: Path, nodes: list[str], near: Callable[[str], Path]
) -> None:
    save(job, nodes[0], replicated, 1, steps=(1, 2, 3, 4, 5))
    nvme, seen = near(nodes[0]), []
    for step in (2, 3, 1, 5, 4):
        load(root, [nodes[0]], replicated, near=near, mend=True, step=step)
        seen.append(staged(nvme))
    assert seen == [[2], [2, 3], [1, 2, 3], [3, 5], [4, 5]]
    shutil.copytree(nvme / "checkpoints" / "000000005", nvme / "checkpoints" / "000000006")
    load(root, [nodes[0]], replicated, near=near, mend=True, step=5)
    assert staged(nvme) == [4, 5, 6], "what the root does not have yet stays"
    load(root, [nodes[0]], replicated, near=near, step=1)
    assert staged(nvme) == [4, 5, 6], "a load that is not asked to writes nothing"


def test_training_goes_on_beside_what_was_brought(root: Path, tmp_path: Path, node: str) -> None:
    nvme, training = tmp_path / "nvme", Training()
    with opened(root, tiers=[near_tier(nvme, keep_last=2)]) as ckpt:
        ckpt.load(training.state)
        for step in (1, 2):
            training.step()
            ckpt.save(step, training.state).wait()
    weights = training.weights()
    forget_memory(root)
    shutil.rmtree(nvme)
    again = Training(seed=4)
    with opened(root, tiers=[near_tier(nvme, keep_last=2)]) as ckpt:
        assert ckpt.load(again.state, mend=True) == 2
        assert ckpt.recovery is not None and set(ckpt.recovery.sources) == {"node"}
        assert same_bits(again.weights(), weights) and staged(nvme) == [2]
        for step, left in ((3, [2, 3]), (4, [3, 4])):
            again.step()
            ckpt.save(step, again.state).wait()
            until(lambda left=left: staged(nvme) == left, "retention on the node")
