"""What an upload's writer wants to know after a crash, in the journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .journal import JobEntry, Journal


class UploadNotes:
    """Notes on the upload of object ``name`` for a job; they go with it. ``journaled`` runs a call of the journal where
    waiting for the disk harms nobody."""

    def __init__(
        self, journal: Journal, entry: JobEntry, name: str, journaled: Callable[..., Awaitable[Any]]
    ) -> None:
        self._journal = journal
        self._entry = entry
        self._name = name
        self._journaled = journaled

    def load(self) -> bytes | None:
        return self._journal.upload(self._entry, self._name)

    async def save(self, data: bytes) -> None:
        await self._journaled(self._journal.put_upload, self._entry, self._name, data)
