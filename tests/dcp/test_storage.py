"""Writer and reader in one process: kinds of values and tensors, what is refused, what lies in the directory."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everstep
import everstep.dcp as ed
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from everstep.backends.api import Backend
from everstep.backends.faults import Fault, Faulty
from everstep.dcp.share import Share
from everstep.dcp.stream import Segment, TensorStream
from everstep.errors import (
    EverstepError,
    RunInUse,
    SaveAbandoned,
    StateMismatch,
    UnsupportedValue,
    UsageError,
)
from everstep.format.manifest import Abort, encode_decision
from everstep.opening import this_writer
from everstep.state.tensors import bytes_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from tests.dcp.kit import assert_same, blank, files


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def saved(root: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=ed.Writer(root), **options)


def loaded(root: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = blank(state)
    dcp.load(found, storage_reader=ed.Reader(root), **options)
    return found


def failure(work: Any) -> EverstepError:
    """What failed inside torch's wrapping."""
    with pytest.raises(CheckpointException) as caught:
        work()
    (found,) = caught.value.failures.values()
    error = found[0]
    assert isinstance(error, EverstepError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
    return error


def kinds() -> dict[str, Any]:
    torch.manual_seed(5)
    base = torch.randn(40, 30)
    return {
        "tensors": {
            "plain": torch.randn(300, 700),
            "bf16": torch.randn(5, 7).bfloat16(),
            "bool": torch.tensor([True, False, True]),
            "complex": torch.randn(3, 2, dtype=torch.complex64),
            "fp8": torch.randn(6).to(torch.float8_e4m3fn).view(torch.uint8),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "transposed": base.t(),
            "strided": base[::2, ::3],
            "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
            "view": torch.arange(1000)[17:23],
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        },
        "values": {
            "int": 7,
            "big": 1 << 70,
            "none": None,
            "nan": [float("inf"), -0.0],
            "text": "Zoë/~.",
            "bytes": b"\x80\x04.",
            "stream": io.BytesIO(b"a stream"),
            "array": np.arange(5, dtype=np.int16),
            "large": np.arange(20_000),
            "tuple": (1, (torch.arange(4), "x"), None),
            "shared": [[1, 2], {"a": {3, 4}}],
            "odd keys": {"": OrderedDict(a=1)},
        },
    }


def assert_kinds(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("array", "large"):
        assert np.array_equal(found["values"].pop(name), expected["values"].pop(name))
    assert_same(found, expected)


@pytest.mark.parametrize("planner", [None, "ours"])
def test_kinds_of_values(tmp_path: Path, planner: str | None) -> None:
    state = kinds()
    saved(tmp_path, state)
    found = loaded(tmp_path, state, planner=ed.LoadPlanner() if planner else None)
    assert_kinds(found, state)
    values = everstep.load(tmp_path)["state_dict"]
    assert_same(values["values.tuple"], state["values"]["tuple"])
    assert torch.equal(values["tensors.strided"], state["tensors"]["strided"])


def test_one_list_twice_in_two_values_stays_apart(tmp_path: Path) -> None:
    """Aliases inside one value come back as such, and are not mixed up with those of another."""
    one: list[Any] = [1]
    two: list[Any] = [2]
    state = {"a": (one, one), "b": (two, [3], two), "c": (one, two)}
    saved(tmp_path, state)
    found = loaded(tmp_path, state)
    assert_same(found, state)
    assert found["a"][0] is found["a"][1] and found["b"][0] is found["b"][2]


def test_a_planner_that_makes_streams_of_its_own(tmp_path: Path) -> None:
    class Doubling(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return super().transform_object(write_item, object if torch.is_tensor(object) else object * 2)

    saved(tmp_path, {"n": 4, "w": torch.ones(2)}, planner=Doubling())
    assert loaded(tmp_path, {"n": 0, "w": torch.ones(2)})["n"] == 8


class Foreign:
    """A class that nobody registered."""


@pytest.mark.parametrize(
    "value", [print, Foreign(), {"a": [Foreign()]}, torch.nn.Linear(1, 1), (torch.empty(2, device="meta"),)]
)
def test_values_that_cannot_be_stored_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    state = {"good": torch.ones(3), "part": {"hook": (value,)}}
    error = failure(lambda: saved(tmp_path / "x", state))
    assert isinstance(error, UnsupportedValue) and "part.hook" in str(error) and "rank 0" in str(error)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob(".metadata"))


def test_a_stream_of_objects_is_refused(tmp_path: Path) -> None:
    class Opaque(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return io.BytesIO(pickle.dumps(Foreign(), protocol=2))

    error = failure(lambda: saved(tmp_path, {"n": 4}, planner=Opaque()))
    assert isinstance(error, UnsupportedValue) and "n" in str(error)


def test_a_plan_that_is_not_what_the_rank_holds(tmp_path: Path) -> None:
    """torch plans such things for uneven shards of several kinds; stored as planned they would be lost."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(4, 2)}, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    assert item.tensor_data is not None
    chunk = dcp.ChunkStorageMetadata(torch.Size([6, 0]), torch.Size([1, 2]))
    planned = dataclasses.replace(item.tensor_data, chunk=chunk)
    with pytest.raises(StateMismatch, match=r"w: .*another region.*\[4, 2\].*\[1, 2\] at \[6, 0\]"):
        Share(SavePlan([dataclasses.replace(item, tensor_data=planned)]), planner, 0)


def test_another_dtype_is_an_error_unless_allowed(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.randn(4)})
    target = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    error = failure(lambda: dcp.load(target, storage_reader=ed.Reader(tmp_path)))
    assert isinstance(error, StateMismatch) and "w" in str(error) and "bfloat16" in str(error)
    assert not target["w"].any()
    dcp.load(target, storage_reader=ed.Reader(tmp_path, cast=True))
    assert torch.equal(target["w"], everstep.load(tmp_path)["state_dict"]["w"].bfloat16())


def test_targets_that_cannot_be_filled_where_they_lie(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 20)}
    saved(tmp_path, state)
    target = {"w": torch.zeros(20, 30).t()}
    dcp.load(target, storage_reader=ed.Reader(tmp_path))
    assert torch.equal(target["w"], state["w"]) and not target["w"].is_contiguous()


def test_the_stream_gives_the_image_whatever_the_pieces() -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(size) for size in (5, 70_000, 1, 33_000, 2)]
    tensors[3] = torch.randn(300, 110).t()
    header, segments, offset = b"h" * 4096, [], 4096
    for number, tensor in enumerate(tensors):
        nbytes = tensor.numel() * 4
        segments.append(Segment(offset, nbytes, lambda tensor=tensor: tensor, str(number)))
        offset += nbytes
    whole = header + b"".join(bytes(bytes_of(tensor)) for tensor in tensors)
    for step in (4096, 100_000, 1 << 20):
        stream = TensorStream(header, segments, offset, step)
        found, before = bytearray(), memoryview(b"")
        for start in range(0, offset, step):
            piece = stream.piece(start, min(start + step, offset))
            found += piece
            assert bytes(before) == whole[max(start - step, 0) : start], "the piece before is still needed"
            before = piece
        assert bytes(found) == whole


def test_large_tensors_leave_in_bounded_pieces(tmp_path: Path) -> None:
    state = {"a": torch.arange(9 << 20, dtype=torch.uint8), "b": torch.randn(3 << 20)}
    saved(tmp_path, state)
    assert_same(loaded(tmp_path, state), state)


def test_several_regions_of_one_tensor_on_one_rank(tmp_path: Path) -> None:
    class Cut(dcp.DefaultSavePlanner):
        """Plans the columns of ``w`` in three regions, the last one first."""

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            assert item.tensor_data is not None
            items = []
            for start, width in ((5, 4), (0, 2), (2, 3)):
                chunk = dcp.ChunkStorageMetadata(torch.Size([0, start]), torch.Size([6, width]))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = dataclasses.replace(item.index, offset=chunk.offsets)
                items.append(
                    dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)
                )
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            data = write_item.tensor_data
            assert data is not None and data.chunk is not None
            start, width = data.chunk.offsets[1], data.chunk.sizes[1]
            whole: torch.Tensor = self.state_dict["w"]
            return whole[:, start : start + width]

    state = {"w": torch.randn(6, 9)}
    saved(tmp_path, state, planner=Cut())
    assert_same(loaded(tmp_path, state), state)


def test_torchs_tool_reads_it(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(6, 9)}, "n": 3}
    saved(tmp_path / "a", state)
    ed.install()
    try:
        from torch.distributed.checkpoint import format_utils

        ed.install()  # that module may be new
        format_utils.dcp_to_torch_save(tmp_path / "a", tmp_path / "file.pt")
    finally:
        ed.uninstall()
    assert_same(torch.load(tmp_path / "file.pt", weights_only=True), state)
    assert format_utils.FileSystemReader is dcp.FileSystemReader is dcp.filesystem.FileSystemReader


# -- the directory


def test_what_may_not_be_replaced(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    saved(tmp_path / "a", state)
    keeping = ed.Writer(tmp_path / "a", overwrite=False)
    assert "has a checkpoint already" in str(failure(lambda: dcp.save(state, storage_writer=keeping)))
    dcp.save(state, storage_writer=keeping, checkpoint_id=tmp_path / "b")
    everstep.save(tmp_path / "run", 3, {"x": torch.ones(2)})
    error = failure(lambda: saved(tmp_path / "run", state))
    assert isinstance(error, UsageError) and "training job" in str(error)
    assert torch.equal(everstep.load(tmp_path / "run")["x"], torch.ones(2))


def test_a_training_run_is_no_dcp_checkpoint(tmp_path: Path) -> None:
    everstep.save(tmp_path / "run", 3, {"x": torch.ones(2)})
    with pytest.raises(CheckpointException, match="no DCP checkpoint"):
        dcp.load({"x": torch.zeros(2)}, storage_reader=ed.Reader(tmp_path / "run"))


def test_a_stale_copy_of_one_rank_is_not_taken_for_a_damaged_checkpoint(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    dcp.save(state, storage_writer=ed.Writer(tmp_path), use_collectives=False)
    saved(tmp_path, {"w": torch.full((2,), 7.0)})
    (manifest,) = tmp_path.glob("checkpoints/*/*/manifest-1.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CheckpointException, match="manifest-1"):
        dcp.load(blank(state), storage_reader=ed.Reader(tmp_path))
    with pytest.raises(UsageError, match="wrote together"):
        dcp.save(state, storage_writer=ed.Writer(tmp_path), use_collectives=False)


def test_an_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    fault = Fault("writer.commit", "state", times=99)

    class Failing(ed.Writer):
        def _open(self, path: str) -> Backend:
            return Faulty(super()._open(path), [fault])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everstep.agent.storage.BACKOFF_FIRST_S", 0.0)
        error = failure(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=Failing(tmp_path)))
    assert "scripted fault" in str(error) and fault.met > 1
    with pytest.raises(CheckpointException, match="no complete checkpoint"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=ed.Reader(tmp_path))


def test_what_passes_is_tried_again(tmp_path: Path) -> None:
    state = {"w": torch.randn(5 << 20)}
    fault = Fault("writer.write", "safetensors", nth=2)

    class Shaky(ed.Writer):
        def _open(self, path: str) -> Backend:
            return Faulty(super()._open(path), [fault])

    dcp.save(state, storage_writer=Shaky(tmp_path))
    assert fault.met > 2
    assert_same(loaded(tmp_path, state), state)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_another_living_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's save that is not decided is not touched while that process lives."""
    saved(tmp_path, {"w": torch.ones(2)})
    (attempt,) = tmp_path.glob("checkpoints/*/*/a1")
    other = attempt.parent / "a2"
    other.mkdir()
    (other / "rank-00001.vote").write_bytes(b"half")
    mine = this_writer()
    monkeypatch.setattr("everstep.dcp.directory.process_alive", lambda writer: writer == mine)
    error = failure(lambda: saved(tmp_path, {"w": torch.zeros(2)}))
    assert isinstance(error, RunInUse) and str(os.getpid()) in str(error)
    monkeypatch.undo()
    saved(tmp_path, {"w": torch.zeros(2)})
    assert not (other / "rank-00001.vote").exists() and not attempt.exists()
    assert not loaded(tmp_path, {"w": torch.ones(2)})["w"].any()


def test_a_save_that_was_given_up_in_between_is_refused_at_the_end(tmp_path: Path) -> None:
    """By someone else, whose reason is told; what was there stays."""

    class GivenUp(ed.Writer):
        def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
            plans = super().prepare_global_plan(plans)
            (step,) = tmp_path.glob("checkpoints/*/*")
            number = len(list(step.glob("manifest-*.json"))) + 1
            abort = Abort(int(step.parent.name), int(step.name), number, "rank 7: its disk is full", 7)
            (step / f"manifest-{number}.json").write_bytes(encode_decision(abort))
            return plans

    saved(tmp_path, {"w": torch.ones(2)})
    error = failure(lambda: dcp.save({"w": torch.zeros(2)}, storage_writer=GivenUp(tmp_path)))
    assert isinstance(error, SaveAbandoned) and "rank 7: its disk is full" in str(error)
    assert loaded(tmp_path, {"w": torch.ones(2)})["w"].all()
    saved(tmp_path, {"w": torch.zeros(2)})
    assert not loaded(tmp_path, {"w": torch.ones(2)})["w"].any()


def test_the_writers_face(tmp_path: Path) -> None:
    writer = ed.Writer(tmp_path / "a")
    assert writer and str(writer.checkpoint_id) == str(tmp_path / "a")
    meta = writer.storage_meta()
    assert meta is not None and str(meta.checkpoint_id) == str(tmp_path / "a")
    assert ed.Writer.validate_checkpoint_id(tmp_path) and not ed.Writer.validate_checkpoint_id("s3://b/x")
    copy = pickle.loads(pickle.dumps(writer))  # noqa: S301
    dcp.save({"w": torch.ones(2)}, storage_writer=copy)
    reader = pickle.loads(pickle.dumps(ed.Reader(tmp_path / "a")))  # noqa: S301
    metadata = reader.read_metadata()
    assert metadata.state_dict_metadata["w"].size == torch.Size([2]) and metadata.storage_data == {}
    with pytest.raises(FileNotFoundError):
        ed.Reader(tmp_path / "nothing").read_metadata()
    with pytest.raises(UsageError):
        ed.Writer().set_up_storage_writer(True)


def test_a_stock_checkpoint_is_replaced_only_when_ours_is_complete(tmp_path: Path) -> None:
    old = {"w": torch.ones(2)}
    dcp.save(old, storage_writer=dcp.FileSystemWriter(tmp_path))
    ed.install()
    try:
        bad = {"w": torch.zeros(2), "f": print}
        failure(lambda: dcp.save(bad, checkpoint_id=tmp_path))
        found = blank(old)
        dcp.load(found, checkpoint_id=tmp_path)
        assert_same(found, old)
        dcp.save({"w": torch.full((2,), 5.0)}, checkpoint_id=tmp_path)
        dcp.load(found, checkpoint_id=tmp_path)
        assert found["w"].tolist() == [5, 5]
    finally:
        ed.uninstall()
    assert not any(
        path.read_bytes().startswith(b"\x80") for path in files(tmp_path) if path.name == ".metadata"
    )
