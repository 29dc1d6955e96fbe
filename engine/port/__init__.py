"""Checkpoints of other formats into a run, and out of one: torch.save files, torch.distributed.checkpoint directories,
safetensors."""
