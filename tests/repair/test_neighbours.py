"""Repair out of other nodes' memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import Manifest, decode_decision
from everstep.neighbours import RunMemory
from everstep.peers import borrowing, greeting, lending
from everstep.peers.described import Seat
from everstep.peers.messages import failed
from everstep.places import locate
from everstep.store import fsck
from everstep.store.findings import Kind, Severity
from everstep.store.repair_run import Mended, check_and_mend

from tests.peers.test_wire_greeting import make_certificates, needs_openssl, use
from tests.repair.damages import cut, empty, flip, remove
from tests.repair.nodes import SECRET, Node, regions_of
from tests.store import store_kit as kit

STEP = 1
IMAGE = names.image(STEP, 1, 1, 0, "optimizer")
OTHER_IMAGE = names.image(STEP, 1, 1, 1, "model")
STATE = names.state(STEP, 1, 1, 0)
VOTE = names.vote(STEP, 1, 1, 0)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)
    monkeypatch.setenv("EVERSTEP_SECRET", SECRET)
    monkeypatch.setenv("EVERSTEP_NODE", "here")
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one step, so that damage that stays is left; copied, never changed."""
    root = tmp_path_factory.mktemp("whole") / "run"
    kit.make_run(root, STEP)
    return root


@dataclass
class Run:
    root: Path
    whole: Path
    memory: Path
    """This node's, where nothing is unless a test puts it there."""
    node: Callable[..., Node]

    def is_right(self) -> bool:
        return _files(self.root) == _files(self.whole)

    def mend(self, *others: Path, **options: Any) -> Mended:
        async def go() -> Mended:
            backends = [LocalBackend(self.root), *map(LocalBackend, others)]
            place = locate(self.root)
            memory = RunMemory(place, backends, self.memory, **options)
            try:
                mended = await check_and_mend(backends[0], others=backends[1:], memory=memory)
                mended.after += memory.told()
                return mended
            finally:
                await memory.close()
                for backend in backends:
                    await backend.close()

        return asyncio.run(go())


