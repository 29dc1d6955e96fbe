"""Whether the ranks of a job together store every global tensor, each element exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StateMismatch
from ..format.entries import Box, Entry, Scope
from .boxes import contains, is_valid, misfit
from .problems import Problems

_Held = tuple[int, Entry]
"""An entry and the rank that has it."""

_Pattern = tuple[tuple[int, ...], tuple[tuple[Box, ...], ...]]
"""A shape and the boxes stored of it, by rank: most tensors of a job are cut like another one."""


def check_coverage(ranks: Sequence[Sequence[Entry]]) -> None:
    """Check the entries of all ranks (index: rank) against each other.

    Every GLOBAL key has one dtype and one shape on all ranks that have it, is GLOBAL on all of them, and its
    stored boxes cover each element exactly once; a key of an empty tensor is stored by some rank. Keys may be
    absent on some ranks (stages of a pipeline). Cost: n log n in the number of entries and boxes.

    Raises one :class:`StateMismatch` that names every key concerned, the element and the ranks.
    """
    problems = Problems()
    first: dict[tuple[str, str], _Held] = {}
    stored: dict[tuple[str, str], list[_Held]] = {}
    private: dict[tuple[str, str], int] = {}
    for rank, entries in enumerate(ranks):
        for entry in entries:
            name = (entry.part, entry.key)
            if entry.scope is not Scope.GLOBAL:
                private.setdefault(name, rank)
                continue
            other_rank, other = first.setdefault(name, (rank, entry))
            if other.dtype != entry.dtype or other.shape != entry.shape:
                text = f"{_tensor(other)} on rank {other_rank}, {_tensor(entry)} on rank {rank}"
                problems.add(entry.part, entry.key, text)
            elif entry.image is not None:
                stored.setdefault(name, []).append((rank, entry))
    for name in sorted(private.keys() & first.keys()):
        problems.add(
            *name, f"one tensor of the job on rank {first[name][0]}, rank {private[name]}'s own there"
        )
    good: set[_Pattern] = set()
    for name, (_, entry) in first.items():
        wrong = _misfit(entry.shape, stored.get(name, ()), good)
        if wrong is not None:
            problems.add(*name, wrong)
    problems.raise_if_any(StateMismatch, "the ranks do not store every tensor of the job exactly once")


def _tensor(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _misfit(shape: tuple[int, ...], held: Sequence[_Held], good: set[_Pattern]) -> str | None:
    """What is wrong with the boxes stored of one key, in words; None if they tile its shape (then noted in
    ``good``, which saves looking again)."""
    if not held:
        return "stored by no rank"
    full = Box.full(shape)
    if len(held) == 1 and held[0][1].boxes == (full,):
        return None
    pattern = (shape, tuple([entry.boxes for _, entry in held]))
    if pattern in good:
        return None
    boxes = [(box, rank) for rank, entry in held for box in entry.boxes]
    for box, rank in boxes:
        if not is_valid(box, shape):
            return f"rank {rank} stores {box.offsets}+{box.lengths}, outside shape {shape}"
    try:
        wrong = misfit([box for box, _ in boxes], full)
    except ValueError as problem:
        return str(problem)
    if wrong is None:
        good.add(pattern)
        return None
    point, surplus = wrong
    if surplus < 0:
        return f"element {point} of shape {shape} is stored by no rank"
    twice = sorted({rank for box, rank in boxes if contains(box, point)})
    return f"element {point} of shape {shape} is stored {surplus + 1} times, by ranks {twice}"
