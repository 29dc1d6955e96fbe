"""Host memory of arenas that CUDA knows of: it copies there at the bus's full speed, and beside everything else."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from typing import Any

import torch
from everstep.memory.arena import Arena

log = logging.getLogger("everstep")

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""

_guard = threading.RLock()
"""Re-entrant: a finalizer may run anywhere."""
_tried: dict[int, bool] = {}
"""By address of a mapping: whether it is registered, or could not be. Guarded by _guard."""


def in_use() -> bool:
    """Whether this process has used CUDA."""
    found: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return found


def pin(arena: Arena) -> bool:
    """Register the arena's mapping with CUDA, once, until it is unmapped; whether it is registered.

    Does nothing in a process that has not used CUDA. Where CUDA refuses (a limit on locked memory, mostly), a warning
    says what that costs; copies are right in any case. Takes about as long as giving the memory its pages.
    """
    if not in_use():
        return False
    address, nbytes = arena.mapped
    with _guard:
        if address in _tried:
            return _tried[address]
        _tried[address] = False
    began = time.monotonic()
    problem = _call("cudaHostRegister", address, nbytes, _PORTABLE)
    if problem is not None:
        arena.on_unmap(lambda: _tried.pop(address, None))
        warnings.warn(
            f"everstep: {nbytes:,} bytes of host memory could not be pinned ({problem}): copies from the devices are "
            "slower, and wait for one another. Raise the limit on locked memory (ulimit -l, or the container's).",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _tried[address] = True
    pid = os.getpid()
    arena.on_unmap(lambda: _unpin(address, pid))
    log.info("everstep: %d bytes of host memory pinned in %.2f s", nbytes, time.monotonic() - began)
    return True


def _unpin(address: int, pid: int) -> None:
    with _guard:
        _tried.pop(address, None)
    if os.getpid() != pid:  # a forked child has neither the mapping nor CUDA
        return
    problem = _call("cudaHostUnregister", address)
    if problem is not None:
        log.warning("everstep: pinned host memory could not be given back to CUDA: %s", problem)


def _call(name: str, *args: int) -> str | None:
    """What CUDA said against it."""
    try:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(getattr(runtime, name)(*args))
    except (RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if code == 0 else f"CUDA error {code}"
