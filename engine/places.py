"""Where a run lies: its canonical root, the node's identity, and the keys derived from both."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from .backends.errors import Permanent
from .backends.open import SUPPORTED, local_path
from .errors import BadOption
from .format.hashing import hexdigest

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
