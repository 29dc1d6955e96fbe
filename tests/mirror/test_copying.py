"""Whole runs from place to place."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from click.testing import CliRunner, Result
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.format import names
from everstep.format.constants import READABLE_VERSIONS
from everstep.format.manifest import encode_decision
from everstep.store.catalog import list_step
from everstep.store.copying import CopyReport, copy_run
from everstep.store.mirror import give_up
from everstep.store.rotate import rotate

from tests.golden import test_golden as golden
from tests.mirror import kit
from tests.store import store_kit


def everstep_(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def said(result: Result) -> Any:
    return json.loads(result.stdout)


def keys(places: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(place["incarnation"], place["step"]) for place in places]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 4, then from step 2 on steps 5 and 6: steps 3 and 4 are cut off."""

    async def make() -> None:
        backend = LocalBackend(tmp_path / "run")
        await store_kit.start_run(backend)
        for step in (1, 2, 3, 4):
            await store_kit.save(backend, step)
        await store_kit.adopt(backend, 1, 2)
        for step in (5, 6):
            await store_kit.save(backend, step, incarnation=2)
        await backend.close()

    asyncio.run(make())
    return tmp_path / "run"


def test_all_of_the_lineage(run: Path, tmp_path: Path) -> None:
    first = everstep_("copy", run, tmp_path / "copy", "--json")
    assert first.exit_code == 0, first.output
    assert keys(said(first)["copied"]) == [(1, 1), (1, 2), (2, 5), (2, 6)]
    assert said(first)["sent_bytes"] > 4 * 40_000
    assert everstep_("fsck", tmp_path / "copy").exit_code == 0
    again = everstep_("copy", run, tmp_path / "copy", "--json")
    assert again.exit_code == 0 and said(again)["sent_bytes"] == 0 and not said(again)["copied"]
    assert keys(said(again)["present"]) == keys(said(first)["copied"])
    for name, data in kit.objects(tmp_path / "copy").items():
        assert (run / name).read_bytes() == data


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        (["--newest", "1"], [(2, 6)]),
        (["--newest", "3"], [(1, 2), (2, 5), (2, 6)]),
        (["--newest", "99"], [(1, 1), (1, 2), (2, 5), (2, 6)]),
        (["--steps", "5, 1"], [(1, 1), (2, 5)]),
    ],
)
def test_some_of_it(run: Path, tmp_path: Path, options: list[str], copied: list[tuple[int, int]]) -> None:
    result = everstep_("copy", run, tmp_path / "copy", "--json", *options)
    assert result.exit_code == 0 and keys(said(result)["copied"]) == copied
    listed = said(everstep_("ls", tmp_path / "copy", "--json"))
    assert [one["step"] for one in listed["checkpoints"]] == [step for _, step in copied]
    assert everstep_("fsck", tmp_path / "copy").exit_code == 0


def test_a_step_that_is_not_there_is_an_error_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    for steps in ("7", "1,3"):  # 3 is cut off
        result = everstep_("copy", run, tmp_path / "copy", "--steps", steps)
        assert result.exit_code == 1 and steps[-1] in result.stderr
        assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("source", "target"),
    [("run", "run"), ("run", "run/copy"), ("run", "."), ("run", "link/x"), ("link", "run")],
)
def test_one_run_in_another_is_refused(run: Path, tmp_path: Path, source: str, target: str) -> None:
    (tmp_path / "link").symlink_to(run)
    before = kit.objects(run)
    result = everstep_("copy", tmp_path / source, tmp_path / target)
    assert result.exit_code == 1 and "DST" in result.stderr
    assert kit.objects(run) == before


@pytest.mark.parametrize("options", [["--steps", "x"], ["--steps", "1", "--newest", "1"], ["--newest", "0"]])
def test_wrong_calls(run: Path, tmp_path: Path, options: list[str]) -> None:
    assert everstep_("copy", run, tmp_path / "copy", *options).exit_code == 2


def test_no_run_and_no_checkpoint(tmp_path: Path) -> None:
    assert everstep_("copy", tmp_path / "nowhere", tmp_path / "copy").exit_code == 1
    asyncio.run(store_kit.start_run(LocalBackend(tmp_path / "empty")))
    result = everstep_("copy", tmp_path / "empty", tmp_path / "copy")
    assert result.exit_code == 1 and "nothing that counts" in result.stderr
    assert not (tmp_path / "copy").exists()


def test_another_run_at_the_target(run: Path, tmp_path: Path) -> None:
    other = asyncio.run(store_kit.start_run(LocalBackend(tmp_path / "copy")))
    result = everstep_("copy", run, tmp_path / "copy")
    assert result.exit_code == 1 and other.run_id in result.stderr
    assert not (tmp_path / "copy" / "checkpoints").exists()


