"""Checkpoints on a backend: runs, flush, commit, load, rotation, fsck. No torch."""
