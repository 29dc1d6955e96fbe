"""Where a run lies: its canonical root, the node's identity, and the keys derived from both."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .agent.places import connect
from .agent.values import TierSettings
from .backends.api import Backend
from .backends.errors import Permanent, UnknownOption
from .backends.open import SUPPORTED, is_local, local_path, locate_store, open_backend
from .errors import BadOption
from .format.hashing import hexdigest
from .plan.pace import TIER_RATE
from .policy import Tier

RUNTIME_BASE = Path("/var/tmp")
"""Node-local directory for the agent's journal and socket: it survives a reboot, as the journal must."""


@dataclass(frozen=True, slots=True)
class Place:
    """One run as seen from one node. ``url`` is canonical: two names of one directory are one run, a copied
    run is another. ``run_key`` names arenas and the agent of this run on this node. ``options`` are the storage's, and
    may be secret."""

    url: str
    node: str
    run_key: str
    runtime_base: Path
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    tiers: tuple[TierSettings, ...] = ()
    """Further places for its checkpoints."""
    shares: tuple[Tier, ...] = ()
    """Those that all nodes share, as the user gave them."""

    @property
    def near(self) -> TierSettings | None:
        """The node's own tier."""
        return next((tier for tier in self.tiers if tier.node), None)

    @property
    def urls(self) -> list[str]:
        """Of the root and all tiers."""
        return [self.url, *[tier.url for tier in self.tiers]]

    def agent_dir(self, run_id: str) -> Path:
        """Private directory of the run's agent on this node: lock, socket, journal, log."""
        return self.runtime_base / f"{self.run_key}-{run_id[:12]}"

    def has_agent(self) -> bool:
        """Whether an agent of a run at this root is there on this node already. Does not wait."""
        for directory in self.runtime_base.glob(f"{self.run_key}-*"):
            found = connect(directory)
            if found is not None:
                found.close()
                return True
        return False

    def open(self) -> Backend:
        """Where the run lies. Nothing is asked yet. Raises BadOption where no backend knows it."""
        return _opened(self.url, self.options)

    def open_tiers(self) -> list[Backend]:
        """The further tiers that all nodes share, nearest first. Raises BadOption as :meth:`open`."""
        return [_opened(tier.url, tier.options) for tier in self.tiers if not tier.node]

    def open_near(self) -> list[Backend]:
        """The node's own tier, if there is one."""
        return [open_backend(tier.url) for tier in self.tiers if tier.node]

    def open_root(self) -> Backend:
        """As :meth:`open`, to write there. Raises BadOption where the storage cannot hold a run by itself."""
        backend = self.open()
        if not backend.capabilities.atomic_create:
            raise BadOption(
                f"{self.url} cannot be the root of a run",
                found="storage that has no atomic create-if-absent",
                expected="a directory that all nodes share, or an s3:// URL",
                hint="It can be a further tier of a run, and a run that was copied there can be read.",
            )
        return backend


def _opened(url: str, options: Mapping[str, Any]) -> Backend:
    """The backend of what all nodes share. BadOption where none knows it, or not with these options."""
    try:
        return open_backend(url, shared=True, options=options)
    except UnknownOption as error:
        raise BadOption(
            f"{url}: an unknown storage option", found=error.cause, expected=f"some of {error.known}"
        ) from None
    except Permanent as error:
        raise BadOption(f"{url} cannot be opened", found=error.cause, expected=SUPPORTED) from None


def locate(
    root: str | os.PathLike[str], *, node: str | None = None, options: Mapping[str, Any] | None = None
) -> Place:
    """The place of ``root``: a path, or a URL (``options`` are for its storage). ``node`` overrides the node's name
    (several simulated nodes on one machine); the environment's EVERSTEP_NODE does so too."""
    if (
        not isinstance(root, (str, os.PathLike))
        or not isinstance(os.fspath(root), str)
        or not os.fspath(root).strip()
    ):
        raise BadOption("the root of a run must be a path or a URL", found=repr(root), expected=SUPPORTED)
    plain = _checked(options)
    try:
        # Of a directory its real path: two ways there are one run.
        found = locate_store(os.path.realpath(local_path(root)) if is_local(root) else root, plain)
    except Permanent as error:
        raise BadOption("the root of a run cannot be used", found=error.cause, expected=SUPPORTED) from None
    name = node or os.environ.get("EVERSTEP_NODE") or socket.gethostname()
    key = hexdigest(f"{found.url}\0{name}".encode())[:16]
    base = Path(os.environ.get("EVERSTEP_RUNTIME_DIR") or RUNTIME_BASE).absolute()
    return Place(found.url, name, key, base / f"everstep-{os.getuid()}", found.options)


def with_tiers(place: Place, tiers: Sequence[Tier]) -> Place:
    """The place with its further tiers. BadOption where two are one, or one is the root or lies within it."""
    found: list[TierSettings] = []
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise BadOption("tiers= must be a list of everstep.Tier", found=repr(tier))
        found_at = locate(tier.url, options=tier.storage_options)
        url = found_at.url
        for name, other in [("the root", place.url), *((one.name, one.url) for one in found)]:
            if f"{url}/".startswith(f"{other}/") or f"{other}/".startswith(f"{url}/"):
                raise BadOption(
                    f"tier {tier.name} and {name} are not two places",
                    found=url,
                    expected=f"none within {other}",
                )
        if any(tier.name == one.name for one in found):
            raise BadOption("two tiers have one name", found=tier.name, hint="Tier(..., name=)")
        node = tier.scope == "node"
        if node and any(one.node for one in found):
            raise BadOption("a node has one tier of its own", found=[one.name for one in found] + [tier.name])
        options = dict(found_at.options)
        # What frees slots has no limit unless one is asked for.
        rate = None if node and tier.rate == TIER_RATE else tier.rate
        found.append(TierSettings(tier.name, url, tier.retention, rate, node=node, options=options))
    shares = tuple([tier for tier in tiers if tier.scope == "shared"])
    return replace(place, tiers=tuple(found), shares=shares)


def _checked(options: object) -> dict[str, Any]:
    """``options`` as plain values, for they go to the agent's process. What they are is not told: they may be
    secret."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise BadOption(
            "storage_options= is no mapping", found=type(options).__name__, expected='{"endpoint_url": ...}'
        )
    plain: dict[str, Any] = {}
    for key, value in options.items():
        try:
            plain[_name(key)] = _plain(value)
        except TypeError as error:
            raise BadOption(
                "storage_options= holds what cannot be passed to another process",
                found=f"{key}: {error}",
                expected="texts, numbers, booleans, None, and lists and dicts of these",
            ) from None
    return plain


def _plain(value: object) -> Any:
    """``value`` with lists for tuples; TypeError names the type that is not plain."""
    if isinstance(value, Mapping):
        return {_name(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def _name(key: object) -> str:
    if isinstance(key, str):
        return key
    raise TypeError(f"a key of type {type(key).__name__}")
