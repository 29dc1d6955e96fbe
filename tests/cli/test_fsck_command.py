"""``everstep fsck``: what it says, and its exit codes."""

from __future__ import annotations

import shutil
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


def damaged_image(run: Path) -> tuple[Path, bytes]:
    path = run / names.image(LATER_STEP, 2, 1, 0, "model")
    good = path.read_bytes()
    data = bytearray(good)
    data[-1] ^= 1
    path.write_bytes(data)
    return path, good


def test_repair_from_a_tier_and_the_exit_codes(run: Path, made_run: Path) -> None:
    path, good = damaged_image(run)
    said = everstep("fsck", run, "--tier", made_run, "--repair", "--json")
    assert said.code == 1
    assert path.read_bytes() == good
    assert [(r["name"], r["place"]) for r in said.json["repaired"]] == [
        (str(path.relative_to(run)), str(run))
    ]
    again = everstep("fsck", run, "--tier", made_run, "--repair")
    assert again.code == 0


def test_without_repair_nothing_is_written(run: Path, made_run: Path) -> None:
    path, _ = damaged_image(run)
    before = path.read_bytes()
    said = everstep("fsck", run, "--tier", made_run, "--json")
    assert said.code == 4
    assert path.read_bytes() == before
    places = {p["place"]: [k["step"] for k in p["lost"]] for p in said.json["places"]}
    assert places == {str(run): [LATER_STEP], str(made_run): []}
    assert "can be loaded: 1 (incarnation 1)" in everstep("fsck", run).out


def test_repair_without_any_other_place_sets_aside(run: Path) -> None:
    damaged_image(run)
    said = everstep("fsck", run, "--repair")
    assert said.code == 4
    assert "set aside" in said.out
    assert said.out.endswith(f"{run}: DAMAGED\n")
    listed = everstep("ls", run, "--json").json
    assert LATER_STEP not in [c["step"] for c in listed["checkpoints"]]
    assert (listed["aside"], listed["removing"]) == ([{"step": LATER_STEP, "incarnation": 2}], [])
    assert "1 checkpoint is set aside as damaged" in everstep("ls", run).out


def test_what_is_set_aside_is_damage_left_until_it_is_mended_or_let_go(run: Path, made_run: Path) -> None:
    damaged_image(run)
    assert everstep("fsck", run, "--repair").code == 4
    for args in ([], ["--repair"], ["--quick"]):
        said = everstep("fsck", run, *args)
        assert said.code == 4 and f"cannot be loaded: {LATER_STEP} (incarnation 2)" in said.out, args
    asides = run.with_name("asides")
    shutil.copytree(run, asides)
    assert everstep("fsck", run, "--tier", made_run, "--repair").code == 1
    assert everstep("fsck", run).code == 0
    # Nothing stands on it: whoever gives it up removes its directory.
    shutil.rmtree(asides / names.checkpoint_dir(LATER_STEP, 2))
    assert everstep("fsck", asides).code == 0


def test_a_sample_is_told_with_its_seed_and_reads_less(made_run: Path) -> None:
    said = everstep("fsck", made_run, "--sample", "1%", "--seed", "7", "--json").json
    [place] = said["places"]
    assert said["sample"] == {"share": 0.01, "seed": 7}
    assert place["unread_bytes"] > place["proved_bytes"]
    again = everstep("fsck", made_run, "--sample", "1%", "--seed", "7", "--json").json
    assert again["places"] == said["places"]
    whole = everstep("fsck", made_run, "--json").json["places"][0]
    assert (whole["unread_bytes"], whole["proved_bytes"]) == (
        0,
        place["unread_bytes"] + place["proved_bytes"],
    )


def test_no_time_means_no_image_is_read(made_run: Path) -> None:
    said = everstep("fsck", made_run, "--max-duration", "0s", "--json")
    assert said.code == 0
    assert said.json["places"][0]["proved_bytes"] == 0
    assert "of images not read" in everstep("fsck", made_run, "--max-duration", "0s").out


@pytest.mark.parametrize("args", [["--sample", "0"], ["--rate", "fast"], ["--max-duration", "5"]])
def test_wrong_amounts(made_run: Path, args: list[str]) -> None:
    assert everstep("fsck", made_run, *args).code == 16


def test_a_rate_is_kept_to(made_run: Path) -> None:
    said = everstep("fsck", made_run, "--rate", "100MiB", "--json")
    assert said.code == 0


def test_pins_that_hold_nothing_are_told(run: Path) -> None:
    assert everstep("pin", run, "1", "--reason", "kept").code == 0
    assert everstep("fsck", run, "--json").json["findings"] == []
    manifest = run / names.decision(1, 1, 1)
    manifest.rename(run / "aside.json")
    found = [f for f in everstep("fsck", run, "--json").json["findings"] if f["kind"] == "pin"]
    assert [(f["severity"], f["step"]) for f in found] == [("info", 1)]


def test_many_infos_of_a_kind_are_counted(run: Path) -> None:
    for number in range(9):
        (run / f"notes-{number}.txt").write_text("mine")
    said = everstep("fsck", run)
    assert said.code == 0
    assert said.out.count("not a name of this format") == 3
    assert "6 more of the kind foreign" in said.out
    assert len(everstep("fsck", run, "--json").json["findings"]) == 9
