"""The buffers that loads hold at once."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import pytest
from everstep.backends import aligned


class Buffers:
    """Counts those that ``modules`` make, from now on. ``most`` and ``most_bytes`` are of what lived at once; no one
    was asked for with more than ``largest`` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.most = self.most_bytes = self.largest = 0
        self._made: list[weakref.ref[Any]] = []
        for module in modules:
            monkeypatch.setattr(module, "aligned_buffer", self._make)

    def _make(self, nbytes: int) -> memoryview:
        view = aligned.aligned_buffer(nbytes)
        self._made.append(weakref.ref(view.obj))
        living = [len(buffer) for ref in self._made if (buffer := ref()) is not None]
        self.most = max(self.most, len(living))
        self.most_bytes = max(self.most_bytes, sum(living))
        self.largest = max(self.largest, nbytes)
        return view
