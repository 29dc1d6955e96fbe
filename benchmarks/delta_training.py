"""Four short trainings on real text, and their states some steps apart.

The text is that of Python's own standard library, which every machine has. All are seeded. The learning rate warms up
over the first eighth of the steps and falls in a cosine to a tenth, as is usual; what is measured are the states at the
last step and some steps before.
"""

from __future__ import annotations

import math
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from everstep.demo.model import GPT
from torch import Tensor, nn

SEED = 5
DISTANCES = (1, 10, 100)
"""Steps between a delta and its base."""
WARM_UP_SHARE = 1 / 8
END_SHARE = 0.1
"""What the learning rate begins with, as a share of the steps, and ends with, as a share of its highest."""
SCHEDULE = f"linear warm-up over {WARM_UP_SHARE:.3g} of the steps, then a cosine to {END_SHARE:.0%}"
"""How the learning rate goes."""
PEAK_LR = 3e-4
FAST_LR = 1e-3
"""Highest learning rates: of the GPTs; of LoRA and the recommender, where few numbers are trained."""
WEIGHT_DECAY = 0.1
CLIP = 1.0

State = dict[str, dict[str, Tensor]]
"""By part, by name."""


@dataclass(frozen=True)
class Sizes:
    """Of models and trainings."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 96
    batch: int = 8
    steps: int = 400
    short_steps: int = 150
    """Of the trainings with few changes."""
    lora_rank: int = 8
    rows: int = 1 << 17
    row: int = 32
    touched: int = 256
    """Rows, and numbers of each, of the table; how many a step touches at most."""


@dataclass(frozen=True)
class Story:
    """What became of a training: its last state, and those so many steps before it, by distance."""

    name: str
    steps: int
    last: State
    before: dict[int, State]
    loss: float


def library_text() -> bytes:
    """The modules of the standard library, one behind the other."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.py")))


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step (from 1 on), as a share of its highest."""
    warm = max(1.0, WARM_UP_SHARE * steps)
    if step < warm:
        return step / warm
    done = (step - warm) / max(1.0, steps - warm)
    return END_SHARE + (1 - END_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def clone(state: State) -> State:
    return {
        part: {name: tensor.detach().clone() for name, tensor in held.items()} for part, held in state.items()
    }


def _train(
    name: str,
    steps: int,
    optimizers: Sequence[torch.optim.Optimizer],
    step_once: Callable[[], float],
    state: Callable[[], State],
) -> Story:
    """``step_once`` computes the gradients, steps, and gives the loss. The learning rates that the optimizers come with
    are the highest."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    wanted = {steps - distance: distance for distance in DISTANCES}
    if min(wanted) < 1:
        raise ValueError(f"{steps} steps are too few for a distance of {max(DISTANCES)}")
    before: dict[int, State] = {}
    losses: list[float] = []
    for step in range(1, steps + 1):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * rate_at(step, steps)
        losses.append(step_once())
        if step in wanted:
            before[wanted[step]] = clone(state())
    recent = losses[-20:]
    return Story(name, steps, clone(state()), before, sum(recent) / len(recent))


class Text:
    """Batches ``[batch, length + 1]`` of bytes, the same ones for the same seed."""

    def __init__(self, sizes: Sizes) -> None:
        self._text = torch.frombuffer(bytearray(library_text()), dtype=torch.uint8)
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(SEED)

    def next(self) -> Tensor:
        length = self._sizes.length + 1
        begins = torch.randint(0, len(self._text) - length, (self._sizes.batch,), generator=self._generator)
        return torch.stack([self._text[at : at + length] for at in begins.tolist()]).long()


class Trainer:
    """The GPT and AdamW. ``mixed``: the model computes in bf16, and the optimizer has masters in fp32."""

    def __init__(self, sizes: Sizes, *, mixed: bool) -> None:
        torch.manual_seed(SEED)
        self.mixed = mixed
        self.model = GPT(
            width=sizes.width, layers=sizes.layers, heads=sizes.heads, length=sizes.length, dropout=0.0
        )
        self.masters = {
            name: p.detach().clone().requires_grad_() if mixed else p
            for name, p in self.model.named_parameters()
        }
        if mixed:
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
        self._text = Text(sizes)

    def step(self) -> float:
        loss: Tensor = self.model(self._text.next())
        torch.autograd.backward(loss)
        live = dict(self.model.named_parameters())
        if self.mixed:
            for name, master in self.masters.items():
                gradient = live[name].grad
                assert gradient is not None
                master.grad = gradient.float()
                live[name].grad = None
        torch.nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.mixed:
            with torch.no_grad():
                for name, master in self.masters.items():
                    live[name].copy_(master)
        return float(loss.detach())

    def state(self) -> State:
        """The live tensors: weights, masters if there are any, and the moments. Each is a part, so that its size is
        seen by itself."""
        found: State = {"weights": dict(self.model.named_parameters())}
        if self.mixed:
            found["masters"] = dict(self.masters)
        for moment in ("exp_avg", "exp_avg_sq"):
            found[moment] = {name: self.optimizer.state[p][moment] for name, p in self.masters.items()}
        return found


