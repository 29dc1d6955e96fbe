"""fsck of a node's own tier: it is recognised, its objects are proved and mended, and nothing is decided there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.store.fsck_images import Extent
from everstep.store.repair_near import look_near, mend_near
from everstep.store.repair_run import Mended

from tests.facade.kit import Training, opened

from .kit import near

WHOLE = Extent()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with deltas in "root", and its node's tier in "nvme"; of step 3, only the tier has the share."""
    base = tmp_path_factory.mktemp("near")
    training = Training()
    policy = {"delta_every": 1, "delta_base": "previous", "keep_last": 9, "on_slow": "wait"}
    ckpt = opened(base / "root", tiers=[near(base / "nvme", keep_last=9)], agent="inline", policy=policy)
    ckpt.load(training.state)
    for step in (1, 2, 3):
        training.step()
        handle = ckpt.step(step, training.state)
        assert handle is not None
        handle.wait()
    assert handle.kind == "delta"
    ckpt.close()
    shutil.rmtree(base / "root" / "checkpoints" / "000000003")
    return base


@pytest.fixture
def places(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "root", tmp_path / "root")
    shutil.copytree(made / "nvme", tmp_path / "nvme")
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {str(at.relative_to(root)): at.read_bytes() for at in root.rglob("*") if at.is_file()}


def fsck(places: Path, *options: str) -> tuple[int, dict[str, object]]:
    args = ["fsck", str(places / "root"), "--tier", str(places / "nvme"), "--json", *options]
    said = CliRunner().invoke(main, args)
    return said.exit_code, json.loads(said.stdout)


@pytest.mark.parametrize("repair", [[], ["--repair"]])
def test_a_healthy_one_is_no_damage_and_nothing_is_written_there(places: Path, repair: list[str]) -> None:
    before = files(places / "nvme")
    code, said = fsck(places, *repair)
    assert code == 0
    findings = said["findings"]
    assert isinstance(findings, list)
    assert [one["kind"] for one in findings if one["place"].endswith("nvme")] == ["node-tier"]
    assert files(places / "nvme") == before


def share(step: int, what: str) -> Callable[[Path], Path]:
    return lambda tier: next((tier / "checkpoints" / f"{step:09d}").glob(f"*/*/rank-00000.{what}"))


OBJECTS = {
    "image": share(2, "model*"),
    "state": share(1, "state*"),
    "vote": share(2, "vote"),
    "layout": lambda tier: next((tier / "layouts").iterdir()),
    "run": lambda tier: tier / "run.json",
}


@pytest.mark.parametrize("what", OBJECTS)
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_there_is_told_and_mended_from_the_root(places: Path, what: str, how: str) -> None:
    before = files(places / "nvme")
    hurt = OBJECTS[what](places / "nvme")
    data = hurt.read_bytes()
    if how == "gone":
        hurt.unlink()
    else:
        hurt.write_bytes(data[:-1] + bytes([data[-1] ^ 4]) if how == "flip" else data[: len(data) // 2])
    if what == "vote" and how == "gone":  # as where it is being removed
        assert fsck(places)[0] == 0
        return
    assert fsck(places)[0] == 4
    code, said = fsck(places, "--repair")
    assert (code, files(places / "nvme")) == (1, before), said


def at_work(places: Path, work: Callable[..., object], others: list[Path]) -> Mended:
    async def go() -> Mended:
        backends = [LocalBackend(place) for place in (places / "nvme", *others)]
        try:
            return await work(backends[0], others=backends[1:], extent=WHOLE)  # type: ignore[misc, no-any-return]
        finally:
            for backend in backends:
                await backend.close()

    return asyncio.run(go())


def test_what_only_the_node_has_is_proved_by_its_vote_and_left_where_nobody_has_it_right(
    places: Path,
) -> None:
    image = share(3, "model*")(places / "nvme")
    data = image.read_bytes()
    image.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    hurt = files(places / "nvme")
    for work in (look_near, mend_near):
        said = at_work(places, work, [places / "root"])
        damage = [finding.name for finding in said.after if finding.severity.value == "damage"]
        assert damage == [str(image.relative_to(places / "nvme"))]
        assert files(places / "nvme") == hurt and not said.done


def test_it_gives_the_root_what_is_damaged_there(places: Path) -> None:
    before = files(places / "root")
    image = share(2, "model*")(places / "root")
    image.write_bytes(image.read_bytes()[:-1])
    code, _ = fsck(places, "--repair")
    assert (code, files(places / "root")) == (1, before)


def test_it_is_refused_as_a_root(places: Path) -> None:
    before = files(places / "nvme")
    for options in ([], ["--repair"], ["--repair", "--tier", str(places / "root")]):
        said = CliRunner().invoke(main, ["fsck", str(places / "nvme"), *options])
        assert said.exit_code == 16
        assert "node's own tier" in said.stderr
    assert files(places / "nvme") == before


def test_another_runs_place_is_refused(places: Path) -> None:
    other = places / "other"
    training = Training()
    with opened(other, agent="inline") as ckpt:
        ckpt.load(training.state)
        training.step()
        ckpt.save(1, training.state).wait()
    before = files(other), files(places / "root")
    for command in (["fsck"], ["fsck", "--repair"]):
        said = CliRunner().invoke(main, [*command, str(places / "root"), "--tier", str(other)])
        assert said.exit_code == 16
        assert "another run is there" in said.stderr
    said = CliRunner().invoke(main, ["du", str(places / "root"), str(other)])
    assert said.exit_code == 1 and "another run is there" in said.stderr
    assert (files(other), files(places / "root")) == before