def _files(root: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {
        name: data for name, data in found.items() if not name.startswith("live/") and ".tmp-" not in name
    }


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Iterator[Run]:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    run_id = json.loads((root / names.RUN).read_text())["run_id"]
    made: list[Node] = []

    def node(name: str, **options: Any) -> Node:
        made.append(Node(root, tmp_path, name, run_id, **options))
        return made[-1]

    yield Run(root, whole, tmp_path / "memory", node)
    for one in made:
        one.close()


def told(mended: Mended) -> list[str]:
    return [f.message for f in mended.after if f.kind is Kind.PEER and f.severity is Severity.INFO]


def damage(mended: Mended) -> list[str]:
    return [f.name for f in mended.after if f.severity is Severity.DAMAGE]


def command(run: Run, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [
        "-m",
        "everstep.cli",
        "fsck",
        str(run.root),
        "--memory",
        str(run.memory.parent),
        "--json",
        *args,
    ]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def layout_of(root: Path, rank: int) -> Path:
    manifest = decode_decision((root / names.decision(STEP, 1, 1)).read_bytes(), "manifest")
    assert isinstance(manifest, Manifest)
    return root / names.layout(manifest.ranks[rank].layout_hash)


def loads(root: Path) -> bool:
    async def go() -> bool:
        backend = LocalBackend(root)
        good, bad = await kit.loadable(backend)
        await backend.close()
        return (good, bad) == ({(1, STEP)}, {})

    return asyncio.run(go())


def test_a_chunk_that_only_the_owners_node_has(run: Run) -> None:
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    said = command(run, "--repair")
    assert said.returncode == 1, said.stdout + said.stderr
    [repaired] = json.loads(said.stdout)["repaired"]
    assert (repaired["name"], repaired["how"]) == (
        IMAGE,
        f"from {LocalBackend(run.root).url}, memory of node there",
    )
    assert run.is_right() and loads(run.root)
    assert command(run, "--repair").returncode == 0


@pytest.mark.parametrize("harm", [remove, empty, cut, flip(3)])
def test_whole_images_states_and_votes_of_what_is_kept_for_another_node(
    run: Run, harm: Callable[[Path], None]
) -> None:
    """Both nodes have lost their own; each keeps the other's."""
    first, second = run.node("first"), run.node("second")
    first.keeps(second, first.has(STEP, 0))
    second.keeps(first, second.has(STEP, 1))
    for node in (first, second):
        node.forget()
        node.beacon()
    for name in (IMAGE, OTHER_IMAGE, STATE, VOTE):
        harm(run.root / name)
    mended = run.mend()
    assert (damage(mended), told(mended)) == ([], []), mended
    assert run.is_right() and loads(run.root)
    assert {one.how for one in mended.done if one.name == OTHER_IMAGE} <= {
        "from memory of node first",
        f"from {LocalBackend(run.root).url}, memory of node first",
    }


@pytest.fixture
def group(run: Run) -> dict[str, Node]:
    """Two nodes with a rank each, and a spare one, with parity of which one may be lost; what is small all have."""
    seats = (Seat("first", (0,)), Seat("second", (1,)), Seat("third", ()))
    nodes = [run.node(seat.name) for seat in seats]
    pins = [
        {rank: node.has(STEP, rank) for rank in seat.ranks} for node, seat in zip(nodes, seats, strict=True)
    ]
    pairs = list(itertools.permutations(range(3), 2))
    for at, to in pairs:
        for pin in pins[at].values():
            nodes[at].tells(nodes[to], pin)
    with ThreadPoolExecutor(len(pairs)) as pool:  # parity is added up once all have made their offers
        sent = [pool.submit(nodes[at].gives, nodes[to], STEP, pins[at], seats, at, to) for at, to in pairs]
    for one in sent:
        one.result()
    return {node.name: node for node in nodes}


@pytest.mark.parametrize("lost", ["first", "second"])
@pytest.mark.parametrize("harm", [remove, cut, flip(-5)])
def test_what_a_lost_node_had_is_computed_from_parity(
    run: Run, group: dict[str, Node], lost: str, harm: Callable[[Path], None]
) -> None:
    for node in group.values():
        if node.name == lost:
            node.close()
        else:
            node.beacon()
    name = IMAGE if lost == "first" else OTHER_IMAGE
    harm(run.root / name)
    mended = run.mend()
    assert (damage(mended), told(mended)) == ([], []), mended
    assert run.is_right() and loads(run.root)
    [how] = [one.how for one in mended.done]
    assert how.endswith("parity of nodes first, second, third")


def test_parity_of_which_too_much_is_lost_mends_nothing(run: Run, group: dict[str, Node]) -> None:
    group["first"].close()
    group["third"].close()
    group["second"].beacon()
    remove(run.root / IMAGE)
    assert damage(run.mend()) == [IMAGE]


def test_wrong_parity_is_not_believed(run: Run, group: dict[str, Node]) -> None:
    group["first"].close()
    for name in ("second", "third"):
        group[name].beacon()
        group[name].spoil_parity()
    remove(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [IMAGE] and not (run.root / IMAGE).exists()


@pytest.mark.parametrize("where", ["memory", "there"])
@pytest.mark.parametrize("harm", [remove, flip(-3)])
def test_a_layout_comes_from_a_slot(run: Run, where: str, harm: Callable[[Path], None]) -> None:
    """This node's, or another's; whoever has another layout under that name gives nothing."""
    wrong = run.node("wrong")
    regions = regions_of(STEP, 0)
    regions["layout"][-5] ^= 1
    wrong.has(STEP, 0, regions=regions)
    node = run.node(where)
    node.has(STEP, 0)
    for one in (wrong, node):
        one.beacon()
    layout = layout_of(run.root, 0)
    harm(layout)
    mended = run.mend()
    assert damage(mended) == [], mended
    assert run.is_right() and loads(run.root)
    assert [one.how for one in mended.done] == [
        f"from memory of {'this node' if where == 'memory' else 'node there'}"
    ]
    assert (wrong.asked == []) == (where == "memory")


def test_a_copy_that_is_wrong_is_not_taken(run: Run) -> None:
    regions = regions_of(STEP, 0)
    regions["image:optimizer"][-5] ^= 1
    there = run.node("there")
    there.has(STEP, 0, regions=regions)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    before = (run.root / IMAGE).read_bytes()
    said = command(run, "--repair")
    assert said.returncode == 4, said.stdout + said.stderr
    assert (run.root / IMAGE).read_bytes() == before
    assert len(there.asked) == 1
    left = {one["name"]: one["reason"] for one in json.loads(said.stdout)["not_repaired"]}
    assert "nobody has the chunk" in left[IMAGE]


def test_one_is_wrong_and_the_next_one_right(run: Run) -> None:
    regions = regions_of(STEP, 0)
    regions["image:optimizer"][-5] ^= 1
    for name, given in (("wrong", regions), ("right", None)):
        node = run.node(name)
        node.has(STEP, 0, regions=given)
        node.beacon()
    flip(-5)(run.root / IMAGE)
    assert damage(run.mend()) == []
    assert run.is_right()


@pytest.mark.parametrize("how", ["refuses", "says nothing", "stalls"])
def test_an_agent_that_does_not_answer_is_told_and_the_next_one_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.3)
    monkeypatch.setattr(borrowing, "ANSWER_S", 0.3)
    monkeypatch.setattr(borrowing.Neighbour.__init__, "__kwdefaults__", {"answer_s": 0.3})
    dead, there = run.node("dead"), run.node("there")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if how != "refuses":
            silent.listen()
        dead.has(STEP, 0)
        there.has(STEP, 0)
        dead.beacon("" if how == "stalls" else f"127.0.0.1:{silent.getsockname()[1]}")
        if how == "stalls":
            dead.stall()
        flip(-5)(run.root / IMAGE)
        began = time.monotonic()
        alone = run.mend()
        assert time.monotonic() - began < 5
        assert damage(alone) == [IMAGE]
        [text] = told(alone)
        assert "node dead" in text and ("not answer" in text or "no agent" in text or "greeting" in text), (
            text
        )
        there.beacon()
        mended = run.mend()
        assert damage(mended) == [] and run.is_right()


def test_all_together_have_so_long(run: Run) -> None:
    there = run.node("there")
    there.has(STEP, 0)
    there.serve = lambda link, borrow: there._wait()
    there.beacon()
    flip(-5)(run.root / IMAGE)
    began = time.monotonic()
    mended = run.mend(asking_s=0.3)
    assert time.monotonic() - began < 5
    assert damage(mended) == [IMAGE]
    assert "no answer in time" in told(mended)[0]


def test_without_the_secret_nobody_is_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    monkeypatch.delenv("EVERSTEP_SECRET")
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [IMAGE] and there.asked == []
    assert "the run's secret is not known here" in told(mended)[0]
    monkeypatch.setenv("EVERSTEP_SECRET", "of some other run's agents")
    mended = run.mend()
    assert damage(mended) == [IMAGE] and there.asked == []
    assert "EVERSTEP_SECRET" in told(mended)[0]
    assert "run's agents" not in "".join(told(mended))


@needs_openssl
def test_where_agents_speak_tls_whoever_mends_must(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path / "tls", "run")
    use(monkeypatch, tmp_path / "tls")
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    use(monkeypatch, None)
    mended = run.mend()
    assert damage(mended) == [IMAGE] and there.asked == []
    assert "TLS is set up on one side only" in told(mended)[0]
    use(monkeypatch, tmp_path / "tls")
    assert damage(run.mend()) == [] and run.is_right()


def test_agents_that_listen_to_nobody_are_told(run: Run) -> None:
    run.node("there").beacon(None)
    flip(-5)(run.root / IMAGE)
    [text] = told(run.mend())
    assert "listen to nobody" in text
    assert told(run.mend()) == [text]


def test_nothing_is_told_where_there_is_no_other_node(run: Run) -> None:
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [IMAGE] and told(mended) == []


def test_whoever_answers_tells_of_nodes_without_a_beacon(run: Run) -> None:
    """A spare node has none."""
    there, spare = run.node("there"), run.node("spare")
    there.has(STEP, 0)
    there.keeps(spare, there.has(STEP, 1))
    there.known = [("there", there.listener.host, there.listener.port)]
    there.known.append(("spare", spare.listener.host, spare.listener.port))
    there.forget()
    there.beacon()
    flip(-5)(run.root / OTHER_IMAGE)
    mended = run.mend()
    assert damage(mended) == [] and run.is_right()
    assert "node spare" in mended.done[0].how


def test_who_is_nearer_is_asked_first(run: Run, tmp_path: Path) -> None:
    """Other tiers, then this node's arenas; other nodes only where neither has it right."""
    there, here = run.node("there"), run.node("memory")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    shutil.copytree(run.whole, tmp_path / "tier")
    mended = run.mend(tmp_path / "tier")
    assert damage(mended) == [] and there.asked == []
    assert "tier" in mended.done[0].how
    here.has(STEP, 0)
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert "memory of this node" in mended.done[0].how and there.asked == []
    flip(-5)(run.root / IMAGE)
    mended = run.mend(tmp_path / "tier")
    assert "tier" in mended.done[0].how
    here.forget()
    flip(-5)(run.root / IMAGE)
    assert "node there" in run.mend().done[0].how


def test_only_sealed_slots_are_lent(run: Run) -> None:
    there = run.node("there")
    there.has(STEP, 0, seal=False)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [IMAGE] and len(there.asked) == 1


def test_a_slot_that_was_reused_is_not_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, there = run.node("gone"), run.node("there")
    for node in (gone, there):
        node.has(STEP, 0)
        node.beacon()
    there.slow()
    give = gone.lender._give
    reused = []

    def later(link: Any, lots: Any, take: Any) -> None:
        gone.reuse()
        reused.append(take)
        give(link, lots, take)

    monkeypatch.setattr(gone.lender, "_give", later)
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [] and told(mended) == []
    assert run.is_right() and len(reused) == 1
    assert mended.done[0].how.endswith("memory of node there")


def test_no_more_borrow_at_once_than_a_node_lends_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LOANS_MAX", 0)
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    mended = run.mend()
    assert damage(mended) == [IMAGE]
    assert "as many others as it may at once" in told(mended)[0]


def test_what_a_node_says_wrongly_costs_that_node_only(run: Run) -> None:
    """Bytes of another number, an error of its own, a message that is none of the answers."""
    from everstep.errors import Damaged
    from everstep.peers.loans import Given, Lent

    def fewer(link: Any, lots: Any, take: Any) -> None:
        link.send(Given(1))
        link.send_bytes(memoryview(b"x"))

    answers: Sequence[Callable[[Any, Any, Any], None]] = (
        fewer,
        lambda link, lots, take: link.send(failed(Damaged("mine", name="mine"))),
        lambda link, lots, take: link.send(Lent([], [])),
    )
    for at, answer in enumerate(answers):
        node = run.node(f"odd-{at}")
        node.has(STEP, 0)
        node.lender._give = answer  # type: ignore[method-assign]
        node.beacon()
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    assert damage(run.mend()) == []
    assert run.is_right()


@pytest.mark.parametrize(
    "point", ["repair.put.before", "repair.put.after", "repair.image.piece", "repair.image.done"]
)
def test_killed_in_mid_repair_and_again(run: Run, point: str) -> None:
    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    for name in (IMAGE, STATE, VOTE):
        remove(run.root / name)
    said = command(run, "--repair", EVERSTEP_POINTS=f"kill:{point}")
    assert said.returncode == -signal.SIGKILL, said.stdout + said.stderr
    assert not run.is_right()
    assert damage(run.mend()) == []
    assert run.is_right() and loads(run.root)


def test_without_repair_no_arena_is_attached_and_nobody_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner
    from everstep.cli.fsck import fsck as fsck_command
    from everstep.memory.arena import Arena

    there = run.node("there")
    there.has(STEP, 0)
    there.beacon()
    flip(-5)(run.root / IMAGE)
    attached: list[Any] = []
    attach = Arena.attach
    monkeypatch.setattr(Arena, "attach", lambda path, **more: attached.append(path) or attach(path, **more))
    memory = run.memory / f"everstep-{os.geteuid()}" / locate(run.root).run_key
    memory.mkdir(parents=True)
    for path in there.directory.iterdir():
        (memory / path.name).hardlink_to(path)
    arguments = [str(run.root), "--memory", str(run.memory)]
    assert CliRunner().invoke(fsck_command, arguments).exit_code == 4
    assert attached == [] and there.asked == []
    assert CliRunner().invoke(fsck_command, [*arguments, "--repair"]).exit_code == 1
    assert attached != [] and run.is_right()
