"""What the exchange raises besides the general errors."""

from __future__ import annotations

from everstep.errors import PeerLost as PeerLost