def test_a_damaged_checkpoint_does_not_hold_up_the_others(run: Path, tmp_path: Path) -> None:
    name = names.image(2, 1, 1, 0, "model")
    data = bytearray((run / name).read_bytes())
    data[store_kit.CHUNK] ^= 1
    (run / name).write_bytes(data)
    manifest = run / names.decision(1, 1, 1)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    result = everstep_("copy", run, tmp_path / "copy", "--json")
    assert result.exit_code == 1 and keys(said(result)["copied"]) == [(2, 5), (2, 6)]
    assert sorted(keys(said(result)["failed"])) == [(1, 1), (1, 2)]
    assert f"{name}: damaged in the chunk at offset {store_kit.CHUNK}" in result.stderr
    good, bad = asyncio.run(store_kit.loadable(LocalBackend(tmp_path / "copy")))
    assert (good, bad) == ({(2, 5), (2, 6)}, {})
    assert everstep_("copy", run, tmp_path / "copy", "--newest", "2").exit_code == 0


def with_copy(run: Path, target: Path, *, at: str, then: Any, **choice: Any) -> CopyReport:
    """Copy, and run ``then(source)`` once the point ``at`` is reached for the first time."""

    async def go() -> CopyReport:
        source, there = LocalBackend(run), LocalBackend(target)
        waiting: list[Any] = []

        def hook(name: str, detail: str) -> None:
            if f"{name}:{detail}".startswith(at):
                points.hook = None
                waiting.append(asyncio.ensure_future(then(source)))
                # What then does has to be done before the copy goes on: reads wait for it.
                gate.clear()
                waiting[0].add_done_callback(lambda _: gate.set())

        gate = asyncio.Event()
        gate.set()
        points.hook = hook
        try:
            report = await copy_run(source, Gated(there, gate), **choice)
            for task in waiting:
                await task
            assert waiting, "the point was not reached"
            return report
        finally:
            points.hook = None
            await source.close()
            await there.close()

    return asyncio.run(go())


class Gated(kit.Wrapper):
    """Writes pass while the gate is open."""

    def __init__(self, inner: LocalBackend, gate: asyncio.Event) -> None:
        super().__init__(inner)
        self.gate = gate

    async def open_writer(self, name: str, nbytes: int, notes: Any = None, **more: Any) -> Any:
        await self.gate.wait()
        return await self.inner.open_writer(name, nbytes, notes, **more)

    async def create(self, name: str, data: bytes) -> None:
        await self.gate.wait()
        await self.inner.create(name, data)


