"""Every part of a packed object damaged, bases that are damaged, gone or wrong: found, named, fetched elsewhere."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, EverstepError, Pruned, UnknownFormat
from everstep.format import names, packed
from everstep.format.manifest import Manifest
from everstep.store.bases import lacking
from everstep.store.findings import Kind, Severity
from everstep.store.fsck import check
from everstep.store.fsck_images import Images
from everstep.store.rotate import rotate
from everstep.store.sources import DurableSource, bases_at

from tests.store import store_kit

from . import kit

STATES = [kit.first(rank) for rank in range(kit.WORLD)]
CHANGED = [kit.dense(data, rank) for rank, data in enumerate(STATES)]
SPARSE = [kit.sparse(data, 3 + rank) for rank, data in enumerate(STATES)]

BASE = names.image(1, 1, 1, 0, "model")
OBJECT = names.packed(2, 1, 1, 0, "model")
NBYTES = len(STATES[0]["model"])
COUNT = -(-NBYTES // kit.CHUNK)
TAIL = packed.tail_bytes(NBYTES, kit.CHUNK)


def flipped(at: int) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 or len(data) :]

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first payload": flipped(0),
    "later payload": flipped(10_000),
    "table": flipped(-TAIL),
    "lengths in the table": flipped(-TAIL + COUNT + 1),
    "magic": flipped(-packed.FOOTER_BYTES),
    "version": flipped(-packed.FOOTER_BYTES + 8),
    "hash of the footer": flipped(-1),
    "cut": lambda data: data[:-1],
    "cut to the half": lambda data: data[: len(data) // 2],
    "grown": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


async def two(backend: LocalBackend, changed: list[kit.Data] = CHANGED) -> tuple[Manifest, Manifest]:
    full = await kit.save(backend, 1, STATES)
    return full, await kit.save(backend, 2, changed, kit.source_of(backend, full))


async def findings(backend: LocalBackend) -> dict[str, list[str]]:
    """What fsck says is damaged: messages by name."""
    found: dict[str, list[str]] = {}
    async for finding in check(backend, decision_wait_s=0):
        if finding.severity is Severity.DAMAGE:
            assert finding.kind in (Kind.DAMAGED, Kind.MISSING, Kind.CHAIN), finding
            found.setdefault(finding.name, []).append(finding.message)
    return found


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_object_is_named_and_the_next_holder_serves(tmp_path: Path, what: str) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        path = tmp_path / "run" / OBJECT
        path.write_bytes(DAMAGES[what](path.read_bytes()))
        source = kit.source_of(backend, delta)
        with pytest.raises((Damaged, UnknownFormat)) as caught:
            await kit.load([source], CHANGED)
        assert caught.value.fields["name"] == OBJECT
        await kit.load([kit.source_of(backend, delta)], CHANGED, [])
        other = LocalBackend(tmp_path / "copy")
        report = await kit.load([kit.source_of(backend, delta), kit.source_of(other, delta)], CHANGED)
        assert report.fallbacks and {fallback.source for fallback in report.fallbacks} == {backend.url}
        assert list(await findings(backend)) == [OBJECT]
        assert await findings(other) == {}
        await other.close()

    kit.on(tmp_path, work)


@pytest.mark.parametrize("off", ["_object", "_chunks"])
def test_fsck_reads_objects_and_what_they_decode_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    """Either look finds a damaged payload by itself; a damaged base only the one that decodes."""

    async def nothing(*_: object) -> list[EverstepError]:
        return []

    async def work(backend: LocalBackend) -> None:
        await two(backend)
        monkeypatch.setattr(Images, off, nothing)
        assert await findings(backend) == {}
        path = tmp_path / "run" / OBJECT
        data = path.read_bytes()
        path.write_bytes(flipped(10_000)(data))
        assert list(await findings(backend)) == [OBJECT]
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "run" / names.attempt_dir(1, 1, 1))
        assert any(name.startswith(names.checkpoint_dir(1, 1)) for name in await findings(backend))

    kit.on(tmp_path, work)


@pytest.mark.parametrize("changed", [CHANGED, SPARSE], ids=["dense", "sparse"])
def test_a_damaged_chunk_of_the_base_comes_from_the_next_holder_of_the_base(
    tmp_path: Path, changed: list[kit.Data], caplog: pytest.LogCaptureFixture
) -> None:
    """Which is told of where there is one."""

    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend, changed)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        other = LocalBackend(tmp_path / "copy")
        path = tmp_path / "run" / BASE
        path.write_bytes(flipped(9 * kit.CHUNK + 7)(path.read_bytes()))
        with pytest.raises(Damaged) as caught:
            await kit.load([kit.source_of(backend, delta)], changed)
        assert (caught.value.name, caught.value.fields["offset"]) == (BASE, 9 * kit.CHUNK)
        found = await findings(backend)
        assert list(found) == [BASE]
        assert "another holder" not in caplog.text
        bases = bases_at([backend, other], kit.CHUNK)
        await kit.load([DurableSource(backend, delta, kit.CHUNK, bases=bases)], changed)
        assert f"another holder than {backend.url} is asked" in caplog.text
        path.unlink()
        bases = bases_at([backend, other], kit.CHUNK)
        await kit.load([DurableSource(backend, delta, kit.CHUNK, bases=bases)], changed)
        path = tmp_path / "copy" / BASE
        path.write_bytes(flipped(9 * kit.CHUNK + 7)(path.read_bytes()))
        bases = bases_at([backend, other], kit.CHUNK)
        with pytest.raises(Damaged) as caught:
            await kit.load([DurableSource(backend, delta, kit.CHUNK, bases=bases)], changed)
        assert caught.value.name == BASE
        await other.close()

    kit.on(tmp_path, work)


def test_only_the_chunks_that_need_a_bad_one_of_the_base_are_lost(tmp_path: Path) -> None:
    """Of a piece that is decoded at once; the others are read, and right, whatever the length of the chain."""
    bad = 9

    async def work(backend: LocalBackend) -> None:
        states, manifest = STATES, await kit.save(backend, 1, STATES)
        for step in (2, 3):
            states = [kit.dense(data, 10 * step + rank) for rank, data in enumerate(states)]
            manifest = await kit.save(backend, step, states, kit.source_of(backend, manifest))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        path = tmp_path / "run" / BASE
        for some in ([bad], [bad, bad + 2]):
            path.write_bytes(flipped(some[-1] * kit.CHUNK + 7)(path.read_bytes()))
            view = bytearray(NBYTES)
            with pytest.raises(Damaged) as caught:
                await kit.source_of(backend, manifest).read_into(0, "model", 0, memoryview(view))
            assert (caught.value.name, caught.value.fields["offset"]) == (BASE, bad * kit.CHUNK)
            assert list(lacking(caught.value)) == some
            expected = states[0]["model"]
            assert [at for at in range(COUNT) if part(view, at) != part(expected, at)] == some
        inner = bytearray(100)  # a chunk that is wanted in part, beside the bad one
        await kit.source_of(backend, manifest).read_into(
            0, "model", (bad + 1) * kit.CHUNK + 5, memoryview(inner)
        )
        assert inner == part(states[0]["model"], bad + 1)[5:105]
        found = await findings(backend)
        assert list(found) == [BASE] and all(f"offset {bad * kit.CHUNK}" in one for one in found[BASE])
        # The other holder of the delta gives these chunks, and no others.
        other = LocalBackend(tmp_path / "copy")
        report = await kit.load([kit.source_of(backend, manifest), kit.source_of(other, manifest)], states)
        told = {(one.offset // kit.CHUNK, str(one.error.fields["name"])) for one in report.fallbacks}
        assert told == {(at, BASE) for at in (bad, bad + 2)}
        path = tmp_path / "run" / names.packed(3, 1, 1, 0, "model")
        path.write_bytes(flipped(15_000)(path.read_bytes()))  # and this one by itself
        assert set(await findings(backend)) == {BASE, names.packed(3, 1, 1, 0, "model")}
        await other.close()

    kit.on(tmp_path, work)


def part(image: bytearray, index: int) -> bytearray:
    return image[index * kit.CHUNK : (index + 1) * kit.CHUNK]


async def _gone(tmp_path: Path, backend: LocalBackend) -> str:
    shutil.rmtree(tmp_path / "run" / names.checkpoint_dir(1, 1))
    return names.checkpoint_dir(1, 1)


async def _image_gone(tmp_path: Path, backend: LocalBackend) -> str:
    (tmp_path / "run" / BASE).unlink()
    return BASE


async def _manifest_damaged(tmp_path: Path, backend: LocalBackend) -> str:
    path = tmp_path / "run" / names.decision(1, 1, 1)
    path.write_bytes(flipped(200)(path.read_bytes()))
    return names.decision(1, 1, 1)


async def _vote_damaged(tmp_path: Path, backend: LocalBackend) -> str:
    path = tmp_path / "run" / names.vote(1, 1, 1, 0)
    path.write_bytes(flipped(300)(path.read_bytes()))
    return names.vote(1, 1, 1, 0)


async def _another(tmp_path: Path, backend: LocalBackend) -> str:
    """Another snapshot under the base's names, right in itself."""
    shutil.rmtree(tmp_path / "run" / names.checkpoint_dir(1, 1))
    await kit.save(backend, 1, CHANGED)
    return BASE


