"""An agent on a backend with scripted faults, or of another protocol: argv is settings and a map of wishes
in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from everstep.agent import link, protocol
from everstep.agent.main import run
from everstep.agent.values import AgentSettings
from everstep.backends import errors
from everstep.backends.api import Backend
from everstep.backends.faults import Fault, Faulty
from everstep.backends.open import open_backend


def main() -> None:
    settings, wishes = AgentSettings.from_json(sys.argv[1]), json.loads(sys.argv[2])
    protocol.PROTOCOL += wishes.get("protocol", 0)
    assert link.protocol is protocol

    def faulty(url: str, options: Mapping[str, Any]) -> Backend:
        script = []
        for fault in wishes.get("faults", []):
            kind = getattr(errors, fault.pop("error"))
            script.append(Fault(**fault, error=lambda name, kind=kind: kind(name, "scripted")))
        return Faulty(open_backend(url, options=options), script)

    run(settings, ready=os.dup(1), open_backend=faulty)


if __name__ == "__main__":
    main()
