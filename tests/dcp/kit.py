"""Small jobs of several ranks: each case is a function of :mod:`tests.dcp.jobs`, run by name in fresh processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TOP = Path(__file__).parents[2]
JOB_TIMEOUT_S = 90.0


def run_job(
    world: int, cases: str, where: Path, *, env: dict[int, dict[str, str]] | None = None
) -> list[str]:
    """Run the comma-separated ``cases`` one after the other in ``world`` processes; what each printed. All must end
    well. Those to which ``env`` gives an environment of their own are killed by it; then the others are ended."""
    store = where / f"store-{cases[:40].replace(',', '-')}-{world}"
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29400",
            "PYTHONPATH": str(TOP),
            **((env or {}).get(rank, {})),
        }
        command = [sys.executable, "-m", "tests.dcp.jobs", cases, str(where), str(store)]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=TOP,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return _collect(processes, list(env or ()))


def _collect(processes: list[subprocess.Popen[str]], killed: list[int]) -> list[str]:
    texts: list[str] = []
    try:
        for rank in killed:
            assert processes[rank].wait(JOB_TIMEOUT_S) == -signal.SIGKILL, processes[rank].communicate()[0]
        if killed:
            return []
        texts = [process.communicate(timeout=JOB_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(processes), "\n----\n".join(texts)
    return texts


def blank(value: Any) -> Any:
    """The same structure with nothing of the contents."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -1) if value.dtype is not torch.bool else torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)({key: blank(item) for key, item in value.items()})
    if isinstance(value, list):
        return [blank(item) for item in value]
    return None


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Equal types, structure and bits."""
    assert type(found) is type(expected), (path, type(found), type(expected))
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert sorted(map(str, found)) == sorted(map(str, expected)), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif hasattr(expected, "getvalue"):
        assert found.getvalue() == expected.getvalue(), path
    else:
        assert found == expected, path


def files(directory: Path) -> list[Path]:
    """All files below ``directory``."""
    return sorted(path for path in directory.rglob("*") if path.is_file())
