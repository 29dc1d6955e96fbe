"""What the ranks of a job tell each other: small messages through the job's store, never a collective.

Every wait is bounded and names the ranks that did not answer. Only the caller's thread talks to the store, so a
background thread can never race with the training's own communication.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from .errors import EverstepError, RankError, from_wire
from .format.hashing import hexdigest

T = TypeVar("T")

GRACE_S = 10.0
"""How much longer than the collecting rank the others wait for its answer."""
POLL_MIN_S = 0.0002
POLL_MAX_S = 0.02


_Store = Any
"""torch.distributed.Store: ``set``, ``get``, ``wait`` and ``check``; its stubs do not say so."""


class Ranks:
    """This process's place among the ranks, and the messages between them.

    One object per checkpointer; all ranks open the checkpointers of one run in the same order.
    """

    def __init__(self, rank: int, world: int, store: _Store, *, prefix: str) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._prefix = prefix
        self._rounds = itertools.count()
        self._known: dict[str, bytes] = {}

    @classmethod
    def detect(cls, scope: str, *, timeout_s: float) -> Ranks:
        """From torch.distributed if it is initialised, else from the launcher's environment, else one process.
        With several ranks all of them meet here; RankError names those that do not come in time."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
            store: _Store = dist.distributed_c10d._get_default_store() if world > 1 else None
        else:
            rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            store = _environment_store(rank, world) if world > 1 else None
        if store is None:
            return cls.alone()
        place = f"everstep/{hexdigest(scope.encode())}"
        meet = _gather_ranks if rank == 0 else _join_rank_0
        return cls(rank, world, store, prefix=f"{place}/{meet(store, place, rank, world, timeout_s)}")

    @classmethod
    def alone(cls) -> Ranks:
        """One rank, whatever job this process belongs to: for readers."""
        return cls(0, 1, None, prefix="")

    def agree(self, what: str, value: Any, *, timeout_s: float) -> list[Any]:
        """Every rank's ``value`` (plain values), by rank. Raises RankError naming ranks that did not answer."""
        if self._store is None:
            return [value]
        base = f"{self._prefix}/{next(self._rounds)}"
        self._store.set(f"{base}/{self.rank}", msgspec.msgpack.encode(value))
        if self.rank == 0:
            answer = self._collect(base, what, timeout_s)
            self._store.set(f"{base}/all", msgspec.msgpack.encode(answer))
        else:
            answer = msgspec.msgpack.decode(self._wait(f"{base}/all", what, timeout_s + GRACE_S))
        if "missing" in answer:
            raise RankError(
                f"{what}: not all ranks answered",
                found=f"nothing from rank(s) {answer['missing']} within {timeout_s:g} s",
                expected=f"all {self.world} ranks",
                hint="Look at those ranks' logs: they failed, hang, or make other calls than the rest.",
                ranks=answer["missing"],
            )
        return list(answer["values"])

    def outcomes(
        self, what: str, act: Callable[[], T], *, timeout_s: float
    ) -> tuple[T | None, dict[int, EverstepError]]:
        """Run ``act`` on every rank: this rank's result, and every failed rank's error, the same on all ranks.
        Where ``act`` raises something that is none of ours, that rank raises it, and the others hear of it."""
        result, _, errors = self.exchange(what, lambda: (act(), None), timeout_s=timeout_s)
        return result, errors

    def exchange(
        self, what: str, act: Callable[[], tuple[T, Any]], *, timeout_s: float
    ) -> tuple[T | None, list[Any], dict[int, EverstepError]]:
        """As :meth:`outcomes` of an ``act`` that gives a result and what to tell the others of it (plain values), in
        one round: this rank's result, what every rank told (None where it failed), and the errors."""
        result: T | None = None
        told: Any = None
        mine: Exception | None = None
        try:
            result, told = act()
        except Exception as caught:
            mine = caught
        value = [_wire_of(mine) if mine is not None else None, told]
        answers = self.agree(what, value, timeout_s=timeout_s)
        if mine is not None and not isinstance(mine, EverstepError):
            raise mine  # the user's own, or a fault of ours: the others heard that this rank failed
        errors = {rank: from_wire(error) for rank, (error, _) in enumerate(answers) if error is not None}
        if mine is not None:
            errors[self.rank] = mine
        return result, [said for _, said in answers], errors

    def together(self, what: str, act: Callable[[], T], *, timeout_s: float) -> T:
        """Run ``act`` on every rank; all succeed, or all raise: a failed rank its own error, the others a
        RankError that names it."""
        result, errors = self.outcomes(what, act, timeout_s=timeout_s)
        if errors:
            raise self.verdict(what, errors)
        return result  # type: ignore[return-value]

    def verdict(self, what: str, errors: dict[int, EverstepError]) -> EverstepError:
        """The error that this rank raises when ``errors`` happened: its own, or one that names the others."""
        if self.rank in errors:
            return errors[self.rank]
        first = errors[min(errors)]
        error = RankError(
            f"{what} failed on rank(s) {sorted(errors)}: {type(first).__name__}: {first}",
            ranks=sorted(errors),
            error=type(first).__name__,
        )
        error.__cause__ = first
        return error

    def from_first(self, what: str, act: Callable[[], Any], *, timeout_s: float) -> Any:
        """What ``act`` gives on rank 0 (plain values), on every rank; its error is every rank's error."""
        outcome: dict[str, Any] = {"ok": None}
        if self.rank == 0:
            try:
                outcome = {"ok": act()}
            except Exception as caught:
                if self._store is None:
                    raise
                outcome = {"error": _wire_of(caught)}
        first = self.agree(what, outcome, timeout_s=timeout_s)[0]
        if "error" in first:
            raise from_wire(first["error"])
        return first["ok"]

    def tell(self, key: str, value: Any) -> None:
        """Publish ``value`` under ``key``, replacing what stood there."""
        data = msgspec.msgpack.encode(value)
        self._known[key] = data
        if self._store is not None:
            self._store.set(f"{self._prefix}/{key}", data)

    def ask(self, key: str, good: Callable[[Any], bool], what: str, *, timeout_s: float) -> Any:
        """The value under ``key`` once ``good`` says so. Raises RankError (of rank 0) after ``timeout_s``."""
        if self._store is None:
            return msgspec.msgpack.decode(self._known[key])
        until = time.monotonic() + timeout_s
        pause = POLL_MIN_S
        self._wait(f"{self._prefix}/{key}", what, timeout_s)
        while True:
            value = msgspec.msgpack.decode(self._store.get(f"{self._prefix}/{key}"))
            if good(value):
                return value
            if time.monotonic() > until:
                raise _silent(what, timeout_s)
            time.sleep(pause)
            pause = min(pause * 2, POLL_MAX_S)

    def _collect(self, base: str, what: str, timeout_s: float) -> dict[str, Any]:
        assert self._store is not None
        keys = [f"{base}/{rank}" for rank in range(self.world)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except Exception:  # the store's own error classes differ between releases
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                return {"missing": missing}
        return {"values": [msgspec.msgpack.decode(self._store.get(key)) for key in keys]}

    def _wait(self, key: str, what: str, timeout_s: float) -> bytes:
        assert self._store is not None
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return bytes(self._store.get(key))
        except Exception as error:
            raise _unanswered(what, timeout_s, began, error) from error


def _wire_of(error: Exception) -> dict[str, Any]:
    if isinstance(error, EverstepError):
        return error.to_wire()
    return EverstepError(f"{type(error).__name__}: {error}").to_wire()


def _gather_ranks(store: _Store, place: str, rank: int, world: int, timeout_s: float) -> str:
    """Rank 0: give every other rank this meeting's name. A launcher's store outlives restarts, and may hold the
    messages of ranks that are long gone: only a rank that is there now acknowledges."""
    name = secrets.token_hex(8)
    until = time.monotonic() + timeout_s
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    pause = POLL_MIN_S
    while missing:
        for other in sorted(missing):
            if not store.check([f"{place}/knock/{other}"]):
                continue
            knock = bytes(store.get(f"{place}/knock/{other}"))
            if answered.get(other) != knock:
                store.set(f"{place}/answer/{other}/{knock.decode()}", name)
                answered[other] = knock
            elif store.check([f"{place}/{name}/here/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > until:
            # Those who came wait for the first round's answer already: let them hear who did not.
            store.set(f"{place}/{name}/0/all", msgspec.msgpack.encode({"missing": sorted(missing)}))
            raise RankError(
                "not all ranks came to open the run",
                found=f"nothing from rank(s) {sorted(missing)} within {timeout_s:g} s",
                expected=f"all {world} ranks",
                hint="Every rank makes the same calls; look at those ranks' logs.",
                ranks=sorted(missing),
            )
        time.sleep(pause)
        pause = min(pause * 2, POLL_MAX_S)
    return name


def _join_rank_0(store: _Store, place: str, rank: int, world: int, timeout_s: float) -> str:
    """Another rank: knock, and take the meeting's name from rank 0."""
    knock = secrets.token_hex(8)
    store.set(f"{place}/knock/{rank}", knock)
    began = time.monotonic()
    try:
        store.wait([f"{place}/answer/{rank}/{knock}"], timedelta(seconds=timeout_s))
    except Exception as error:
        raise _unanswered("opening the run", timeout_s, began, error) from error
    name = bytes(store.get(f"{place}/answer/{rank}/{knock}")).decode()
    store.set(f"{place}/{name}/here/{rank}", "1")
    return name


def _unanswered(what: str, timeout_s: float, began: float, error: Exception) -> RankError:
    """Rank 0 was silent for the whole time, or its store went away before (rank 0 often hosts it, and died)."""
    if time.monotonic() - began >= timeout_s:
        return _silent(what, timeout_s)
    return RankError(
        f"{what}: the job's store was lost",
        found=f"{type(error).__name__}: {error}",
        expected="an answer of rank 0",
        hint="Whoever hosts the store, often rank 0, has ended: look at rank 0's log.",
        ranks=[0],
    )


def _silent(what: str, timeout_s: float) -> RankError:
    return RankError(
        f"{what}: rank 0 did not answer",
        found=f"nothing within {timeout_s:g} s",
        hint="Look at rank 0's log: it failed, hangs, or makes other calls than the rest.",
        ranks=[0],
    )


def _environment_store(rank: int, world: int) -> _Store:
    """The launcher's store, where it offers one, else one hosted by rank 0 at MASTER_ADDR:MASTER_PORT."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if not host or not port:
        raise RankError(
            "the environment names several ranks but no place to meet",
            found=f"WORLD_SIZE={world}, MASTER_ADDR={host}, MASTER_PORT={port}",
            expected="MASTER_ADDR and MASTER_PORT, or an initialised process group",
            hint="Start with torchrun, or call torch.distributed.init_process_group before the first load or step.",
            ranks=[rank],
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        host, int(port), world, is_master=rank == 0 and not hosted, multi_tenant=True, wait_for_workers=False
    )
    return PrefixStore("everstep", store)
