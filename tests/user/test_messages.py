"""What a person reads names what a person can find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from everstep.backends.errors import Permanent
from everstep.backends.open import open_backend


def test_errors_below_a_held_directory_name_its_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    backend = open_backend(tmp_path / "run", bound=True)
    (tmp_path / "run" / "a").touch()
    with pytest.raises(Permanent) as caught:
        asyncio.run(backend.write("a/b", b"x"))
    assert f"({tmp_path}/run/a" in str(caught.value) and "/proc/" not in str(caught.value)
