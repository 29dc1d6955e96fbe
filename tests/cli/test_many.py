"""A run of a thousand checkpoints in chains: what the commands ask for, and the processor time that they take, grow
with the number of manifests and no faster."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import everstep, put
from click.testing import CliRunner
from everstep.backends.api import Backend
from everstep.backends.count import Counting
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.format import names
from everstep.format.layout import build_layout
from everstep.format.manifest import Manifest, encode_decision
from everstep.format.vote import DELTA, ImageRecord, Vote, decode_header, encode_vote
from everstep.places import Place
from everstep.store.catalog import read_vote
from everstep.store.commit import make_manifest, next_attempt, try_commit
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.runs import open_run
from everstep.store.sources import DurableSource

from tests.store import store_kit as kit

MANY, FEW = 1000, 250
CHAIN = 10
CPU_S_MAX = 5.0
TRIES = 3
SLACK = 20
"""Requests that do not depend on the number of checkpoints."""

COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "prune": ["--keep-last", "3", "--keep-every", "50", "--dry-run"],
    "fsck": ["--quick"],
}


async def _two(root: Path) -> list[list[Vote]]:
    """A full checkpoint, and a delta of it in which nothing has changed: their votes, by rank."""
    backend = LocalBackend(root)
    await kit.start_run(backend)
    run = await open_run(backend)
    base: DurableSource | None = None
    votes = []
    for step in (1, 2):
        attempt, _ = await next_attempt(backend, step, 1)
        for rank in range(kit.WORLD):
            layout = build_layout(kit.specs(rank))
            pinned = kit.snapshot(step, rank, layout=layout)
            for spec in layout.images:
                same = random.Random(f"{rank} {spec.name}").randbytes(spec.nbytes - len(spec.header))
                pinned.data[f"image:{spec.name}"] = bytearray(spec.header + same)
            job = FlushJob(step, 1, attempt, rank, kit.WORLD)
            await flush_rank(backend, job, pinned, chunk_bytes=run.chunk_bytes, run=run, base=base)  # type: ignore[arg-type]
        manifest = await try_commit(backend, step, 1, attempt, kit.WORLD)
        assert isinstance(manifest, Manifest)
        base = DurableSource(backend, manifest, run.chunk_bytes)
        votes.append([(await read_vote(backend, step, 1, 1, rank))[1] for rank in range(kit.WORLD)])
    await backend.close()
    return votes


def many(root: Path, count: int) -> Path:
    """Every tenth checkpoint is a full one, the others are deltas of the one before. Their objects are links to those
    of two: only what they are called, and what their votes say, differs."""
    full, delta = asyncio.run(_two(root))
    for step in range(3, count + 1):
        template = full if step % CHAIN == 1 else delta
        of, base = template[0].step, step - 1
        headers, first = [], None
        (root / names.attempt_dir(step, 1, 1)).mkdir(parents=True)
        for rank, vote in enumerate(template):
            for image in vote.images:
                os.link(root / image.object_name(of, 1, 1, rank), root / image.object_name(step, 1, 1, rank))
            made = replace(vote, step=step, images=tuple([_based(image, base) for image in vote.images]))
            data, name = encode_vote(made), names.vote(step, 1, 1, rank)
            put(root, name, data)
            headers.append(decode_header(data, name))
            first = first or made
        assert first is not None
        manifest = make_manifest(first, headers, "shared")
        put(root, names.decision(step, 1, 1), encode_decision(manifest))
    return root


def _based(image: ImageRecord, base: int) -> ImageRecord:
    if image.encoding != DELTA:
        return image
    assert image.base is not None
    return replace(image, base={**image.base, "step": base})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    home = tmp_path_factory.mktemp("many")
    return {count: many(home / str(count), count) for count in (FEW, MANY)}


def requests_of(monkeypatch: pytest.MonkeyPatch, command: str, run: Path) -> int:
    """What the command asks of the storage."""
    opened: list[Counting] = []
    really: Callable[..., Backend] = Place.open

    def counted(place: Place, *args: Any, **options: Any) -> Backend:
        opened.append(Counting(really(place, *args, **options)))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Place, "open", counted)
        said = CliRunner().invoke(main, [command, str(run), *COMMANDS[command], "--json"])
    assert said.exit_code == 0, said.output
    return sum(sum(backend.operations.values()) for backend in opened)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_thousand_checkpoints_are_four_times_what_a_quarter_is(
    runs: dict[int, Path], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    few, lot = (requests_of(monkeypatch, command, runs[count]) for count in (FEW, MANY))
    assert few >= FEW
    assert lot <= few * MANY / FEW + SLACK, (few, lot)


GROWS_MAX = 8.0
"""What a thousand may take of what a quarter of it takes, without the start of the process; squares take 16 times as
long."""


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_thousand_checkpoints_take_less_than_five_seconds(runs: dict[int, Path], command: str) -> None:
    tried = []
    for _ in range(TRIES):
        start = everstep(command, "--help", fresh=True).cpu_s
        took = {}
        for count in (FEW, MANY):
            said = everstep(command, runs[count], *COMMANDS[command], "--json", fresh=True)
            assert said.code == 0, said.err
            took[count] = said.cpu_s
        grows = (took[MANY] - start) / max(took[FEW] - start, 0.05)
        tried.append((round(took[FEW], 2), round(took[MANY], 2), round(grows, 1)))
        if took[MANY] < CPU_S_MAX and grows < GROWS_MAX:
            print(command, tried)
            return
    raise AssertionError(f"processor seconds of {FEW} and {MANY}, and the growth: {tried}")


def test_it_is_a_run_of_chains(runs: dict[int, Path]) -> None:
    """What the figures above are of: whole checkpoints, nine in ten of them deltas."""
    found = everstep("ls", runs[FEW], "--json").json["checkpoints"]
    assert [one["kind"] for one in found[:11]] == ["full", *["delta"] * 9, "full"]
    assert everstep("fsck", runs[FEW], "--step", str(FEW), "--json").code == 0
