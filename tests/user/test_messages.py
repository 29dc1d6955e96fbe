"""What a person reads names what a person can find."""

from __future__ import annotations

import asyncio
import shutil
import warnings
from pathlib import Path

import pytest
from everstep.backends.errors import Permanent
from everstep.backends.open import open_backend
from everstep.errors import SaveFailed

from tests.facade.kit import Training, opened


def test_errors_below_a_held_directory_name_its_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    backend = open_backend(tmp_path / "run", bound=True)
    (tmp_path / "run" / "a").touch()
    with pytest.raises(Permanent) as caught:
        asyncio.run(backend.write("a/b", b"x"))
    assert f"({tmp_path}/run/a" in str(caught.value) and "/proc/" not in str(caught.value)


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_a_run_that_is_deleted_under_its_trainer_is_called_gone(root: Path, agent: str) -> None:
    """Its agent leaves; nobody says that it died."""
    training = Training()
    ckpt = opened(root, agent=agent)
    ckpt.load(training.state)
    training.step()
    ckpt.save(1, training.state).wait()
    shutil.rmtree(root)
    training.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = ckpt.save(2, training.state)
        with pytest.raises(SaveFailed, match="is gone: it was deleted"):
            handle.wait()
        training.step()
        with pytest.raises(SaveFailed, match="is gone: it was deleted"):
            ckpt.save(3, training.state).wait()
        with pytest.raises(SaveFailed, match="is gone"):
            ckpt.close()
    told = [str(one.message) for one in caught]
    assert len([text for text in told if "is gone" in text]) == 1, told
    assert not [text for text in told if "died" in text or "was lost" in text], told
    assert not root.exists()
