"""What fsck finds: frozen values, and the exit code that a set of them comes to."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.Enum):
    """How bad a finding is. Infos and warnings hurt no checkpoint."""

    INFO = "info"
    WARNING = "warning"
    DAMAGE = "damage"
    CANNOT_TELL = "cannot-tell"


class Kind(enum.Enum):
    """What a finding is about."""

    DAMAGED = "damaged"
    """Bytes that are not what was written."""
    MISSING = "missing"
    UNDECIDED = "undecided"
    """All votes of an attempt are there but no decision: what a lost manifest looks like."""
    LEFTOVER = "leftover"
    """An attempt that was given up, or never finished."""
    TOMBSTONE = "tombstone"
    """A checkpoint that is being removed."""
    QUARANTINE = "quarantine"
    """A checkpoint that was found damaged, and that nobody had right."""
    CHAIN = "chain"
    """A delta whose base is not there."""
    PIN = "pin"
    """A pin that has expired, whose checkpoint is not there, or that cannot be read (which is damage)."""
    PEER = "peer"
    """Another node whose memory could not be asked."""
    ASIDE = "aside"
    """A damaged object that was kept when it was made anew."""
    TEMPORARY = "temporary"
    """An unfinished file of a writer that died, or that is at work."""
    NODE_TIER = "node-tier"
    """The place is a node's own tier."""
    FOREIGN = "foreign"
    """A name that is not ours, or that nothing names."""
    CANNOT_TELL = "cannot-tell"
    """The storage did not answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``name`` is the object's (or directory's) name relative to the root, or an address; ``hurts``
    says what can no longer be done because of it, "" for nothing."""

    severity: Severity
    kind: Kind
    name: str
    step: int | None
    incarnation: int | None
    message: str
    hurts: str = ""


EXIT_CLEAN = 0
EXIT_REPAIRED = 1
EXIT_DAMAGE = 4
EXIT_CANNOT_TELL = 8
EXIT_USAGE = 16


def exit_code(findings: Iterable[Finding], *, repaired: bool = False) -> int:
    """As fsck(8): the sum of 1 (something was repaired), 4 (damage left) and 8 (cannot tell) where they apply; 0 for
    infos and warnings. What is set aside is damage that is left: it was saved, and does not load. 16 is for calls that
    are wrong (the root is no run, no such step)."""
    told = list(findings)
    found = {finding.severity for finding in told}
    left = Severity.DAMAGE in found or any(finding.kind is Kind.QUARANTINE for finding in told)
    return (
        (EXIT_REPAIRED if repaired else 0)
        + (EXIT_DAMAGE if left else 0)
        + (EXIT_CANNOT_TELL if Severity.CANNOT_TELL in found else 0)
    )