def train_gpt(sizes: Sizes, *, mixed: bool) -> Story:
    """Mixed precision, or all in fp32."""
    trainer = Trainer(sizes, mixed=mixed)
    name = "mixed" if mixed else "fp32"
    return _train(name, sizes.steps, [trainer.optimizer], trainer.step, trainer.state)


class Adapter(nn.Module):
    """A frozen layer and a low-rank one beside it that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        there: Tensor = self.frozen(x)
        return there + x @ self.down.T @ self.up.T


def train_lora(sizes: Sizes, base: State) -> Story:
    """Adapters on the attention and feed-forward layers of the fp32 GPT, whose weights ``base`` has."""
    torch.manual_seed(SEED + 1)
    model = GPT(width=sizes.width, layers=sizes.layers, heads=sizes.heads, length=sizes.length, dropout=0.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(base["weights"][name])
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        _adapt(block, "qkv", sizes.lora_rank)
        _adapt(block, "out", sizes.lora_rank)
        mlp = block.mlp
        assert isinstance(mlp, nn.Sequential)
        for index in (0, 2):
            _adapt(mlp, str(index), sizes.lora_rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=FAST_LR)
    text = Text(sizes)

    def step_once() -> float:
        loss: Tensor = model(text.next())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return _train(
        "lora", sizes.short_steps, [optimizer], step_once, lambda: _model_and_moments(model, [optimizer])
    )


def _adapt(owner: nn.Module, name: str, rank: int) -> None:
    layer = owner.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    setattr(owner, name, Adapter(layer, rank))


def _model_and_moments(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> State:
    """As a trainer would give it: a part for the model, one for its optimizers."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    moments = {
        f"{names[p]}.{key}": value
        for optimizer in optimizers
        for p, held in optimizer.state.items()
        for key, value in sorted(held.items())
        if isinstance(value, Tensor) and value.shape == p.shape
    }
    return {"model": dict(model.named_parameters()), "optimizer": moments}


class Recommender(nn.Module):
    """A large table, of which each example uses a few rows, and a small network: which group comes next."""

    GROUPS = 256

    def __init__(self, rows: int, row: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, row, mode="mean", sparse=True)
        self.network = nn.Sequential(nn.Linear(row, 4 * row), nn.GELU(), nn.Linear(4 * row, self.GROUPS))

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.network(self.table(ids)), wanted)


HISTORY = 8
"""Ids that an example has seen."""


def item_ids(rows: int) -> Tensor:
    """The text's pairs of words, one after the other, as ids of items: a few are common, most are seldom."""
    words = re.findall(rb"\w+", library_text())
    return torch.tensor([zlib.crc32(a + b" " + b) % rows for a, b in pairwise(words)])


def train_recommender(sizes: Sizes) -> Story:
    """The table by SparseAdam, the network by AdamW."""
    torch.manual_seed(SEED + 2)
    model = Recommender(sizes.rows, sizes.row)
    network = list(model.network.parameters())
    optimizers: list[Any] = [
        torch.optim.SparseAdam(list(model.table.parameters()), lr=FAST_LR),
        torch.optim.AdamW(network, lr=FAST_LR, weight_decay=WEIGHT_DECAY),
    ]
    ids = item_ids(sizes.rows)
    generator = torch.Generator().manual_seed(SEED)
    batch = max(1, sizes.touched // HISTORY)

    def step_once() -> float:
        begins = torch.randint(0, len(ids) - HISTORY - 1, (batch,), generator=generator)
        windows = torch.stack([ids[at : at + HISTORY + 1] for at in begins.tolist()])
        loss: Tensor = model(windows[:, :-1], windows[:, -1] % Recommender.GROUPS)
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return _train(
        "recommender",
        sizes.short_steps,
        optimizers,
        step_once,
        lambda: _model_and_moments(model, optimizers),
    )


__all__ = [
    "DISTANCES",
    "SCHEDULE",
    "Sizes",
    "State",
    "Story",
    "Trainer",
    "clone",
    "train_gpt",
    "train_lora",
    "train_recommender",
]
