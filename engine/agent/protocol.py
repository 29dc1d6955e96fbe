"""Messages between trainers and agent: one msgpack map per frame, told apart by its field ``t``.

A conversation begins with :class:`Knock` and :class:`Answer`, whose form never changes, so that any two
releases understand each other's refusal. All other messages belong to :data:`PROTOCOL` and change with it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from everstep.errors import AgentError

PROTOCOL = 5
"""Goes up with every change of the messages after the handshake."""

FRAME_BYTES_MAX = 1 << 20
"""No message is larger; a peer that announces more is cut off."""


class Knock(msgspec.Struct, tag="knock", tag_field="t"):
    """First frame of a client. ``wants``: "serve", or "leave" to ask an idle agent to make room."""

    protocol: int
    wants: str = "serve"


class Answer(msgspec.Struct, tag="answer", tag_field="t"):
    """First frame of the agent. It hangs up behind it when the protocols differ, and when it leaves."""

    protocol: int
    pid: int
    start_time: int
    boot: str
    idle: bool
    leaving: bool


class Register(msgspec.Struct, tag="register", tag_field="t"):
    """A trainer introduces itself. ``arena`` is "" where a descriptor comes with the frame."""

    settings: dict[str, Any]
    run_id: str
    rank: int
    world: int
    incarnation: int
    adopted: tuple[int, int] | None
    pid: int
    start_time: int
    boot: str
    arena: str


class FlushRequest(msgspec.Struct, tag="flush", tag_field="t"):
    """``attempt`` counts this incarnation's requests for this step, from 1; all ranks count alike. ``tiers``: names of
    the further tiers that the checkpoint is to reach. ``base``: (incarnation, step) that a delta stands on; ``merge``:
    it is to be made a full once it is durable."""

    step: int
    slot: int
    generation: int
    kind: str
    attempt: int
    tiers: list[str] = []
    base: tuple[int, int] | None = None
    merge: bool = False


class GiveUpRequest(msgspec.Struct, tag="give_up", tag_field="t"):
    step: int
    attempt: int
    reason: str


class Ping(msgspec.Struct, tag="ping", tag_field="t"):
    number: int


class StatusRequest(msgspec.Struct, tag="status?", tag_field="t"):
    number: int


class ArenasRequest(msgspec.Struct, tag="arenas?", tag_field="t"):
    """Asked without registering. ``descriptors``: send one for each arena that has no path."""

    number: int
    descriptors: bool


class PeersRequest(msgspec.Struct, tag="peers?", tag_field="t"):
    """Asked without registering, by whoever mends the run here: how the agents of other nodes are reached."""

    number: int


class Loading(msgspec.Struct, tag="loading", tag_field="t"):
    """Said without registering: the process begins to load, or (``ended``) is done. What an agent sends in the
    background stands back meanwhile."""

    number: int
    pid: int
    start_time: int
    boot: str
    ended: bool


class Listen(msgspec.Struct, tag="listen", tag_field="t"):
    """Asks for an address at which agents of other nodes reach this one, on ``host``. ``secret`` is what they all
    know; it stays on this machine."""

    number: int
    host: str
    secret: bytes
    incarnation: int


class Guarding(msgspec.Struct, tag="guarding", tag_field="t"):
    """Protect this incarnation's snapshots against the loss of nodes. ``nodes`` is an encoded
    :class:`~everstep.peers.nodemap.NodeMap`, ``me`` this node's position in it; ``arenas`` is the directory for what
    is kept of others; the times: see :class:`~everstep.peers.hub.Tally`."""

    number: int
    nodes: bytes
    me: int
    incarnation: int
    arenas: str
    chunk_bytes: int
    rate_bytes_per_s: float | None
    timeout_s: float
    limit_s: float


class Taken(msgspec.Struct, tag="taken", tag_field="t"):
    """A snapshot is VALID: it can be sent to other nodes."""

    step: int
    slot: int
    generation: int


class Bye(msgspec.Struct, tag="bye", tag_field="t"):
    """The trainer ends on purpose. ``flush`` False: nothing more is to be made durable on its behalf. ``safe``: its
    newest snapshot is durable, and nobody needs what lies in memory any more."""

    number: int
    flush: bool
    safe: bool = False


class Welcome(msgspec.Struct, tag="welcome", tag_field="t"):
    epoch: int


class Refused(msgspec.Struct, tag="refused", tag_field="t"):
    """The agent will not serve this client; it hangs up behind it."""

    error: dict[str, Any]


class News(msgspec.Struct, tag="news", tag_field="t"):
    """A :class:`~everstep.agent.values.Progress`."""

    step: int
    incarnation: int
    attempt: int
    tier: str
    stage: str
    error: dict[str, Any] | None
    seconds: float
    nbytes: int
    rank: int
    kind: str = ""
    base: tuple[int, int] | None = None


class Pong(msgspec.Struct, tag="pong", tag_field="t"):
    number: int


class StatusAnswer(msgspec.Struct, tag="status", tag_field="t"):
    number: int
    status: dict[str, Any]


class ArenasAnswer(msgspec.Struct, tag="arenas", tag_field="t"):
    """One map each: rank, incarnation, path ("" where a descriptor comes with the frame, in this order). What is kept
    of other nodes' ranks is among them where it has no path."""

    number: int
    arenas: list[dict[str, Any]]


class PeersAnswer(msgspec.Struct, tag="peers", tag_field="t"):
    """What this node's agent proves itself with to those of other nodes, where it listens, and names and addresses of
    all that it knows, itself too. All empty where it talks to none. The secret stays on this machine."""

    number: int
    secret: bytes
    address: str
    nodes: list[tuple[str, str, int]]


class Noted(msgspec.Struct, tag="noted", tag_field="t"):
    """The agent knows who loads."""

    number: int


class Listening(msgspec.Struct, tag="listening", tag_field="t"):
    """Where other nodes' agents reach this one; or why not."""

    number: int
    host: str
    port: int
    error: dict[str, Any] | None = None


class Guarded(msgspec.Struct, tag="guarded", tag_field="t"):
    """There is memory for all that this node is to keep; or why not."""

    number: int
    error: dict[str, Any] | None = None


class Goodbye(msgspec.Struct, tag="goodbye", tag_field="t"):
    number: int


Request = (
    Knock
    | Register
    | FlushRequest
    | GiveUpRequest
    | Ping
    | StatusRequest
    | ArenasRequest
    | PeersRequest
    | Loading
    | Listen
    | Guarding
    | Taken
    | Bye
)
Reply = (
    Answer
    | Welcome
    | Refused
    | News
    | Pong
    | StatusAnswer
    | ArenasAnswer
    | PeersAnswer
    | Noted
    | Listening
    | Guarded
    | Goodbye
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Raises AgentError for anything that is no request of this protocol."""
    try:
        return _requests.decode(frame)
    except msgspec.MsgspecError as error:
        raise AgentError(
            "a trainer sent what is no request", found=str(error), expected=f"protocol {PROTOCOL}"
        ) from None


def decode_reply(frame: bytes) -> Reply:
    """Raises AgentError for anything that is no reply of this protocol."""
    try:
        return _replies.decode(frame)
    except msgspec.MsgspecError as error:
        raise AgentError(
            "the agent sent what is no reply", found=str(error), expected=f"protocol {PROTOCOL}"
        ) from None
