"""``everstep fsck``: what it says, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import LATER_STEP, everstep, put
from everstep.format import names
from everstep.format.constants import FORMAT_VERSION
from everstep.format.sealed import seal


def test_clean(made_run: Path) -> None:
    said = everstep("fsck", made_run, "--json")
    assert said.code == 0
    assert said.json["clean"] is True
    assert everstep("fsck", made_run).out.splitlines()[-1].endswith("clean")


@pytest.mark.parametrize("quick", [False, True])
def test_a_changed_byte_of_an_image(run: Path, quick: bool) -> None:
    name = names.image(LATER_STEP, 2, 1, 0, "model")
    data = bytearray((run / name).read_bytes())
    data[-1] ^= 1
    (run / name).write_bytes(data)
    said = everstep("fsck", run, "--json", *(["--quick"] if quick else []))
    assert said.code == (0 if quick else 4)
    if not quick:
        damage = [f for f in said.json["findings"] if f["severity"] == "damage"]
        assert [(f["name"], f["step"]) for f in damage] == [(name, LATER_STEP)]
        assert "cannot be loaded" in damage[0]["hurts"]


def test_quick_sees_a_wrong_size(run: Path) -> None:
    path = run / names.image(LATER_STEP, 2, 1, 0, "model")
    path.write_bytes(path.read_bytes()[:-1])
    said = everstep("fsck", run, "--quick")
    assert said.code == 4
    assert str(names.image(LATER_STEP, 2, 1, 0, "model")) in said.out


def test_only_one_step(run: Path) -> None:
    path = run / names.image(LATER_STEP, 2, 1, 0, "model")
    path.unlink()
    assert everstep("fsck", run, "--step", "1").code == 0
    assert everstep("fsck", run, "--step", str(LATER_STEP)).code == 4


def test_a_newer_format_cannot_be_told(tmp_path: Path) -> None:
    put(tmp_path, names.RUN, seal("run", {"what": "ever"}, format=FORMAT_VERSION + 1))
    said = everstep("fsck", tmp_path)
    assert said.code == 8
    assert "format" in said.err


@pytest.mark.parametrize(
    "args",
    [
        ["--no-such-option"],
        [],
        ["nowhere"],
        ["{run}", "--step", "77"],
        ["{run}", "--step", "x"],
        ["s3://"],
    ],
)
def test_a_wrong_call(made_run: Path, args: list[str]) -> None:
    said = everstep("fsck", *(arg.format(run=made_run) for arg in args))
    assert said.code == 16
    assert said.err
    assert "Traceback" not in said.err
