"""Loading from the memory of several nodes."""
