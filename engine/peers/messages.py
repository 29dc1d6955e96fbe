"""What agents say to each other, and how it lies on the wire.

A frame is a 4-byte length (big-endian), the hash of the body, and the body: a msgpack map whose ``type`` names the
message. Bulk bytes follow a frame as they are; what they are compared with stood in it. A new kind of message is a
subclass of :class:`Message`, wherever it is defined.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, TypeVar, Union

import msgspec
from everstep.errors import BadOption, EverstepError, PeerLost, from_wire
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import digest

FRAME_BYTES_MAX = 64 << 20
"""Largest body: an offer holds 16 bytes for each chunk of a rank's snapshot, so this is enough for 4 TiB in chunks of
1 MiB."""
REGIONS_MAX = 256
AGAIN_MAX = 1024
"""Chunks of one snapshot that are asked for again: where more came damaged, something else is wrong."""
TEXT_MAX = 2000
"""Characters of an error's texts, as they are sent."""

Wire = dict[str, Any]
"""An error's ``to_wire()``."""
Mode = Literal["full", "meta"]
"""Of an offer: with its images, or without."""

_HEAD = struct.Struct(f">I{HASH_BYTES}s")
HEAD_BYTES = _HEAD.size


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; they are told apart by their class's name."""


class Offer(Message, frozen=True):
    """A sealed snapshot of one rank, for the other side to keep.

    ``regions`` are those of its slot, with sizes in bytes (layout, meta, state and its images; no copies of other
    ranks'); ``records`` is the table of the hashes of all images and the state. ``slot_bytes`` is the size of the
    owner's slots. In mode "meta" no image is to be sent.
    """

    run_id: str
    incarnation: int
    step: int
    rank: int
    world: int
    chunk_bytes: int
    slot_bytes: int
    layout_hash: str
    regions: list[tuple[str, int]]
    records: bytes
    mode: Mode = "full"


class Need(Message, frozen=True):
    """The answer to an offer: send the layout, meta, the state, and these images, in the offer's order."""

    images: list[str]


class Sent(Message, frozen=True):
    """All that was asked for was sent, and the slot still held that very snapshot."""


class Again(Message, frozen=True):
    """These pieces did not come as they should: send them once more. Each is a region, an offset and a size."""

    pieces: list[tuple[str, int, int]]


class Kept(Message, frozen=True):
    """The snapshot is held, proved and sealed. ``root`` binds the records of all the rank's images."""

    root: bytes


class Failed(Message, frozen=True):
    """What was asked for was not done; ``error`` says why."""

    error: Wire


class Standing(Message, frozen=True):
    """What a node has of an incarnation: its newest step that all its ranks hold, and the newest that is protected
    against its loss (-1: none). ``moved`` counts bytes that its holders took, so that slow is told from stuck;
    ``error`` is why protection does not get on."""

    node: str
    incarnation: int
    valid: int
    protected: int
    moved: int = 0
    error: Wire | None = None


class Complete(Message, frozen=True):
    """W over all nodes (-1: none yet), and the nodes that it goes on without, each with the reason."""

    incarnation: int
    step: int
    without: dict[str, Wire] = {}


class Moved(Message, frozen=True):
    """The agent of ``node`` listens elsewhere now."""

    node: str
    host: str
    port: int


M = TypeVar("M", bound=Message)


def encode_frame(message: Message) -> bytes:
    """A whole frame. BadOption if it is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise BadOption(
            f"a message to another node is too large ({type(message).__name__})",
            found=f"{len(body)} bytes",
            expected=f"at most {FRAME_BYTES_MAX}",
            hint="Larger chunks need fewer hashes",
        )
    return _HEAD.pack(len(body), digest(body)) + body


def decode_head(head: bytes | bytearray) -> tuple[int, bytes]:
    """(size, hash) of the body that follows. PeerLost if it is too large."""
    nbytes, expected = _HEAD.unpack(head)
    if nbytes > FRAME_BYTES_MAX:
        raise PeerLost(
            "a message of another node is too large",
            found=f"{nbytes} bytes",
            expected=f"at most {FRAME_BYTES_MAX}",
        )
    return int(nbytes), bytes(expected)


def decode_body(body: bytes | bytearray, expected: bytes) -> Message:
    """The message. PeerLost if it does not have its hash, or is none of the known ones."""
    if digest(body) != expected:
        raise PeerLost(
            "a message of another node came damaged", found=digest(body).hex(), expected=expected.hex()
        )
    try:
        return _decoder().decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerLost("another node said what is no message", found=error) from None


_decoders: dict[tuple[type[Message], ...], msgspec.msgpack.Decoder[Message]] = {}
"""By the kinds of message that are known: modules that are loaded later add theirs."""


def _decoder() -> msgspec.msgpack.Decoder[Message]:
    kinds = tuple(_kinds(Message))
    if kinds not in _decoders:
        _decoders.clear()
        _decoders[kinds] = msgspec.msgpack.Decoder(Union[kinds])  # noqa: UP007  # a type made of values
    return _decoders[kinds]


def _kinds(base: type[Message]) -> list[type[Message]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_kinds(child))]


def expect(message: Message, kind: type[M]) -> M:
    """``message``, which must be of ``kind``. The error of a :class:`Failed` is raised; PeerLost for any other."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Failed):
        raise from_wire(message.error)
    raise unexpected(message, kind.__name__)


def unexpected(message: Message, expected: str) -> PeerLost:
    return PeerLost("another node said what was not asked", found=type(message).__name__, expected=expected)


def failed(error: EverstepError) -> Failed:
    """``error`` as a message; overlong texts are cut."""
    wire = error.to_wire()
    for name in ("message", "found", "expected", "hint"):
        if isinstance(wire[name], str):
            wire[name] = wire[name][:TEXT_MAX]
    wire["fields"] = {
        key: value[:TEXT_MAX] if isinstance(value, str) else value for key, value in wire["fields"].items()
    }
    return Failed(wire)
