"""How small a delta of a real training is, how fast it is coded, and what it costs to have and to restore.

Four trainings (:mod:`.delta_training`) run first. Deltas of their last states on those 1, 10 and 100 steps before are
written by an agent (:mod:`.delta_runs`), and the same images are coded in other ways beside (:mod:`.delta_codec`).
Everything is compared bit for bit before it counts.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .common import MIB, Samples, Step, machine, workspace
from .delta_codec import Coded, Image, Tally, code, zipnn_missing
from .delta_runs import Slowdown, measure_restore, nbytes_of, read_pair, write_pair
from .delta_training import (
    DISTANCES,
    FAST_LR,
    PEAK_LR,
    SCHEDULE,
    SEED,
    Sizes,
    State,
    Story,
    train_gpt,
    train_lora,
    train_recommender,
)

AT = 10
"""The distance of the headline."""
NOISE_BYTES = 8 * MIB


def run_delta(
    repeats: int, directory: Path | None, tell: Step, *, sizes: Sizes | None = None
) -> dict[str, Any]:
    """All measurements of ``bench delta``; times in seconds. Raises Mismatch where bytes come back changed."""
    sizes = sizes or Sizes()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    try:
        with workspace(directory) as work:
            stories = _trained(sizes, tell)
            measured = [_Measured(story, work / story.name, repeats, tell) for story in stories]
            noise = _noise(work / "noise", tell)
            mixed = stories[0]
            restore = measure_restore(work / "restore", mixed.before[AT], mixed.last, repeats, tell)
            slow = Slowdown(work, sizes).run(repeats, tell)
            load.append(os.getloadavg()[0])
            return {
                "benchmark": "delta",
                **_headline(measured, noise),
                **restore,
                **slow,
                "repeats": repeats,
                "trainings": {one.story.name: one.summary() for one in measured},
                "schedule": SCHEDULE,
                "peak_learning_rate": {"gpt": PEAK_LR, "others": FAST_LR},
                "seed": SEED,
                "left_out": {"zipnn": missing} if (missing := zipnn_missing()) else {},
                "checked": "every delta was loaded, and every chunk decoded, and compared bit for bit",
                "load_average": load,
                "machine": machine(work),
            }
    finally:
        torch.set_num_threads(threads)


def _trained(sizes: Sizes, tell: Step) -> list[Story]:
    """Two at a time, each in a process and on one thread: what they compute does not depend on that."""
    tell("training: GPT with mixed precision; beside it GPT with fp32, LoRA, recommender")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        mixed, others = pool.submit(train_gpt, sizes, mixed=True), pool.submit(_others, sizes)
        return [mixed.result(), *others.result()]


def _others(sizes: Sizes) -> list[Story]:
    fp32 = train_gpt(sizes, mixed=False)
    return [fp32, train_lora(sizes, fp32.last), train_recommender(sizes)]


class _Measured:
    """One training's deltas, by distance."""

    def __init__(self, story: Story, root: Path, repeats: int, tell: Step) -> None:
        self.story = story
        tell(f"deltas: {story.name}")
        self.images: dict[int, list[Image]] = {}
        for distance in DISTANCES:
            run, base = root / str(distance), story.before[distance]
            write_pair(run, base, story.last)
            self.images[distance] = read_pair(run, base, story.last)
        self.by_part: dict[tuple[str, int], Tally] = {}
        self.alone: dict[str, Tally] = {}
        tell(f"other ways: {story.name}")
        with_zipnn = zipnn_missing() is None
        for distance, images in self.images.items():
            for image in images:
                tally = self.by_part.setdefault((image.part, distance), Tally())
                tally.take(image)
        for image in self.images[DISTANCES[0]]:
            self.alone.setdefault(image.part, Tally()).take_alone(image, with_zipnn=with_zipnn)
        self.rounds = [_round(self.images[AT]) for _ in range(repeats)]

    def stored(self, distance: int, part: str | None = None) -> tuple[int, int]:
        """Bytes of the delta's objects, and of the images: of one part, or of all."""
        images = [image for image in self.images[distance] if part in (None, image.part)]
        return sum(image.stored for image in images), sum(image.nbytes for image in images)

    def vs_changed(self, distance: int) -> float:
        """Bytes of the delta over the bytes of the numbers that changed."""
        return self.stored(distance)[0] / max(
            1, sum(image.changed_bytes() for image in self.images[distance])
        )

    def largest(self) -> float:
        return max(_ratio(*self.stored(distance)) for distance in DISTANCES)

    def summary(self) -> dict[str, Any]:
        parts = sorted(self.alone)
        return {
            "steps": self.story.steps,
            "loss": self.story.loss,
            "state_bytes": nbytes_of(self.story.last),
            "delta": {str(distance): _ratio(*self.stored(distance)) for distance in DISTANCES},
            "vs_changed": {str(distance): self.vs_changed(distance) for distance in DISTANCES},
            "parts": {
                part: {
                    "bytes": self.stored(AT, part)[1],
                    "alone": self.alone[part].summary(),
                    **{
                        str(distance): {
                            "delta": _ratio(*self.stored(distance, part)),
                            **self.by_part[part, distance].summary(),
                        }
                        for distance in DISTANCES
                    },
                }
                for part in parts
            },
        }


