"""What goes out of a run comes back equal, and other libraries read it."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from everstep.cli.main import main
from everstep.errors import BadOption, Damaged, NoCheckpoint, StateError, StorageFull, UnsupportedValue
from everstep.port.dcp_dirs import export_dcp, import_dcp, read_dcp
from everstep.port.safetensors_files import export_safetensors, import_safetensors, read_safetensors
from everstep.port.torch_files import export_torch, import_torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model, optimizer = trained()
    state = everstep.TrainState(model=model, optimizer=optimizer, rng=False, extra={"epoch": 3})
    everstep.save(tmp_path / "run", 7, state)
    return tmp_path / "run"


def continued(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def resumed(run: Path) -> dict[str, torch.Tensor]:
    """Train on from the run, as a resumed job does."""
    model, optimizer = trained(seed=1)
    state = everstep.TrainState(model=model, optimizer=optimizer, rng=False)
    everstep.load(run, into=state, allow={"unexpected"})
    return continued(model, optimizer)


def test_torch_file(run: Path, tmp_path: Path) -> None:
    export_torch(run, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    model, optimizer = trained()
    assert equal(found["model"], dict(model.state_dict())) and found["extra"] == {"epoch": 3}
    fresh_model, fresh = trained(seed=3)
    fresh_model.load_state_dict(found["model"])
    fresh.load_state_dict(found["optimizer"])
    expected = continued(model, optimizer)
    assert equal(dict(continued(fresh_model, fresh)), dict(expected))

    assert import_torch(tmp_path / "a.pt", tmp_path / "back", step=9) == list(found)
    assert equal(dict(resumed(tmp_path / "back")), dict(expected))


def test_torch_file_of_a_bare_state_dict(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "m.bin")
    assert import_torch(tmp_path / "m.bin", tmp_path / "run") == ["model"]
    assert equal(dict(everstep.load(tmp_path / "run")["model"]), dict(model.state_dict()))


def test_random_states_and_numpy_values_come_back(tmp_path: Path) -> None:
    """What a run holds by default, and what people put into their files beside the models."""
    model, optimizer = trained()
    odd = {
        "ids": np.arange(3, dtype=np.int16),
        "none": np.zeros((0, 2)),
        "flag": np.bool_(True),
        "text": np.array("a"),
    }
    state = everstep.TrainState(model=model, optimizer=optimizer, best=np.float64(0.5), odd=odd)
    everstep.save(tmp_path / "run", 7, state)
    expected = everstep.load(tmp_path / "run")
    export_torch(tmp_path / "run", tmp_path / "a.pt")
    export_dcp(tmp_path / "run", tmp_path / "d")
    import_torch(tmp_path / "a.pt", tmp_path / "from_torch")
    import_dcp(tmp_path / "d", tmp_path / "from_dcp")
    drawn = []
    for name in ("from_torch", "from_dcp"):
        found = everstep.load(tmp_path / name)
        for part in ("rng", "best", "odd"):
            assert repr(found[part]) == repr(expected[part])
        live = everstep.TrainState(model=model, optimizer=optimizer, best=np.float64(0), odd=odd)
        everstep.load(tmp_path / name, into=live)
        drawn.append((np.random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("as_dcp", [False, True])
def test_tensors_beside_state_dicts_are_parts(as_dcp: bool, tmp_path: Path) -> None:
    """A generator's state or a counter at the top does not make one state dict of the whole file."""
    model, optimizer = trained()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "step": torch.tensor(3),
    }
    if as_dcp:
        dcp.save(dict(value), checkpoint_id=tmp_path / "a", no_dist=True)
        assert set(import_dcp(tmp_path / "a", tmp_path / "run")) == set(value)
    else:
        torch.save(value, tmp_path / "a")
        assert import_torch(tmp_path / "a", tmp_path / "run") == list(value)
    assert equal(dict(resumed(tmp_path / "run")), dict(continued(model, optimizer)))


