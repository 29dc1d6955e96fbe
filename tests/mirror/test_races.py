"""Several who mirror the same checkpoint: the agents of other nodes, or of the same ranks."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.format.manifest import Abort, Manifest
from everstep.store.catalog import list_step, read_decision_at
from everstep.store.mirror import conclude, copy_records, give_up

from tests.mirror import kit
from tests.store import store_kit


class Node:
    """What one node's agent has: backends of its own, on a thread of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def does(self, work: Any) -> Any:
        async def go() -> Any:
            source, target = LocalBackend(self.base / "source"), LocalBackend(self.base / "target")
            try:
                return await work(source, target)
            finally:
                await source.close()
                await target.close()

        return asyncio.run(go())


@pytest.mark.parametrize("shares", [([0, 1], [2, 3]), ([0, 1, 2, 3], [3, 2, 1, 0])], ids=["own", "same"])
def test_two_nodes_at_one_checkpoint(tmp_path: Path, shares: tuple[list[int], list[int]]) -> None:
    async def make(source: LocalBackend, target: LocalBackend) -> Manifest:
        await store_kit.start_run(source)
        return await store_kit.save(source, 1, world=4)

    manifest = Node(tmp_path).does(make)
    results: dict[int, object] = {}
    errors: list[BaseException] = []
    together = threading.Barrier(2)

    def node(index: int) -> None:
        async def work(source: LocalBackend, target: LocalBackend) -> object:
            await asyncio.to_thread(together.wait, 30)
            await copy_records(source, target)
            await kit.send(source, target, manifest, shares[index])
            return await conclude(source, target, manifest)

        try:
            results[index] = Node(tmp_path).does(work)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=node, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    # Whoever was first may have found the other's ranks missing; whoever was last has not.
    assert manifest in results.values() and set(map(type, results.values())) <= {Manifest, type(None)}

    async def look(source: LocalBackend, target: LocalBackend) -> None:
        assert await conclude(source, target, manifest) == manifest
        assert kit.objects(tmp_path / "target") == kit.objects(tmp_path / "source")
        assert await kit.findings(target) == []
        assert await store_kit.loadable(target) == ({(1, 1)}, {})

    Node(tmp_path).does(look)


async def _decided(target: LocalBackend) -> object:
    assert (await list_step(target, 1, 1)).decisions == (1,)
    return await read_decision_at(target, 1, 1, 1)


@pytest.mark.parametrize("winner", [Manifest, Abort])
def test_given_up_in_the_very_moment_of_the_manifest(tmp_path: Path, winner: type) -> None:
    """The other node acts between the look and the manifest, or right behind it."""
    point = "mirror.manifest.before" if winner is Abort else "mirror.manifest.after"

    async def work(source: LocalBackend, target: LocalBackend) -> None:
        manifest = await store_kit.save(source, 1)
        await kit.send(source, target, manifest)
        others: list[object] = []

        def hook(name: str, detail: str) -> None:
            if name == point:
                points.hook = None

                async def give(source: LocalBackend, target: LocalBackend) -> object:
                    return await give_up(target, manifest, "too slow")

                other = threading.Thread(target=lambda: others.append(Node(tmp_path).does(give)))
                other.start()
                other.join(30)

        points.hook = hook
        try:
            stood = await conclude(source, target, manifest)
        finally:
            points.hook = None
        assert isinstance(stood, winner) and others == [stood] == [await _decided(target)]

    kit.on_two(tmp_path, work)


def test_giving_up_and_concluding_at_once_is_decided_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    seen = set()
    for round_ in range(12):
        base = tmp_path / str(round_)

        async def work(source: LocalBackend, target: LocalBackend) -> None:
            manifest = await store_kit.save(source, 1)
            await kit.send(source, target, manifest)
            waits = [numbers.random() * 0.004 for _ in range(3)]

            async def one(index: int) -> object:
                await asyncio.sleep(waits[index])
                if index == 1:
                    return await give_up(target, manifest, "too slow")
                return await conclude(source, target, manifest)

            answers = await asyncio.gather(*(one(index) for index in range(3)))
            stood = await _decided(target)
            assert stood is not None and all(answer == stood for answer in answers), answers
            seen.add(type(stood))

        kit.on_two(base, work)
    assert seen <= {Manifest, Abort}
