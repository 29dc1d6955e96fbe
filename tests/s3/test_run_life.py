"""A training run whose root is on an S3 server: killed, resumed, rotated, looked at."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch
from everstep import errors
from everstep.agent import spawn
from everstep.agent.asking import ask_status
from everstep.agent.values import AgentSettings
from everstep.connecting import agent_settings
from everstep.oneshot import _closing as closing
from everstep.places import Place, locate
from everstep.store.blocking import run_blocking
from everstep.store.runs import open_run

from tests.facade.kit import Forked, Training, same_bits, torchrun, undisturbed, until

from . import run_kit as kit
from .server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Fork = Callable[[Callable[..., object]], Forked]


def test_a_killed_trainer_resumes_bit_for_bit_and_secrets_are_nowhere(
    s3_server: S3Server,
    forked: Fork,
    tmp_path: Path,
) -> None:
    url = s3_server.url()
    losses, weights = undisturbed(9)

    def first_life(say: Callable[..., None]) -> None:
        training = Training()
        ckpt = kit.opened(url, s3_server)
        assert ckpt.load(training.state) is None
        for first, last in ((1, 2), (3, 4), (5, 5)):
            kit.train(training, ckpt, first, last)
        kit.train(training, ckpt, 6, 6, save=False)
        say("trained", ckpt.agent_pid)
        signal.pause()

    child = forked(first_life)
    assert child.line().startswith("trained")
    child.stop()

    training = Training(seed=2)
    with kit.opened(url, s3_server) as ckpt:
        assert repr(ckpt._place).count(s3_server.secret) == 0
        assert ckpt.load(training.state) == 6, "from memory, one step after the newest durable one"
        assert ckpt.recovery is not None and ckpt.recovery.tier == "memory"
        kit.train(training, ckpt, 7, 9)
        until(lambda: kit.checkpoints(s3_server, kit.url_with_endpoint(s3_server, url)) == [6, 9], "rotation")
    assert same_bits(training.weights(), weights)
    assert training.extra["history"] == losses[-4:]

    place = locate(url, options=s3_server.storage_options)
    until(lambda: _status(place) is None, "the agent has ended")
    code, found = kit.command(s3_server, "fsck", place.url)
    assert (code, {one["kind"] for one in found["findings"]}) == (0, {"tombstone"})
    assert kit.command(s3_server, "show", place.url, "9", "--values")[0] == 0
    code, found = kit.command(s3_server, "status", place.url)
    assert (code, found["tiers"]["durable"]["step"]) == (3, 9), "nothing runs"
    assert kit.command(s3_server, "plan-memory", place.url)[0] in (0, 4)
    assert kit.command(s3_server, "clean-memory", place.url)[0] == 0

    kept = {name.split("/")[1] for name in kit.names(s3_server, url) if name.endswith(".vote")}
    assert kept == {"000000006", "000000009"}, "rotation left what it should"
    assert kit.uploads(s3_server, url) == []
    told = [*kit.files_below(tmp_path / "runtime"), *kit.objects(s3_server, url)]
    assert any(str(name).endswith("agent.log") for name, _ in told), "the agent's log was looked at"
    assert [name for name, data in told if s3_server.secret.encode() in data] == []


def _status(place: Place) -> object:
    for directory in place.runtime_base.glob(f"{place.run_key}-*"):
        said = ask_status(AgentSettings(place.url, place.run_key, place.node, directory), timeout_s=1)
        if said is not None:
            return said
    return None


@pytest.mark.parametrize(
    "point",
    [
        "s3.complete.before",
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("flush.image.first", "s3.upload.after", "s3.part.after", "s3.complete.after")
        ),
    ],
)
def test_an_agent_killed_in_mid_upload_is_replaced_and_the_upload_ends(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    url = s3_server.url()
    state = kit.tensors(1, nbytes=40 << 20)
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", f"kill:{point}:w.safetensors")
    with kit.opened(url, s3_server) as ckpt:
        ckpt.load({"w": torch.zeros(1)})
        ckpt.step(1, state)
        first = ckpt.agent_pid
        monkeypatch.delenv("EVERSTEP_AGENT_POINTS")
        ckpt.save(1, state).wait(timeout_s=60)
        assert ckpt.agent_pid not in (None, first)
    values = everstep.load(url, storage_options=s3_server.storage_options)
    assert torch.equal(values["w"], state["w"])
    assert kit.uploads(s3_server, url) == []
    code, found = kit.command(s3_server, "fsck", kit.url_with_endpoint(s3_server, url))
    assert (code, found["findings"]) == (0, [])


@pytest.mark.parametrize("name", ["a b+c%20d=é/run", "deep//er/"])
def test_one_call_saves_and_loads_whatever_the_root_is_called(s3_server: S3Server, name: str) -> None:
    url = f"{s3_server.url()}/{name}"
    everstep.save(url, 3, {"w": torch.arange(5)}, storage_options=s3_server.storage_options)
    again = url.replace("deep//er/", "deep/er") + "/"
    values = everstep.load(again, storage_options=s3_server.storage_options)
    assert torch.equal(values["w"], torch.arange(5))
    assert kit.checkpoints(s3_server, kit.url_with_endpoint(s3_server, again)) == [3]
    with pytest.raises(errors.StepOrder):
        everstep.save(again, 3, {"w": torch.arange(5)}, storage_options=s3_server.storage_options)
    plan = everstep.plan_memory(url, storage_options=s3_server.storage_options)
    assert "step 3" in plan.source


def test_keys_may_come_from_the_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3_server.env.items():
        monkeypatch.setenv(key, value)
    url = s3_server.url()
    state = {"w": torch.arange(100.0)}
    with everstep.Checkpointer(url, policy=kit.policy(**kit.OPTIONS)) as ckpt:
        assert ckpt.load(state) is None
        ckpt.step(1, state)
        ckpt.save(1, state).wait()
    assert everstep.load(url)["w"].sum() == 4950


def test_an_agent_with_dead_keys_takes_those_of_the_trainer_that_comes(s3_server: S3Server) -> None:
    url = s3_server.url()
    state = {"w": torch.arange(100.0)}
    everstep.save(url, 1, state, storage_options=s3_server.storage_options)
    dead = locate(url, options={**s3_server.storage_options, "secret": "expired"})
    good = locate(url, options=s3_server.storage_options)
    with closing(good.open()) as backend:
        run = run_blocking(open_run(backend))
    start = spawn.start(agent_settings(dead, kit.policy(**kit.OPTIONS), run.run_id, run.chunk_bytes))
    assert until(start.look, "the agent has started") == "ready"
    start.close()
    with kit.opened(url, s3_server) as ckpt:
        assert ckpt.load(state) == 1
        ckpt.step(2, state)
        ckpt.save(2, state).wait()
        said = _status(good)
        assert isinstance(said, dict) and said["pid"] == ckpt.agent_pid and said["epoch"] == 1, (
            "the first one"
        )


def test_a_forked_child_reads_with_a_client_of_its_own(s3_server: S3Server, forked: Fork) -> None:
    url, options = s3_server.url(), s3_server.storage_options
    everstep.save(url, 1, {"w": torch.arange(10)}, storage_options=options)
    with kit.opened(url, s3_server) as ckpt:
        assert ckpt.load({"w": torch.zeros(10, dtype=torch.int64)}) == 1
        child = forked(lambda say: say(int(everstep.load(url, storage_options=options)["w"].sum())))
        assert child.line() == "45"
        assert child.end()[0] == 0
        assert everstep.load(url, storage_options=options)["w"].sum() == 45, "and so does the parent"


def test_who_may_not_read_is_told_at_once(s3_server: S3Server) -> None:
    url = s3_server.url()
    state = {"w": torch.arange(3)}
    began = time.monotonic()
    for options, what in (
        ({**s3_server.storage_options, "secret": "wrong"}, r"denied|Forbidden|AccessDenied|Signature"),
        ({**s3_server.storage_options, "key": "nobody"}, r"denied|Forbidden|AccessDenied|InvalidAccessKey"),
    ):
        with pytest.raises(errors.CannotTell, match=what) as caught:
            kit.opened(url, s3_server, storage_options=options, agent="inline").load(state)
        assert "wrong" not in str(caught.value)
    with pytest.raises(errors.CannotTell, match=r"bucket"):
        kit.opened("s3://no-such-bucket-here/run", s3_server, agent="inline").load(state)
    assert time.monotonic() - began < 20


def test_who_may_not_write_is_told_at_once(s3_server: S3Server) -> None:
    if not s3_server.reader:
        pytest.skip("needs EVERSTEP_TEST_S3_READER: a user of that endpoint who may only read")
    url = s3_server.url()
    state = {"w": torch.arange(3)}
    reader = {**s3_server.storage_options, "key": s3_server.reader, "secret": s3_server.reader_secret}
    began = time.monotonic()
    ckpt = kit.opened(url, s3_server, storage_options=reader, agent="inline")
    assert ckpt.load(state) is None
    with pytest.raises(errors.NotARun, match=r"cannot become a run.*(denied|AccessDenied)"):
        ckpt.step(1, state)
    everstep.save(url, 1, state, storage_options=s3_server.storage_options)
    assert torch.equal(everstep.load(url, storage_options=reader)["w"], state["w"])
    assert time.monotonic() - began < 20


def test_what_cannot_be_a_root(s3_server: S3Server) -> None:
    with pytest.raises(errors.BadOption, match=r"memory://.*cannot be the root.*further tier"):
        everstep.Checkpointer("memory://here/run")
    with pytest.raises(errors.BadOption, match=r"secret") as caught:
        everstep.Checkpointer("s3://bucket/run?secret=abc")
    assert "abc" not in str(caught.value)
    with pytest.raises(errors.BadOption, match=r"session: .*object"):
        everstep.Checkpointer(s3_server.url(), storage_options={"session": object()})
    with pytest.raises(errors.NotARun, match="does not exist"):
        everstep.load(s3_server.url(), storage_options=s3_server.storage_options)


TWO_RANKS = """
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, url, marks = dist.get_rank(), sys.argv[2], Path(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own = {"rank": rank, "n": 0}
state = everstep.TrainState(model=model, optimizer=optimizer, extra=own)
ckpt = everstep.Checkpointer(url, policy=policy(linger_s=2.0, keep_last=2))
start = ckpt.load(state) or 0
first_life = not (marks / "second").exists()
dist.barrier()
assert first_life == (start == 0), start
assert (own["rank"], own["n"]) == (rank, start)
for step in range(start + 1, 7):
    torch.manual_seed(step * 10 + rank)
    optimizer.zero_grad()
    model(torch.rand(4, 64)).pow(2).mean().backward()
    optimizer.step()
    own["n"] = step
    ckpt.step(step, state)
    if step % 2 == 0:
        ckpt.save(step, state).wait()
    if step == 5 and first_life:
        (marks / "second").touch()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
ckpt.close()
if rank == 0:
    torch.save({k: v for k, v in model.module.state_dict().items()}, marks / "weights.pt")
    say("resumed at", start)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks_resume_and_are_loaded_by_one_process(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in s3_server.env.items():
        monkeypatch.setenv(key, value)
    url = s3_server.url()
    (tmp_path / "marks").mkdir()
    out = torchrun(TWO_RANKS, tmp_path / "marks", url, restarts=1)
    assert "resumed at 5" in out
    weights = torch.load(tmp_path / "marks" / "weights.pt", weights_only=True)
    values = everstep.load(url)
    assert all(torch.equal(values["model"][name], value) for name, value in weights.items())
    assert [everstep.load(url, rank=rank)["extra"] for rank in (0, 1)] == [
        {"rank": rank, "n": 6} for rank in (0, 1)
    ]
    assert kit.command_here("fsck", url)[0] == 0
