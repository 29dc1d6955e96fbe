"""What jobs and tests of ``everstep.dcp`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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
