"""The memory tier: a rank's arena of slots in shared memory, its protocol, and who lives. No torch."""
