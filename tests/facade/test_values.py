"""Names, values and tensors of every kind, through the public face."""

from __future__ import annotations

import gc
import json
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import pytest
import torch
from everstep import errors, reading
from everstep.store import fill as filling_module
from torch import nn

from .kit import Training, forget_memory, opened


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(5.0),
        torch.tensor(3.5),
        np.arange(4),
        [1, torch.ones(2)],
        7,
        "text",
        None,
        1.5,
        (1, 2),
        {},
        {1: 2},
    ],
    ids=repr,
)
def test_a_bare_value_is_a_state(root: Path, value: Any) -> None:
    with opened(root) as ckpt:
        ckpt.save(1, value).wait()
    found = everstep.load(root)
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(found, value) and found.shape == value.shape
    elif isinstance(value, np.ndarray):
        assert np.array_equal(found, value)
    elif isinstance(value, list):
        assert found[0] == 1 and torch.equal(found[1], torch.ones(2))
    else:
        assert found == value


def test_parts_with_names_that_are_no_file_names(root: Path, tmp_path: Path) -> None:
    before = {path for path in tmp_path.rglob("*") if root not in path.parents and path != root}
    names = [
        "val/loss",
        "..",
        ".",
        "a\\b",
        "CASE",
        "case",
        "ü" * 40,
        " ",
        "x" * 300,
        "con",
        "-",
        "%2F",
        "run.json",
    ]
    state: dict[str, Any] = {name: torch.full((3,), float(i)) for i, name in enumerate(names)}
    with opened(root) as ckpt:
        ckpt.load(state)
        ckpt.save(1, state).wait()
    forget_memory(root)
    found = everstep.load(root)
    assert list(found) == names
    assert all(found[name].eq(i).all() for i, name in enumerate(names))
    after = {path for path in tmp_path.rglob("*") if root not in path.parents and path != root}
    assert {path for path in after - before if "runtime" not in path.parts} == set(), (
        "nothing outside of the root"
    )


def manifest(root: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((root / "checkpoints" / f"{step:09d}" / "0001" / "manifest-1.json").read_text()))


def test_metrics_of_every_kind_are_exact_and_keep_the_manifest_readable(root: Path) -> None:
    metrics = {
        "loss": np.float32(0.1),
        "step": np.int64(2**62),
        "huge": 2**70,
        "nan": math.nan,
        "inf": -math.inf,
        "torch": torch.tensor(2.5),
        "flag": np.bool_(True),
        "val/loss": 1e-300,
    }
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}, metrics=metrics).wait()

    def refuse(text: str) -> None:
        raise AssertionError(f"a bare {text}")

    path = root / "checkpoints" / "000000001" / "0001" / "manifest-1.json"
    stored = json.loads(path.read_text(), parse_constant=refuse)["metrics"]
    assert stored["loss"] == float(np.float32(0.1)) and stored["step"] == 2**62 and stored["torch"] == 2.5
    assert stored["huge"] == str(2**70)
    assert stored["flag"] is True and stored["val/loss"] == 1e-300


