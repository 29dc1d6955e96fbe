"""``everstep du``."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_kit import everstep


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_every_byte_is_counted_once(made_run: Path) -> None:
    said = everstep("du", made_run, "--json").json
    [place] = said["places"]
    assert said["nbytes"] == place["nbytes"] == on_disk(made_run)
    assert sum(place["kinds"].values()) == place["nbytes"]
    assert set(place["parts"]) == {"model", "optimizer", "plain values"}
    assert [x["step"] for x in place["checkpoints"]] == [1, 2, 3, 4, 5]
    for one in place["checkpoints"]:
        assert one["nbytes"] == on_disk(made_run / "checkpoints" / f"{one['step']:09d}")


def test_what_a_prune_would_free(made_run: Path) -> None:
    said = everstep("du", made_run, "--keep-last", "1", "--json").json
    [place] = said["places"]
    goes = {x["step"] for x in place["checkpoints"] if x["prune"]}
    assert goes == {1, 2, 3, 4}
    assert place["prune_frees"] == sum(x["nbytes"] for x in place["checkpoints"] if x["step"] in goes)
    assert "would free" in everstep("du", made_run, "--keep-last", "1").out


def test_tiers_and_what_is_no_run(made_run: Path, tmp_path: Path) -> None:
    tier = Path(shutil.copytree(made_run, tmp_path / "tier"))
    said = everstep("du", made_run, tier, "--json").json
    assert said["nbytes"] == 2 * on_disk(made_run)
    broken = everstep("du", made_run, tmp_path / "none", "--json")
    assert broken.code == 1
    assert [x["place"] for x in broken.json["unreadable"]] == [str(tmp_path / "none")]
    assert everstep("du", tmp_path / "none").code == 1


def test_foreign_and_given_up(run: Path) -> None:
    (run / "notes.txt").write_text("hello")
    step = next(iter((run / "checkpoints" / "000000005").iterdir()))
    attempt = step / "a9"
    attempt.mkdir()
    (attempt / "rank-00000.model.safetensors").write_bytes(bytes(1000))
    [place] = everstep("du", run, "--json").json["places"]
    assert place["kinds"]["foreign"] == 5
    assert place["given_up"] == 1000
    assert place["nbytes"] == on_disk(run)


def test_neither_torch_nor_numpy(made_run: Path) -> None:
    assert everstep("du", made_run, blocked=True).code == 0
