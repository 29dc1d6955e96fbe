"""All names of stored objects, built and parsed here and nowhere else.

Names are relative to the run's root and ``/``-separated. Numbers are zero-padded for people's sake only: more
digits are allowed, they compare as integers, and each number has exactly one spelling, so that no two names
mean the same object. :func:`parse` answers None for everything that is not ours.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .constants import NUMBER_MAX
from .hashing import hexdigest, is_hash

RUN = "run.json"
INCARNATIONS = "incarnations"
LAYOUTS = "layouts"
CHECKPOINTS = "checkpoints"
EVENTS = "events"
LIVE = "live"
PINS = "pins"

ESCAPED_MAX = 120
"""Longest escaped text. A file name holds it, a rank, an extension and the decorations of a temporary name
within the 255 bytes that file systems allow."""

_STEP_DIGITS = 9
_INCARNATION_DIGITS = 4
_RANK_DIGITS = 5

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_EMPTY = "%_"
_SHORTENED = "%~"
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")

COPY_PREFIX = "copy:"
"""Of regions with second copies of what other ranks store: no part of what a seal proves, nor of what is flushed."""
_SHARED = re.compile(r".*\+([0-9.]+)", re.DOTALL)
_TOKEN = re.compile(r"[0-9a-f]{8,32}")
_SHARED_CHARS_MAX = 4096
"""Longest list of ranks in the name of a shared image: hundreds of copies."""


class Kind(enum.Enum):
    """What a name stands for."""

    RUN = "run"
    INCARNATION = "incarnation"
    LAYOUT = "layout"
    DECISION = "decision"
    VOTE = "vote"
    GATHER = "gather"
    IMAGE = "image"
    STATE = "state"
    EVENTS = "events"
    BEACON = "beacon"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A name taken apart; fields that the kind does not have are None.

    ``attempt`` is the number of a decision as well. ``text`` is the escaped text (of an image's or writer's
    name; a pin's token) as it stands in the name; ``image`` and ``writer`` are that text unescaped, None where it
    was shortened. ``packed`` tells of an image that its object is a packed one.
    """

    kind: Kind
    step: int | None = None
    incarnation: int | None = None
    attempt: int | None = None
    rank: int | None = None
    hash: str | None = None
    text: str | None = None
    image: str | None = None
    writer: str | None = None
    packed: bool = False


def shared_image(part: str, ranks: Sequence[int]) -> str:
    """Name of the image with those tensors of ``part`` of which ``ranks`` (ascending) keep second copies."""
    return f"{part}+{'.'.join(map(_number, ranks))}"


def shared_with(image_name: str) -> tuple[int, ...]:
    """The ranks that keep second copies of all of an image's tensors; empty if the name does not say so."""
    found = _SHARED.fullmatch(image_name)
    if found is None or len(found[1]) > _SHARED_CHARS_MAX:
        return ()
    ranks = [_parse_number(text, 1) for text in found[1].split(".")]
    proper = [rank for rank in ranks if rank is not None]
    return tuple(proper) if len(proper) == len(ranks) and proper == sorted(set(proper)) else ()


def copy_name(rank: int, image_name: str) -> str:
    """How a layout names the second copies of all tensors of ``rank``'s image of that name."""
    return f"{_number(rank)}/{image_name}"


def copied_from(name: str) -> tuple[int, str] | None:
    """The rank and the name of its image, of a :func:`copy_name`; None for anything else."""
    rank, _, image_name = name.partition("/")
    number = _parse_number(rank, 1)
    partners = shared_with(image_name)
    return (number, image_name) if number is not None and partners and number not in partners else None


def copy_region(rank: int, image_name: str) -> str:
    """The region of a slot with the second copy of that image of ``rank``: the same bytes."""
    return COPY_PREFIX + copy_name(rank, image_name)


def escape(text: str) -> str:
    """``text`` as a piece of a file name: injective, safe, at most ``ESCAPED_MAX`` characters.

    Every byte (UTF-8) other than ``A-Z a-z 0-9 _ -`` becomes ``%XX``. The empty text is ``%_``. What would be
    too long is cut, and the hash of the whole text put behind ``%~``.
    """
    raw = text.encode("utf-8", "surrogatepass")
    escaped = "".join([chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]) or _EMPTY
    if len(escaped) <= ESCAPED_MAX:
        return escaped
    tail = _SHORTENED + hexdigest(raw)
    head = escaped[: ESCAPED_MAX - len(tail)]
    if "%" in head[-2:]:  # do not cut an escape in two
        head = head[: head.rindex("%")]
    return head + tail


