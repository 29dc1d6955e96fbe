"""What ``torch.save`` wrote, read without running anything of it: tensors, plain values, and numpy's own arrays and
scalars, which torch leaves out and which training states hold (numpy's random state, a best loss)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
"""The module that a pickle names for numpy's constructors, before and from numpy 2 on."""


def load_pickled(source: Any, **options: Any) -> Any:
    """``torch.load(source, weights_only=True, **options)`` that knows numpy too."""
    with torch.serialization.safe_globals(_known()):
        return torch.load(source, weights_only=True, **options)


def refused_by(error: BaseException) -> str:
    """What :func:`load_pickled` would not make: torch says it below a general remark."""
    text = str(error)
    found = re.search(r"GLOBAL ([\w.]+)", text)
    return found[1] if found else text.splitlines()[0][:300]


def _known() -> list[Any]:
    makers = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    known: list[Any] = [np.ndarray, np.dtype, bytes]  # bytes: an empty array's data
    known += [(make, f"{module}.{name}") for module in _NUMPY for name, make in makers.items()]
    known += [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    return known
