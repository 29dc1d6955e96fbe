"""Adapters of other checkpoint engines, each in the configuration that its own documentation recommends for a machine
without GPU.

None of the modules imports its engine when it is loaded: what is not installed is skipped by name, with the reason.
"""

from __future__ import annotations

_HERE = "everstep.benchmarks.harness.rivals"

SPECS: tuple[str, ...] = (
    f"{_HERE}.dcp:Dcp",
    f"{_HERE}.dcp:DcpThreads",
    f"{_HERE}.dcp:DcpAsync",
    f"{_HERE}.dcp:DcpAsyncCached",
    f"{_HERE}.dcp:DcpAsyncShared",
    f"{_HERE}.dcp:DcpAsyncStaging",
    f"{_HERE}.dcp:DcpAsyncProcess",
    f"{_HERE}.torchsnapshots:TorchSnapshot",
    f"{_HERE}.torchsnapshots:TorchSnapshotAsync",
    f"{_HERE}.torch_checkpoints:TorchCheckpointing",
    f"{_HERE}.torch_checkpoints:TorchCheckpointingAsync",
    f"{_HERE}.nvrx:Nvrx",
    f"{_HERE}.nvrx:NvrxAsync",
    f"{_HERE}.flash:DLRover",
    f"{_HERE}.fastpersist:DeepSpeedFast",
    f"{_HERE}.orbax_numpy:Orbax",
    f"{_HERE}.orbax_numpy:OrbaxAsync",
    f"{_HERE}.streamers:RunaiStreamer",
    f"{_HERE}.streamers:FastSafetensors",
    f"{_HERE}.s3:S3TorchConnector",
)
"""``module:Class`` of each system."""

__all__ = ["SPECS"]
