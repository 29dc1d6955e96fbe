"""Agents of different nodes: how they talk, what one sends, and what another keeps of it."""
