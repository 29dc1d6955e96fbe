"""The background process of a node: it seals, writes, commits and rotates, outside the trainer. No torch."""
