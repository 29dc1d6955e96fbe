"""Deltas of several ranks and nodes, on further tiers, and through the node's own."""

from __future__ import annotations

from pathlib import Path

import everstep
import pytest
import torch

from tests.facade.kit import forget_memory, run_ranks, until
from tests.nvme.kit import staged

from .runs_kit import Adapter, chain, deltas, is_bit_equal, merged, stands, train

JOB = """
from tests.delta.runs_kit import *
rank = int(os.environ["RANK"])
work = Adapter(rank)
os.environ["EVERSTEP_RUNTIME_DIR"] += f"-{rank}"
ckpt = deltas(root, agent=sys.argv[2], full_every=None, max_chain=3, node=f"node-{rank}")
def at(step):
    rows = torch.arange(8.0).reshape(4, 2) + 100 * rank + step
    return {**work.at(step), "shared": {"rows": everstep.Shards((8, 2), [((4 * rank, 0), (4, 2))], [rows])}}
ckpt.load(at(0))
for step in range(1, 9):
    ckpt.step(step, at(step)).wait()
until(lambda: any(one.attempt == 2 for one in stands(root).values()), "a delta is made a full")
ckpt.step(9, at(9)).wait()
ckpt.close()
"""

AGAIN = """
from tests.delta.runs_kit import *
rank = int(os.environ["RANK"])
work = Adapter()
ckpt = deltas(root, full_every=None, agent="inline")
def at(step):
    rows = torch.zeros(2, 2)
    return {"shared": {"rows": everstep.Shards((8, 2), [((2 * rank, 0), (2, 2))], [rows])}, "rest": work.at(step)}
state = at(0)
assert ckpt.load(state, allow={"ranks", "rng", "missing", "unexpected"}) == 9
found = state["shared"]["rows"].tensors[0]
half = rank // 2
assert torch.equal(found, torch.arange(8.0).reshape(4, 2)[2 * (rank % 2) :][:2] + 100 * half + 9), found
ckpt.step(10, state).wait()
ckpt.close()
"""


@pytest.mark.parametrize("agent", ["inline", pytest.param("process", marks=pytest.mark.long)])
def test_each_node_merges_what_its_ranks_wrote(root: Path, agent: str) -> None:
    run_ranks(JOB, root, agent)
    there = stands(root)
    full = next(step for step, one in there.items() if one.attempt == 2)
    assert there[full][:2] == ("full", None) and there[9].kind == "delta"
    votes = (root / "checkpoints" / f"{full:09d}").glob("*/a2/*.vote")
    assert sorted(vote.name for vote in votes) == ["rank-00000.vote", "rank-00001.vote"]
    forget_memory(root)
    for step in (full, 9):
        whole = everstep.load(root, step=step, parts=["shared"])["shared"]["rows"]
        halves = [torch.arange(8.0).reshape(4, 2) + 100 * rank + step for rank in range(2)]
        assert torch.equal(whole, torch.cat(halves)), step
    if agent == "process":
        run_ranks(AGAIN, root, ranks=4)  # of another number of ranks no delta is made
        assert stands(root)[10].kind == "full"


CUT = """
from tests.delta.runs_kit import *
rank = int(os.environ["RANK"])
work = Adapter(rank)
ckpt = deltas(root, agent="inline", full_every=None, node=f"node-{rank}")
ckpt.load(work.at(0))
for step in range(1, 4):
    ckpt.step(step, work.at(step)).wait()
if rank == 1:
    [image] = root.glob("checkpoints/*1/*/a1/rank-00001.*.safetensors")
    os.truncate(image, 4096)
for step in range(4, 12):
    ckpt.step(step, work.at(step)).wait()
ckpt.close()
"""


def test_a_base_that_is_lost_to_another_node_makes_a_full(root: Path) -> None:
    """Rank 0 has it still, and hears of it by the checkpoint's manifest."""
    run_ranks(CUT, root)
    there = stands(root)
    kinds = [there[step].kind for step in range(1, 12)]
    after = 1 + kinds.index("full", 1)
    assert kinds[:4] == ["full", "delta", "delta", "delta"] and kinds.count("full") == 2
    assert 5 <= after <= 8 and kinds[after - 1] == "full"  # what was decided ahead comes before
    assert all(there[step].base == after for step in range(after + 1, 12))
    votes = sorted((root / "checkpoints" / "000000004").glob("*/a1/rank-*.model.*"))
    assert [vote.suffix for vote in votes] == [".packed", ".safetensors"]


