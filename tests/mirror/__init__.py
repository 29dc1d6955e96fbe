"""Copying checkpoints from place to place."""