ANOTHER: defaultdict[str, str | None] = defaultdict(
    lambda: None, {BASE: names.image(1, 1, 1, 0, "optimizer")}
)
"""Images are looked at side by side."""


@pytest.mark.parametrize("what", [_gone, _image_gone, _manifest_damaged, _vote_damaged, _another])
def test_a_base_that_is_gone_or_wrong_is_named(
    tmp_path: Path, what: Callable[[Path, LocalBackend], object]
) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        name = await what(tmp_path, backend)  # type: ignore[misc]
        with pytest.raises(EverstepError) as caught:
            await kit.load([kit.source_of(backend, delta)], CHANGED)
        assert isinstance(caught.value, Damaged) and caught.value.name in (name, ANOTHER[name])
        found = await findings(backend)
        assert name in found
        if what is _another:
            assert "not the base" in found[name][0]

    kit.on(tmp_path, work)


def test_damage_in_the_middle_of_a_chain_is_named(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        states, manifest = STATES, await kit.save(backend, 1, STATES)
        for step in range(2, 6):
            states = [kit.dense(data, 10 * step + rank) for rank, data in enumerate(states)]
            manifest = await kit.save(backend, step, states, kit.source_of(backend, manifest))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        path = tmp_path / "run" / names.packed(3, 1, 1, 0, "model")
        path.write_bytes(flipped(15_000)(path.read_bytes()))
        with pytest.raises(Damaged) as caught:
            await kit.load([kit.source_of(backend, manifest)], states)
        assert caught.value.name == names.packed(3, 1, 1, 0, "model")
        other = LocalBackend(tmp_path / "copy")
        bases = bases_at([backend, other], kit.CHUNK)
        await kit.load([DurableSource(backend, manifest, kit.CHUNK, bases=bases)], states)
        await other.close()

    kit.on(tmp_path, work)


def test_a_delta_that_was_removed_with_its_base_is_pruned(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        _, delta = await two(backend)
        await kit.save(backend, 3, STATES)
        source = kit.source_of(backend, delta)
        await source.layout(0)
        await source.layout(1)
        await rotate(backend, await store_kit.plan_for(backend), is_superseded=store_kit.not_superseded)
        with pytest.raises(Pruned):
            await kit.load([source], CHANGED)

    kit.on(tmp_path, work)
