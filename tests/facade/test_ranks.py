"""Two ranks: one verdict for all, each its own state back, and only steps that both hold."""

from __future__ import annotations

from pathlib import Path

import everstep
import pytest

from .kit import forget_memory, steps_on_disk, torchrun

JOB = """
import torch.distributed as dist
from datetime import timedelta
from everstep import errors
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
own = {"numbers": list(range(rank + 1)), "tensor": torch.full((3,), float(rank)), "n": 0}
loader = Loader(seed=rank)
state = everstep.TrainState(model=model, optimizer=optimizer, loader=loader, extra=own)
out = Path(sys.argv[2])
def check(name, good, *more):
    (out / f"{name}.{rank}").write_text("ok" if good else f"{name} on rank {rank}: {more}")
def took(began):
    return time.monotonic() - began
def train(step):
    optimizer.zero_grad()
    model(torch.rand(4, 64)).pow(2).mean().backward()
    optimizer.step()
    loader.next()
    own["n"] = step

ckpt = everstep.Checkpointer(root, policy=policy(commit_timeout_s=4.0, linger_s=1.0, keep_last=20))
start = ckpt.load(state)
first_life = not (out / "second").exists()
dist.barrier()

if first_life:
    check("fresh", start is None)
    for step in (1, 2):
        train(step)
        ckpt.step(step, state)
    handle = ckpt.save(2, state, metrics={"loss": 1.0})
    handle.wait()
    check("saved", handle.done())

    # One rank cannot save: all are told, by name, soon; then all go on.
    train(3)
    own["bad"] = (lambda: 0) if rank == 1 else 0
    began = time.monotonic()
    if rank == 1:
        try:
            ckpt.save(3, state)
            check("refused", False)
        except errors.UnsupportedValue as error:
            check("refused", "bad" in str(error), str(error))
    else:
        try:
            ckpt.save(3, state).wait()
            check("refused", False)
        except errors.SaveFailed as error:
            check("refused", "rank 1" in str(error) and took(began) < 15, str(error), took(began))
    own["bad"] = 0
    dist.barrier()
    handle = ckpt.save(3, state)
    handle.wait()
    check("again", handle.done())
    del own["bad"]

    # One rank makes no save at all: the other is told whom it waited for.
    train(4)
    dist.barrier()
    if rank == 0:
        began = time.monotonic()
        try:
            ckpt.save(4, state).wait()
            check("absent", False)
        except errors.EverstepError as error:
            check("absent", "rank 1" in str(error) and took(began) < 20, repr(str(error)), took(began))
    dist.barrier()
    ckpt.save(5, state).wait()

    # Parts that are promised to be equal, and are not.
    uneven = everstep.TrainState(rng=False, replicated=("w",), w=torch.zeros(3 + rank), v=torch.zeros(1))
    try:
        ckpt.save(6, uneven).wait()
        check("uneven", False)
    except errors.EverstepError as error:
        named = all(word in str(error) for word in ("w: ", "rank 0", "rank 1", "float32[4]"))
        check("uneven", isinstance(error, errors.SaveFailed) and named, repr(error), str(error))
    dist.barrier()
    for step in (7, 8, 9):
        train(step)
        ckpt.step(step, state)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save([weights, torch.get_rng_state(), loader.state_dict()], out / f"at-9.{rank}")
    (out / "second").touch()
    dist.barrier()
    # Step 10 reaches the memory of rank 0 only.
    if rank == 0:
        own["n"] = 10
        ckpt.step(10, state)
        (out / "ten").touch()
        time.sleep(100)
    until((out / "ten").exists, "step 10 on rank 0")
    os.kill(os.getpid(), signal.SIGKILL)

weights, generator, position = torch.load(out / f"at-9.{rank}", weights_only=False)
check("common", start == 9 and own["n"] == 9, start, own["n"])
check("tier", ckpt.recovery.tier == "memory", ckpt.recovery)
check("own", own["numbers"] == list(range(rank + 1)) and own["tensor"].eq(rank).all().item(), own)
check("weights", all(torch.equal(v, weights[k]) for k, v in model.state_dict().items()))
check("rng", torch.equal(torch.get_rng_state(), generator) and loader.state_dict() == position)
dist.barrier()

# A load that fails on one rank, by our own error or by the user's code, is told on both.
class Stubborn:
    def state_dict(self):
        return {"position": 1, "rng": {}}
    def load_state_dict(self, state):
        raise ZeroDivisionError("not today")

for name, spoilt, mine in [
    ("mismatch", everstep.TrainState(model=model if rank == 0 else nn.Linear(2, 2)), errors.StateMismatch),
    ("foreign", everstep.TrainState(model=model, optimizer=optimizer, extra=own,
                                    loader=loader if rank == 0 else Stubborn()), Exception),
]:
    began = time.monotonic()
    try:
        ckpt.load(spoilt, allow=("missing", "unexpected"))
        check(name, False, "no error")
    except Exception as error:
        if rank == 1:
            check(name, isinstance(error, mine), repr(error))
        else:
            good = isinstance(error, errors.EverstepError) and took(began) < 10
            check(name, good and (name == "mismatch" or "rank(s) [1]" in str(error)), repr(error), took(began))
    dist.barrier()
again = ckpt.load(state)
check("reload", again == 9)
train(10)
ckpt.step(10, state)
ckpt.close()
dist.barrier()
check("closed", (root / "checkpoints" / "000000010" / "0002" / "manifest-1.json").exists())
"""

FIRST = {"fresh", "saved", "refused", "again", "uneven"}
SECOND = {"common", "tier", "own", "weights", "rng", "mismatch", "foreign", "reload", "closed"}


@pytest.mark.timeout(300)
def test_two_ranks_agree_whatever_happens_to_one(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    torchrun(JOB, root, out, restarts=1)
    told = [path for path in out.iterdir() if path.suffix in (".0", ".1") and path.stem != "at-9"]
    results = {path.name: path.read_text() for path in told}
    expected = {f"{name}.{rank}" for name in FIRST | SECOND for rank in (0, 1)} | {"absent.0"}
    assert set(results) == expected
    assert {name: text for name, text in results.items() if text != "ok"} == {}
    # Step 9 too, if both ranks were gone for long enough before the restart: then the agent flushes the newest.
    assert [step for step in steps_on_disk(root) if step != 9] == [2, 3, 5, 10]
    forget_memory(root)
    values = [everstep.load(root, rank=rank) for rank in (0, 1)]
    assert [value["extra"]["numbers"] for value in values] == [[0], [0, 1]]
    assert [value["extra"]["tensor"].tolist() for value in values] == [[0.0] * 3, [1.0] * 3]
    assert values[0]["model"].keys() == values[1]["model"].keys(), "shared tensors come to every rank"
    with pytest.raises(everstep.errors.NoCheckpoint, match="rank 2"):
        everstep.load(root, rank=2)
    stored = sum(p.stat().st_size for p in (root / "checkpoints" / "000000003").rglob("*.model.safetensors"))
    assert stored < 2 * 64 * 64 * 4, "what the ranks share is stored once"
