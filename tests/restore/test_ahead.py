"""The beginnings of images are read while a load still plans: once, no more memory, and the same errors."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import reading
from everstep.backends.localfs import LocalFiles
from everstep.errors import Damaged, StateMismatch
from everstep.store import ahead, fill, pieces
from everstep.store.pieces import InFlight

from tests.buffers import Buffers

MIB = 1 << 20
WAIT_S = 20.0


def state(value: float, mib: int = 6) -> dict[str, Any]:
    return {
        "model": {name: torch.full((mib * MIB // 8,), value) for name in ("a", "b")},
        "other": {"c": torch.full((MIB // 4,), value)},
    }


class Reads:
    """Large reads of images: how often each place, how many at once, and the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: Counter[tuple[str, int]] = Counter()
        self.under_way = 0
        self.began = threading.Event()
        self._lock = threading.Lock()
        plain = LocalFiles.read_into

        def read_into(files: LocalFiles, name: str, offset: int, view: memoryview) -> None:
            with self._lock:
                self.places[name, offset] += 1
                self.under_way += 1
            self.began.set()
            try:
                plain(files, name, offset, view)
            finally:
                with self._lock:
                    self.under_way -= 1

        monkeypatch.setattr(LocalFiles, "read_into", read_into)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def when_planning(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    plain = reading.plan_restore

    def plan_restore(*args: Any, **kwargs: Any) -> Any:
        act()
        return plain(*args, **kwargs)

    monkeypatch.setattr(reading, "plan_restore", plan_restore)


def require_ones(live: dict[str, Any]) -> None:
    for part in live.values():
        assert all(bool((tensor == 1.0).all()) for tensor in part.values())


def test_reading_begins_before_the_plan_and_reads_nothing_twice(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "FROM_FILES", InFlight(8, MIB))
    everstep.save(tmp_path, 1, state(1.0))
    begun: list[bool] = []
    when_planning(monkeypatch, lambda: begun.append(reads.began.wait(WAIT_S)))
    live = state(2.0)
    everstep.load(tmp_path, into=live)
    assert begun == [True]
    assert set(reads.places.values()) == {1}
    require_ones(live)


def test_no_more_buffers_than_a_filling_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(monkeypatch, ahead, fill)
    monkeypatch.setattr(pieces, "FROM_FILES", InFlight(3, MIB))
    everstep.save(tmp_path, 1, state(1.0))
    live = state(2.0)
    everstep.load(tmp_path, into=live)
    require_ones(live)
    assert buffers.most == 3


def test_a_load_from_files_has_24_mib_of_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = Buffers(monkeypatch, ahead, fill)
    everstep.save(tmp_path, 1, {"w": torch.ones(16 * MIB)})
    live = {"w": torch.zeros(16 * MIB)}
    everstep.load(tmp_path, into=live)
    assert bool((live["w"] == 1).all())
    assert 16 * MIB <= buffers.most_bytes <= 24 * MIB


def test_what_is_read_for_nothing_ends_with_the_load(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    everstep.save(tmp_path, 1, state(1.0))
    when_planning(monkeypatch, lambda: reads.began.wait(WAIT_S))
    with pytest.raises(StateMismatch, match="another"):
        everstep.load(tmp_path, into={"model": {"another": torch.zeros(3)}})
    assert reads.began.is_set()
    assert reads.under_way == 0


@pytest.mark.parametrize("how", [{"parts": ["other"]}, {"allow": {"unexpected"}}], ids=["parts", "allow"])
def test_what_may_not_be_needed_is_not_read_ahead(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    everstep.save(tmp_path, 1, state(1.0))
    before: list[int] = []
    when_planning(monkeypatch, lambda: before.append(sum(reads.places.values())))
    live = {"other": state(2.0)["other"]}
    everstep.load(tmp_path, into=live, **how)
    assert before == [0]
    assert not any("model" in name for name, _ in reads.places)
    require_ones(live)


def test_damage_in_what_is_read_ahead_is_named(tmp_path: Path, reads: Reads) -> None:
    everstep.save(tmp_path, 1, state(1.0))
    [image] = tmp_path.rglob("*.model.safetensors")
    data = bytearray(image.read_bytes())
    data[MIB] ^= 1
    image.write_bytes(data)
    live = state(2.0)
    with pytest.raises(Damaged, match=image.name):
        everstep.load(tmp_path, into=live)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    everstep.save(tmp_path, 1, state(1.0))
    [image] = tmp_path.rglob("*.model.safetensors")
    image.unlink()
    with pytest.raises(Damaged, match=f"{image.name} is missing"):
        everstep.load(tmp_path, into=state(2.0))
