"""The shapes of public families are those that were published; smaller ones keep their proportions."""

from __future__ import annotations

import math

import pytest
from everstep.benchmarks.harness.shapes import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MOE_EXPERTS,
    MOE_LAYERS,
    Family,
    count,
    llama_factor,
    llama_shapes,
    moe_shapes,
    scaled,
)

FAMILIES = [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (LLAMA_405B, 405_853_388_800)]


@pytest.mark.parametrize(("family", "parameters"), FAMILIES)
def test_at_factor_one_it_is_the_published_model(family: Family, parameters: int) -> None:
    assert count(llama_shapes(family)) == parameters
    assert llama_factor(family, parameters) == llama_factor(family, 2 * parameters) == 1


@pytest.mark.parametrize(("family", "parameters"), FAMILIES)
@pytest.mark.parametrize("wanted", [300_000, 40_000_000, 1_000_000_000])
def test_divided_by_a_factor_it_has_the_size_asked_for(family: Family, parameters: int, wanted: int) -> None:
    shapes, scale = scaled(family, wanted)
    assert abs(count(shapes) / wanted - 1) < (0.08 if wanted < 1_000_000 else 0.01)
    assert scale == {"factor": llama_factor(family, wanted), "of": family.of}
    assert shapes == llama_shapes(family, float(f"{scale['factor']:g}")), "as a report prints it"
    full = llama_shapes(family)
    assert [name for name, _ in shapes] == [name for name, _ in full] and len(full) == 9 * family.layers + 3
    assert math.isclose(float(f"{scale['factor']:g}"), math.sqrt(parameters / wanted), rel_tol=0.06)


def test_few_heads_have_keys_and_values() -> None:
    shapes = dict(llama_shapes(LLAMA_70B))
    assert shapes["layer79_key"] == shapes["layer79_value"] == (1024, 8192)
    assert shapes["layer0_query"] == (8192, 8192) and shapes["layer0_down"] == (8192, 28672)


@pytest.mark.parametrize("wanted", [75_000, 300_000, 40_000_000])
def test_experts_are_uneven(wanted: int) -> None:
    shapes = dict(moe_shapes(wanted))
    assert abs(count(list(shapes.items())) / wanted - 1) < 0.01
    for layer in range(MOE_LAYERS):
        rows = [shapes[f"layer{layer}_expert{expert}_up"][0] for expert in range(MOE_EXPERTS)]
        assert rows.index(max(rows)) == -layer % MOE_EXPERTS and min(rows) <= max(1, max(rows) >> 11)
