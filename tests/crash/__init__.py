"""Whole runs that are killed at named points, and go on."""
