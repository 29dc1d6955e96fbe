"""Taking snapshots: flatten the state, plan its layout, copy it into a slot, at once or behind the next step."""

from __future__ import annotations
