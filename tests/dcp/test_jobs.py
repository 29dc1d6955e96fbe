"""Jobs of several ranks through ``dcp.save``, ``dcp.async_save`` and ``dcp.load``, and what they leave."""

from __future__ import annotations

import pickletools
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import everstep
import everstep.dcp as ed
import pytest
import torch
import torch.distributed.checkpoint as dcp
from everstep.backends.open import open_backend
from everstep.errors import Damaged
from everstep.store.blocking import run_blocking
from everstep.store.findings import Finding, Severity
from everstep.store.fsck import check
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.dcp.jobs import differing, full, nested, trained
from tests.dcp.kit import assert_same, blank, files
from tests.dcp.run import run_job

FOUR = (
    "fsdp_save,fsdp_load,plan_caching,titan,per_rank,full_disk,full_disk_coordinator,refused_values,"
    "given_up_before,async_thread,own_stager"
)
TWO = "fsdp_load,per_rank_elsewhere,installed_writer,without_collectives,other_shapes"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What four ranks wrote, and two read again."""
    where = tmp_path_factory.mktemp("jobs")
    run_job(4, FOUR, where)
    run_job(2, TWO, where)
    yield where


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def everstep_command(*arguments: str) -> str:
    command = [sys.executable, "-c", "from everstep.cli.main import main; main()", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def assert_sound(root: Path, *allowed: Severity) -> None:
    """fsck finds nothing wrong, and nothing left over."""

    async def look() -> list[Finding]:
        backend = open_backend(root, shared=True)
        try:
            return [finding async for finding in check(backend)]
        finally:
            await backend.close()

    assert [finding for finding in run_blocking(look()) if finding.severity not in allowed] == [], root


def test_one_process_without_a_group_loads_what_four_sharded(left: Path) -> None:
    model, optimizer = trained(8, sharded=False)
    state = nested(model, optimizer)
    dcp.load(state, storage_reader=ed.Reader(left / "fsdp" / "step-7"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(full(model, optimizer), torch.load(left / "reference.pt", weights_only=False))


def test_without_a_model(left: Path) -> None:
    """torch's tool for that knows everything from the metadata."""
    found: dict[str, object] = {}
    reader = ed.Reader(left / "fsdp" / "step-7")
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    expected = torch.load(left / "reference.pt", weights_only=False)
    assert_same(found["model"], dict(expected["model"]))
    assert_same(found["optim"]["state"], expected["optim"]["state"])  # type: ignore[index]


def test_the_directory_is_a_run(left: Path) -> None:
    directory = str(left / "fsdp" / "step-7")
    assert "clean" in everstep_command("fsck", directory)
    listed = everstep_command("ls", directory).splitlines()
    assert len(listed) == 2 and listed[1].split()[:3] == ["7", "1", "4"]
    assert "state_dict" in everstep_command("show", directory)


def test_everstep_loads_values_of_all_ranks(left: Path) -> None:
    values = everstep.load(left / "titan" / "step-3", rank=0)["state_dict"]
    assert values["train_state.tokens"] == 3000 and values["optim.lr"] == 1.5
    for rank in range(4):
        assert values[f"dataloader.dp_rank_{rank}"] == f"position 3 of {rank}".encode()


def test_everstep_loads_whole_tensors(left: Path) -> None:
    expected = torch.load(left / "reference.pt", weights_only=False)
    values = everstep.load(left / "fsdp" / "step-7", parts=["state_dict"])["state_dict"]
    for name, tensor in expected["model"].items():
        assert torch.equal(values[f"model.{name}"], tensor)


def test_ranks_keep_their_own(left: Path) -> None:
    root = left / "per-rank" / "0"
    for rank in (0, 3):
        values = everstep.load(root, rank=rank)["state_dict"]
        assert values["loader.position"] == 10 + rank
        assert_same(values["rng"], differing(rank)["rng"])
    state = blank(differing(0))
    with pytest.warns(RuntimeWarning, match=r"loader\.position.*rank 0's"):
        dcp.load(state, storage_reader=ed.Reader(root))
    assert_same(state, differing(0))


def test_all_that_was_left_is_sound_and_holds_no_pickle(left: Path) -> None:
    checked = 0
    for marker in left.rglob("*.metadata"):
        root = marker.parent
        if not (root / "run.json").is_file():
            continue
        assert marker.read_bytes().startswith(b'{"everstep"')
        assert_sound(root)
        for path in files(root):
            data = path.read_bytes()
            assert not data.startswith(b"PK") and b"_rebuild_tensor" not in data, path
            with pytest.raises(Exception, match=r"opcode|exhausted|truncated|newline|expected"):
                list(pickletools.genops(data))
        checked += 1
    assert checked >= 8


def test_former_saves_leave_nothing_but_records(left: Path) -> None:
    """A directory that was saved to many times holds one checkpoint's bytes."""
    root = left / "full"
    (attempt,) = root.glob("checkpoints/*/*/a*")
    assert int(attempt.name[1:]) >= 5
    assert not list(root.rglob(".tmp-*"))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_found_at_load(left: Path, tmp_path: Path, damage: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(left / "fsdp" / "step-7", root)
    (image,) = root.glob("checkpoints/*/*/a1/rank-00002.state_dict.safetensors")
    data = bytearray(image.read_bytes())
    data[-3] ^= 4
    if damage == "gone":
        image.unlink()
    else:
        image.write_bytes(data if damage == "flip" else data[:-3])
    model, optimizer = trained(9, sharded=False)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(nested(model, optimizer), storage_reader=ed.Reader(root))
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], Damaged) and "rank-00002" in str(failure[0])


@pytest.mark.parametrize(
    ("rank", "point", "tokens"),
    [
        pytest.param(1, "kill:flush.image.first", 1000, marks=pytest.mark.long),
        (1, "kill:vote.before", 1000),
        pytest.param(0, "kill:manifest.before", 1000, marks=pytest.mark.long),
        pytest.param(0, "kill:manifest.after", 2000, marks=pytest.mark.long),
    ],
)
def test_a_rank_dies_in_the_midst_of_a_save(tmp_path: Path, rank: int, point: str, tokens: int) -> None:
    run_job(2, "dies", tmp_path, killed={rank: point})
    run_job(2, "after_death", tmp_path, env={"EXPECTED": str(tokens)})
    assert_sound(tmp_path / "dies", Severity.INFO)
    assert len(list((tmp_path / "dies").glob("checkpoints/*/*/a*"))) == 1


def test_a_process_that_saves_in_the_background(tmp_path: Path) -> None:
    run_job(2, "async_process", tmp_path)
    assert_sound(tmp_path / "process" / "a")
