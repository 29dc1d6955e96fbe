"""Names: injective, safe, one spelling each, and nothing foreign is taken for ours."""

from __future__ import annotations

import dataclasses

import pytest
from everstep.backends.api import check_name
from everstep.format import names
from everstep.format.names import Kind
from hypothesis import example, given
from hypothesis import strategies as st

TEXTS = (
    st.text()
    | st.text(st.characters(categories=["Cs", "Cc", "Lu", "Ll", "So"]))
    | st.text("aA%._-/~0", max_size=9)
)
NUMBERS = st.integers(0, 10**18 - 1)
HASH = "0123456789abcdef0123456789abcdef"


@given(TEXTS)
@example("")
@example("..")
@example("val/loss")
@example("\ud800")
@example("%_")
@example("x" * 5000)
@example("é" * 40)
def test_escaped_texts_are_safe_and_come_back(text: str) -> None:
    escaped = names.escape(text)
    assert len(escaped) <= names.ESCAPED_MAX
    assert "/" not in escaped and "." not in escaped
    name = names.image(1, 2, 3, 4, text)
    assert check_name(name) == name
    assert max(len(piece) for piece in name.split("/")) + len(".tmp-.4194304.0123456789abcdef") <= 255
    back = names.unescape(escaped)
    if "%~" in escaped:
        assert back is None
    else:
        assert back == text


@given(TEXTS, TEXTS)
@example("a", "A")
@example("a/b", "a%2Fb")
@example("", "%_")
@example("é", "e\u0301")
@example("x" * 121, "x" * 122)
@example("x" * 119 + "/", "x" * 119 + "%")
def test_two_texts_never_share_a_name(one: str, other: str) -> None:
    assert (names.escape(one) == names.escape(other)) == (one == other)


@given(st.text(min_size=100, max_size=200), st.text(min_size=1, max_size=3))
def test_long_texts_that_begin_alike_differ(head: str, tail: str) -> None:
    assert names.escape(head) != names.escape(head + tail)


@given(NUMBERS, NUMBERS, st.integers(1, 10**18 - 1), NUMBERS, TEXTS)
@example(10**12, 0, 1, 0, "model")
@example(12000, 3, 1, 0, "state")
@example(1, 1, 1, 1, "é" * 40)
@example(1, 1, 1, 1, "x" + "é" * 40)
@example(1, 1, 1, 1, "xx" + "é" * 40)
def test_every_built_name_parses_to_its_numbers(
    step: int, incarnation: int, attempt: int, rank: int, text: str
) -> None:
    numbers = (step, incarnation, attempt)
    decision = names.parse(names.decision(*numbers))
    assert decision is not None and decision.kind is Kind.DECISION
    assert (decision.step, decision.incarnation, decision.attempt) == numbers
    for kind, name in (
        (Kind.VOTE, names.vote(*numbers, rank)),
        (Kind.STATE, names.state(*numbers, rank)),
        (Kind.IMAGE, names.image(*numbers, rank, text)),
        (Kind.IMAGE, names.packed(*numbers, rank, text)),
    ):
        parsed = names.parse(name)
        assert parsed is not None and parsed.kind is kind
        assert (parsed.step, parsed.incarnation, parsed.attempt, parsed.rank) == (*numbers, rank)
        assert name.startswith(names.attempt_dir(*numbers) + "/")
    image = names.parse(names.image(*numbers, rank, text))
    assert image is not None and image.text == names.escape(text)
    assert image.image == (None if "%~" in names.escape(text) else text)
    packed = names.parse(names.packed(*numbers, rank, text))
    assert packed == dataclasses.replace(image, packed=True) and not image.packed
    record = names.parse(names.incarnation(incarnation))
    assert record is not None and (record.kind, record.incarnation) == (Kind.INCARNATION, incarnation)
    events = names.parse(names.events(text))
    assert events is not None and (events.kind, events.text) == (Kind.EVENTS, names.escape(text))


def test_names_are_as_documented() -> None:
    assert names.RUN == "run.json" and names.parse("run.json") == names.Parsed(Kind.RUN)
    assert names.incarnation(3) == "incarnations/0003.json"
    assert names.layout(HASH) == f"layouts/{HASH}"
    assert names.parse(f"layouts/{HASH}") == names.Parsed(Kind.LAYOUT, hash=HASH)
    assert names.checkpoint_dir(12000, 3) == "checkpoints/000012000/0003"
    assert names.decision(12000, 3, 1) == "checkpoints/000012000/0003/manifest-1.json"
    assert names.vote(12000, 3, 1, 0) == "checkpoints/000012000/0003/a1/rank-00000.vote"
    assert names.image(12000, 3, 1, 0, "val/loss").endswith("/a1/rank-00000.val%2Floss.safetensors")
    assert names.state(12000, 3, 1, 0) == "checkpoints/000012000/0003/a1/rank-00000.state.msgpack"
    assert names.events("node a.1") == "events/node%20a%2E1.jsonl"


