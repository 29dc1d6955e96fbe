"""What a user gets wrong is told at the call, by name, before anything is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import pytest
import torch
from everstep import errors
from everstep.format.constants import NUMBER_MAX
from everstep.places import locate

from tests.facade.kit import Script, opened


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": "3"},
        {"keep_last": None},
        {"keep_last": True},
        {"keep_last": 1.5},
        {"keep_every": "9"},
        {"keep_interval": 6},
        {"keep_best": 0, "best": "min:loss"},
        {"best": "loss", "keep_best": 1},
        {"best": None, "keep_best": 1},
        {"keep_best": None, "best": "min:loss"},
        {"keep_incarnations": -1},
        {"failures_max": "x"},
        {"failures_max": 0},
        {"rate_bytes_per_s": "1G"},
        {"slot_timeout_s": "10"},
        {"linger_s": None},
        {"full_every": "ten"},
    ],
)
def test_policies_name_the_wrong_option(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadOption, match=rf"Policy\({next(iter(options))}="):
        everstep.Policy(**options)


@pytest.mark.parametrize(
    "options", [{"slots": "3"}, {"slots": 3.0}, {"bytes": "1G"}, {"bytes": 0}, {"path": 3}, {"path": ""}]
)
def test_memory_tiers_name_the_wrong_option(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadOption, match=rf"Memory\({next(iter(options))}="):
        everstep.Memory(**options)


def test_memory_needs_a_directory_and_keeps_it_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for wrong in ("nowhere", "file"):
        with pytest.raises(errors.BadOption, match="must be a directory"):
            everstep.Memory(path=tmp_path / wrong)
    (tmp_path / "arenas").mkdir()
    monkeypatch.chdir(tmp_path)
    tier = everstep.Memory(path="arenas")
    monkeypatch.chdir("/")
    assert tier.directory == tmp_path / "arenas"


def test_the_agent_finds_arenas_in_a_relative_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arenas").mkdir()
    monkeypatch.chdir(tmp_path)
    with opened(root, agent="process", memory=everstep.Memory(path="arenas")) as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
    assert everstep.load(root) == {"n": 1}


@pytest.mark.parametrize("options", [{"policy": 3}, {"policy": {"full_every": 1}}, {"memory": "1G"}])
def test_checkpointers_refuse_other_kinds(root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadOption, match=f"{next(iter(options))}= is of another type"):
        everstep.Checkpointer(root, **options)


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", "", "  ", ["a"]])
def test_roots_are_paths(wrong: Any) -> None:
    for call in (everstep.Checkpointer, everstep.load, lambda root: everstep.save(root, 1, {})):
        with pytest.raises(errors.BadOption, match="path or a URL"):
            call(wrong)


@pytest.mark.parametrize("good", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_steps_may_be_any_whole_number(root: Path, good: Any) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(good, {"n": 1}).wait()
    everstep.save(root, type(good)(8) if not isinstance(good, torch.Tensor) else torch.tensor(8), {"n": 2})
    assert everstep.load(root, step=7) == {"n": 1}
    assert everstep.load(root) == {"n": 2}


@pytest.mark.parametrize(
    "wrong", [-1, "3", 2.0, None, True, float("nan"), NUMBER_MAX + 1, torch.ones(2), np.float64(1)]
)
def test_what_is_no_step_makes_no_run(root: Path, wrong: Any) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    for call in (lambda: ckpt.step(wrong, {"n": 1}), lambda: ckpt.save(wrong, {"n": 1})):
        with pytest.raises(errors.StepOrder, match="whole number"):
            call()
    with pytest.raises(errors.StepOrder, match="whole number"):
        everstep.save(root, wrong, {"n": 1})
    ckpt.close()
    assert not root.exists()


def test_a_part_called_data_is_told_what_data_means() -> None:
    with pytest.raises(errors.BadOption, match="under another name"):
        everstep.TrainState(data=torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_mismatches_end_in_what_to_pass(root: Path) -> None:
    everstep.save(root, 1, {"a": 1, "b": 2})
    with pytest.raises(errors.StateMismatch) as caught:
        everstep.load(root, into={"a": 0})
    assert str(caught.value).rstrip().endswith("load with allow={'unexpected'}")
    assert "\n." not in str(caught.value)


def test_damage_names_its_file(root: Path) -> None:
    everstep.save(root, 1, {"a": 1})
    record = root / "run.json"
    record.write_bytes(record.read_bytes()[:-5])
    with pytest.raises(errors.Damaged, match=r"^run\.json: "):
        everstep.load(root)


def test_paths_need_be_no_text(tmp_path: Path) -> None:
    root = os.fsdecode(bytes(tmp_path) + b"/r\xff \xc3\xb6%20")
    with opened(Path(root), agent="process") as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
    assert everstep.load(root) == {"n": 1}
    assert everstep.load(locate(root).url) == {"n": 1}
    assert os.path.exists(os.path.join(os.fsencode(root), b"run.json"))


def test_paths_under_the_c_locale(tmp_path: Path, script: Callable[..., Script]) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    one = script(
        """
        import logging
        assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
        with opened(root, agent="process") as ckpt:
            ckpt.load({"n": 0})
            ckpt.step(1, {"n": 1})
        """,
        tmp_path / "mödel",
        env=plain,
    )
    code, _, err = one.end()
    assert code == 0, err
    assert everstep.load(tmp_path / "mödel") == {"n": 1}


def test_a_relative_runtime_directory_stays_where_it_was(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", "rt")
    ckpt = opened(root, agent="process")
    monkeypatch.chdir("/")
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})
    ckpt.close()
    assert (tmp_path / "rt").is_dir()
