"""Which systems there are, by name: those that come along, those of entry points, and those given as module:Class."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata

from .api import WORKS, System

GROUP = "everstep.benchmark_systems"
BUILT_IN = tuple(
    f"everstep.benchmarks.harness.{spec}"
    for spec in (
        "ours:Everstep",
        "ours:EverstepOverlap",
        "plain:Torch",
        "plain:TorchMmap",
        "plain:Safetensors",
        "rivals.dcp:Dcp",
        "rivals.dcp:DcpThreads",
        "rivals.dcp:DcpAsync",
        "rivals.dcp:DcpAsyncCached",
        "rivals.dcp:DcpAsyncShared",
        "rivals.dcp:DcpAsyncStaging",
        "rivals.dcp:DcpAsyncProcess",
        "rivals.torchsnapshots:TorchSnapshot",
        "rivals.torchsnapshots:TorchSnapshotAsync",
        "rivals.torch_checkpoints:TorchCheckpointing",
        "rivals.torch_checkpoints:TorchCheckpointingAsync",
        "rivals.nvrx:Nvrx",
        "rivals.nvrx:NvrxAsync",
        "rivals.flash:DLRover",
        "rivals.fastpersist:DeepSpeedFast",
        "rivals.orbax_numpy:Orbax",
        "rivals.orbax_numpy:OrbaxAsync",
        "rivals.streamers:RunaiStreamer",
        "rivals.streamers:FastSafetensors",
        "rivals.s3:S3TorchConnector",
        "rivals.objects:S3fs",
        "rivals.objects:Boto3",
    )
)
"""Their modules import no engine when they are loaded."""


class UnknownName(ValueError):
    """A workload or system that there is not, or a class that is no adapter."""


def all_systems() -> dict[str, str]:
    """Name to ``module:Class`` of every system that is known. Those that come along stand first; a user's cannot take
    their names. One whose module fails is left out with a warning."""
    found = {load(spec).name: spec for spec in BUILT_IN}
    for point in metadata.entry_points(group=GROUP):
        try:
            found.setdefault(load(point.value).name, point.value)
        except UnknownName as error:
            warnings.warn(f"everstep: the installed system {point.name!r} is left out: {error}", stacklevel=2)
    return found


def load(spec: str) -> System:
    """The system that ``module:Class`` names. Raises UnknownName."""
    module, _, name = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's adapter lies beside what he runs
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnknownName(f"{spec} cannot be loaded: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, System)):
        raise UnknownName(f"{spec} is no subclass of everstep.benchmarks.harness.api.System")
    for attribute in ("name", "meaning", "works"):
        if not getattr(kind, attribute, None):
            raise UnknownName(f"{spec} does not say its {attribute!r}")
    if not kind.works <= WORKS:
        raise UnknownName(f"{spec}: works has {sorted(kind.works - WORKS)}; known are {sorted(WORKS)}")
    return kind()


def chosen(names: Sequence[str]) -> dict[str, str]:
    """Name to ``module:Class`` of the systems that ``names`` ask for (all of them, if none), in that order. Raises
    UnknownName, telling the known ones."""
    known = all_systems()
    if not names:
        return known
    found: dict[str, str] = {}
    for name in names:
        if ":" in name:
            found[load(name).name] = name
        elif name in known:
            found[name] = known[name]
        else:
            raise UnknownName(f"there is no system {name!r}; known: {', '.join(known)}, or module:Class")
    return found


__all__ = ["UnknownName", "all_systems", "chosen", "load"]
