"""The command line. Imports no torch: help is there at once, and ls, show and fsck run without it."""