def test_a_delta_takes_its_chain_to_a_further_tier(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    work = Adapter()
    tiers = [everstep.Tier(far, name="far", every=4, keep_last=1000, rate=None)]
    ckpt = deltas(root, tiers=tiers, full_every=None, delta_base="previous")
    ckpt.load(work.at(0))
    for step in range(1, 10):
        ckpt.step(step, work.at(step)).wait("far" if step % 4 == 1 else None)
    there = stands(far)
    assert there[9].kind == "delta" and set(chain(far, 9)) <= set(there)
    ckpt.close()
    assert is_bit_equal(far, 9, work) and is_bit_equal(far, 5, work)
    assert set(there) == {1, *chain(far, 9), *chain(far, 5)}  # nothing but what is needed


def test_a_merged_full_goes_where_the_delta_went(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    work = Adapter()
    tiers = [everstep.Tier(far, name="far", keep_last=1000, rate=None)]
    ckpt = deltas(root, tiers=tiers, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    for step in range(1, 10):
        ckpt.step(step, work.at(step)).wait("far")
        until(lambda: not ckpt.status()["agent"]["merging"], "nothing is being merged")
    full = next(step for step, one in stands(root).items() if one.attempt == 2)
    merged(far, full)
    until(lambda: not ckpt.status()["tiers"][0]["owed"], "nothing is owed")
    ckpt.close()
    assert all(len(chain(far, step)) <= 2 for step in stands(far))
    assert all(is_bit_equal(far, step, work) for step in (full, 9))


def test_the_nodes_own_tier_keeps_bases(root: Path, tmp_path: Path) -> None:
    """So a delta is made without a look at the root's images."""
    near = tmp_path / "near"
    work = Adapter()
    ckpt = deltas(root, tiers=[everstep.Tier(near, scope="node", keep_last=1)], full_every=None)
    ckpt.load(work.at(0))
    for step in range(1, 4):
        ckpt.step(step, work.at(step)).wait()
    full = max(step for step, one in stands(root).items() if one.kind == "full")
    (image,) = root.glob(f"checkpoints/{full:09d}/*/a1/*.safetensors")
    whole = image.rename(tmp_path / "away")
    for step in range(4, 8):
        ckpt.step(step, work.at(step)).wait()
    ckpt.close()
    assert [stands(root)[step].base for step in range(4, 8)] == [full] * 4
    assert staged(near) == [full, 7]
    whole.rename(image)
    assert is_bit_equal(root, 7, work)


@pytest.mark.parametrize("where", ["near", "root", "both"])
def test_a_merge_beside_a_damaged_base(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """One whole holder is enough for a full that is right; without one the delta stays, and the trainer is told."""
    calm: list[bool] = []
    monkeypatch.setattr("everstep.agent.tiers.Tiers.is_recovering", lambda self: not calm)
    near, work = tmp_path / "near", Adapter()
    tiers = [everstep.Tier(near, scope="node", keep_last=1000)]
    ckpt = deltas(root, tiers=tiers, full_every=None, max_chain=2)
    ckpt.load(work.at(0))
    train(ckpt, work, range(1, 9))
    (merging, *_) = ckpt.status()["agent"]["merging"]
    base = stands(root)[merging].base
    assert base is not None
    whole: dict[Path, bytes] = {}
    for place in {"near": [near], "root": [root], "both": [near, root]}[where]:
        (image,) = place.glob(f"checkpoints/{base:09d}/*/a1/*.safetensors")
        data = whole[image] = image.read_bytes()
        image.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    calm.append(True)
    until(lambda: not ckpt.status()["agent"]["merging"], "all merges are over")
    if where == "both":
        with pytest.warns(RuntimeWarning, match=f"step {merging}.*{base:09d}"):
            ckpt.step(9, work.at(9))
        assert stands(root)[merging][:3] == ("delta", base, 1)
        assert not list((root / "checkpoints" / f"{merging:09d}").glob("*/a2/*.vote"))
    else:
        assert stands(root)[merging][:3] == ("full", None, 2)
        assert is_bit_equal(root, merging, work)  # by itself: what is damaged is so still
    for image, data in whole.items():
        image.write_bytes(data)
    ckpt.close()
    assert all(is_bit_equal(root, step, work) for step in stands(root))


def test_through_the_nodes_own_tier(root: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    work = Adapter()
    ckpt = deltas(root, tiers=[everstep.Tier(near, scope="node")], full_every=None, max_chain=3)
    ckpt.load(work.at(0))
    for step in range(1, 12):
        ckpt.step(step, work.at(step)).wait()
        until(lambda: not ckpt.status()["agent"]["merging"], "nothing is being merged")
    ckpt.close()
    there = stands(root)
    assert there[10].kind == "delta" and any(one.attempt == 2 for one in there.values())
    assert list(near.glob("checkpoints/*/*/*/*.packed"))
    fulls = [step for step, one in there.items() if one.attempt == 2]
    assert not set(fulls) & set(staged(near))  # they are at the root, and nothing is kept for them here
    assert all(is_bit_equal(root, step, work) for step in there)
    forget_memory(root)
    again = deltas(root, tiers=[everstep.Tier(near, scope="node")], full_every=None)
    state = Adapter().at(0)
    assert again.load(state) == 11 and work.is_at(11, state)
    again.close()
