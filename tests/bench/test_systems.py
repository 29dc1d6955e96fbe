"""Every system of the harness that can run here keeps its promises: what was saved comes back bit for bit, though the
state changed as soon as the trainer might go on, and nothing is left when it is closed.

Each system runs in a process of its own, as the harness runs it. What cannot run here is skipped with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from everstep.benchmarks.harness.processes import MARK, end_processes, new_token
from everstep.benchmarks.harness.systems import all_systems, load

from tests.bench.small_state import SAVES
from tests.s3.server import S3Server

LIMIT_S = 110
SYSTEMS = all_systems()
RIVALS = [load(spec) for spec in SYSTEMS.values() if ".rivals." in spec]
ON_FILES = [name for name, spec in SYSTEMS.items() if load(spec).works & {"save", "load"}]
IN_STORES = [system.name for system in RIVALS if "s3" in system.works]


def run_in_process(
    name: str, directory: Path, environment: dict[str, str] | None = None, url: str = ""
) -> None:
    """Save, load, recover and close in a process of its own; raises AssertionError with its words if that fails."""
    if why := load(SYSTEMS[name]).missing():
        pytest.skip(f"{name}: {why}")
    files = directory / "files"
    files.mkdir()
    token = new_token()
    runtime = directory / "runtime"
    runtime.mkdir()
    task = json.dumps({"system": SYSTEMS[name], "directory": str(files), "url": url})
    # A file takes what it prints: a process that it leaves behind would hold a pipe open.
    with open(directory / "log", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.small_state", task],
            cwd=Path(__file__).parents[2],
            env={
                **os.environ,
                MARK: token,
                "EVERSTEP_RUNTIME_DIR": str(runtime),
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            end_processes(token)
            process.wait()
            load(SYSTEMS[name]).clean(files)
        log.seek(0)
        words = log.read().decode(errors="replace")
    assert code == 0, f"{name}: exit code {code}\n{words[-3000:]}"
    assert f"kept {SAVES} saves" in words


@pytest.mark.parametrize("name", ON_FILES)
def test_what_was_saved_comes_back(name: str, tmp_path: Path) -> None:
    run_in_process(name, tmp_path)


@pytest.mark.parametrize("name", IN_STORES)
def test_what_was_saved_comes_back_from_a_store(name: str, tmp_path: Path, s3_server: S3Server) -> None:
    if why := load(SYSTEMS[name]).missing():
        pytest.skip(f"{name}: {why}")
    run_in_process(name, tmp_path, s3_server.env, s3_server.url())


def test_what_cannot_run_says_why_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the engines every rival that is no part of torch names what to install."""
    from importlib import metadata

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    for system in RIVALS:
        why = system.missing()
        if system.package == "torch":
            assert why is None
        else:
            assert why is not None and why.startswith("not installed: pip install "), system.name
            assert system.package in why
        assert system.version() == ""


def test_no_engine_is_imported_before_it_is_used() -> None:
    """Listing the systems costs nothing: no rival is loaded, nor is torch."""
    code = (
        "import sys\n"
        "from everstep.benchmarks.harness import systems\n"
        "found = [systems.load(spec).missing() for spec in systems.all_systems().values()]\n"
        "heavy = {'torch', 'torchsnapshot', 'torch_checkpointing', 'nvidia_resiliency_ext', 'dlrover', 'deepspeed',\n"
        "         'orbax', 'jax', 'runai_model_streamer', 'fastsafetensors', 's3torchconnector'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
