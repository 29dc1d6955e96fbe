"""Runs of given seeds from the command line, one after the other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_given(
    arguments: Sequence[str], what: str, run_seed: Callable[[int, Path], Any], told: Callable[[Any], str]
) -> int:
    """The exit code. What has problems is kept, with all its notes; all is, with ``--keep``."""
    failed = 0
    for seed in [int(text) for text in arguments if not text.startswith("-")]:
        base = Path(tempfile.mkdtemp(prefix=f"{what}-{seed}-"))
        run = run_seed(seed, base)
        (base / "told.txt").write_text("\n".join([told(run), *run.notes]))
        print(told(run).splitlines()[0], *(text[:600] for text in run.problems), sep="\n     ", flush=True)
        failed += bool(run.problems)
        if run.problems or "--keep" in arguments:
            print(f"     {base}", flush=True)
        else:
            shutil.rmtree(base)
    return int(failed > 0)
