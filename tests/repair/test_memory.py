"""Repair out of this node's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from everstep.format import names

TRAINER = """
import os, sys, torch, everstep
root, memory = sys.argv[1:]
torch.manual_seed(1)
model = torch.nn.Linear(300, 300)
state = everstep.TrainState(model=model)
policy = everstep.Policy(full_every=None, keep_last=9, linger_s=0.5)
ckpt = everstep.Checkpointer(root, memory=everstep.Memory(path=memory), policy=policy)
ckpt.load(state)
for step in (1, 2):
    with torch.no_grad():
        model.weight += 1
    ckpt.step(step, state)
    ckpt.save(step, state).wait(timeout_s=60)
print("saved", flush=True)
sys.stdin.read()
"""


def fsck(root: Path, memory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everstep.cli", "fsck", str(root), "--memory", str(memory), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_chunk_and_a_vote_come_from_the_snapshot_in_memory(tmp_path: Path) -> None:
    root, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    env = {**os.environ, "EVERSTEP_RUNTIME_DIR": str(tmp_path / "runtime")}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(root), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(30)
    finally:
        trainer.kill()
        trainer.wait(30)
        for stream in (trainer.stdin, trainer.stdout):
            if stream is not None:
                stream.close()
    image = root / names.image(2, 1, 1, 0, "model")
    vote = root / names.vote(2, 1, 1, 0)
    good, good_vote = image.read_bytes(), vote.read_bytes()
    data = bytearray(good)
    data[-1] ^= 1
    image.write_bytes(data)
    vote.unlink()
    said = fsck(root, memory, "--repair")
    assert said.returncode == 1, said.stdout + said.stderr
    assert "memory of this node" in said.stdout
    assert (image.read_bytes(), vote.read_bytes()) == (good, good_vote)
