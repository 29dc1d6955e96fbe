"""The trainer's side of the agent. Plain synchronous code, no thread (but for the inline agent's own)."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from everstep.errors import AgentError, EverstepError, SaveFailed, from_wire

from . import places
from .asking import ask
from .frames import FrameSocket
from .link import Link, State
from .protocol import (
    ArenasAnswer,
    ArenasRequest,
    Bye,
    FlushRequest,
    GiveUpRequest,
    Goodbye,
    Guarded,
    Guarding,
    Listen,
    Listening,
    News,
    StatusAnswer,
    StatusRequest,
    Taken,
)
from .spawn import Standby
from .values import NO_STEP, VERDICTS, AgentSettings, Hello, Progress

if TYPE_CHECKING:
    from .inline import InlineAgent

CONNECT_TIMEOUT_S = 60.0
STATUS_S = 5.0
NEWS_MAX = 100_000
"""Progress that nobody has polled; the oldest is dropped then (verdicts of one's own steps are kept
apart)."""
STEPS_MAX = 10_000
"""Steps whose attempts and verdicts are remembered."""

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", StatusAnswer, Listening, Guarded, Goodbye)

_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()
_fork_hooked = False


@dataclass
class _Wanted:
    """A flush without a verdict."""

    request: FlushRequest
    since: float


@dataclass(frozen=True)
class HeldArena:
    """An arena that the agent knows; ``fd`` (the caller's, to close) where it has no path."""

    rank: int
    incarnation: int
    path: Path | None
    fd: int | None


class AgentClient:
    """One rank's client. One thread at a time uses it.

    No call waits for storage or for the agent, but for :meth:`connect`, :meth:`wait`, :meth:`status` and
    :meth:`bye`, each bounded by its time-out. A lost agent is started again (at most 5 times in 10
    minutes), told what was unfinished, and reported as progress of stage "agent_lost"; when it cannot be
    had at all, :class:`AgentError` is raised once, the unfinished flushes fail, and so does every later one
    until it can be had again. In a forked child every call but :meth:`close` raises AgentError, and nothing
    of the parent's is touched.
    """

    def __init__(
        self,
        settings: AgentSettings,
        hello: Hello,
        inline: InlineAgent | None,
        standby: Standby | None = None,
        patient: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._settings = settings
        self._hello = hello
        self._inline = inline
        self._news: deque[Progress] = deque(maxlen=NEWS_MAX)
        self._wanted: dict[int, _Wanted] = {}
        self._owed: dict[int, FlushRequest] = {}
        """What is durable at the root, and not yet at the tiers that are named."""
        self._attempts: dict[int, int] = {}
        self._given_up: dict[int, int] = {}
        self._decided: dict[int, int] = {}
        """Of each step the highest attempt that has a verdict."""
        self._verdicts: dict[int, Progress] = {}
        self._untold: EverstepError | None = None
        self._run_gone: EverstepError | None = None
        """Why the agent left, where that was its reason."""
        self._down = False
        self._said_goodbye = False
        self._numbers = itertools.count(1)
        frames = None if inline is None else FrameSocket(inline.socket)
        self._link = Link(
            settings,
            hello,
            up=self._registered,
            lost=self._agent_lost,
            inline=frames,
            standby=standby,
            patient=patient,
        )
        _hook_fork()
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        settings: AgentSettings,
        hello: Hello,
        *,
        mode: Literal["process", "inline"] = "process",
        timeout_s: float = CONNECT_TIMEOUT_S,
        standby: Standby | None = None,
        patient: bool = False,
    ) -> AgentClient:
        """Register with the agent, which is started if none answers (``standby`` becomes it; ``patient``: another
        process of this node has a while to do it). Raises
        AgentError (no agent, another release's, another run's), RunInUse (a living process is this rank already)."""
        if mode == "process":
            places.prepare(settings.runtime_dir)
        inline: InlineAgent | None = None
        if mode == "inline":
            from .inline import InlineAgent  # a whole agent, which a trainer needs not load otherwise

            inline = InlineAgent(settings)
        client = cls(settings, hello, inline, standby, patient)
        try:
            client._await_up(timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def is_inline(self) -> bool:
        """Whether the agent is a thread of this process."""
        return self._inline is not None

    # -- flushes

    def flush(
        self,
        step: int,
        *,
        slot: int,
        generation: int,
        kind: str = "full",
        tiers: Sequence[str] = (),
        base: tuple[int, int] | None = None,
        merge: bool = False,
    ) -> None:
        """Ask for the snapshot in ``slot`` to be made durable as ``step``, and then on ``tiers``, by name. Asking again
        before there is a verdict adds tiers, or the wish to merge, and does nothing else; after a failure it opens the
        next attempt. A delta stands on ``base``; ``merge``: it is to be made a full then. Does not wait."""
        self._check_process()
        if step in self._wanted:
            self._pump()
        if step in self._wanted:
            self._want_more(self._wanted[step], tiers, merge=merge)
            return
        attempt = self.next_attempt(step)
        _remember(self._attempts, step, attempt)
        self._verdicts.pop(step, None)
        request = FlushRequest(step, slot, generation, kind, attempt, list(tiers), base, merge)
        self._wanted[step] = _Wanted(request, time.monotonic())
        self._pump()  # only now: another rank may have had this very attempt given up already
        if step not in self._wanted:
            return
        if self._link.state is State.DOWN:
            self._fail_wanted()
            self._raise_untold()
        else:
            self._link.send(request)

    def _want_more(self, wanted: _Wanted, tiers: Sequence[str], *, merge: bool) -> None:
        request = wanted.request
        more = [tier for tier in tiers if tier not in request.tiers]
        if more or (merge and not request.merge):
            all_tiers, merge = [*request.tiers, *more], merge or request.merge
            wanted.request = msgspec.structs.replace(request, tiers=all_tiers, merge=merge)
            self._link.send(wanted.request)

    def next_attempt(self, step: int) -> int:
        """The attempt that the next request for ``step`` opens."""
        return max(self._attempts.get(step, 0), self._given_up.get(step, 0)) + 1

    def give_up(self, step: int, reason: str) -> None:
        """Have the unfinished flush of ``step`` abandoned by all ranks; its verdict says which came first. A
        rank that has not asked for it, and cannot, says so too."""
        self._check_process()
        wanted = self._wanted.get(step)
        if wanted is not None:
            attempt = wanted.request.attempt
        else:
            # Again, before anyone has heard of the first time, it is the same attempt: the others asked for no other.
            unheard = self._given_up.get(step, 0)
            unheard = unheard if unheard > self._decided.get(step, 0) else 0
            attempt = unheard or self.next_attempt(step)
            _remember(self._given_up, step, attempt)
        self._link.send(GiveUpRequest(step, attempt, reason))

    def rearm(self, arena: Path | int) -> None:
        """The rank's snapshots lie in another arena from now on."""
        self._check_process()
        self._hello = replace(self._hello, arena=arena)
        self._link.register_anew(self._hello)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Steps that were asked for and have no verdict yet."""
        return tuple(self._wanted)

    def poll(self) -> list[Progress]:
        """What has happened since the last call. Never waits. Raises AgentError once when the agent is
        given up."""
        self._check_process()
        self._pump()
        if not self._news:
            self._raise_untold()
        news = list(self._news)
        self._news.clear()
        return news

    def listen(self, timeout_s: float) -> list[Progress]:
        """As :meth:`poll`, waiting up to ``timeout_s`` for something to happen."""
        news = self.poll()
        if not news:
            self._link.wait(timeout_s)
            news = self.poll()
        return news

    @property
    def agent_pid(self) -> int | None:
        """The agent's process id, while there is one (inline: this process)."""
        return self._link.agent.pid if self._link.agent is not None else None

    def wait(self, step: int, *, tier: str | None = None, timeout_s: float) -> Progress:
        """The verdict on the flush of ``step`` (also one that :meth:`poll` has given already). Raises
        AgentError after ``timeout_s``, and for a step that was never asked for."""
        self._check_process()
        deadline = time.monotonic() + timeout_s
        while True:
            self._pump()
            found = self._verdicts.get(step)
            if found is not None and tier in (None, found.tier):
                return found
            if step not in self._wanted:
                raise AgentError(f"step {step} was not asked to be made durable", expected="flush() first")
            left = deadline - time.monotonic()
            if left <= 0:
                raise AgentError(
                    f"step {step} is still not durable",
                    found=f"{timeout_s:g} s have passed; the agent is {self._link.state.value}",
                    hint="It goes on in the background; wait longer",
                    step=step,
                )
            self._link.wait(left)

    def status(self) -> dict[str, Any]:
        """What the agent says of itself. Raises AgentError if it does not within 5 s."""
        self._check_process()
        self._await_up(STATUS_S)
        number = next(self._numbers)
        self._link.send(StatusRequest(number))
        return self._reply(StatusAnswer, number, STATUS_S).status

    # -- protection against the loss of nodes

    def listen_for_peers(self, host: str, secret: bytes, *, timeout_s: float) -> tuple[str, int]:
        """Where agents of other nodes that know ``secret`` reach this node's. Raises AgentError, PeerLost."""
        self._check_process()
        self._await_up(timeout_s)
        number = next(self._numbers)
        self._link.send(Listen(number, host, secret, self._hello.incarnation))
        answer = self._reply(Listening, number, timeout_s)
        if answer.error is not None:
            raise from_wire(answer.error)
        return answer.host, answer.port

    def guard(self, wish: Guarding, *, timeout_s: float) -> None:
        """Have this node's snapshots protected from now on, and others' kept. Raises MemoryTooSmall, AgentError,
        PeerLost."""
        self._check_process()
        self._await_up(timeout_s)
        number = next(self._numbers)
        self._link.send(msgspec.structs.replace(wish, number=number))
        answer = self._reply(Guarded, number, timeout_s)
        if answer.error is not None:
            raise from_wire(answer.error)

    def taken(self, step: int, *, slot: int, generation: int) -> None:
        """There is a snapshot of ``step``. Does not wait; an agent that is not there finds it when it comes."""
        self._check_process()
        self._link.send(Taken(step, slot, generation))

    @property
    def answers(self) -> bool:
        """Whether an agent serves this trainer and owes it no answer, as far as it is known."""
        return self._link.answers

    def ask(self) -> None:
        """Have the agent give a sign of life. Does not wait: :meth:`poll` and :attr:`answers` tell."""
        self._check_process()
        self._link.ask()

    @property
    def given_up(self) -> bool:
        """Whether there is no agent, and none is started for a while."""
        return os.getpid() == self._pid and self._link.state is State.DOWN

    # -- the end

    def bye(self, *, timeout_s: float, flush: bool = True, safe: bool = False) -> None:
        """Say that this trainer ends on purpose. ``flush``: first wait for the verdicts on what was asked
        for. Without, nothing is waited for, and nothing more is made durable than what the agent has
        accepted. ``safe``: what lies in memory is durable, also what other nodes keep of it and this one of theirs.

        Raises SaveFailed if flushes are left after ``timeout_s`` (a process agent still goes on with them).
        """
        self._check_process()
        deadline = time.monotonic() + timeout_s
        while flush and self._wanted and self._link.state is not State.DOWN and time.monotonic() < deadline:
            self._pump()
            if self._wanted:
                self._link.wait(deadline - time.monotonic())
        left = sorted(self._wanted)
        number = next(self._numbers)
        if self._link.state is State.SILENT:
            self._link.send(Bye(number, flush, safe))  # it may wake up, and is not waited for
        elif self._link.state is not State.DOWN:
            with contextlib.suppress(AgentError):
                self._await_up(max(0.0, deadline - time.monotonic()))
                self._link.send(Bye(number, flush, safe))
                self._reply(Goodbye, number, max(0.1, deadline - time.monotonic()))
                self._said_goodbye = flush and not left
        self.close()
        if flush and left:
            raise SaveFailed(
                f"{len(left)} flush{'' if len(left) == 1 else 'es'} did not become durable before the end",
                found=f"steps {left}",
                expected=f"verdicts within {timeout_s:g} s",
                step=left[-1],
            )

    def close(self) -> None:
        """Hang up. Without :meth:`bye` the agent takes the end of this process for a crash, and makes its
        newest step durable."""
        if os.getpid() != self._pid:
            return
        self._link.close()
        if self._inline is not None:
            self._inline.stop(finish=self._said_goodbye)

    # -- inside

    def _pump(self) -> None:
        self._link.advance()
        self._hear()

    def _hear(self) -> None:
        """Take in the news that have come."""
        replies = self._link.replies
        for _ in range(len(replies)):
            reply = replies.popleft()
            if isinstance(reply, News):
                self._take(Progress(**{name: getattr(reply, name) for name in News.__struct_fields__}))
            else:
                replies.append(reply)

    def _take(self, progress: Progress) -> None:
        self._news.append(progress)
        if progress.stage == "run_gone" and progress.error is not None:
            self._run_gone = from_wire(progress.error)
        elif progress.stage == "committed":
            self._run_gone = None
        if progress.incarnation != self._hello.incarnation:
            return
        if progress.stage in ("mirrored", "mirror_dropped") and progress.step in self._owed:
            self._arrived(progress)
        if progress.stage not in VERDICTS:
            return
        _remember(self._decided, progress.step, max(progress.attempt, self._decided.get(progress.step, 0)))
        wanted = self._wanted.get(progress.step)
        # An older attempt's verdict that comes late says nothing of the one that was asked for since.
        if wanted is not None and (
            progress.attempt >= wanted.request.attempt or progress.stage == "committed"
        ):
            del self._wanted[progress.step]
            _remember(self._verdicts, progress.step, progress)
            if progress.stage == "committed" and wanted.request.tiers:
                _remember(self._owed, progress.step, wanted.request)

    def _arrived(self, progress: Progress) -> None:
        names = [tier.name for tier in self._settings.tiers if tier.url == progress.tier]
        request = self._owed.pop(progress.step)
        left = [name for name in request.tiers if name not in names]
        if left:
            self._owed[progress.step] = msgspec.structs.replace(request, tiers=left)

    def _registered(self) -> None:
        """Up, perhaps again: whatever has no verdict, or has not reached its tiers, is asked for again; what the agent
        knows already it joins."""
        self._down = False
        for request in [wanted.request for wanted in self._wanted.values()] + list(self._owed.values()):
            self._link.send(request)

    def _agent_lost(self, why: str) -> None:
        """Told once per loss; AgentError is raised once per time without any agent."""
        self._hear()  # it may have said why it leaves
        down = self._link.state is State.DOWN
        if not (down and self._down):
            error = AgentError("the agent was lost", found=why)
            self._news.append(self._own(max(self._wanted, default=NO_STEP), "agent_lost", error))
        if down:
            if not self._down and self._run_gone is None:
                self._untold = self._link.error
            self._down = True
            self._fail_wanted()

    def _fail_wanted(self) -> None:
        error = self._why_down("there is no agent")
        for step in list(self._wanted):
            progress = self._own(step, "failed", error)
            del self._wanted[step]
            self._news.append(progress)
            _remember(self._verdicts, step, progress)

    def _own(self, step: int, stage: str, error: EverstepError) -> Progress:
        wanted = self._wanted.get(step)
        attempt, since = (wanted.request.attempt, wanted.since) if wanted else (0, time.monotonic())
        return Progress(
            step,
            self._hello.incarnation,
            attempt,
            self._settings.root,
            stage,
            error.to_wire(),
            time.monotonic() - since,
            rank=self._hello.rank,
        )

    def _raise_untold(self) -> None:
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    def _await_up(self, timeout_s: float) -> None:
        self._await(lambda: self._link.state is State.UP or None, timeout_s, "the agent did not answer")

    def _reply(self, kind: type[ReplyT], number: int, timeout_s: float) -> ReplyT:
        def look() -> ReplyT | None:
            for reply in list(self._link.replies):
                if isinstance(reply, kind) and reply.number == number:
                    self._link.replies.remove(reply)
                    return reply
            return None

        return self._await(look, timeout_s, f"the agent gave no {kind.__name__}")

    def _await(self, look: Callable[[], T | None], timeout_s: float, else_say: str) -> T:
        deadline = time.monotonic() + timeout_s
        while True:
            self._pump()
            found = look()
            if found is not None:
                return found
            if self._link.state is State.DOWN:
                self._untold = None
                raise self._why_down(else_say)
            left = deadline - time.monotonic()
            if left <= 0:
                raise AgentError(
                    f"{else_say} within {timeout_s:g} s",
                    found=f"it is {self._link.state.value}",
                    hint=f"Read {self._settings.runtime_dir / places.LOG}",
                )
            self._link.wait(left)

    def _why_down(self, else_say: str) -> EverstepError:
        if self._inline is not None and self._inline.error is not None:
            error = self._inline.error
            return AgentError("the inline agent failed", found=f"{type(error).__name__}: {error}")
        return self._run_gone or self._link.error or AgentError(else_say)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise AgentError(
                "the agent's client was used after a fork", hint="Use it in the process that made it"
            )

    def _forget_in_child(self) -> None:
        self._link.abandon()


def fetch_arenas(settings: AgentSettings, *, timeout_s: float = STATUS_S) -> list[HeldArena]:
    """The arenas that a running agent knows, those without a path as descriptors: how a restarted trainer
    gets its memory back, before it has an incarnation. Empty where no agent runs; starts none."""
    return ask(settings, ArenasRequest(1, True), ArenasAnswer, _held, timeout_s=timeout_s) or []


def _held(link: Link, answer: ArenasAnswer) -> list[HeldArena]:
    return [
        HeldArena(
            one["rank"],
            one["incarnation"],
            Path(one["path"]) if one["path"] else None,
            None if one["path"] else link.take_fd(),
        )
        for one in answer.arenas
    ]


def _remember(table: dict[int, Any], step: int, value: Any) -> None:
    table.pop(step, None)
    table[step] = value
    while len(table) > STEPS_MAX:
        del table[next(iter(table))]


def _hook_fork() -> None:
    global _fork_hooked
    if not _fork_hooked:
        _fork_hooked = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_in_child()


__all__ = [
    "AgentClient",
    "AgentSettings",
    "HeldArena",
    "Hello",
    "Progress",
    "fetch_arenas",
]
