"""``everstep bench delta``, small: what it says is asserted where it follows from the data; times mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from everstep.benchmarks import delta, delta_codec, delta_runs
from everstep.benchmarks.common import Mismatch
from everstep.benchmarks.delta_codec import Image
from everstep.benchmarks.delta_training import DISTANCES, Sizes, Story, rate_at, train_gpt

SMALL = Sizes(width=32, layers=1, length=16, steps=104, short_steps=104, rows=1 << 11)
FIELDS = (
    "bf16_weights_at_10",
    "fp32_weights_at_10",
    "exp_avg_at_10",
    "exp_avg_sq_at_10",
    "mixed_state_at_10",
    "encode_gb_per_s",
    "decode_gb_per_s",
    "lora_vs_changed",
    "sparse_vs_changed",
    "never_above",
    "restore_vs_full",
    "restore_bound",
)


@pytest.mark.long
def test_everything_is_measured_and_shown(tmp_path: Path) -> None:
    from everstep.cli.bench import _delta_text

    found = delta.run_delta(1, tmp_path, lambda what: None, sizes=SMALL)
    assert list(tmp_path.iterdir()) == []
    for name in FIELDS:
        assert found[name] > 0, name
    assert "step_slowdown" in found
    assert found["bf16_weights_at_10"] < found["fp32_weights_at_10"] < 1
    assert found["never_above"] < 1.01
    assert set(found["trainings"]) == {"mixed", "fp32", "lora", "recommender"}
    for training in found["trainings"].values():
        assert set(training["delta"]) == {"1", "10", "100"}
        assert training["delta"]["1"] < training["delta"]["100"] < 1.01
    part = found["trainings"]["mixed"]["parts"]["exp_avg_sq"]["10"]
    assert part["chosen"]["ratio"] <= 1.01 * min(
        part[way]["ratio"] for way in ("planes", "xor", "difference")
    )
    text = _delta_text(found)
    assert "exp_avg_sq" in text and "never_above" in text


@pytest.fixture(scope="module")
def story() -> Story:
    return train_gpt(SMALL, mixed=True)


@pytest.fixture(scope="module")
def images(story: Story, tmp_path_factory: pytest.TempPathFactory) -> list[Image]:
    run = tmp_path_factory.mktemp("bench") / "run"
    delta_runs.write_pair(run, story.before[10], story.last)
    return delta_runs.read_pair(run, story.before[10], story.last)


def test_a_training_is_the_same_each_time_and_goes_on(story: Story) -> None:
    again = train_gpt(SMALL, mixed=True)
    assert again.loss == story.loss
    for part, held in story.last.items():
        for name, tensor in held.items():
            assert torch.equal(tensor, again.last[part][name]), (part, name)
    moved = [float((story.last["masters"]["token.weight"] - s["masters"]["token.weight"]).abs().mean())
             for s in (story.before[distance] for distance in DISTANCES)]  # fmt: skip
    assert 0 < moved[0] < moved[1] < moved[2]
    assert story.last["weights"]["token.weight"].dtype == torch.bfloat16


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [rate_at(step, 400) for step in range(1, 401)]
    assert rates[0] == pytest.approx(1 / 50) and max(rates) == 1 and rates.index(1.0) == 49
    assert rates[49:] == sorted(rates[49:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_images_are_those_of_the_states(story: Story, images: list[Image]) -> None:
    assert {image.part for image in images} == {"weights", "masters", "exp_avg", "exp_avg_sq"}
    for image in images:
        numbers = sum(tensor.numel() for tensor in story.last[image.part].values())
        item = 2 if image.part == "weights" else 4
        assert numbers * item <= image.nbytes < numbers * item + (16 << 10)
        assert 0 < image.stored < image.nbytes
        changed = sum(
            int((tensor.view(torch.int16 if item == 2 else torch.int32)
                 != story.before[10][image.part][name].view(torch.int16 if item == 2 else torch.int32)).sum())
            for name, tensor in story.last[image.part].items()
        )  # fmt: skip
        assert image.changed_bytes() == changed * item


@pytest.mark.parametrize("way", delta_codec.WAYS)
def test_each_way_comes_back_and_the_chosen_one_is_the_object(images: list[Image], way: str) -> None:
    for image in images:
        coded = delta_codec.code(image, way)
        assert coded.nbytes == image.nbytes
        if way == "chosen":
            assert 0 <= image.stored - coded.stored < 256, "the table and the footer"


def test_what_comes_back_otherwise_is_a_mismatch(
    images: list[Image], story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(encoding: int, payload: Any, base: Any, out: memoryview) -> None:
        honest(encoding, payload, base, out)
        out[-1] ^= 1

    honest = delta_codec.decode_chunk
    monkeypatch.setattr(delta_codec, "decode_chunk", decode)
    for way in delta_codec.WAYS:
        with pytest.raises(Mismatch, match="other bytes"):
            delta_codec.code(images[0], way)
    run = tmp_path / "run"
    delta_runs.write_pair(run, story.before[10], story.last)
    with pytest.raises(Mismatch, match="came back with other bytes"):
        delta_runs.read_pair(run, story.before[10], story.before[1])
