"""Tests of parity: arithmetic, stripes, agents that keep it, and rebuilding from it."""
