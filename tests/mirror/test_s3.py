"""``copy`` and ``gc`` where one place, or both, are on an S3 server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.backends.open import open_backend
from everstep.errors import RunError
from everstep.format import names
from everstep.store.catalog import list_steps
from everstep.store.mirror import conclude, give_up

from tests.mirror import kit
from tests.s3.run_kit import command, objects, uploads
from tests.s3.server import S3Server
from tests.store import store_kit


@pytest.fixture
def server(s3_server: S3Server) -> S3Server:
    return s3_server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints in a directory."""

    async def work(source: Any, target: Any) -> None:
        for step in (1, 2):
            await store_kit.save(source, step)

    kit.on_two(tmp_path, work)
    return tmp_path / "source"


def stored(server: S3Server, url: str) -> dict[str, bytes]:
    """The run's objects, without what the storage keeps for itself."""
    return {name: data for name, data in objects(server, url) if not name.startswith(".")}


def begin_upload(server: S3Server, url: str, name: str) -> None:
    """What a writer leaves that is killed."""
    client, key = server.client(), f"{url.partition('://')[2].partition('/')[2]}/{name}"
    upload = client.create_multipart_upload(Bucket=server.bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=server.bucket, Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))
    assert len(uploads(server, url)) == 1


def at(server: S3Server, url: str, work: Callable[[Any], Any]) -> Any:
    async def go() -> Any:
        backend = open_backend(url, options=server.storage_options)
        try:
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(go())


def test_there_and_back_again(server: S3Server, run: Path, tmp_path: Path) -> None:
    url = server.url("a run+100%=é/gpt")
    code, said = command(server, "copy", str(run), url)
    assert code == 0 and [one["step"] for one in said["copied"]] == [1, 2]
    assert stored(server, url) == kit.objects(run)
    assert not uploads(server, url)
    code, said = command(server, "copy", str(run), url + "/")
    assert code == 0 and said["sent_bytes"] == 0 and len(said["present"]) == 2
    assert command(server, "fsck", url)[0] == 0
    second = server.url()
    assert command(server, "copy", url, second, "--newest", "1")[0] == 0
    assert command(server, "copy", second, str(tmp_path / "back"))[0] == 0
    back = kit.objects(tmp_path / "back")
    assert back.items() <= kit.objects(run).items()
    assert at(server, second, store_kit.loadable) == ({(1, 2)}, {})
    assert asyncio.run(store_kit.loadable(open_backend(tmp_path / "back"))) == ({(1, 2)}, {})


def test_one_run_in_another_is_refused(server: S3Server, run: Path) -> None:
    url = server.url()
    assert command(server, "copy", str(run), url)[0] == 0
    before = stored(server, url)
    for source, target in ((url, url + "/x"), (url + "/", url), (url + "/x", url)):
        code, said = command(server, "copy", source, target)
        assert code == 1 and "DST" in said["error"]["message"]
    assert stored(server, url) == before
    code, said = command(server, "copy", url, url + "-2")
    assert code == 0 and len(said["copied"]) == 2


def test_half_a_copy_goes_with_its_uploads(server: S3Server, run: Path) -> None:
    url = server.url()
    assert command(server, "copy", str(run), url, "--steps", "1")[0] == 0
    whole = stored(server, url)

    async def break_off(target: Any) -> None:
        source = open_backend(run)
        found = (await list_steps(source))[-1]
        manifest = await store_kit.read_decision(source, found)
        assert isinstance(manifest, store_kit.Manifest)
        await kit.send(source, target, manifest, [0])
        await source.close()

    at(server, url, break_off)
    begin_upload(server, url, names.image(2, 1, 1, 1, "model"))
    code, said = command(server, "gc", url)
    assert code == 0 and not said["attempts"] and not said["temporaries"] and len(said["kept"]) == 2
    assert at(server, url, store_kit.loadable) == ({(1, 1)}, {})
    code, said = command(server, "gc", url, "--older-than", "0s", "--dry-run")
    assert code == 0 and said["attempts"] and len(uploads(server, url)) == 1
    code, said = command(server, "gc", url, "--older-than", "0s")
    assert code == 0 and said["attempts"] == [{"step": 2, "incarnation": 1, "attempt": 1}]
    assert not uploads(server, url)
    left = stored(server, url)
    assert left.keys() - whole.keys() == {names.decision(2, 1, 1)}
    # The abort record goes when no commit of it can be under way any more; then it can be copied after all.
    assert command(server, "copy", str(run), url)[0] == 3
    assert command(server, "gc", url, "--older-than", "0s")[0] == 0
    assert stored(server, url) == whole
    assert command(server, "copy", str(run), url)[0] == 0
    assert stored(server, url) == kit.objects(run)


