"""One error for all that is wrong, instead of the first thing only."""

from __future__ import annotations

from typing import Any

from ..errors import EverstepError
from ..format.entries import path_of

PROBLEMS_MAX = 20
"""Most problems that one message spells out; the rest is counted."""


class Problems:
    """Collects problems in words. ``keys`` are the names concerned, in order, each once (as many as
    spelled)."""

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []
        self.keys: list[str] = []

    def add(self, part: str, key: str, text: str) -> None:
        """Note ``text`` about ``key`` of ``part``."""
        self.count += 1
        if len(self.texts) < PROBLEMS_MAX:
            name = path_of(part, key)
            self.texts.append(f"{name}: {text}")
            if name not in self.keys:
                self.keys.append(name)

    def raise_if_any(self, error: type[EverstepError], message: str, **fields: Any) -> None:
        """Raise ``error`` with everything noted; its fields ``keys`` and ``count`` are for programs."""
        if not self.count:
            return
        more = self.count - len(self.texts)
        found = "; ".join(self.texts) + (f"; and {more} more" if more else "")
        raise error(message, found=found, keys=tuple(self.keys), count=self.count, **fields)