def unescape(escaped: str) -> str | None:
    """The text that :func:`escape` was given; None if it was shortened or is no escaped text at all."""
    if escaped == _EMPTY:
        return ""
    if not _ESCAPED.fullmatch(escaped):
        return None
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), escaped).encode("latin-1")
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return text if escape(text) == escaped else None


def _is_escaped(text: str) -> bool:
    """Whether ``text`` may have come from :func:`escape`, shortened or not."""
    head, mark, tail = text.partition(_SHORTENED)
    if mark:
        return is_hash(tail) and len(text) <= ESCAPED_MAX and _ESCAPED.fullmatch(head) is not None
    return unescape(text) is not None


def _number(value: int, digits: int = 1) -> str:
    if not 0 <= value <= NUMBER_MAX:
        raise ValueError(f"{value} is outside 0..{NUMBER_MAX}")
    return f"{value:0{digits}d}"


def incarnation(number: int) -> str:
    """Record of incarnation ``number``."""
    return f"{INCARNATIONS}/{_number(number, _INCARNATION_DIGITS)}.json"


def layout(layout_hash: str) -> str:
    """Layout object of that hash (32 hexadecimal digits)."""
    if not is_hash(layout_hash):
        raise ValueError(f"{layout_hash!r} is no hash")
    return f"{LAYOUTS}/{layout_hash}"


def step_dir(step: int) -> str:
    """Directory of everything of ``step``, whatever the incarnation."""
    return f"{CHECKPOINTS}/{_number(step, _STEP_DIGITS)}"


def checkpoint_dir(step: int, incarnation: int) -> str:
    """Directory of ``step`` as written by ``incarnation``."""
    return f"{step_dir(step)}/{_number(incarnation, _INCARNATION_DIGITS)}"


def decision(step: int, incarnation: int, number: int) -> str:
    """Manifest, abort record or tombstone: decision ``number`` (from 1) on the checkpoint."""
    return f"{checkpoint_dir(step, incarnation)}/manifest-{_number(number)}.json"


def attempt_dir(step: int, incarnation: int, attempt: int) -> str:
    """Directory of the votes and images of one attempt (from 1)."""
    return f"{checkpoint_dir(step, incarnation)}/a{_number(attempt)}"


def _rank_file(step: int, incarnation: int, attempt: int, rank: int) -> str:
    return f"{attempt_dir(step, incarnation, attempt)}/rank-{_number(rank, _RANK_DIGITS)}"


def vote(step: int, incarnation: int, attempt: int, rank: int) -> str:
    """Vote of ``rank``."""
    return f"{_rank_file(step, incarnation, attempt, rank)}.vote"


def gather(step: int, incarnation: int, attempt: int, rank: int) -> str:
    """Headers of the votes of one node's ranks, of which ``rank`` is the lowest."""
    return f"{attempt_dir(step, incarnation, attempt)}/node-{_number(rank, _RANK_DIGITS)}.votes"


def image(step: int, incarnation: int, attempt: int, rank: int, image_name: str) -> str:
    """Plain image (a safetensors file) of that name (``ImageSpec.name``)."""
    return f"{_rank_file(step, incarnation, attempt, rank)}.{escape(image_name)}.safetensors"


def packed(step: int, incarnation: int, attempt: int, rank: int, image_name: str) -> str:
    """Packed image (:mod:`.packed`) of that name."""
    return f"{_rank_file(step, incarnation, attempt, rank)}.{escape(image_name)}.packed"


def state(step: int, incarnation: int, attempt: int, rank: int) -> str:
    """Image of the plain values of ``rank``."""
    return f"{_rank_file(step, incarnation, attempt, rank)}.state.msgpack"


def events(writer: str) -> str:
    """Event log of one writer."""
    return f"{EVENTS}/{escape(writer)}.jsonl"


def beacon(node_key: str) -> str:
    """What the agent of that node (or, within a trainer, of that rank) says of itself while it trains."""
    return f"{LIVE}/{escape(node_key)}.json"


def pin(pin_id: str) -> str:
    """Record that a checkpoint is not to be removed."""
    if _parse_pin(pin_id) is None:
        raise ValueError(f"{pin_id!r} is no pin's id")
    return f"{PINS}/{pin_id}.json"


def pin_id(step: int, incarnation: int, token: str) -> str:
    """Id of a pin of that checkpoint; ``token`` (8 to 32 hexadecimal digits) tells it from others."""
    return f"{_number(step, _STEP_DIGITS)}-{_number(incarnation, _INCARNATION_DIGITS)}-{token}"


