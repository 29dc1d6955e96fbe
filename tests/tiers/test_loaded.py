"""A load takes what the root does not have, or not rightly, from a further tier; even the run itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors

from tests.facade.kit import Training, forget_memory, opened, same_bits, steps_on_disk, until

from .test_mirrored import tree


def trained(root: Path, far: Path, steps: int, **policy: Any) -> dict[int, dict[str, torch.Tensor]]:
    """Every step at the tier, as many at the root as the policy keeps; nothing in memory. The weights of each step."""
    training, weights = Training(), {}
    ckpt = opened(root, tiers=[everstep.Tier(far, keep_last=100)], policy=policy)
    ckpt.load(training.state)
    for step in range(1, steps + 1):
        training.step()
        ckpt.save(step, training.state).wait("file")
        weights[step] = training.weights()
    ckpt.close()
    forget_memory(root)
    return weights


def test_a_step_that_the_root_gave_up(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 4, keep_last=1)
    until(lambda: steps_on_disk(root) == [4], "rotation")
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        assert ckpt.load(training.state, step=2) == 2
        assert same_bits(training.weights(), weights[2])
    with opened(root) as ckpt, pytest.raises(errors.NoCheckpoint):
        ckpt.load(training.state, step=2)


def images(root: Path, step: int) -> list[Path]:
    return sorted((root / "checkpoints" / f"{step:09d}").glob("*/*/*.safetensors"))


@pytest.mark.parametrize("fault", ["damaged", "missing", "cut short", "vote"])
def test_what_is_wrong_at_the_root_comes_from_the_tier(root: Path, tmp_path: Path, fault: str) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 2)
    image = images(root, 2)[0]
    if fault == "damaged":
        data = bytearray(image.read_bytes())
        data[len(data) // 2] ^= 1
        image.write_bytes(data)
    elif fault == "missing":
        image.unlink()
    elif fault == "cut short":
        image.write_bytes(image.read_bytes()[:-5])
    else:
        next(image.parent.glob("*.vote")).unlink()
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        assert ckpt.load(training.state) == 2
        assert same_bits(training.weights(), weights[2])
        assert ckpt.recovery is not None and ckpt.recovery.tier == "disk"
        if fault != "vote":
            assert any("far" in text for text in ckpt.recovery.fallbacks)


def test_a_root_that_is_lost_is_gone_on_with_from_the_tier(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 3)
    shutil.rmtree(root)
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far, keep_last=100)]) as ckpt:
        assert ckpt.load(training.state) == 3
        assert same_bits(training.weights(), weights[3])
        assert ckpt.recovery is not None and set(ckpt.recovery.sources) == {"tier"}
        assert not (root / "run.json").exists()  # a load writes nothing
        training.step()
        ckpt.save(4, training.state).wait("file")
    assert (root / "run.json").read_bytes() == (far / "run.json").read_bytes()
    assert steps_on_disk(root) == [4] and steps_on_disk(far) == [1, 2, 3, 4]
    forget_memory(root)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        assert ckpt.load(training.state) == 4
        assert ckpt.recovery is not None and ckpt.recovery.incarnation == 2


def test_a_tier_that_cannot_be_asked_stops_nobody(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 2)
    shutil.rmtree(far)
    far.write_text("no directory")
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="far"):
            assert ckpt.load(training.state) == 2
        assert same_bits(training.weights(), weights[2])
    shutil.rmtree(root)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        with pytest.raises(errors.EverstepError, match="far"):
            ckpt.load(training.state)


@pytest.mark.parametrize("fault", ["damaged", "missing", "vote", "layout", "all"])
def test_a_load_that_is_asked_to_mends_the_root(root: Path, tmp_path: Path, fault: str) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 2)
    whole = tree(root)
    image = images(root, 2)[0]
    if fault == "damaged":
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.write_bytes(data)
    elif fault == "missing":
        image.unlink()
    elif fault == "vote":
        next(image.parent.glob("*.vote")).write_bytes(b"damaged")
    elif fault == "layout":
        for layout in (root / "layouts").iterdir():
            layout.write_bytes(b"damaged")
    else:
        shutil.rmtree(root)
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        assert ckpt.load(training.state, mend=True) == 2
        assert same_bits(training.weights(), weights[2])
        assert ckpt.recovery is not None and set(ckpt.recovery.sources) == {"disk"}, "what was mended is read"
        assert not ckpt.recovery.fallbacks
    after = tree(root)
    assert {name: data for name, data in whole.items() if "000000002" in name} == {
        name: data for name, data in after.items() if "000000002" in name
    }
    shutil.rmtree(far)
    again = Training(seed=8)
    with opened(root) as ckpt:
        assert ckpt.load(again.state) == 2
        assert ckpt.recovery is not None and not ckpt.recovery.fallbacks
    assert same_bits(again.weights(), weights[2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("fault", "step"), [("both", 1), ("out of reach", 2)])
def test_what_cannot_be_mended_does_not_stop_the_load(
    root: Path, tmp_path: Path, fault: str, step: int
) -> None:
    far = tmp_path / "far"
    weights = trained(root, far, 2)
    if fault == "both":
        flip(images(root, 2)[0])
    if fault == "out of reach":
        shutil.rmtree(far)
        far.write_text("no directory")
    else:
        flip(images(far, 2)[0])
        images(root, 2)[1].unlink()
    training = Training(seed=4)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 2 could not be mended"):
            assert ckpt.load(training.state, mend=True) == step
        assert same_bits(training.weights(), weights[step])
