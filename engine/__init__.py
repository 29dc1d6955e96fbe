"""everstep: a tiered checkpoint storage engine for PyTorch training."""
