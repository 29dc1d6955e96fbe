from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace

from everstep.memory.process import Process, boot_id


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def test_this_process_is_alive() -> None:
    me = Process.current()
    assert me.pid == os.getpid()
    assert me.boot == boot_id() != ""
    assert me.alive()
    assert Process.of(os.getpid()) == me


def test_a_zombie_is_dead() -> None:
    child = sleeper()
    process = Process.of(child.pid)
    assert process is not None
    assert process.alive()
    os.kill(child.pid, signal.SIGKILL)
    assert process.wait_dead(10)
    assert os.path.exists(f"/proc/{child.pid}"), "not reaped yet"
    assert not process.alive()
    assert Process.of(child.pid) is None
    child.wait()
    assert not process.alive()
    assert Process.of(child.pid) is None
    assert process.wait_dead(0)


def test_a_reused_id_is_another_process() -> None:
    me = Process.current()
    assert not replace(me, start_time=me.start_time - 1).alive()
    assert not replace(me, boot="another boot").alive()
    assert replace(me, start_time=me.start_time - 1).wait_dead(0)


def test_waiting_is_bounded() -> None:
    start = time.monotonic()
    assert not Process.current().wait_dead(0.05)
    assert time.monotonic() - start < 5


def test_a_forked_child_is_another_process() -> None:
    me = Process.current()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, b"1" if Process.current() != me and Process.current().alive() else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 1) == b"1"
    os.close(read_end)
    os.close(write_end)
