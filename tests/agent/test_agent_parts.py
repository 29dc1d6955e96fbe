"""The agent's parts on their own: frames, journal, places, settings, verdicts."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.agent import places
from everstep.agent.frames import OUTBOX_BYTES_MAX, FrameSocket
from everstep.agent.journal import VOTED, JobEntry, LmdbJournal, MemberEntry
from everstep.agent.protocol import FRAME_BYTES_MAX
from everstep.agent.values import AgentSettings
from everstep.agent.verdict import error_of, given_up, ranks_missing, stage_of, superseded
from everstep.errors import AgentError
from everstep.format.manifest import Abort
from everstep.plan.retention import Retention
from hypothesis import given, settings
from hypothesis import strategies as st

JOB = JobEntry(
    incarnation=2,
    step=10,
    rank=1,
    run_id="run",
    world=2,
    arena="/a",
    slot=0,
    generation=7,
    kind="full",
    attempt=1,
    order=1,
    process=(1, 2, "boot"),
)
MEMBER = MemberEntry("run", 1, 2, 2, (1, 9), (1, 2, "boot"), "/a")


# -- frames


def pair() -> tuple[FrameSocket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return FrameSocket(ours), theirs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_frames_survive_any_splitting(frames: list[bytes], cuts: list[int]) -> None:
    reader, raw = pair()
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    got: list[bytes] = []
    at = 0
    while at < len(stream):
        nbytes = cuts[at % len(cuts)]
        raw.sendall(stream[at : at + nbytes])
        at += nbytes
        got += reader.pull()
    assert got == frames and not reader.ended
    raw.close()
    assert reader.pull() == [] and reader.ended
    reader.close()


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    reader, raw = pair()
    raw.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
    assert reader.pull() == [] and reader.ended
    with pytest.raises(AgentError, match="too large"):
        reader.queue(bytes(FRAME_BYTES_MAX + 1))
    reader.close()
    raw.close()


def test_a_peer_that_does_not_read_is_given_up_and_never_waited_for() -> None:
    writer, raw = pair()
    frame = bytes(FRAME_BYTES_MAX // 2)
    for _ in range(3 + OUTBOX_BYTES_MAX // len(frame)):
        writer.queue(frame)
        writer.push()
    assert writer.ended
    writer.close()
    raw.close()


def test_descriptors_ride_along_and_are_the_receivers_own(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender, receiver = FrameSocket(ours), FrameSocket(theirs)
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"content")
        file.flush()
        sender.queue(b"first")
        sender.queue(b"second", [file.fileno()])
    sender.push()  # the sender's own is closed by now
    assert receiver.pull() == [b"first", b"second"]
    fd = receiver.take_fd()
    assert os.pread(fd, 10, 0) == b"content" and not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(AgentError, match="did not come"):
        receiver.take_fd()
    sender.close()
    receiver.close()


# -- journal


def test_the_journal_gives_back_what_was_put(tmp_path: Path) -> None:
    journal = LmdbJournal(tmp_path / "journal")
    later = replace(JOB, rank=0, order=5, root=b"\x01" * 16)
    for entry in (later, JOB, replace(JOB, step=11, order=3)):
        journal.put_job(entry)
    journal.put_member(MEMBER)
    journal.close()
    again = LmdbJournal(tmp_path / "journal")
    assert (journal.epoch, again.epoch, again.repaired) == (1, 2, None)
    assert again.jobs() == [JOB, replace(JOB, step=11, order=3), later]
    assert again.members() == [MEMBER]
    again.put_job(replace(JOB, stage=VOTED))
    again.drop_jobs([later])
    again.drop_member(MEMBER)
    assert (
        again.jobs() == [replace(JOB, stage=VOTED), replace(JOB, step=11, order=3)] and again.members() == []
    )
    again.close()


def test_forgetting_an_attempt_does_not_forget_a_later_one(tmp_path: Path) -> None:
    journal = LmdbJournal(tmp_path / "journal")
    journal.put_job(replace(JOB, attempt=2))
    journal.drop_jobs([JOB])
    assert [entry.attempt for entry in journal.jobs()] == [2]
    journal.close()


def test_notes_on_uploads_go_with_their_job(tmp_path: Path) -> None:
    journal = LmdbJournal(tmp_path / "journal")
    other = replace(JOB, rank=JOB.rank + 1)
    for entry in (JOB, other):
        journal.put_job(entry)
        for name in ("a", "b" * 900):
            journal.put_upload(entry, name, f"{entry.rank}{name}".encode())
    journal.put_upload(JOB, "a", b"later")
    journal.close()
    again = LmdbJournal(tmp_path / "journal")
    assert again.jobs() == [JOB, other] or again.jobs() == [other, JOB]
    assert again.upload(JOB, "a") == b"later" and again.upload(JOB, "c") is None
    again.drop_jobs([replace(JOB, attempt=JOB.attempt - 1)])
    assert again.upload(JOB, "a") == b"later", "an older attempt's end says nothing of it"
    again.drop_jobs([JOB])
    assert again.upload(JOB, "a") is None and again.upload(JOB, "b" * 900) is None
    assert again.upload(other, "b" * 900) == f"{other.rank}{'b' * 900}".encode()
    again.close()


@pytest.mark.parametrize("damage", [b"", b"garbage" * 1000, b"\0" * 65536])
def test_a_damaged_journal_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    for _ in range(2):
        journal = LmdbJournal(tmp_path / "journal")
        journal.put_job(JOB)
        journal.close()
        (tmp_path / "journal" / "data.mdb").write_bytes(damage)
    journal = LmdbJournal(tmp_path / "journal")
    assert journal.jobs() == []
    journal.put_job(JOB)
    assert journal.jobs() == [JOB]
    journal.close()


def test_a_journal_of_another_version_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.agent.journal.VERSION", 2)
    LmdbJournal(tmp_path / "journal").close()
    monkeypatch.undo()
    journal = LmdbJournal(tmp_path / "journal")
    assert journal.repaired is not None and "another version" in journal.repaired
    assert (tmp_path / "journal.damaged").is_dir()
    journal.close()


# -- places


def test_the_runtime_directory_is_made_private(tmp_path: Path) -> None:
    places.prepare(tmp_path / "a" / "b")
    places.prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(AgentError, match="must be a directory"):
        places.prepare(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_an_open_directory_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "d"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(AgentError, match="must be private"):
        places.prepare(path)


def test_a_parent_that_others_can_write_is_refused_unless_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "p"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(AgentError, match="others can replace"):
        places.prepare(parent / "d")
    parent.chmod(0o1777)
    places.prepare(parent / "d")


def test_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places.prepare(tmp_path / "d")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(AgentError):
        places.prepare(tmp_path / "d")


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "cifs"])
def test_a_remote_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(places, "file_system_of", lambda path: kind)
    with pytest.raises(AgentError, match="local file system") as caught:
        places.prepare(tmp_path / "d")
    assert kind in str(caught.value)


def test_file_systems_are_told() -> None:
    assert places.file_system_of(Path("/proc")) == "proc"


def test_a_relative_path_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="absolute"):
        places.prepare(Path("here"))
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentError):
        places.prepare(tmp_path / "file")
    with pytest.raises(AgentError, match="cannot be used"):
        places.prepare(tmp_path / "file" / "d")


@pytest.mark.parametrize("nbytes", [20, 104, 200])
def test_sockets_work_at_any_path_length(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / ("x" * nbytes)
    places.prepare(path)
    assert places.connect(path) is None
    for _ in range(2):  # a stale one is replaced
        listener = places.listen(path)
        client = places.connect(path)
        assert client is not None and (path / places.SOCKET).is_socket()
        served, _ = listener.accept()
        assert places.peer_uid(served) == os.getuid()
        for sock in (client, served, listener):
            sock.close()
    assert places.connect(path) is None


def test_one_is_elected_at_a_time(tmp_path: Path) -> None:
    first = places.elect(tmp_path)
    assert first is not None and places.elect(tmp_path) is None
    os.close(first)
    second = places.elect(tmp_path)
    assert second is not None
    os.close(second)


# -- values and verdicts


def test_settings_pass_through_json(tmp_path: Path) -> None:
    given = AgentSettings("/r", "k", "n", tmp_path, 5e6, Retention(3, 100), 1.5, 2.5, 4096, 7)
    assert AgentSettings.from_json(given.to_json()) == given


def test_an_abort_record_gives_the_same_stage_as_the_error_that_made_it() -> None:
    for error, reason in (given_up(5, "no time", "t"), superseded(1, 5, 2)):
        assert stage_of(error_of(Abort(5, 1, 1, reason), "t")) == stage_of(error)
    error, reason, rank = ranks_missing(5, 3, [0], [1, 2], "did not vote", "t")
    assert rank == 1 and error.ranks == "1, 2" and reason == "ranks 1, 2 did not vote"
    assert stage_of(error_of(Abort(5, 1, 1, reason, rank), "t")) == stage_of(error) == "failed"
    assert stage_of(error_of(None, "t")) == "failed"
