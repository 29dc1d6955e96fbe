"""Names and shapes of the parameters of public model families, and of a mixture of experts, made smaller by a factor.
Pure: no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shapes = list[tuple[str, tuple[int, ...]]]
HALVINGS = 60
"""Of the interval in which a factor is looked for."""
MOE_LAYERS = 8
MOE_EXPERTS = 12
"""Of each layer; each has half the hidden rows of the one before, at least one."""
MOE_EXPERTS_SHARE = 0.8
"""How much of the parameters lies in the layers; the embedding has the rest."""
MOE_LAYER_SQUARES = 20
"""Parameters of a layer in squares of the width: attention 4, experts 2 x (4 + 2 + 1 + ...)."""


@dataclass(frozen=True)
class Family:
    """Sizes of a model with grouped query attention and gated feed-forward layers. ``hidden``: rows of the latter;
    ``of``: what it is called."""

    of: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int


LLAMA_8B = Family("Llama 3.1 8B", 4096, 32, 32, 8, 14336, 128256)
LLAMA_70B = Family("Llama 3.1 70B", 8192, 80, 64, 8, 28672, 128256)
LLAMA_405B = Family("Llama 3.1 405B", 16384, 126, 128, 8, 53248, 128256)


def llama_shapes(family: Family, factor: float = 1.0) -> Shapes:
    """All of the family's parameters, widths and the vocabulary divided by ``factor``; as many layers as it has. At
    factor 1 they are the published model's."""

    def less(size: int) -> int:
        return max(1, round(size / factor))

    width, hidden, vocabulary = less(family.width), less(family.hidden), less(family.vocabulary)
    keys = less(family.width // family.heads * family.kv_heads)
    shapes: Shapes = [("embedding", (vocabulary, width))]
    for layer in range(family.layers):
        shapes += [
            (f"layer{layer}_{name}", shape)
            for name, shape in (
                ("attention_norm", (width,)),
                ("query", (width, width)),
                ("key", (keys, width)),
                ("value", (keys, width)),
                ("attention_out", (width, width)),
                ("mlp_norm", (width,)),
                ("gate", (hidden, width)),
                ("up", (hidden, width)),
                ("down", (width, hidden)),
            )
        ]
    return [*shapes, ("norm", (width,)), ("output", (vocabulary, width))]


def llama_factor(family: Family, parameters: int) -> float:
    """By what the family's sizes are divided (six digits, at least 1) for about so many parameters."""
    low, high = 1.0, float(family.vocabulary)
    if count(llama_shapes(family)) <= parameters:
        return 1.0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if count(llama_shapes(family, middle)) > parameters else (low, middle)
    near = [float(f"{factor:.6g}") for factor in (low, high)]
    return min(near, key=lambda factor: abs(count(llama_shapes(family, factor)) - parameters))


def moe_shapes(parameters: int) -> Shapes:
    """About so many parameters in layers of attention, a router, and experts from large to tiny, in every layer in
    another order."""
    wanted = MOE_EXPERTS_SHARE * parameters / (MOE_LAYERS * MOE_LAYER_SQUARES)
    width = max(4, int(math.sqrt(wanted)))
    shapes: Shapes = []
    for layer in range(MOE_LAYERS):
        shapes += [
            (f"layer{layer}_norm", (width,)),
            (f"layer{layer}_qkv", (3 * width, width)),
            (f"layer{layer}_out", (width, width)),
            (f"layer{layer}_router", (MOE_EXPERTS, width)),
        ]
        for expert in range(MOE_EXPERTS):
            rows = max(1, 4 * width >> (expert + layer) % MOE_EXPERTS)
            shapes.append((f"layer{layer}_expert{expert}_up", (rows, width)))
            shapes.append((f"layer{layer}_expert{expert}_down", (width, rows)))
    return [("embedding", (max(1, (parameters - count(shapes)) // width), width)), *shapes]


def count(shapes: Shapes) -> int:
    """How many numbers they are."""
    return sum(math.prod(shape) for _, shape in shapes)


def scaled(family: Family, parameters: int) -> tuple[Shapes, dict[str, object]]:
    """The family's shapes for about so many parameters, and what a report says of it: ``factor`` and ``of``."""
    factor = llama_factor(family, parameters)
    return llama_shapes(family, factor), {"factor": factor, "of": family.of}


__all__ = [
    "LLAMA_405B",
    "LLAMA_70B",
    "LLAMA_8B",
    "Family",
    "Shapes",
    "count",
    "llama_factor",
    "llama_shapes",
    "moe_shapes",
    "scaled",
]
