"""Lets the tests of this directory import its ``kit``; one thread each."""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

# Tensors here are tiny: threads would only wait for each other, most of all on a busy machine.
torch.set_num_threads(1)
