"""Storage backends: bytes and names, nothing of checkpoints. Imports nothing from the engine."""
