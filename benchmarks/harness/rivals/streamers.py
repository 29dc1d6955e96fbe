"""Loaders of safetensors files: runai-model-streamer and fastsafetensors. The files are made by safetensors."""

from __future__ import annotations

from pathlib import Path

from ..api import Done, Job, Pending, Session, System
from .parts import absent, fill


class SafetensorsFile(Session):
    """One file for each step."""

    def save(self, step: int) -> Pending:
        from safetensors.torch import save_file

        self.path(step).mkdir()
        save_file(self.job.state.tensors(), self.file(step))
        return Done()

    def file(self, step: int) -> Path:
        return self.path(step) / "state.safetensors"


class RunaiSession(SafetensorsFile):
    """Its own choice of readers and memory; tensors are copied out of its buffers as they come."""

    def load(self, step: int) -> None:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(self.file(step)), owned=False)
            fill(self.job.state, streamer.get_tensors())


class FastSafetensorsSession(SafetensorsFile):
    """Its reader without GPU Direct Storage: a buffer of the whole file, out of which tensors are copied."""

    def load(self, step: int) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        try:
            loader.add_filenames({0: [str(self.file(step))]})
            buffer = loader.copy_files_to_device()
            try:
                fill(self.job.state, ((name, buffer.get_tensor(name)) for name in loader.get_keys()))
            finally:
                buffer.close()
        finally:
            loader.close()


class RunaiStreamer(System):
    name = "runai"
    meaning = "runai-model-streamer reads a safetensors file, and a copy"
    works = frozenset({"load"})
    package = "runai-model-streamer"

    def missing(self) -> str | None:
        return absent("runai-model-streamer")

    def open(self, job: Job) -> Session:
        return RunaiSession(job)


class FastSafetensors(System):
    name = "fastsafetensors"
    meaning = "fastsafetensors reads a safetensors file, and a copy"
    works = frozenset({"load"})
    package = "fastsafetensors"

    def missing(self) -> str | None:
        return absent("fastsafetensors")

    def open(self, job: Job) -> Session:
        return FastSafetensorsSession(job)


__all__ = ["FastSafetensors", "RunaiStreamer"]
