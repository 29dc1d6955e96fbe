"""Copies of live tensors into slots."""
