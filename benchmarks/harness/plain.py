"""What everybody has: torch.save and torch.load, and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .api import Done, Job, Pending, Session, System

FILE = "state"


class FileSession(Session):
    """One file for each step."""

    def save(self, step: int) -> Pending:
        path = self.path(step)
        path.mkdir()
        self.write(path / FILE)
        return Done()

    def load(self, step: int) -> None:
        self.read(self.path(step) / FILE)

    def write(self, path: Path) -> None:
        raise NotImplementedError

    def read(self, path: Path) -> None:
        raise NotImplementedError

    def fill(self, values: Mapping[str, Any]) -> None:
        """Copy tensors by name into the state's. Raises KeyError."""
        import torch

        with torch.no_grad():
            for name, tensor in self.job.state.tensors().items():
                tensor.copy_(values[name])


class TorchSession(FileSession):
    mmap = False

    def write(self, path: Path) -> None:
        import torch

        torch.save(self.job.state.tensors(), path)

    def read(self, path: Path) -> None:
        import torch

        self.fill(torch.load(path, mmap=self.mmap, weights_only=True))


class MmapSession(TorchSession):
    mmap = True


class SafetensorsSession(FileSession):
    def write(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.job.state.tensors(), path)

    def read(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.fill(load_file(path))


class Torch(System):
    name = "torch"
    meaning = "torch.save, torch.load and a copy"
    works = frozenset({"save", "load"})
    package = "torch"

    def open(self, job: Job) -> Session:
        return TorchSession(job)


class TorchMmap(Torch):
    name = "torch-mmap"
    meaning = "torch.save, torch.load(mmap=True) and a copy"

    def open(self, job: Job) -> Session:
        return MmapSession(job)


class Safetensors(System):
    name = "safetensors"
    meaning = "safetensors' save_file, load_file and a copy"
    works = frozenset({"save", "load"})
    package = "safetensors"

    def open(self, job: Job) -> Session:
        return SafetensorsSession(job)
