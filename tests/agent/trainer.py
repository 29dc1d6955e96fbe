"""A trainer process of the agent's tests: one JSON command a line on stdin, one JSON answer a line on
stdout."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from everstep.agent.values import AgentSettings

from .agent_kit import Place, Trainer


def run(trainer: Trainer, name: str, *args: Any) -> Any:
    if name == "connect":
        trainer.connect()
        os.environ.pop("EVERSTEP_AGENT_POINTS", None)  # for the first agent only
        return None
    if name == "verdict":
        progress = trainer.verdict(*args)
        return [progress.stage, progress.error]
    if name == "poll":
        return [[news.stage, news.step, news.error] for news in trainer.agent.poll()]
    if name == "bye":
        trainer.agent.bye(timeout_s=10.0, flush=args[0])
        return None
    value = getattr(trainer, name)(*args)
    return value if isinstance(value, (int, str, type(None))) else None


def main() -> None:
    given = json.loads(sys.argv[1])
    place = Place(Path(given["base"]), given["run_id"])
    place.settings = AgentSettings.from_wire(given["settings"])
    trainer = Trainer.make(place, given["rank"], given["world"], given["incarnation"])
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = {"value": run(trainer, name, *args)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