@pytest.mark.parametrize("what", ["image", "state", "vote", "layout"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_what_is_missing_or_cut_at_the_target_is_sent_again(
    run: Path, tmp_path: Path, what: str, how: str
) -> None:
    copy = tmp_path / "copy"
    assert everstep_("copy", run, copy).exit_code == 0
    before = kit.objects(copy)
    name = {
        "image": names.image(5, 2, 1, 0, "model"),
        "state": names.state(5, 2, 1, 1),
        "vote": names.vote(5, 2, 1, 0),
        "layout": next(name for name in sorted(before) if name.startswith("layouts/")),
    }[what]
    data = before[name]
    (copy / name).unlink()
    if how == "cut":
        (copy / name).write_bytes(data[:-3])
    again = everstep_("copy", run, copy, "--json")
    assert again.exit_code == 0 and len(keys(said(again)["present"])) == 4
    assert (what == "layout") or keys(said(again)["resent"]) == [(2, 5)]
    assert said(again)["sent_bytes"] == len(data)
    assert kit.objects(copy) == before


def test_damage_at_both_places_is_no_success(run: Path, tmp_path: Path) -> None:
    copy, name = tmp_path / "copy", names.image(5, 2, 1, 0, "model")
    assert everstep_("copy", run, copy).exit_code == 0
    for place in (run, copy):
        (place / name).write_bytes((place / name).read_bytes()[:-3])
    again = everstep_("copy", run, copy, "--json")
    assert again.exit_code == 1 and keys(said(again)["failed"]) == [(2, 5)]


def test_what_a_live_source_prunes_meanwhile_is_said_and_skipped(run: Path, tmp_path: Path) -> None:
    async def prune(source: LocalBackend) -> None:
        plan = await store_kit.plan_for(source, 2)
        report = await rotate(source, plan, is_superseded=store_kit.not_superseded)
        assert (1, 2) in report.removed

    point = f"mirror.image.done:{names.attempt_dir(2, 1, 1)}"
    report = with_copy(run, tmp_path / "copy", at=point, then=prune)
    assert report.copied == [(1, 1), (2, 5), (2, 6)] and report.pruned == [(1, 2)]
    assert not report.failed and not report.refused

    async def look() -> None:
        target = LocalBackend(tmp_path / "copy")
        assert await kit.findings(target) == []
        assert (await list_step(target, 2, 1)).attempts == ()
        assert await store_kit.loadable(target) == ({(1, 1), (2, 5), (2, 6)}, {})
        await target.close()

    asyncio.run(look())


def test_a_live_source_that_goes_on_meanwhile(run: Path, tmp_path: Path) -> None:
    async def go_on(source: LocalBackend) -> None:
        await store_kit.adopt(source, 2, 6)
        await store_kit.save(source, 7, incarnation=3)

    point = f"mirror.image.done:{names.attempt_dir(2, 1, 1)}"
    report = with_copy(run, tmp_path / "copy", at=point, then=go_on)
    assert report.copied == [(1, 1), (1, 2), (2, 5), (2, 6)]
    later = everstep_("copy", run, tmp_path / "copy", "--json")
    assert keys(said(later)["copied"]) == [(3, 7)] and len(said(later)["present"]) == 4
    assert everstep_("fsck", tmp_path / "copy").exit_code == 0


def test_what_stands_at_the_target_counts(run: Path, tmp_path: Path) -> None:
    assert everstep_("copy", run, tmp_path / "copy", "--steps", "1,5").exit_code == 0

    async def decide() -> None:
        source, target = LocalBackend(run), LocalBackend(tmp_path / "copy")
        plan = await store_kit.plan_for(target)
        await rotate(target, plan, is_superseded=store_kit.not_superseded)
        source_names = await list_step(source, 6, 2)
        manifest = await store_kit.read_decision(source, source_names)
        assert isinstance(manifest, store_kit.Manifest)
        await give_up(target, manifest, "too slow")
        await source.close()
        await target.close()

    asyncio.run(decide())
    result = everstep_("copy", run, tmp_path / "copy", "--json")
    assert result.exit_code == 3
    assert keys(said(result)["copied"]) == [(1, 2)] and keys(said(result)["present"]) == [(2, 5)]
    reasons = {(one["incarnation"], one["step"]): one["reason"] for one in said(result)["refused"]}
    assert "removed" in reasons[1, 1] and reasons[2, 6] == "too slow"


def test_a_delta_brings_its_base(run: Path, tmp_path: Path) -> None:
    async def make_delta() -> None:
        source = LocalBackend(run)
        manifest = await store_kit.read_decision(source, await list_step(source, 6, 2))
        assert isinstance(manifest, store_kit.Manifest)
        delta = replace(manifest, kind="delta", parent={"step": 5, "incarnation": 2, "attempt": 1})
        (run / names.decision(6, 2, 1)).write_bytes(encode_decision(delta))
        await source.close()

    asyncio.run(make_delta())
    result = everstep_("copy", run, tmp_path / "copy", "--steps", "6", "--json")
    assert result.exit_code == 0 and keys(said(result)["copied"]) == [(2, 5), (2, 6)]
    shutil.rmtree(tmp_path / "copy")
    shutil.rmtree(run / names.step_dir(5))
    result = everstep_("copy", run, tmp_path / "copy", "--steps", "6", "--json")
    assert result.exit_code == 1 and "base of step 6" in result.stderr and not said(result)["copied"]


@pytest.mark.parametrize("version", READABLE_VERSIONS)
@pytest.mark.parametrize("which", ["alone", "pair"])
def test_a_run_of_any_format_version_is_copied_as_it_is(tmp_path: Path, version: int, which: str) -> None:
    source = golden.RUNS[version] / which
    result = everstep_("copy", source, tmp_path / "copy", "--json")
    assert result.exit_code == 0 and said(result)["copied"]
    kept = {name: data for name, data in kit.objects(source).items() if not name.endswith(".votes")}
    copied = kit.objects(tmp_path / "copy")
    assert copied.items() <= kept.items()
    assert everstep_("fsck", tmp_path / "copy").exit_code == 0


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real run of two steps."""
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    train(tmp_path / "run", None, (1, 2))
    yield tmp_path / "run"


def train(root: Path, expected: int | None, steps: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    state = everstep.TrainState(model=model)
    policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=100, linger_s=0.5)
    with everstep.Checkpointer(root, policy=policy, agent="inline") as ckpt:
        assert ckpt.load(state) == expected
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.save(step, state).wait(timeout_s=30)


def test_a_copy_loads_and_is_gone_on_with(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert everstep_("copy", trained, copy).exit_code == 0
    assert torch.equal(everstep.load(copy)["model"]["weight"], torch.full((8, 8), 2.0))
    train(copy, 2, (3,))
    assert torch.equal(everstep.load(copy)["model"]["weight"], torch.full((8, 8), 3.0))
    assert everstep_("fsck", copy).exit_code == 0
    # Both went on, each in its own way: they are no longer copies of one run.
    train(trained, 2, (3,))
    result = everstep_("copy", trained, copy)
    assert result.exit_code == 1 and names.incarnation(2) in result.stderr
