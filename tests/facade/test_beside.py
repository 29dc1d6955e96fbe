"""The first save opens the run beside its copy: nothing counts before the records are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors, opening
from everstep.opening import Claim

from .kit import Forked, in_memory, opened, until

Write = Callable[..., Any]


@pytest.fixture
def before_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done on the thread that writes the records, before it does."""

    def put(act: Callable[[], object]) -> None:
        original: Write = Claim.write

        def write(claim: Claim, *args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(Claim, "write", original)
            act()
            return original(claim, *args, **kwargs)

        monkeypatch.setattr(Claim, "write", write)

    return put


def records(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "incarnations").glob("*.json"))


def test_the_copy_goes_on_beside_the_records_and_counts_only_with_them(
    root: Path, before_write: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, found = threading.Event(), []
    await_written = opening.Opening._await_written

    def wait(one: opening.Opening) -> bool:
        copied.set()
        return await_written(one)

    def look() -> None:
        assert copied.wait(20), "the copy waited for the records"
        found.append((in_memory(root), root.exists()))

    monkeypatch.setattr(opening.Opening, "_await_written", wait)
    before_write(look)
    with opened(root) as ckpt:
        ckpt.load({"w": torch.zeros(1000)})
        ckpt.save(1, {"w": torch.ones(1000)}).wait()
        assert found == [([], False)]
        assert in_memory(root) == [1]
    assert torch.equal(everstep.load(root)["w"], torch.ones(1000))


@pytest.mark.parametrize(
    "error", [errors.StorageFull("no room"), errors.SaveFailed("no"), OSError("strange")]
)
def test_what_keeps_the_records_from_being_written_is_told_as_it_is_and_the_next_call_tries_again(
    root: Path, before_write: Callable[[Callable[[], object]], None], error: Exception
) -> None:
    def fail() -> None:
        raise error

    before_write(fail)
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        with pytest.raises(type(error), match=str(error)):
            ckpt.save(1, {"n": 1})
        assert in_memory(root) == [], "nothing is left that a restart could take for a snapshot"
        assert not root.exists()
        ckpt.save(1, {"n": 1}).wait()
    assert records(root) == ["0001.json"]
    assert everstep.load(root)["n"] == 1


@pytest.mark.parametrize("begun_before", [False, True])
def test_who_is_overtaken_by_another_opening_is_refused_and_disturbs_nothing(
    root: Path,
    forked: Callable[..., Forked],
    before_write: Callable[[Callable[[], object]], None],
    begun_before: bool,
) -> None:
    """Both have looked, and found nobody."""
    if begun_before:
        everstep.save(root, 1, {"n": 1})

    def train(say: Callable[..., None]) -> None:
        until((root.parent / "go").exists, "the moment")
        with opened(root) as other:
            other.load({"n": 0})
            other.save(2, {"n": 2}).wait()
            say("open")
            until((root.parent / "end").exists, "the word to end")
            other.save(3, {"n": 3}).wait()

    number = 2 if begun_before else 1
    ckpt = opened(root)
    ckpt.load({"n": 0})
    child = forked(train)

    def overtake() -> None:
        (root.parent / "go").touch()
        assert child.line() == "open"

    before_write(overtake)
    with pytest.raises(errors.RunInUse, match="at the same moment"):
        ckpt.save(7, {"n": 7})
    with pytest.raises(errors.RunInUse, match="another process writes"):
        ckpt.save(7, {"n": 7})
    assert 7 not in in_memory(root)
    assert records(root)[-1] == f"{number:04d}.json", (
        "no incarnation was added that would supersede the winner"
    )
    with pytest.raises(errors.RunInUse):  # the winner's mark is still there
        everstep.save(root, 9, {"n": 9})
    ckpt.close()
    (root.parent / "end").touch()
    assert child.end()[0] == 0
    assert everstep.load(root)["n"] == 3


def test_a_first_save_that_is_interrupted_after_its_record_is_written_can_be_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an emergency save does, with nothing loaded: what stands in the run is this process's own attempt."""
    finish = opening.Opening.finish

    def interrupted(one: opening.Opening) -> Any:
        monkeypatch.setattr(opening.Opening, "finish", finish)
        finish(one).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(opening.Opening, "finish", interrupted)
    with opened(root) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"n": 1})
        assert records(root) == ["0001.json"]
        ckpt.save(1, {"n": 1}).wait()
    assert records(root) == ["0001.json", "0002.json"]
    assert everstep.load(root)["n"] == 1
    with opened(root) as ckpt, pytest.raises(errors.NotLoaded):
        ckpt.save(2, {"n": 2})


def test_who_finds_another_writer_is_told_of_it_also_with_nothing_loaded(
    root: Path, forked: Callable[..., Forked]
) -> None:
    def train(say: Callable[..., None]) -> None:
        with opened(root) as other:
            other.save(1, {"n": 1}).wait()
            say("open")
            until((root.parent / "end").exists, "the word to end")

    child = forked(train)
    assert child.line() == "open"
    with opened(root) as ckpt, pytest.raises(errors.RunInUse):
        ckpt.save(2, {"n": 2})
    (root.parent / "end").touch()
    assert child.end()[0] == 0


def test_a_rejected_state_opens_the_run_all_the_same(root: Path) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        with pytest.raises(errors.UnsupportedValue):
            ckpt.save(1, {"n": object()})
        ckpt.save(1, {"n": 1}).wait()
    assert records(root) == ["0001.json"]
