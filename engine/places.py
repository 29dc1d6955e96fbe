"""Where a run lies: its canonical root, the node's identity, and the keys derived from both."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from .agent.values import TierSettings
from .backends.errors import Permanent
from .backends.open import SUPPORTED, local_path
from .errors import BadOption
from .format.hashing import hexdigest
from .plan.retention import Retention
from .policy import Tier

RUNTIME_BASE = Path("/var/tmp")
"""Node-local directory for the agent's journal and socket: it survives a reboot, as the journal must."""


@dataclass(frozen=True, slots=True)
class Place:
    """One run as seen from one node. ``url`` is canonical: two names of one directory are one run, a copied
    run is another. ``run_key`` names arenas and the agent of this run on this node."""

    url: str
    node: str
    run_key: str
    runtime_base: Path
    tiers: tuple[TierSettings, ...] = ()
    """Further places for its checkpoints."""
    shares: tuple[Tier, ...] = ()
    """Those that all nodes share, as the user gave them."""

    @property
    def near(self) -> TierSettings | None:
        """The node's own tier."""
        return next((tier for tier in self.tiers if tier.node), None)

    def agent_dir(self, run_id: str) -> Path:
        """Private directory of the run's agent on this node: lock, socket, journal, log."""
        return self.runtime_base / f"{self.run_key}-{run_id[:12]}"


def locate(root: str | os.PathLike[str], *, node: str | None = None) -> Place:
    """The place of ``root``: a path, or a ``file://`` URL. ``node`` overrides the node's name (several simulated
    nodes on one machine); the environment's EVERSTEP_NODE does so too."""
    if (
        not isinstance(root, (str, os.PathLike))
        or not isinstance(os.fspath(root), str)
        or not os.fspath(root).strip()
    ):
        raise BadOption("the root of a run must be a path or a URL", found=repr(root), expected=SUPPORTED)
    try:
        path = os.path.realpath(local_path(os.fspath(root)))
    except Permanent as error:
        raise BadOption("the root of a run cannot be used", found=error.cause, expected=SUPPORTED) from None
    url = "file://" + quote(os.fsencode(path))  # a path need be no UTF-8
    name = node or os.environ.get("EVERSTEP_NODE") or socket.gethostname()
    key = hexdigest(f"{url}\0{name}".encode())[:16]
    base = Path(os.environ.get("EVERSTEP_RUNTIME_DIR") or RUNTIME_BASE).absolute()
    return Place(url=url, node=name, run_key=key, runtime_base=base / f"everstep-{os.getuid()}")


def with_tiers(place: Place, tiers: Sequence[Tier]) -> Place:
    """The place with its further tiers. BadOption where two are one, or one is the root or lies within it."""
    found: list[TierSettings] = []
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise BadOption("tiers= must be a list of everstep.Tier", found=repr(tier))
        url = locate(tier.url).url
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
        keep = Retention(keep_last=tier.keep_last, keep_every=tier.keep_every)
        options = dict(tier.storage_options)
        found.append(TierSettings(tier.name, url, keep, tier.rate, node=node, options=options))
    shares = tuple([tier for tier in tiers if tier.scope == "shared"])
    return replace(place, tiers=tuple(found), shares=shares)
