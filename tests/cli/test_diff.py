"""``everstep diff``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import everstep as es
import numpy as np
import pytest
import torch
from cli_kit import ADOPTED_STEP, LATER_STEP, everstep
from everstep.cli.survey import choose, survey
from everstep.places import locate
from everstep.store import changes as changes_module
from everstep.store.blocking import run_blocking
from everstep.store.changes import Changes, Name, changes_between
from everstep.store.numbers import _FLOAT8, Change, _float8, compare
from everstep.store.sources import DurableSource


def compared(root: Path, before: int, after: int) -> Changes:
    found = survey(str(root))

    async def read() -> Changes:
        backend = locate(root).open()
        try:
            sides = []
            for step in (before, after):
                one = choose(found, step)
                assert one is not None
                sides.append(DurableSource(backend, one.manifest, found.run.chunk_bytes))
            return await changes_between(*sides)
        finally:
            await backend.close()

    return run_blocking(read())


def saved(root: Path, *states: dict[str, Any]) -> Path:
    for step, state in enumerate(states, 1):
        es.save(root, step, {"model": state})
    return root


def test_numbers_are_those_that_torch_finds(tmp_path: Path) -> None:
    torch.manual_seed(1)
    old = {
        "f32": torch.randn(50, 30),
        "bf16": torch.randn(400).bfloat16(),
        "f16": torch.randn(400).half(),
        "i64": torch.arange(9),
        "flag": torch.tensor([True, False]),
        "same": torch.randn(7),
        "scalar": torch.tensor(2.0),
    }
    new = {key: value.clone() for key, value in old.items()}
    new["f32"][3, 4] += 5
    new["f32"][7] *= 1.5
    new["bf16"][:9] *= 2
    new["f16"][0] = 3
    new["i64"][8] = 100
    new["flag"][1] = True
    new["scalar"] *= 3
    root = saved(tmp_path / "run", old, new)
    found = {name.key: change for name, (_, change) in compared(root, 1, 2).tensors.items()}
    assert set(found) == set(old)
    for key, before in old.items():
        was, now = before.double(), new[key].double()
        change = found[key]
        assert change.elements == before.numel()
        assert change.nbytes == before.numel() * before.element_size()
        assert change.changed == int((was != now).sum()), key
        if key == "same":
            assert (change.changed_bytes, change.max_abs) == (0, 0.0)
            continue
        assert change.max_abs == pytest.approx(float((was - now).abs().max()))
        assert change.norm == pytest.approx(float((was - now).norm()))
        assert change.relative_norm == pytest.approx(float((was - now).norm() / was.norm()))


def test_what_is_not_finite_is_counted_and_not_measured(tmp_path: Path) -> None:
    old = torch.ones(8)
    new = old.clone()
    new[0], new[1], new[2] = float("nan"), float("inf"), 1.5
    root = saved(tmp_path / "run", {"w": old}, {"w": new})
    [(_, change)] = compared(root, 1, 2).tensors.values()
    assert (change.changed, change.max_abs, change.nans_before, change.nans_after) == (3, 0.5, 0, 1)
    text = everstep("diff", root, "1", "2").out
    assert "0 -> 1" in text


def test_equal_chunks_are_not_read(tmp_path: Path) -> None:
    old = {"frozen": torch.randn(1 << 20), "lora": torch.randn(64)}
    new = {"frozen": old["frozen"], "lora": old["lora"] + 1}
    found = compared(saved(tmp_path / "run", old, new), 1, 2)
    sizes = {name.key: (c.nbytes, c.changed_bytes > 0) for name, (_, c) in found.tensors.items()}
    assert sizes == {"frozen": (4 << 20, False), "lora": (256, True)}
    assert found.read_bytes < 3 << 20


def test_large_tensors_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "SLAB_BYTES", 1000)
    monkeypatch.setattr(changes_module, "BATCH_BYTES", 5000)
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    shapes = [(), (1,), (7, 33), (300,), (3, 5, 11), (0, 4), (2, 700)]
    old = {f"t{at}": torch.randn(shape) for at, shape in enumerate(shapes)}
    new = {key: value * 1.25 for key, value in old.items()}
    found = compared(saved(tmp_path / "run", old, new), 1, 2)
    for name, (_, change) in found.tensors.items():
        value = old[name.key].double()
        assert change.elements == value.numel()
        if value.numel():
            assert change.norm == pytest.approx(float((value * 0.25).norm()), rel=1e-6)


def test_what_is_in_one_only_and_what_is_another_kind(tmp_path: Path) -> None:
    old = {"gone": torch.ones(2), "wide": torch.ones(4), "n": 3, "name": "a", "nan": float("nan")}
    new = {"come": torch.ones(3), "wide": torch.ones(4, dtype=torch.float64), "n": 4, "nan": float("nan")}
    root = saved(tmp_path / "run", old, new)
    said = everstep("diff", root, "1", "2", "--json").json
    assert said["equal"] is False
    assert [x["key"] for x in said["only_before"]] == ["gone"]
    assert [x["key"] for x in said["only_after"]] == ["come"]
    assert [(x["dtype_before"], x["dtype"]) for x in said["retyped"]] == [("float32", "float64")]
    values = {path.rsplit("/", 1)[1]: (v["before"], v["after"]) for path, v in said["values"].items()}
    assert values["n"] == (3, 4)
    assert values["name"] == ("a", "<absent>")
    assert "nan" not in values
    text = everstep("diff", root, "1", "2").out
    assert "only before" in text
    assert "float32 [4] -> float64 [4]" in text


def test_a_step_and_itself_are_equal_without_a_byte_read(made_run: Path) -> None:
    said = everstep("diff", made_run, "2", "2", "--json").json
    assert (said["equal"], said["read_bytes"]) == (True, 0)


def test_equal_and_empty_tensors_have_numbers_too(tmp_path: Path) -> None:
    state = {"same": torch.ones(4), "empty": torch.ones(0), "bits": torch.ones(3, dtype=torch.bool)}
    root = saved(tmp_path / "run", state, {**state, "n": 1})
    found = {t["key"]: t for t in everstep("diff", root, "1", "2", "--all", "--json").json["tensors"]}
    for key in ("same", "empty"):
        assert [found[key][name] for name in ("max_abs", "norm", "relative_norm")] == [0.0, 0.0, 0.0]
    assert found["bits"]["max_abs"] == 0.0


def test_steps_of_a_training(made_run: Path) -> None:
    said = everstep("diff", made_run, str(ADOPTED_STEP), str(LATER_STEP), "--json").json
    assert said["equal"] is False
    changed = {t["key"] for t in said["tensors"] if t["part"] == "model" and t["changed_bytes"]}
    assert changed == {"weight", "bias"}
    only_model = everstep("diff", made_run, "2", "5", "--part", "model")
    assert "optimizer" not in only_model.out
    assert everstep("diff", made_run, "2", "5", "--part", "modle").code == 1
    assert everstep("diff", made_run, "2", "77").code == 1


def test_torch_is_not_needed(made_run: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "torch.py"
    blocker.write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert everstep("diff", made_run, "2", "5", env={"PYTHONPATH": path}).code == 0


@pytest.mark.parametrize("name", sorted(_FLOAT8))
def test_float8_values_are_torchs(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
    mine = torch.tensor([_float8(code, *_FLOAT8[name]) for code in range(256)], dtype=torch.float64)
    assert torch.equal(codes.nan_to_num(12345), mine.nan_to_num(12345))


def test_bytes_without_numbers() -> None:
    change = Change()
    a, b = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    b[3] = 1
    compare(change, "bits8", 8, memoryview(a), memoryview(b))
    assert (change.numeric, change.changed_bytes, change.max_abs) == (False, 1, 0.0)


def test_a_ranks_own_has_its_rank_in_its_name() -> None:
    assert Name("model", "w") < Name("model", "w", 0)
