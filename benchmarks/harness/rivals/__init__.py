"""Adapters of other checkpoint engines, each in the configuration that its own documentation recommends for a machine
without GPU.

None of the modules imports its engine when it is loaded: what is not installed is skipped by name, with the reason.
"""
