"""Runs that each format version wrote, kept for ever, load bit for bit with whatever the code is now."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import everstep
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from everstep.cli.main import main
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION, READABLE_VERSIONS
from everstep.format.dtypes import DTYPES as STORED
from everstep.state.tensors import DTYPES

from tests.golden import contents, make_golden
from tests.golden.make_golden import PAIR_PARTS
from tests.golden.same import differences, raw

RUNS = {version: Path(__file__).parent / f"v{version}" for version in READABLE_VERSIONS}
ALONE, PAIR = RUNS[FORMAT_VERSION] / "alone", RUNS[FORMAT_VERSION] / "pair"
STEPS = {
    contents.FULL_STEP: contents.full,
    contents.SMALL_STEP: contents.small,
    contents.BARE_STEP: contents.bare,
}


@pytest.fixture(params=READABLE_VERSIONS, ids=lambda version: f"v{version}")
def alone(request: pytest.FixtureRequest) -> Path:
    return RUNS[request.param] / "alone"


@pytest.fixture(params=READABLE_VERSIONS, ids=lambda version: f"v{version}")
def pair(request: pytest.FixtureRequest) -> Path:
    return RUNS[request.param] / "pair"


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """Nothing is passed over, or comes from a second holder, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("step", STEPS)
def test_every_value_bit_for_bit(alone: Path, step: int) -> None:
    found = everstep.load(alone, step=step)
    assert list(differences(found, STEPS[step]())) == []


def test_the_newest_step_is_a_bare_value(alone: Path) -> None:
    assert list(differences(everstep.load(alone), contents.bare())) == []


def test_what_is_one_object_comes_back_as_one(alone: Path) -> None:
    found = everstep.load(alone, step=contents.FULL_STEP)
    assert found["model"]["tied"][0] is found["model"]["tied"][1]
    aliases = found["plain"]["aliases"]
    assert aliases["one"] is aliases["other"]


def test_every_dtype_of_the_format_is_there(alone: Path) -> None:
    found = everstep.load(alone, step=contents.FULL_STEP, parts=["dtypes"])
    assert list(found) == ["dtypes"]
    # Quantised ones have no plain tensors.
    missing = set(STORED) - set(found["dtypes"])
    assert all(name not in DTYPES for name in missing), missing
    assert len(found["dtypes"]) >= 35