def test_metrics_that_cannot_be_stored_are_refused_before_anything_happens(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    for bad in ({"f": object()}, {"f": lambda: 0}, [1]):
        with pytest.raises(errors.BadOption):
            ckpt.step(1, {"n": 1}, metrics=bad)  # type: ignore[arg-type]
    ckpt.step(1, {"n": 1}, metrics={"loss": 1})
    ckpt.close()


# -- loading into what does not fit


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"w": torch.zeros(4, 4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"w": torch.zeros(4, 4, dtype=torch.float64)}, "float64"),
        ({"w": torch.zeros(4, 2)}, "4, 2"),
        ({"w": torch.zeros(2, 8)}, "2, 8"),
        ({"w": torch.zeros(16)}, "16"),
        ({"w": torch.zeros(4, 4, 1)}, "4, 4, 1"),
        ({"v": torch.zeros(4, 4)}, "v"),
        ({"w": torch.zeros(4, 4), "v": 1}, "v"),
        ({"w": torch.zeros(4, 4, device="meta")}, "meta"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_target_that_does_not_fit_is_an_error_that_names_it(root: Path, target: Any, named: str) -> None:
    with opened(root) as ckpt:
        ckpt.save(1, {"w": torch.ones(4, 4)}).wait()
    before = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
    for load in (lambda: opened(root).load(target), lambda: everstep.load(root, into=target)):
        with pytest.raises(errors.StateMismatch) as caught:
            load()
        assert named in str(caught.value)
        for key, value in before.items():
            if not value.is_meta:
                assert torch.equal(target[key], value), "nothing was written"


def test_optimizer_moments_keep_their_dtype(root: Path) -> None:
    """torch's own load_state_dict would cast moments to the parameters' dtype."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.randn(state["exp_avg"].shape)  # float32 beside bfloat16 parameters
    with opened(root) as ckpt:
        ckpt.save(1, everstep.TrainState(model=model, optimizer=optimizer)).wait()
    again = nn.Linear(4, 4).to(torch.bfloat16)
    other = torch.optim.AdamW(again.parameters())
    with opened(root) as ckpt:
        ckpt.load(everstep.TrainState(model=again, optimizer=other))
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert mine["exp_avg"].dtype == torch.float32 and torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_parts_that_nobody_consumes_are_told(root: Path) -> None:
    training = Training()
    training.step()
    with opened(root) as ckpt:
        ckpt.save(1, training.state).wait()
    for drop in ("optimizer", "scheduler", "loader"):
        less = Training(seed=4)
        setattr(less.state, drop, None)
        with pytest.raises(errors.StateMismatch, match=drop):
            opened(root).load(less.state)


def test_a_wrapped_model_loads_into_a_bare_one(root: Path) -> None:
    model = nn.Linear(3, 3)
    wrapped = torch.compile(model)
    with opened(root) as ckpt:
        ckpt.save(1, everstep.TrainState(model=wrapped)).wait()
    bare = nn.Linear(3, 3)
    with opened(root) as ckpt:
        ckpt.load(everstep.TrainState(model=bare))
        ckpt.save(2, everstep.TrainState(model=bare)).wait()
    assert torch.equal(bare.weight, model.weight)
    again = torch.compile(nn.Linear(3, 3))
    with opened(root) as ckpt:
        assert ckpt.load(everstep.TrainState(model=again)) == 2
    strange = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(errors.StateMismatch):
        opened(root).load(everstep.TrainState(model=strange), allow=("missing", "unexpected"))


def test_random_number_state_is_left_as_it_is(root: Path) -> None:
    state = everstep.TrainState(extra={"n": 1})
    torch.manual_seed(5)
    torch.rand(3)
    with opened(root) as ckpt:
        ckpt.save(1, state).wait()
    expected = torch.rand(4)
    torch.manual_seed(0)
    values = everstep.load(root)
    assert not torch.equal(torch.rand(4), expected), "reading values changes no generator"
    assert values["extra"] == {"n": 1}
    with opened(root) as ckpt:
        ckpt.load(everstep.TrainState(extra={"n": 0}))
    assert torch.equal(torch.rand(4), expected)


def test_loaded_values_are_nobody_elses(root: Path) -> None:
    """They stay right when the checkpoint they came from is pruned, overwritten, or its slot reused."""
    ckpt = opened(root, policy={"keep_last": 1})
    ckpt.load({"w": torch.zeros(5000)})
    ckpt.save(1, {"w": torch.full((5000,), 1.0)}).wait()
    from_memory = everstep.load(root)["w"]
    from_disk = everstep.load(root, step=1)["w"]
    for step in range(2, 7):
        ckpt.save(step, {"w": torch.full((5000,), float(step))}).wait()
    ckpt.close()
    assert from_memory.eq(1).all() and from_disk.eq(1).all()
    from_memory.fill_(9)
    assert everstep.load(root)["w"].eq(6).all()


# -- the one-call forms


def test_save_and_load_in_one_call(root: Path) -> None:
    everstep.save(root, 1, {"w": torch.ones(3), "n": 1}, metrics={"loss": 2.0}, config={"lr": 1})
    everstep.save(root, 5, {"w": torch.ones(3) * 5, "n": 5})
    assert everstep.load(root)["n"] == 5 and everstep.load(root, step=1)["n"] == 1
    with pytest.raises(errors.StepOrder):
        everstep.save(root, 5, {"n": 6})
    with pytest.raises(errors.UnsupportedValue):
        everstep.save(root, 6, {"f": lambda: 0})
    with pytest.raises(errors.NoCheckpoint, match="step 4"):
        everstep.load(root, step=4)
    target = {"w": torch.zeros(3), "n": 0}
    assert everstep.load(root, into=target) is None
    assert target["n"] == 5 and target["w"].eq(5).all()


def test_parts_and_ranks_can_be_chosen(root: Path) -> None:
    everstep.save(root, 1, {"a": torch.ones(3), "b": {"c": 1}})
    assert set(everstep.load(root, parts=["b"])) == {"b"}
    with pytest.raises(errors.EverstepError, match="nope"):
        everstep.load(root, parts=["nope"])
    with pytest.raises(errors.NoCheckpoint, match="rank 3"):
        everstep.load(root, rank=3)


def test_a_run_without_a_checkpoint_says_so(root: Path) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
        assert everstep.load(root) == {"n": 1}, "a live run's memory is read"
        ckpt.close(flush=False)
    forget_memory(root)
    with pytest.raises(errors.NoCheckpoint, match="no checkpoint yet"):
        everstep.load(root)
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) is None


def test_a_reader_of_a_live_run_sees_whole_steps_only(root: Path) -> None:
    ckpt = opened(root, policy={"full_every": 1, "keep_last": 1, "on_slow": "skip"})
    ckpt.load({"a": torch.zeros(20_000), "b": torch.zeros(20_000), "n": 0})
    seen: list[int] = []
    trouble: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                found = everstep.load(root)
            except Exception as error:
                trouble.append(error)
                return
            if not (found["a"].eq(found["n"]).all() and found["b"].eq(found["n"]).all()):
                trouble.append(AssertionError(f"a mix at step {found['n']}"))
                return
            seen.append(found["n"])

    ckpt.step(1, {"a": torch.ones(20_000), "b": torch.ones(20_000), "n": 1})
    reader = threading.Thread(target=read)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing here is worth one
        reader.start()
        for step in range(2, 60):
            value = torch.full((20_000,), float(step))
            ckpt.step(step, {"a": value, "b": value, "n": step})
        stop.set()
        reader.join()
    ckpt.close()
    assert not trouble, trouble[0]
    assert seen == sorted(seen) and seen


class Watching:
    """State that notes, while it is given back, whether collections may run."""

    def __init__(self) -> None:
        self.collecting: list[bool] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(4)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert torch.equal(state["w"], torch.ones(4))
        self.collecting.append(gc.isenabled())


@pytest.mark.parametrize("large", [False, True])
def test_nothing_is_collected_while_a_load_plans_and_where_it_is_not_large_fills(
    root: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    everstep.save(root, 1, {"a": Watching()})
    filling: list[bool] = []
    if large:
        monkeypatch.setattr(reading, "UNCOLLECTED_BYTES", 15)
    verify = filling_module.verify_and_copy

    def verified(*args: Any) -> Any:
        filling.append(gc.isenabled())
        return verify(*args)

    monkeypatch.setattr(filling_module, "verify_and_copy", verified)
    into = Watching()
    assert gc.isenabled()
    everstep.load(root, into={"a": into})
    assert gc.isenabled() and into.collecting == [False] and filling == [large]
