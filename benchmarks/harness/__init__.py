"""Checkpoint engines side by side: workloads, systems, floors, one report."""