def by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    """As the writers of version 3 store an optimizer's state: by the parameters' names, not their positions."""
    names = dict(enumerate(name for name, _ in make_golden.pair_model().named_parameters()))
    groups = [
        {**group, "params": [names[at] for at in group["params"]]} for group in optimizer["param_groups"]
    ]
    return {"state": {names[at]: state for at, state in optimizer["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("rank", range(contents.PAIR_WORLD))
def test_the_state_of_each_of_two_ranks(pair: Path, rank: int) -> None:
    found = everstep.load(pair, rank=rank)
    state = make_golden.pair_state(rank, make_golden.pair_model())
    expected = make_golden.plain_parts(state)
    assert list(found) == list(expected) == list(PAIR_PARTS)
    assert list(differences(found["extra"], contents.of_rank(rank))) == []
    optimizer = expected["optimizer"] if pair.parent.name < "v3" else by_name(expected["optimizer"])
    assert list(differences(found["optimizer"], optimizer)) == []
    assert list(differences(found["scheduler"], expected["scheduler"])) == []
    assert list(differences(dict(found["model"]), dict(expected["model"]))) == []


def test_what_nodes_share_is_stored_once_in_images_of_their_own() -> None:
    """Each of the two ranks had a second copy of what the other one stored, and none of it was written."""
    stored = sorted(path.name for path in PAIR.rglob("rank-*.safetensors"))
    shared = [name for name in stored if "%2B" in name]
    assert shared == [
        f"rank-0000{rank}.{part}%2B{1 - rank}.safetensors"
        for rank in range(2)
        for part in ("model", "optimizer")
    ]
    assert set(stored) == {*shared, *(f"rank-0000{rank}.extra.safetensors" for rank in range(2))}
    keys = [key for name in shared for key in safetensors.torch.load_file(next(PAIR.rglob(name)))]
    assert len(keys) == len(set(keys)) == 3 + 9


def test_parts_in_several_images_are_exported_whole(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    said = CliRunner().invoke(main, ["export", str(pair), str(out)])
    assert said.exit_code == 0, said.output
    expected = make_golden.pair_state(0, make_golden.pair_model()).model.state_dict()
    found = safetensors.torch.load_file(out)
    assert {key: raw(value) for key, value in found.items()} == {
        key: raw(value) for key, value in expected.items()
    }
    shown = CliRunner().invoke(main, ["show", str(pair), str(contents.PAIR_STEP), "--json"])
    parts = json.loads(shown.stdout)["checkpoint"]["parts"]
    assert set(parts) == {"plain values", "model", "optimizer", "extra"}


def test_into_live_objects_of_one_of_two_ranks(pair: Path) -> None:
    state = make_golden.pair_state(1, make_golden.pair_model())
    wanted = {key: value.clone() for key, value in state.model.state_dict().items()}
    contents.settle(state.model.state_dict(), 7000)
    everstep.load(pair, rank=1, into=state)
    assert list(differences(dict(state.model.state_dict()), wanted)) == []


@pytest.mark.parametrize("version", READABLE_VERSIONS)
@pytest.mark.parametrize("which", ["alone", "pair"])
def test_fsck_finds_nothing(version: int, which: str) -> None:
    run = RUNS[version] / which
    said = CliRunner().invoke(main, ["fsck", str(run), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["findings"] == []


def test_loading_writes_nothing(pair: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(pair, tmp_path / "run"))

    def listed() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))

    before = listed()
    everstep.load(run)
    assert listed() == before


def test_images_open_without_everstep(alone: Path) -> None:
    at = (contents.FULL_STEP, 1, 1, 0)
    for part in contents.full():
        path = alone / names.image(*at, "state@" if part == "state" else part)
        if part == "plain":
            assert not path.exists(), "no tensor, no image"
            continue
        opened = safetensors.torch.load_file(path)
        assert opened, part
    model = safetensors.torch.load_file(alone / names.image(*at, "model"))
    expected = contents.full()["model"]
    for key in ("parameter", "transposed", "strided", "expanded", "scalar", "empty"):
        assert raw(model[key]) == raw(expected[key]), key
    assert model["channels"].dtype is torch.float16


def test_the_metrics_and_the_configuration_are_told(alone: Path) -> None:
    said = CliRunner().invoke(main, ["show", str(alone), str(contents.FULL_STEP), "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert told["incarnations"][0]["config"] == contents.CONFIG
    manifest = told["checkpoint"]["manifest"]
    assert manifest["config_hash"] == told["incarnations"][0]["config_hash"]
    assert manifest["metrics"]["loss"] == contents.METRICS["loss"]
    # Facades write numbers that large as texts since.
    assert int(manifest["metrics"]["seen"]) == contents.METRICS["seen"]


def test_a_run_of_version_1_goes_on(tmp_path: Path) -> None:
    """What is written from now on is of the newest version; what was there stays, and all of it loads."""
    run = Path(shutil.copytree(RUNS[1] / "alone", tmp_path / "run"))
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    step = contents.BARE_STEP + 1
    everstep.save(run, step, contents.small())
    for name, data in before.items():
        assert (run / name).read_bytes() == data, name
    manifest = json.loads((run / names.decision(step, 4, 1)).read_bytes())
    assert manifest["format"] == FORMAT_VERSION and json.loads(before[Path(names.RUN)])["format"] == 1
    assert list(differences(everstep.load(run), contents.small())) == []
    for old, content in STEPS.items():
        assert list(differences(everstep.load(run, step=old), content())) == []
    said = CliRunner().invoke(main, ["fsck", str(run), "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["findings"] == []
    listed = json.loads(CliRunner().invoke(main, ["ls", str(run), "--json"]).stdout)
    assert [one["step"] for one in listed["checkpoints"]] == [*sorted(STEPS), step]


def test_the_generator_still_makes_such_a_run(tmp_path: Path) -> None:
    """The images are the same bytes today; records differ by time, place and random ids."""
    make_golden.make_alone(tmp_path / "alone")
    images = [path.relative_to(ALONE) for path in ALONE.rglob("rank-*") if path.suffix != ".vote"]
    assert len(images) >= 9
    for name in images:
        assert (tmp_path / "alone" / name).read_bytes() == (ALONE / name).read_bytes(), name
    assert {path.name for path in (ALONE / "layouts").iterdir()} == {
        path.name for path in (tmp_path / "alone" / "layouts").iterdir()
    }


def test_the_comparison_sees_what_differs() -> None:
    one = contents.full()
    for change in (
        lambda new: new["model"]["scalar"].add_(1),
        lambda new: new["plain"]["floats"].__setitem__(1, 0.0),
        lambda new: new["plain"]["floats"].__setitem__(5, contents.nan(0x7FF8000000000000)),
        lambda new: new["plain"]["tuple"][1].__class__ and new["plain"].__setitem__("tuple", [1, (2, ())]),
        lambda new: new["plain"]["keys"].__setitem__("new", 1),
        lambda new: new["plain"]["deque"].append(3),
        lambda new: new["plain"]["generator"].manual_seed(1),
        lambda new: new[".."]["big"].__setitem__((0, 0), 7),
        lambda new: new["plain"]["user"][1].__setattr__("rate", 0.25),
    ):
        other = contents.full()
        change(other)
        assert len(list(differences(other, one))) == 1
