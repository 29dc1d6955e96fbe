"""What rotation keeps, and what it never touches."""

from __future__ import annotations

from pathlib import Path

import everstep
import pytest

from .kit import opened, steps_on_disk


def save_all(root: Path, steps: list[int], **policy: object) -> None:
    with opened(root, policy=policy) as ckpt:
        ckpt.load({"n": 0})
        for step in steps:
            ckpt.save(step, {"n": step}).wait()


def test_keep_last_and_every_across_a_restart(root: Path) -> None:
    save_all(root, list(range(1, 7)), keep_last=2, keep_every=4)
    assert steps_on_disk(root) == [4, 5, 6]
    save_all(root, [7, 8, 9, 10, 11], keep_last=2, keep_every=4)
    assert steps_on_disk(root) == [4, 8, 10, 11], "the first process's steps count too"
    save_all(root, [12, 13], keep_last=1)
    assert steps_on_disk(root) == [13]
    assert everstep.load(root)["n"] == 13


def test_steps_are_numbers_not_texts(root: Path) -> None:
    steps = [9, 10, 99, 100, 9_999, 10_000, 999_999_999, 10**12]
    save_all(root, steps, keep_last=3)
    assert steps_on_disk(root) == [10_000, 999_999_999, 10**12] or sorted(steps_on_disk(root)) == steps[-3:]
    assert everstep.load(root)["n"] == 10**12


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_is_never_removed(root: Path, keep_last: int) -> None:
    for step in range(1, 6):
        save_all(root, [step], keep_last=keep_last)
        assert steps_on_disk(root) == list(range(max(1, step - keep_last + 1), step + 1))


def test_what_the_run_does_not_own_is_never_deleted(root: Path) -> None:
    save_all(root, [1], keep_last=1)
    foreign = [
        root / "checkpoints" / "000000001" / "notes.txt",
        root / "checkpoints" / "000000001" / "0001" / "mine.bin",
        root / "checkpoints" / "000000001" / "0001" / "a1" / "mine.bin",
        root / "checkpoints" / "best" / "model.pt",
        root / "checkpoints" / "1" / "0001" / "a1" / "x",
        root / "readme.md",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    save_all(root, [2, 3], keep_last=1)
    assert steps_on_disk(root) == [3]
    assert all(path.read_text() == "mine" for path in foreign)


def test_checkpoints_of_a_cut_lineage_do_not_push_out_those_of_this_one(root: Path) -> None:
    save_all(root, [1, 2, 3, 4], keep_last=10)
    with opened(root, policy={"keep_last": 2}) as ckpt:
        assert ckpt.load({"n": 0}, step=1) == 1
        assert everstep.load(root)["n"] == 4, "nothing was written yet"
        ckpt.save(2, {"n": 20}).wait()
        assert everstep.load(root)["n"] == 20
    assert everstep.load(root, step=1)["n"] == 1, "two of this lineage stay"