def _parse_number(text: str, digits: int, least: int = 0) -> int | None:
    if not (len(text) <= 18 and text.isascii() and text.isdigit()):
        return None
    value = int(text)
    return value if value >= least and f"{value:0{digits}d}" == text else None


def parse_step(text: str) -> int | None:
    """The step that a child of ``checkpoints`` names, else None."""
    return _parse_number(text, _STEP_DIGITS)


def parse_incarnation(text: str) -> int | None:
    """The incarnation that a child of a step's directory names, else None."""
    return _parse_number(text, _INCARNATION_DIGITS)


def parse_decision(text: str) -> int | None:
    """The number in ``manifest-N.json``, the child of a checkpoint's directory, else None."""
    match = re.fullmatch(r"manifest-([0-9]+)\.json", text)
    return _parse_number(match[1], 1, least=1) if match else None


def parse_attempt(text: str) -> int | None:
    """The number of an attempt's directory ``aN``, else None."""
    return _parse_number(text[1:], 1, least=1) if text.startswith("a") else None


def parse_vote(text: str) -> int | None:
    """The rank whose vote a child of an attempt's directory is, else None."""
    return _parse_ranked(text, "rank-", ".vote")


def parse_gather(text: str) -> int | None:
    """The lowest rank of the gathered votes that a child of an attempt's directory is, else None."""
    return _parse_ranked(text, "node-", ".votes")


def _parse_ranked(text: str, begin: str, end: str) -> int | None:
    if not (text.startswith(begin) and text.endswith(end)):
        return None
    return _parse_number(text[len(begin) : -len(end)], _RANK_DIGITS)


def parse(name: str) -> Parsed | None:
    """What ``name`` stands for; None if it is no name of this format."""
    pieces = name.split("/")
    if name == RUN:
        return Parsed(Kind.RUN)
    if len(pieces) == 2:
        return _parse_top(*pieces)
    if pieces[0] != CHECKPOINTS or len(pieces) not in (4, 5):
        return None
    step, incarnation = parse_step(pieces[1]), parse_incarnation(pieces[2])
    if step is None or incarnation is None:
        return None
    if len(pieces) == 4:
        number = parse_decision(pieces[3])
        return None if number is None else Parsed(Kind.DECISION, step, incarnation, number)
    attempt = parse_attempt(pieces[3])
    return None if attempt is None else _parse_rank_file(step, incarnation, attempt, pieces[4])


def _parse_top(directory: str, file: str) -> Parsed | None:
    if directory == LAYOUTS:
        return Parsed(Kind.LAYOUT, hash=file) if is_hash(file) else None
    if directory == INCARNATIONS and file.endswith(".json"):
        number = parse_incarnation(file[: -len(".json")])
        return None if number is None else Parsed(Kind.INCARNATION, incarnation=number)
    if directory == EVENTS and file.endswith(".jsonl"):
        text = file[: -len(".jsonl")]
        return Parsed(Kind.EVENTS, text=text, writer=unescape(text)) if _is_escaped(text) else None
    if directory == LIVE and file.endswith(".json"):
        text = file[: -len(".json")]
        return Parsed(Kind.BEACON, text=text, writer=unescape(text)) if _is_escaped(text) else None
    if directory == PINS and file.endswith(".json"):
        return _parse_pin(file[: -len(".json")])
    return None


def _parse_pin(pin_id: str) -> Parsed | None:
    step, incarnation, token = ([*pin_id.split("-", 2), "", ""])[:3]
    found = parse_step(step), parse_incarnation(incarnation)
    if None in found or not _TOKEN.fullmatch(token):
        return None
    return Parsed(Kind.PIN, *found, text=token)


def _parse_rank_file(step: int, incarnation: int, attempt: int, file: str) -> Parsed | None:
    lowest = parse_gather(file)
    if lowest is not None:
        return Parsed(Kind.GATHER, step, incarnation, attempt, lowest)
    match = re.fullmatch(r"rank-([0-9]+)\.(vote|state\.msgpack|([^./]+)\.(?:safetensors|packed))", file)
    rank = _parse_number(match[1], _RANK_DIGITS) if match else None
    if match is None or rank is None:
        return None
    if match[2] == "vote":
        return Parsed(Kind.VOTE, step, incarnation, attempt, rank)
    if match[2] == "state.msgpack":
        return Parsed(Kind.STATE, step, incarnation, attempt, rank)
    text = match[3]
    if not _is_escaped(text):
        return None
    packed = file.endswith(".packed")
    return Parsed(
        Kind.IMAGE, step, incarnation, attempt, rank, text=text, image=unescape(text), packed=packed
    )
