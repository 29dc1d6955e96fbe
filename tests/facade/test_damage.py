"""Nothing there, there but bad, cannot tell: three answers, and never a silent fresh start."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch
from everstep import errors
from everstep.backends.errors import Permanent, Retryable
from everstep.backends.faults import Fault, Faulty
from everstep.memory.arena import Arena

from .kit import arenas_of, opened, steps_on_disk


@pytest.fixture
def run(root: Path) -> Path:
    """Three checkpoints, nothing in memory."""
    with opened(root, policy={"keep_last": 10}) as ckpt:
        ckpt.load({"n": 0, "w": torch.zeros(3000)})
        for step in (1, 2, 3):
            ckpt.save(step, {"n": step, "w": torch.full((3000,), float(step))}).wait()
    return root


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"{step:09d}" / "0001"


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # another file: nothing may lean on the old inode
    path.write_bytes(data)


def image(directory: Path) -> Path:
    return next((directory / "a1").glob("*.w.safetensors"))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit in an image": lambda d: flip(image(d)),
    "a truncated image": lambda d: image(d).write_bytes(image(d).read_bytes()[:-1]),
    "a missing image": lambda d: image(d).unlink(),
    "a flipped bit in the state": lambda d: flip(next((d / "a1").glob("*.state.msgpack")), 5),
    "a damaged vote": lambda d: flip(next((d / "a1").glob("*.vote")), 30),
    "a missing vote": lambda d: next((d / "a1").glob("*.vote")).unlink(),
    "a damaged manifest": lambda d: flip(d / "manifest-1.json", 50),
    "an empty manifest": lambda d: (d / "manifest-1.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_step_is_passed_over_loudly(run: Path, damage: str) -> None:
    DAMAGES[damage](checkpoint(run, 3))
    with warnings.catch_warnings(), pytest.raises(errors.Damaged, match="step 3 cannot be loaded"):
        warnings.simplefilter("error")  # nothing is passed over of what was asked for
        everstep.load(run, step=3)
    state = {"n": 0, "w": torch.zeros(3000)}
    ckpt = opened(run, policy={"keep_last": 10})
    with pytest.warns(RuntimeWarning, match="passed over step 3"):
        assert ckpt.load(state) == 2
    assert state["n"] == 2 and state["w"].eq(2).all()
    assert ckpt.recovery is not None and any("step 3" in text for text in ckpt.recovery.skipped)
    ckpt.save(4, {"n": 4, "w": state["w"]}).wait()
    ckpt.close()
    assert everstep.load(run)["n"] == 4


def test_if_nothing_good_is_left_the_load_fails_and_nothing_starts_anew(run: Path) -> None:
    for step in (1, 2, 3):
        flip(image(checkpoint(run, step)))
    ckpt = opened(run)
    with pytest.warns(RuntimeWarning), pytest.raises(errors.Damaged, match="no checkpoint of this run"):
        ckpt.load({"n": 0, "w": torch.zeros(3000)})
    with pytest.raises(errors.NotLoaded):
        ckpt.step(4, {"n": 4})
    ckpt.close()
    assert steps_on_disk(run) == [1, 2, 3]
    with opened(run, fresh="all is lost") as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})


def test_missing_layouts_are_damage(run: Path) -> None:
    shutil.rmtree(run / "layouts")
    with pytest.warns(RuntimeWarning, match="passed over step 2"), pytest.raises(errors.Damaged):
        opened(run).load({"n": 0, "w": torch.zeros(3000)})


@pytest.mark.parametrize("name", ["run.json", "incarnations/0001.json"])
@pytest.mark.parametrize("how", ["missing", "flipped", "empty"])
def test_a_lost_or_damaged_record_is_never_a_fresh_start(run: Path, name: str, how: str) -> None:
    path = run / name
    {"missing": path.unlink, "flipped": lambda: flip(path), "empty": lambda: path.write_bytes(b"")}[how]()
    before = sorted(str(found) for found in run.rglob("*"))
    for call in (
        lambda: everstep.load(run),
        lambda: everstep.save(run, 9, {"n": 9}),
        lambda: opened(run).load({"n": 0, "w": torch.zeros(3000)}),
        lambda: opened(run).step(9, {"n": 9}),
        lambda: opened(run, fresh="why not").step(9, {"n": 9}),
    ):
        with pytest.raises((errors.Damaged, errors.NotLoaded)):
            call()
    assert sorted(str(found) for found in run.rglob("*")) == before


@pytest.mark.parametrize("op", ["read", "read_into", "list", "list_names"])
@pytest.mark.parametrize("error", [Permanent, Retryable])
def test_storage_that_does_not_answer_is_cannot_tell(run: Path, op: str, error: type) -> None:
    ckpt = opened(run)
    fault = Fault(op=op, times=10**9, error=lambda name: error(name, "permission denied"))
    ckpt._backend = Faulty(ckpt._backend, [fault])
    state = {"n": 0, "w": torch.zeros(3000)}
    if op in ("list",):  # not used by this load
        assert ckpt.load(state) == 3
        return
    with pytest.raises(errors.CannotTell, match="permission denied"):
        ckpt.load(state)
    with pytest.raises(errors.EverstepError):
        ckpt.step(4, state)
    fault.times = 0
    assert ckpt.load(state) == 3, "nothing was decided from it"
    ckpt.close()


def test_a_lost_manifest_with_all_votes_is_committed_by_a_training_load(run: Path) -> None:
    (checkpoint(run, 3) / "manifest-1.json").unlink()
    with pytest.warns(RuntimeWarning, match="all votes are in"):
        assert everstep.load(run)["n"] == 2, "a reader writes nothing"
    assert steps_on_disk(run) == [1, 2]
    state = {"n": 0, "w": torch.zeros(3000)}
    with opened(run) as ckpt, pytest.warns(RuntimeWarning, match="committed now"):
        assert ckpt.load(state) == 3
    assert state["n"] == 3 and 3 in steps_on_disk(run)


def test_a_reader_that_comes_between_the_last_vote_and_the_manifest_waits_for_it(run: Path) -> None:
    manifest, aside = checkpoint(run, 3) / "manifest-1.json", run.parent / "aside"
    manifest.rename(aside)
    soon = threading.Timer(0.4, aside.rename, [manifest])
    soon.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert everstep.load(run)["n"] == 3
    soon.join()


def test_a_half_attempt_is_invisible_and_the_step_can_be_written_again(run: Path) -> None:
    shutil.copytree(checkpoint(run, 3), run / "checkpoints" / "000000004" / "0001")
    directory = run / "checkpoints" / "000000004" / "0001"
    (directory / "manifest-1.json").unlink()
    next((directory / "a1").glob("*.vote")).unlink()
    state = {"n": 0, "w": torch.zeros(3000)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert everstep.load(run)["n"] == 3
        with opened(run) as ckpt:
            assert ckpt.load(state) == 3
            ckpt.save(4, {"n": 40, "w": state["w"]}).wait()
    assert everstep.load(run)["n"] == 40


def test_damage_in_memory_is_mended_from_disk_or_passed_over(root: Path) -> None:
    ckpt = opened(root, policy={"keep_last": 10})
    state = {"n": 0, "w": torch.zeros(3000)}
    ckpt.load(state)
    for step in (1, 2):
        ckpt.save(step, {"n": step, "w": torch.full((3000,), float(step))}).wait()
    ckpt.close(flush=False)
    (info,) = arenas_of(root)
    with Arena.attach(info.path) as arena:
        index = next(s.index for s in arena.snapshots() if s.step == 2)
        with arena.pin(index, next(s.generation for s in arena.snapshots() if s.step == 2)) as pinned:
            expected = bytes(pinned.view("image:w"))
    data = bytearray(info.path.read_bytes())
    at = data.find(expected)
    assert at > 0
    data[at + len(expected) - 5] ^= 4
    with info.path.open("r+b") as file:
        file.write(data)
    ckpt = opened(root)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert ckpt.load(state) == 2
    assert state["w"].eq(2).all(), "the bytes came from the disk"
    assert heard, "and that is told"
    ckpt.close()