def test_an_upload_is_all_that_is_seen_of_an_attempt(server: S3Server, run: Path) -> None:
    url = server.url()
    assert command(server, "copy", str(run), url, "--steps", "1")[0] == 0

    begin_upload(server, url, names.image(2, 1, 1, 0, "model"))
    code, said = command(server, "gc", url, "--older-than", "0s")
    assert code == 0 and len(said["temporaries"]) == 1 and not uploads(server, url)


def test_a_damaged_byte_never_arrives(server: S3Server, run: Path) -> None:
    name = names.image(2, 1, 1, 1, "optimizer")
    data = bytearray((run / name).read_bytes())
    data[-1] ^= 1
    (run / name).write_bytes(data)
    url = server.url()
    code, said = command(server, "copy", str(run), url)
    assert code == 1 and name in said["failed"][0]["error"]["message"]
    assert name not in stored(server, url) and not uploads(server, url)
    assert at(server, url, store_kit.loadable) == ({(1, 1)}, {})


def test_decided_once_on_the_server(server: S3Server, run: Path) -> None:
    async def work(target: Any) -> None:
        source = open_backend(run)
        for found in await list_steps(source):
            manifest = await store_kit.read_decision(source, found)
            assert isinstance(manifest, store_kit.Manifest)
            await kit.send(source, target, manifest)
            answers = await asyncio.gather(
                conclude(source, target, manifest),
                give_up(target, manifest, "too slow"),
                conclude(source, target, manifest),
            )
            assert answers[0] == answers[1] == answers[2] and answers[0] is not None
        other = open_backend(run.parent / "other")
        await store_kit.start_run(other)
        with pytest.raises(RunError, match="another run"):
            await kit.send(other, target, manifest, [])
        await source.close()

    at(server, server.url(), work)


def test_a_copy_on_the_server_is_loaded_and_gone_on_with(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    model = torch.nn.Linear(8, 8)
    state = everstep.TrainState(model=model)
    policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=100, linger_s=0.5)

    def train(root: Any, expected: int | None, step: int, **options: Any) -> None:
        with everstep.Checkpointer(root, policy=policy, agent="inline", **options) as ckpt:
            assert ckpt.load(state) == expected
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.save(step, state).wait(timeout_s=60)

    train(tmp_path / "run", None, 1)
    url = server.url()
    assert command(server, "copy", str(tmp_path / "run"), url)[0] == 0
    shutil.rmtree(tmp_path / "run")
    train(url, 1, 2, storage_options=server.storage_options)
    assert command(server, "fsck", url)[0] == 0
    assert command(server, "copy", url, str(tmp_path / "run"))[0] == 0
    assert torch.equal(everstep.load(tmp_path / "run")["model"]["weight"], torch.full((8, 8), 2.0))


@pytest.mark.parametrize("far", [True, False])
def test_a_copy_that_was_killed_is_gone_on_with_by_calling_it_again(
    server: S3Server, tmp_path: Path, far: bool
) -> None:
    """Killed in the middle of a large image (in the object store: of its upload)."""
    run, target = tmp_path / "run", server.url() if far else str(tmp_path / "target")
    for step in (1, 2):
        everstep.save(run, step, {"w": torch.rand(3 << 20), "small": {"v": torch.ones(5) * step}})
    half = names.image(2, 2, 1, 0, "w")
    environment = {**os.environ, **server.env, "EVERSTEP_POINTS": f"kill:mirror.image.piece:{half}:2"}
    child = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "copy", str(run), target], env=environment, timeout=100
    )
    assert child.returncode == -signal.SIGKILL
    code, listed = command(server, "ls", target)
    assert code == 0 and [one["step"] for one in listed["checkpoints"]] == [1]

    code, said = command(server, "copy", str(run), target)
    assert code == 0 and [one["step"] for one in said["copied"]] == [2]
    assert [one["step"] for one in said["present"]] == [1]
    assert said["sent_bytes"] < 1.1 * (run / half).stat().st_size
    assert command(server, "fsck", target)[0] == 0
    assert command(server, "gc", target, "--older-than", "0s")[0] == 0
    if far:
        assert stored(server, target) == kit.objects(run) and not uploads(server, target)
    else:
        assert kit.objects(Path(target)) == kit.objects(run)
    code, said = command(server, "copy", str(run), target)
    assert code == 0 and said["sent_bytes"] == 0
