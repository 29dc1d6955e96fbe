"""Snapshots from one node's memory to the ranks of another, while they load."""
