"""Decisions as pure functions of frozen values: no I/O, no clock, no randomness, no torch."""