def test_a_part_called_state_does_not_meet_the_state_image() -> None:
    assert names.image(1, 1, 1, 0, "state") != names.state(1, 1, 1, 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "run.json/",
        "/run.json",
        "run.json.bak",
        "incarnations/3.json",
        "incarnations/00003.json",
        "incarnations/0003.json\n",
        "incarnations/٠٠٠٣.json",
        "incarnations/-003.json",
        f"layouts/{HASH[:-1]}",
        f"layouts/{HASH.upper()}",
        f"layouts/{HASH}.tmp",
        "checkpoints/12000/0003/manifest-1.json",
        "checkpoints/0000012000/0003/manifest-1.json",
        "checkpoints/000012000/3/manifest-1.json",
        "checkpoints/000012000/0003/manifest-01.json",
        "checkpoints/000012000/0003/manifest-0.json",
        "checkpoints/000012000/0003/manifest-1.json~",
        "checkpoints/000012000/0003/a0/rank-00000.vote",
        "checkpoints/000012000/0003/a01/rank-00000.vote",
        "checkpoints/000012000/0003/b1/rank-00000.vote",
        "checkpoints/000012000/0003/a1/rank-0.vote",
        "checkpoints/000012000/0003/a1/rank-00000.votes",
        "checkpoints/000012000/0003/a1/rank-00000.mo.del.safetensors",
        "checkpoints/000012000/0003/a1/rank-00000..safetensors",
        "checkpoints/000012000/0003/a1/rank-00000.%2f.safetensors",
        "checkpoints/000012000/0003/a1/rank-00000.%41.safetensors",
        "checkpoints/000012000/0003/a1/rank-00000.%FF.safetensors",
        "checkpoints/000012000/0003/a1/.tmp-rank-00000.vote.12.34",
        "checkpoints/000012000/0003/a1/x/rank-00000.vote",
        "checkpoints/../0003/a1/rank-00000.vote",
        "checkpoints/1000000000000000000/0003/manifest-1.json",
        "events/a b.jsonl",
    ],
)
def test_foreign_names_are_not_ours(name: str) -> None:
    assert names.parse(name) is None


@given(st.text("0123456789abcdef/.-_%~acehiklmnoprstuvw", max_size=60))
def test_what_parses_is_spelled_as_it_is_built(name: str) -> None:
    parsed = names.parse(name)
    if parsed is not None and parsed.kind is Kind.DECISION:
        assert names.decision(parsed.step or 0, parsed.incarnation or 0, parsed.attempt or 0) == name


def test_children_of_directories_parse_one_by_one() -> None:
    assert names.parse_step("000012000") == 12000
    assert names.parse_step("1000000000000") == 10**12
    assert [names.parse_step(text) for text in ("12000", "", "00001200x", "0000012000")] == [None] * 4
    assert names.parse_incarnation("0003") == 3 and names.parse_incarnation("12345") == 12345
    assert names.parse_decision("manifest-12.json") == 12 and names.parse_decision("manifest-.json") is None
    assert names.parse_attempt("a7") == 7 and names.parse_attempt("a") is None


@pytest.mark.parametrize("bad", [-1, 10**18])
def test_numbers_out_of_range_make_no_name(bad: int) -> None:
    with pytest.raises(ValueError):
        names.step_dir(bad)
    with pytest.raises(ValueError):
        names.incarnation(bad)
    with pytest.raises(ValueError):
        names.layout("../../etc/passwd")


@given(TEXTS, st.lists(NUMBERS, min_size=1, max_size=4, unique=True), NUMBERS)
@example("model+1", [2], 0)
@example("", [0, 10], 3)
def test_shared_images_say_with_whom(part: str, ranks: list[int], rank: int) -> None:
    ranks.sort()
    name = names.shared_image(part, ranks)
    assert names.shared_with(name) == tuple(ranks)
    copy = names.copy_name(rank, name)
    assert names.copied_from(copy) == (None if rank in ranks else (rank, name))
    assert names.copy_region(rank, name) == f"copy:{rank}/{name}"


@pytest.mark.parametrize(
    "name", ["model", "state", "model+", "model+1.", "+", "m+01", "m+2.1", "m+1.1", "m+-1", "m+1@", "m+1 "]
)
def test_other_images_are_shared_with_nobody(name: str) -> None:
    assert names.shared_with(name) == ()
    assert names.copied_from(f"0/{name}") is None


@pytest.mark.parametrize("name", ["", "/", "m+1", "x/m+1", "/m+1", "-1/m+2", "01/m+2", "1 /m+2"])
def test_other_names_are_no_copies(name: str) -> None:
    assert names.copied_from(name) is None
