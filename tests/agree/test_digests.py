"""A live tensor's hash is that of the bytes that a slot would hold."""

from __future__ import annotations

import pytest
import torch
from everstep.format.hashing import digest
from everstep.snapshot import digests as module
from everstep.snapshot.digests import digests

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint16,
    torch.float8_e4m3fn,
]


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_stride(dtype: torch.dtype) -> None:
    base = (torch.randn(12, 14, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    views = [base, base.t(), base[::2], base[:, 3], base.t()[1:2, 1], base[0, 0], base[:0], base[:1].t()]
    views += [base[:1, :1].expand(20, 30), base.reshape(2, 6, 14).permute(2, 0, 1)]
    if dtype.is_complex:
        views += [base.conj(), base.t().conj()]
    if dtype is torch.float32:
        views.append(torch.nn.Parameter(base))
    assert digests([[view] for view in views]) == [digest(raw(view)) for view in views]


def test_several_pieces_follow_each_other() -> None:
    left, right = torch.arange(5), torch.arange(7)
    assert digests([[left, right], []]) == [digest(raw(left) + raw(right)), digest(b"")]


def test_one_bit_makes_another_hash() -> None:
    tensor = torch.zeros(1000)
    before = digests([[tensor]])
    tensor.view(torch.int32)[777] ^= 1
    assert digests([[tensor]]) != before
