"""What the exchange raises besides the general errors."""

from __future__ import annotations

from everstep.errors import Damaged


class PeerLost(Damaged):
    """Another node's memory cannot be read: it does not answer, or gives what it should not. To a load that is one
    holder less, as if its bytes were damaged: the next one serves, or the step is passed over."""
