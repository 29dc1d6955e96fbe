"""Bounds of all that an agent does behind flushes, one checkpoint after the other: uploads, copies to further tiers,
deltas that are made fulls."""

WAITING_MAX = 2
"""Checkpoints that wait behind the one that is at work; of more, the oldest is given up."""
THREADS = 2
"""That hash what passes through."""
POLL_FIRST_S = 0.05
"""Between the first looks whether the other nodes' ranks are there."""
