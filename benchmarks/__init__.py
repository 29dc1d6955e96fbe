"""Benchmarks against what the machine can do with the same bytes; `everstep bench` runs them."""
