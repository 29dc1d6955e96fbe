"""The table of dtypes against the torch that is installed."""

from __future__ import annotations

import pytest
import torch
from everstep.errors import UnsupportedValue
from everstep.format import dtypes

TORCH = sorted(
    {str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)}.items()
)
PACKED = {"quint4x2": 4, "quint2x4": 2}
"""Quantised dtypes whose elements share a byte, though torch says one byte each."""


@pytest.mark.parametrize(("name", "dtype"), TORCH)
def test_the_table_agrees_with_torch(name: str, dtype: torch.dtype) -> None:
    assert dtypes.itemsize_bits(name) == PACKED.get(name, 8 * dtype.itemsize)


def test_bytes_are_whole() -> None:
    assert dtypes.nbytes("float32", 3) == 12
    assert dtypes.nbytes("float32", 0) == 0
    assert [dtypes.nbytes("quint4x2", n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert [dtypes.nbytes("quint2x4", n) for n in (1, 4, 5)] == [1, 1, 2]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UnsupportedValue, match="float3_e1m1"):
        dtypes.nbytes("float3_e1m1", 1)