def _round(images: list[Image]) -> Coded:
    """All of a state, coded and decoded once more."""
    total = Coded()
    for image in images:
        total.add(code(image, "chosen"))
    return total


def _ratio(stored: int, full: int) -> float:
    return stored / full


def _noise(root: Path, tell: Step) -> float:
    """A delta of what has nothing to do with its base, over the full."""
    tell("deltas: noise")
    generator = torch.Generator().manual_seed(SEED)
    base, new = (_random_bits(generator) for _ in range(2))
    write_pair(root, base, new)
    images = read_pair(root, base, new)
    return sum(image.stored for image in images) / sum(image.nbytes for image in images)


def _random_bits(generator: torch.Generator) -> State:
    words = torch.randint(-(1 << 31), 1 << 31, (NOISE_BYTES // 4,), generator=generator)
    return {"noise": {"bits": words.to(torch.int32).view(torch.float32)}}


def _headline(measured: list[_Measured], noise: float) -> dict[str, Any]:
    """The fields by which this is judged. What both GPTs have is of both."""
    mixed, fp32, lora, recommender = measured

    def of(part: str, *those: _Measured) -> float:
        found = [one.stored(AT, part) for one in those]
        return _ratio(sum(stored for stored, _ in found), sum(full for _, full in found))

    def speed(seconds: Callable[[Coded], float]) -> float:
        rounds = zip(mixed.rounds, fp32.rounds, strict=True)
        nbytes = mixed.rounds[0].nbytes + fp32.rounds[0].nbytes
        return nbytes / Samples([seconds(a) + seconds(b) for a, b in rounds]).median / 1e9

    return {
        "bf16_weights_at_10": of("weights", mixed),
        "fp32_weights_at_10": of("weights", fp32),
        "fp32_masters_at_10": of("masters", mixed),
        "exp_avg_at_10": of("exp_avg", mixed, fp32),
        "exp_avg_sq_at_10": of("exp_avg_sq", mixed, fp32),
        "mixed_state_at_10": _ratio(*mixed.stored(AT)),
        "fp32_state_at_10": _ratio(*fp32.stored(AT)),
        "encode_gb_per_s": speed(lambda coded: coded.encode_s),
        "decode_gb_per_s": speed(lambda coded: coded.decode_s),
        "lora_vs_changed": max(lora.vs_changed(distance) for distance in DISTANCES),
        "sparse_vs_changed": max(recommender.vs_changed(distance) for distance in DISTANCES),
        "never_above": max(noise, *(one.largest() for one in measured)),
    }


__all__ = ["run_delta"]
