"""A full disk is left behind by keeping less, without deleting anything by hand."""

from __future__ import annotations

from pathlib import Path

import everstep
import pytest
from everstep import errors
from everstep.backends.errors import NoSpace
from everstep.backends.faults import Fault

from tests.facade.kit import Storage, opened, steps_on_disk, until


def test_less_is_kept_once_the_policy_says_so(root: Path, storage: Storage) -> None:
    with opened(root, policy={"keep_last": 9}) as ckpt:
        ckpt.load({"n": 0})
        for step in range(1, 6):
            ckpt.save(step, {"n": step}).wait()
    assert steps_on_disk(root) == [1, 2, 3, 4, 5]
    storage.fail(
        Fault(op="open_writer", name=".msgpack", times=10**9, error=lambda name: NoSpace(name, "ENOSPC"))
    )
    ckpt = opened(root, policy={"keep_last": 2, "failures_max": None})
    assert ckpt.load({"n": 0}) == 5
    with pytest.raises(errors.SaveFailed, match="no room"):
        ckpt.save(6, {"n": 6}).wait()
    until(lambda: steps_on_disk(root) == [4, 5], "what the new policy gives up goes")
    storage.heal()
    ckpt.save(7, {"n": 7}).wait()
    ckpt.close()
    assert everstep.load(root) == {"n": 7}
