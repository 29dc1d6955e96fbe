"""Loading from snapshots that nodes hold for others."""
