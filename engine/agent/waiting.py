"""Waiting for an event, for some time."""

from __future__ import annotations

import asyncio


async def happened(event: asyncio.Event, seconds: float) -> bool:
    """Wait until ``event`` is set, at most ``seconds``; whether it is. A cancellation always gets through: in Python
    3.11 and before, asyncio.wait_for may lose one that comes together with the event, and who was told to end goes
    on."""
    task = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    return event.is_set()
