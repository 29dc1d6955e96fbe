"""A node that serves another is lost, stalls or lies in the middle of a load: the next one that has it serves on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep.nodes
import pytest
from everstep.exchange.protocol import Line, Reply, Request
from everstep.exchange.server import Server

from tests.exchange.kit import WAIT_S, Job, erase

from .kit import BIG, hold, load, save

IO_S = 2.0
BROKEN_MAX = 1
"""Servers that do wrong; the others serve rightly."""


class Faulty(Server):
    """Of those that are made, the first that is asked for an image's bytes does wrong, from then on."""

    guard = threading.Lock()
    bad: list[Server] = []

    def _answer(self, line: Line, request: Request) -> None:
        if request.what == "read" and request.image != "state":
            with self.guard:
                if len(self.bad) < BROKEN_MAX and self not in self.bad:
                    self.bad.append(self)
            if self in self.bad:
                self.spoil(line, request)
                return
        super()._answer(line, request)

    def spoil(self, line: Line, request: Request) -> None:
        raise NotImplementedError


class Closes(Faulty):
    """In the middle of the bytes."""

    def spoil(self, line: Line, request: Request) -> None:
        line.send_frame(Reply(request.nbytes))
        line.send(bytes(request.nbytes // 2))
        line.abort()


class Stalls(Faulty):
    def spoil(self, line: Line, request: Request) -> None:
        line.send_frame(Reply(request.nbytes))
        line.receive_into(memoryview(bytearray(1)), idle_s=WAIT_S)


class Lies(Faulty):
    def spoil(self, line: Line, request: Request) -> None:
        line.send_frame(Reply(request.nbytes))
        line.send(bytes(request.nbytes))


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Faulty]], list[Server]]:
    def spoil(kind: type[Faulty]) -> list[Server]:
        class Made(kind):  # type: ignore[misc,valid-type]
            bad: list[Server] = []

        monkeypatch.setattr(everstep.nodes, "Server", Made)
        monkeypatch.setattr(everstep.nodes, "IO_S", IO_S)
        return Made.bad

    return spoil


Spoil = Callable[[type[Faulty]], list[Server]]


@pytest.fixture
def held_twice(root: Path, nodes: list[str], job: Job) -> list[str]:
    """Rank 0's node is lost; both others hold what it had."""
    a, b, c = nodes[:3]
    save(job, [a, b, c], [1, 2], size=BIG)
    hold(root, a, b, steps=[2])
    hold(root, a, c, steps=[2])
    erase(root, a)
    return nodes


@pytest.mark.parametrize("kind", [Closes, Stalls, Lies], ids=lambda kind: kind.__name__.lower())
def test_the_next_holder_serves_on(
    root: Path, held_twice: list[str], spoilt: Spoil, kind: type[Faulty]
) -> None:
    _, b, c, fresh = held_twice
    bad = spoilt(kind)
    began = time.monotonic()
    loads = load(root, [fresh, b, c], size=BIG).check(2)
    assert bad, "nothing was asked of the one that fails"
    assert loads.kinds()[0] == {"peer"}
    [text, *_] = loads.fallbacks(0)
    labels = [f"memory of node {node}" for node in (b, c)]
    assert text.split(": ")[0] in labels or "slot" in text
    assert any(f"came from {label}" in text for label in labels)
    assert text in loads.warned
    assert time.monotonic() - began < WAIT_S


def test_with_no_other_holder_the_disk_serves_on(
    root: Path, nodes: list[str], job: Job, spoilt: Spoil
) -> None:
    a, b, fresh = nodes[:3]
    save(job, [a, b], [1, 2], durable=[2], size=BIG)
    hold(root, a, b)
    erase(root, a)
    spoilt(Closes)
    loads = load(root, [fresh, b], size=BIG).check(2)
    assert loads.sources(0)["disk"] > 2 << 20
    assert "came from file://" in loads.fallbacks(0)[0]


def test_a_node_that_cannot_serve_at_all_is_a_holder_less(
    root: Path, held_twice: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b, c, fresh = held_twice
    made: list[Any] = []

    class Deaf(Server):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            if len(made) == 1:
                raise OSError("no address for that")
            super().__init__(*args, **options)

    monkeypatch.setattr(everstep.nodes, "Server", Deaf)
    hold(root, b, c, steps=[2])
    hold(root, c, b, steps=[2])
    loads = load(root, [fresh, b, c], size=BIG).check(2)
    assert "no address for that" in loads.warned
