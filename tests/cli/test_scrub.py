"""``everstep scrub``: what is proved next, what it says, where it goes on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from cli_kit import LATER_STEP, everstep
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.store.scrub import Scrub, Scrubbed, next_due


def scrubbed(root: Path, *, every_s: float = 1000.0, now: float = 1000.0) -> list[Scrubbed]:
    async def go() -> list[Scrubbed]:
        backend = LocalBackend(root)
        try:
            return await Scrub(backend, every_s, clock=lambda: now).run(once=True)
        finally:
            await backend.close()

    return asyncio.run(go())


def test_never_proved_first_then_the_oldest_proof() -> None:
    keys = [(1, 1), (1, 2), (1, 3)]
    assert next_due(keys, {}, 10, 100) == (1, 3)
    assert next_due(keys, {(1, 3): 100}, 10, 100) == (1, 2)
    proved = {(1, 1): 95.0, (1, 2): 80.0, (1, 3): 85.0}
    assert next_due(keys, proved, 10, 100) == (1, 2)
    assert next_due(keys, {**proved, (1, 2): 100}, 10, 100) == (1, 3)
    assert next_due(keys, dict.fromkeys(keys, 95.0), 10, 100) is None
    assert next_due(keys, dict.fromkeys(keys, 1e9), 10, 100) is None  # a clock that was ahead
    assert next_due([], proved, 10, 100) is None


def test_every_checkpoint_gets_its_turn_whatever_the_order() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    keys = [(1, step) for step in range(20)]
    proved: dict[tuple[int, int], float] = {key: numbers.uniform(0, 50) for key in keys[::2]}
    done = []
    while (key := next_due(keys, proved, 40, 100)) is not None:
        done.append(key)
        proved[key] = 100
    assert sorted(done) == keys
    assert set(done[:10]) == set(keys[1::2])


def test_a_later_scrub_goes_on_where_the_first_stopped(run: Path) -> None:
    first = [one.key for one in scrubbed(run)]
    assert first == [(2, 5), (1, 4), (1, 3), (1, 2), (1, 1)]
    assert scrubbed(run, now=1500.0) == []
    assert [one.key for one in scrubbed(run, now=2500.0)] == sorted(first)


def test_damage_is_in_the_answer_and_in_the_log(run: Path) -> None:
    name = names.image(LATER_STEP, 2, 1, 0, "model")
    data = bytearray((run / name).read_bytes())
    data[-1] ^= 1
    (run / name).write_bytes(data)
    said = everstep("scrub", run, "--once", "--rate", "1GiB", "--json")
    assert said.code == 4
    hurt = [(one["step"], d["name"]) for one in said.json["proved"] for d in one["damage"]]
    assert hurt == [(LATER_STEP, name)]
    assert name in said.err
    logged = "".join(path.read_text() for path in (run / names.EVENTS).glob("scrub-*"))
    assert logged.count('"scrubbed"') == 5
    assert name in logged
    again = everstep("scrub", run, "--once", "--json")
    assert (again.code, [one["step"] for one in again.json["proved"]]) == (4, [LATER_STEP])
    data[-1] ^= 1
    (run / name).write_bytes(data)
    whole = everstep("scrub", run, "--once", "--json")
    assert (whole.code, [one["step"] for one in whole.json["proved"]]) == (0, [LATER_STEP])
    assert "nothing was due" in everstep("scrub", run, "--once").out


def test_once_proves_each_checkpoint_once_however_short_the_time_is(run: Path) -> None:
    assert everstep("scrub", run, "--once", "--every", "0s").code == 2
    said = everstep("scrub", run, "--once", "--every", "0.000001s", "--json")
    assert (said.code, len(said.json["proved"])) == (0, 5)


@pytest.mark.parametrize("data", [b"", None])
def test_a_damaged_run_is_damage(run: Path, data: bytes | None) -> None:
    (run / names.RUN).unlink()
    if data is not None:
        (run / names.RUN).write_bytes(data)
    assert everstep("scrub", run, "--once").code == 4


def test_no_run(tmp_path: Path) -> None:
    assert everstep("scrub", tmp_path, "--once").code == 1
