"""What all tests have in common."""

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: collections that tests ask for, or cause, need not go through a million objects of it
    each time."""
    gc.collect()
    gc.freeze()
