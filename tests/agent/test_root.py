"""The agent's root follows the trainers' options and credentials, which are shown nowhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import everstep.agent.guard
import pytest
from everstep.agent.guard import SameRun
from everstep.agent.root import FORMER_MAX, Root, take_environment
from everstep.agent.values import AgentSettings, storage_environment
from everstep.backends.api import Backend, Capabilities
from everstep.backends.count import Counting
from everstep.backends.files import LocalBackend
from everstep.errors import SaveFailed
from everstep.store.runs import create_run

URL = "s3://bucket/run"
SETTINGS = AgentSettings(URL, "k" * 16, "node", Path("/nowhere"), options={"secret": "swordfish"})


class Opened:
    """Backends by the options that they were opened with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[tuple[Mapping[str, Any], str | None]] = []
        self.closed: list[int] = []

    def __call__(self, url: str, options: Mapping[str, Any]) -> Backend:
        opened, number = self, len(self.made)

        class Noted(LocalBackend):
            async def close(self) -> None:
                opened.closed.append(number)
                await super().close()

        self.made.append((options, os.environ.get("AWS_PROFILE")))
        return Noted(self.root)


def test_other_options_and_another_environment_open_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "first")
    monkeypatch.setenv("AWS_GONE", "x")

    async def main() -> None:
        opened = Opened(tmp_path)
        root = Root(SETTINGS.root, SETTINGS.options, opened)
        settings = replace(SETTINGS, environment=storage_environment(URL))

        async def renew(theirs: AgentSettings) -> None:
            await root.renew(theirs.options, anew=take_environment(theirs))

        await renew(settings)
        await renew(replace(settings, linger_s=7.0))
        await renew(SETTINGS)
        assert len(opened.made) == 1, "nothing else came, or nothing was said"
        before = root.inner

        await renew(replace(settings, options={"secret": "other"}))
        assert opened.made[-1] == ({"secret": "other"}, "first") and root.inner is not before
        other = {"AWS_PROFILE": "second"}
        await renew(replace(settings, options={"secret": "other"}, environment=other))
        assert opened.made[-1] == ({"secret": "other"}, "second")
        assert storage_environment(URL) == other
        assert opened.closed == list(range(len(opened.made) - 1 - FORMER_MAX)), "older ones are closed"
        await root.write("x", b"1")
        await root.close()
        assert sorted(opened.closed) == [0, 1, 2]

    asyncio.run(main())


def test_the_environment_matters_to_stores_that_read_it() -> None:
    os.environ["AWS_X"] = "1"
    try:
        assert storage_environment("file:///run") == {}
        assert storage_environment(URL)["AWS_X"] == "1"
    finally:
        del os.environ["AWS_X"]


def test_secrets_travel_and_are_not_shown() -> None:
    settings = replace(SETTINGS, environment={"AWS_SECRET_ACCESS_KEY": "sesame"})
    assert AgentSettings.from_json(settings.to_json()) == settings
    assert "swordfish" not in repr(settings) and "sesame" not in repr(settings)


class Flat(LocalBackend):
    """Local files, as if each request cost something."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.capabilities = Capabilities(atomic_create=True, shared=True, flat=True)


def test_where_a_look_is_a_request_what_decides_nothing_is_looked_at_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        counting = Counting(Flat(tmp_path))
        run = await create_run(counting, chunk_bytes=4096)
        gone: list[str] = []
        guarded = SameRun(counting, run, gone.append)
        counting.reset()
        for number in range(5):
            await guarded.write(f"events/{number}.jsonl", b"x")
        await guarded.delete([])
        assert counting.operations["read"] == 1
        (tmp_path / "run.json").unlink()
        await guarded.write("events/9.jsonl", b"x")
        with pytest.raises(SaveFailed, match="is gone"):
            await guarded.create("decisive", b"x")
        assert gone == ["no run"]
        monkeypatch.setattr(everstep.agent.guard, "LOOK_S", 0.0)
        late = SameRun(counting, run, gone.append)
        with pytest.raises(SaveFailed):
            await late.write("events/10.jsonl", b"x")
        assert not (tmp_path / "decisive").exists() and not (tmp_path / "events" / "10.jsonl").exists()
        await counting.close()

    asyncio.run(main())
