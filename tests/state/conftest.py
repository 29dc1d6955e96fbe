"""Lets the tests of this directory import its ``kit``."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