def test_extra_states_are_of_their_state_dict(tmp_path: Path) -> None:
    value = {"w": torch.ones(2), "fp8._extra_state": {"scale": torch.ones(1)}}
    torch.save(value, tmp_path / "a.pt")
    assert import_torch(tmp_path / "a.pt", tmp_path / "run") == ["model"]


def test_the_class_that_is_refused_is_named(tmp_path: Path) -> None:
    torch.save({"model": {}, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValue, match=r"argparse\.Namespace"):
        import_torch(tmp_path / "a.pt", tmp_path / "run")


def test_a_torch_file_with_objects_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {}, "path": Path("x"), "odd": equal}, tmp_path / "odd.pt")
    with pytest.raises(UnsupportedValue, match=r"odd\.pt"):
        import_torch(tmp_path / "odd.pt", tmp_path / "run")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 not all")
    with pytest.raises((Damaged, UnsupportedValue), match=r"cut\.pt"):
        import_torch(tmp_path / "cut.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_dcp_directory(run: Path, tmp_path: Path) -> None:
    export_dcp(run, tmp_path / "d")
    values = read_dcp(tmp_path / "d")
    expected = everstep.load(run)
    assert equal(values["model"], dict(expected["model"])) and values["extra"] == {"epoch": 3}
    model, optimizer = trained()
    assert set(import_dcp(tmp_path / "d", tmp_path / "back")) == {"model", "optimizer", "extra"}
    assert equal(dict(resumed(tmp_path / "back")), dict(continued(model, optimizer)))


def test_stock_dcp_is_imported_and_resumed(tmp_path: Path) -> None:
    """As frameworks write it: one object "app", the optimizer by names, nested or flattened."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    for flat in (False, True):
        model, optimizer = trained()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        sd, osd = get_state_dict(model, optimizer, options=options)
        state = {"app": {"model": sd, "optimizer": osd}}
        dcp.save(state, checkpoint_id=tmp_path / f"stock{flat}", no_dist=True)
        root = tmp_path / f"run{flat}"
        assert set(import_dcp(tmp_path / f"stock{flat}", root, step=4)) == {"model", "optimizer"}
        assert equal(dict(resumed(root)), dict(continued(model, optimizer)))
        parts = {"weights": "app.model"}
        assert import_dcp(tmp_path / f"stock{flat}", tmp_path / f"some{flat}", parts=parts) == ["weights"]


def test_dcp_metadata_that_names_other_classes_is_not_run(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    mark = tmp_path / "ran"
    code = f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()
    (evil / ".metadata").write_bytes(code)
    with pytest.raises(UnsupportedValue, match=r"posix\.system"):
        import_dcp(evil, tmp_path / "run")
    assert not mark.exists()
    (evil / ".metadata").write_bytes(b"\x80\x04junk")
    with pytest.raises(Damaged):
        import_dcp(evil, tmp_path / "run")
    with pytest.raises(StateError, match=r"app has nothing at 'nope'"):
        model, _ = trained()
        dcp.save({"app": {"model": model.state_dict()}}, checkpoint_id=tmp_path / "ok", no_dist=True)
        import_dcp(tmp_path / "ok", tmp_path / "run", parts={"model": "app.nope"})


def test_safetensors_file_and_shards(run: Path, tmp_path: Path) -> None:
    model, _ = trained()
    assert export_safetensors(run, tmp_path / "m.safetensors") == ["m.safetensors"]
    assert equal(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))
    names = export_safetensors(run, tmp_path / "hub", shard_bytes=100)
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict()) and len(names) == len(set(names)) == 3
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert index["metadata"]["total_size"] == total
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "hub" / file)[name], model.state_dict()[name])
    for source in ("m.safetensors", "hub"):
        assert import_safetensors(tmp_path / source, tmp_path / f"run-{source}") == ["model"]
        back = everstep.load(tmp_path / f"run-{source}")
        assert equal(dict(back["model"]), dict(model.state_dict()))


def test_ties_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)}
    )
    model["b"].weight = model["a"].weight
    everstep.save(tmp_path / "run", 1, everstep.TrainState(model=model, rng=False))
    export_safetensors(tmp_path / "run", tmp_path / "m.safetensors")
    assert list(load_file(tmp_path / "m.safetensors")) == ["a.weight"]


def test_broken_shards_are_named(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"a": torch.zeros(2)}, hub / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = hub / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Damaged, match=r"00002-of-00002.* is missing"):
        read_safetensors(hub)
    save_file({"c": torch.zeros(2)}, hub / "model-00002-of-00002.safetensors")
    with pytest.raises(Damaged, match="differ in 2 tensors"):
        read_safetensors(hub)
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(Damaged, match="outside"):
        read_safetensors(hub)
    (hub / "model-00002-of-00002.safetensors").write_bytes(b"short")
    index.unlink()
    with pytest.raises(Damaged, match="cannot be read"):
        read_safetensors(hub)


def test_nothing_is_replaced_and_nothing_left_behind(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    for export in (export_safetensors, export_dcp, export_torch):
        with pytest.raises(BadOption, match="exists"):
            export(run, out)
    with pytest.raises(NoCheckpoint):
        export_torch(run, tmp_path / "n.pt", step=99)
    everstep.save(tmp_path / "odd", 1, {"model": {"z": torch.zeros(3, dtype=torch.complex128)}})
    with pytest.raises(UnsupportedValue, match="complex128"):
        export_safetensors(tmp_path / "odd", tmp_path / "odd.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "out", "run"]
    assert (out / "mine").read_text() == "x"


def test_dotted_names_that_collide_are_refused(tmp_path: Path) -> None:
    everstep.save(tmp_path / "run", 1, {"model": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}})
    with pytest.raises(StateError, match="one name"):
        export_safetensors(tmp_path / "run", tmp_path / "m.safetensors")


def test_commands(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(main, ["export", str(run), str(tmp_path / "m.safetensors"), "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["files"] == ["m.safetensors"]
    done = runner.invoke(main, ["export", str(run), str(tmp_path / "d"), "--to", "dcp", "--part", "model"])
    assert done.exit_code == 0, done.output
    back = str(tmp_path / "back")
    done = runner.invoke(main, ["import", str(tmp_path / "d"), back, "--step", "3", "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["parts"] == ["model"]
    again = runner.invoke(main, ["import", str(tmp_path / "d"), back, "--step", "2"])
    assert again.exit_code == 1 and "newer" in again.output
    assert runner.invoke(main, ["fsck", back]).exit_code == 0
    both = ["export", str(run), str(tmp_path / "x.safetensors"), "--part", "a", "--part", "b"]
    assert runner.invoke(main, both).exit_code == 2


OUTPUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "torch": (export_torch, "out.pt"),
    "dcp": (export_dcp, "out"),
    "one safetensors file": (export_safetensors, "out.safetensors"),
    "a directory of them": (export_safetensors, "out"),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 KB, which holds less than the export."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs leave to mount a small disk")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("format", OUTPUTS)
def test_a_full_disk_is_told_as_that(tmp_path: Path, disk: Path, format: str) -> None:
    everstep.save(tmp_path / "large", 1, {"model": {"a": torch.ones(100_000)}})
    export, name = OUTPUTS[format]
    with pytest.raises(StorageFull, match=f"{disk / name}.*No space left"):
        export(tmp_path / "large", disk / name)
    assert not list(disk.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("format", OUTPUTS)
def test_a_place_that_cannot_be_written_is_told(run: Path, disk: Path, format: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    export, name = OUTPUTS[format]
    with pytest.raises(BadOption, match=f"{disk / name}.*Read-only file system"):
        export(run, disk / name)
    with pytest.raises(BadOption, match="cannot be written"):
        export(run, run / "run.json" / name)
