"""The check for a machine with a GPU, on this machine without one: the same steps, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from everstep.benchmarks import gpu_check

from tests.facade.kit import SHM
from tests.sources import TOP

MIB = 1 << 20


def test_it_runs_from_a_checkout_and_says_that_there_is_no_gpu(node: str) -> None:
    command = [sys.executable, str(TOP / "benchmarks" / "gpu_check.py"), "--mib", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # more would wait for each other beside other tests
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    if not torch.cuda.is_available():
        assert found["cuda"] is False and "CPU only" in found["device"]
    assert {"device_slot: rollback from device", "overlap: load from memory"} <= set(found["equal"])
    assert len(found["equal"]) == 9
    for ratio in ("beside_vs_ceiling", "to_host_vs_ceiling"):
        assert found[ratio] > 0
    assert set(found["stall"]) == {"device_slot", "eager", "overlap"}


@pytest.mark.parametrize("name", ["model.0.weight", "extra.mask", "optimizer.0.exp_avg", "number"])
def test_a_single_bit_is_found(name: str) -> None:
    trainer = gpu_check.Trainer(torch.device("cpu"), MIB, seed=1)
    trainer.step()
    wanted, found = trainer.bits(), trainer.bits()
    gpu_check.same(found, wanted, "nothing")
    value = found[name]
    if isinstance(value, torch.Tensor):
        value.view(-1).view(torch.uint8)[-1] ^= 1
    else:
        found[name] = value + 1
    with pytest.raises(gpu_check.Differs, match=name):
        gpu_check.same(found, wanted, "a flipped bit")


def test_bits_that_differ_end_it_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(nbytes: int | None) -> None:
        raise gpu_check.Differs("w differs")

    monkeypatch.setattr(gpu_check, "run", differ)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 1
    assert json.loads(capsys.readouterr().out)["differs"] == "w differs"


def test_what_it_leaves_behind(node: str) -> None:
    before = everything()
    with gpu_check.working(MIB) as work:
        equal = gpu_check.check_bits(torch.device("cpu"), MIB, work)
        assert everything() > before and not list(work.arenas.iterdir())
    assert len(equal) == 9 and everything() == before


def everything() -> set[str]:
    """In shared memory, of this check."""
    return {str(path) for path in SHM.glob("everstep-check-*")}
