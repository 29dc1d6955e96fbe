"""The trainer's line to its agent: finds or starts it, shakes hands, registers, and notices when it is lost.

A state machine without waits: :meth:`Link.advance` does what can be done now, and :meth:`Link.wait` sleeps
until there may be more, at most as long as it is told.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from everstep.errors import AgentError, EverstepError, from_wire
from everstep.memory.process import Process

from . import places, protocol, spawn
from .frames import FrameSocket
from .protocol import Answer, Knock, Ping, Pong, Refused, Register, Reply, Request, Welcome
from .values import AgentSettings, Hello

PING_S = 2.0
"""Silence after which the agent is asked for a sign of life."""
ASK_S = 0.25
"""Between questions of someone who waits for the agent."""
SILENCE_S_MAX = 10.0
"""Silence after which it counts as lost; it may still wake up."""
STOPPED_S_MAX = 60.0
"""Silence after which its process is killed, so that another can take its place: its journal holds its
work."""
SHAKE_S_MAX = 10.0
"""A connection that is not answered by then is tried anew."""
REGISTER_S_MAX = 120.0
"""The agent may have to wait for storage before it can welcome a trainer; it gives signs of life
meanwhile."""
DOWN_S = 30.0
"""Rest before the next try once there is no agent to be had."""
TAKEN_MAX = 20
"""Starts that found another agent in office but not answering, before that counts as a loss."""
STARTS_MAX = 5
STARTS_WINDOW_S = 600.0
"""At most so many restarts in so long a time."""
PATIENCE_S = 5.0
"""How long the first process of the node has to start the agent, before another one does."""
PATIENT_LOOK_S = 0.005
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0


class State(Enum):
    SEEKING = "seeking"
    STARTING = "starting"
    SHAKING = "shaking"
    REGISTERING = "registering"
    UP = "up"
    SILENT = "silent"
    DOWN = "down"


def register_frame(settings: AgentSettings, hello: Hello) -> tuple[Register, tuple[int, ...]]:
    """The registration, and the descriptors that go with it."""
    by_fd = isinstance(hello.arena, int)
    message = Register(
        settings=settings.to_wire(),
        run_id=hello.run_id,
        rank=hello.rank,
        world=hello.world,
        incarnation=hello.incarnation,
        adopted=hello.adopted,
        pid=hello.process.pid,
        start_time=hello.process.start_time,
        boot=hello.process.boot,
        arena="" if by_fd else str(hello.arena),
    )
    return message, (hello.arena,) if isinstance(hello.arena, int) else ()


class Link:
    """``hello`` None: only ask questions, start nothing. ``error`` says why the state is DOWN. ``up`` is
    called at each (re-)registration, ``lost`` at each loss. Used by one thread of one process."""

    def __init__(
        self,
        settings: AgentSettings,
        hello: Hello | None,
        *,
        up: Callable[[], None],
        lost: Callable[[str], None],
        inline: FrameSocket | None = None,
        standby: spawn.Standby | None = None,
        patient: bool = False,
    ) -> None:
        """``patient``: another process of this node is about to start the agent. It has ``PATIENCE_S`` for that: each
        start takes a core for half a second, and but one becomes the agent."""
        self.state = State.SEEKING
        self.error: EverstepError | None = None
        self.agent: Process | None = None
        self.replies: deque[Reply] = deque()
        self._settings = settings
        self._hello = hello
        self._up = up
        self._lost = lost
        self._inline = inline is not None
        self._frames: FrameSocket | None = None
        self._start: spawn.Start | None = None
        self._standby = standby
        """What the first start is made of, if it is there still."""
        self._starts: deque[float] = deque()
        self._free_start = True
        self._taken = 0
        self._unanswered: float | None = None
        """Since when connections have been made that were not answered."""
        self._not_before = 0.0
        self._pause = PAUSE_FIRST_S
        self._since = time.monotonic()
        self._patient_until = self._since + PATIENCE_S if patient else 0.0
        self._heard = self._since
        self._asked: float | None = None
        """When the first question was asked that is still unanswered."""
        if inline is not None:
            self._knock(inline)

    # -- for the client

    def send(self, message: Request) -> None:
        """Queue a message to a registered agent; what cannot be sent now goes with a later
        :meth:`advance`."""
        if self._frames is not None and self.state in (State.UP, State.SILENT):
            self._frames.queue(protocol.encode(message))
            self._frames.push()

    @property
    def answers(self) -> bool:
        """Whether there is an agent, and it owes no answer, as far as it is known."""
        return self.state is State.UP and self._asked is None

    def ask(self) -> None:
        """Have the agent give a sign of life, for whoever waits for it: silence is noticed sooner then."""
        if self.state is State.UP and self._asked is None and time.monotonic() - self._heard > ASK_S:
            self._ping()

    def register_anew(self, hello: Hello) -> None:
        """Register again as ``hello`` (its arena was replaced), now or when the agent is there again."""
        self._hello = hello
        if self._frames is not None and self.state in (State.UP, State.SILENT):
            self._register(hello)

    def take_fd(self) -> int:
        """The next descriptor that came with a reply; the caller owns it."""
        if self._frames is None:
            raise AgentError("the agent was lost")
        return self._frames.take_fd()

    def advance(self) -> None:
        """Do everything that can be done without waiting."""
        for _ in range(len(State)):
            before = self.state
            step = {
                State.SEEKING: self._seek,
                State.STARTING: self._watch_start,
                State.SHAKING: self._listen,
                State.REGISTERING: self._listen,
                State.UP: self._listen,
                State.SILENT: self._listen,
                State.DOWN: self._rest,
            }[before]
            step()
            if self.state is before:
                return

    def wait(self, timeout_s: float) -> None:
        """Until something may have happened, at most ``timeout_s``."""
        waits_for = self._start if self.state is State.STARTING else self._frames
        timeout_s = max(0.0, min(timeout_s, PING_S))
        if waits_for is None:
            least = PATIENT_LOOK_S if self._since < self._patient_until else PAUSE_FIRST_S
            time.sleep(min(timeout_s, max(least, self._not_before - time.monotonic())))
            return
        poll = select.poll()
        sending = isinstance(waits_for, FrameSocket) and waits_for.waiting
        poll.register(waits_for.fileno(), select.POLLIN | (select.POLLOUT if sending else 0))
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        if self._frames is not None:
            self._frames.push()
            self._frames.close()
            self._frames = None
        if self._start is not None:
            self._start.close()
            self._start = None

    def abandon(self) -> None:
        """In a forked child: let go of the descriptors without a word."""
        if self._frames is not None:
            self._frames.close()

    # -- the states

    def _seek(self) -> None:
        if time.monotonic() < self._not_before:
            return
        sock = places.connect(self._settings.runtime_dir)
        if sock is not None:
            self._knock(FrameSocket(sock))
        elif self._hello is None:
            self._go_down(AgentError("no agent answers", found=str(self._settings.runtime_dir)))
        elif time.monotonic() < self._patient_until:
            self._not_before = time.monotonic() + PATIENT_LOOK_S
        elif not self._may_start():
            text = f"{STARTS_MAX} times in {STARTS_WINDOW_S / 60:g} minutes"
            self._go_down(
                AgentError(
                    "the agent was lost again and again; going on with memory only",
                    found=text,
                    hint=f"Read {self._settings.runtime_dir / places.LOG}",
                )
            )
        else:
            try:
                self._start = spawn.start(self._settings, self._standby)
                self._standby = None
                self._to(State.STARTING)
            except (AgentError, OSError) as error:
                self._go_down(
                    error if isinstance(error, AgentError) else AgentError("no agent", found=str(error))
                )

    def _may_start(self) -> bool:
        """The very first start is free; restarts are counted."""
        if self._free_start:
            self._free_start = False
            return True
        now = time.monotonic()
        while self._starts and self._starts[0] < now - STARTS_WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= STARTS_MAX:
            return False
        self._starts.append(now)
        return True

    def _watch_start(self) -> None:
        assert self._start is not None
        outcome = self._start.look()
        if outcome is None:
            return
        self._start.close()
        self._start = None
        if outcome == spawn.KILLED:  # lost like any other: the next one may live
            self._lose("it ended while it started")
            return
        if outcome not in (spawn.READY, spawn.TAKEN):
            self._go_down(AgentError("the agent could not be started", found=outcome))
            return
        if outcome == spawn.TAKEN:  # its winner may be leaving just now: then the next start is not our fault
            self._taken += 1
            self._free_start = self._taken <= TAKEN_MAX
            self._hold_off()
        self._to(State.SEEKING)

    def _knock(self, frames: FrameSocket, wants: str = "serve") -> None:
        self._frames = frames
        self._frames.queue(protocol.encode(Knock(protocol.PROTOCOL, wants)))
        self._frames.push()
        self._to(State.SHAKING)
        self._heard, self._asked = time.monotonic(), None

    def _listen(self) -> None:
        assert self._frames is not None
        now = time.monotonic()
        self._frames.push()
        try:
            for frame in self._frames.pull():
                self._heard, self._asked = now, None
                self._take(protocol.decode_reply(frame))
        except EverstepError as error:
            self._go_down(error)
            return
        self._judge(now)

    def _judge(self, now: float) -> None:
        """What silence, or the end of the connection, means."""
        if self._frames is None:
            return
        if self._frames.ended:
            self._lose("it has ended")
        elif self.state is State.SHAKING:
            if now - self._since > SHAKE_S_MAX:
                self._not_answered(now)
        elif self.state is State.REGISTERING and now - self._since > REGISTER_S_MAX:
            self._lose("it did not welcome us")
        else:
            self._check_silence(now)

    def _not_answered(self, now: float) -> None:
        """Someone listens, but does not answer: a stopped agent, which must not keep the place for ever."""
        assert self._frames is not None
        self.agent = Process.of(self._frames.peer_pid())
        if self._unanswered is None:
            self._unanswered = self._since
        if now - self._unanswered > STOPPED_S_MAX:
            self._unanswered = None
            self._kill_agent()
        else:
            self._lose("it did not answer")

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Answer):
            self._answered(reply)
        elif isinstance(reply, Welcome):
            self._pause, self._taken = PAUSE_FIRST_S, 0
            self._to(State.UP)
            self._up()
        elif isinstance(reply, Refused):
            raise from_wire(reply.error)
        elif not isinstance(reply, Pong):
            self.replies.append(reply)
        if self.state is State.SILENT:
            self._to(State.UP)

    def _answered(self, answer: Answer) -> None:
        assert self._frames is not None
        self.agent = Process(answer.pid, answer.start_time, answer.boot)
        self._unanswered = None
        if answer.protocol != protocol.PROTOCOL:
            self._mismatch(answer)
        elif self._hello is None:
            self._to(State.UP)
            self._up()
        else:
            self._to(State.REGISTERING)
            self._register(self._hello)

    def _register(self, hello: Hello) -> None:
        assert self._frames is not None
        message, fds = register_frame(self._settings, hello)
        self._frames.queue(protocol.encode(message), fds)
        self._frames.push()

    def _mismatch(self, answer: Answer) -> None:
        """An older, idle agent makes room when it is asked to; else two releases are at work at once."""
        assert self._frames is not None
        if answer.leaving:
            self._drop()
            self._free_start = True
            self._hold_off()
            self._to(State.SEEKING)
        elif answer.protocol < protocol.PROTOCOL and answer.idle and self._hello is not None:
            self._drop()
            sock = places.connect(self._settings.runtime_dir)
            if sock is not None:
                self._knock(FrameSocket(sock), "leave")
            else:
                self._to(State.SEEKING)
        else:
            raise AgentError(
                "the agent on this node is of another release",
                found=f"protocol {answer.protocol}, process {answer.pid}{'' if answer.idle else ', busy'}",
                expected=f"protocol {protocol.PROTOCOL}",
                hint="Use one release of everstep for all processes of a run",
            )

    def _check_silence(self, now: float) -> None:
        """Silence counts from the first unanswered question: a trainer that did not look for long did not
        ask."""
        assert self._frames is not None
        if self._asked is None:
            if now - self._heard > PING_S:
                self._ping()
            return
        silent = now - self._asked
        if self.state is State.REGISTERING and silent > SILENCE_S_MAX:
            self._lose("it stopped answering")
        elif self.state is State.UP and silent > SILENCE_S_MAX:
            self._to(State.SILENT)
            self._lost(f"it has not answered for {silent:.0f} s")
        elif self.state is State.SILENT and silent > STOPPED_S_MAX:
            self._kill_agent()

    def _ping(self) -> None:
        assert self._frames is not None
        self._asked = time.monotonic()
        self._frames.queue(protocol.encode(Ping(0)))
        self._frames.push()

    def _rest(self) -> None:
        """DOWN is not for ever: after a rest an agent is sought again, and started if the window allows
        it."""
        if self._hello is not None and not self._inline and time.monotonic() >= self._not_before:
            self.error = None
            self._to(State.SEEKING)

    # -- losing it

    def _kill_agent(self) -> None:
        if self.agent is not None and self.agent.alive():
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(self.agent.pid)
                try:
                    if self.agent.alive():
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
        self._lose("it was stopped for too long", told=True)

    def _lose(self, why: str, *, told: bool = False) -> None:
        was_up = self.state in (State.UP, State.SILENT)
        self._drop()
        if self._inline or self._hello is None:
            self._go_down(AgentError("the agent was lost", found=why))
            return
        self._hold_off()
        self._to(State.SEEKING)
        if was_up and not told:
            self._lost(why)

    def _hold_off(self) -> None:
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX_S)

    def _go_down(self, error: EverstepError) -> None:
        self._drop()
        self.error = error
        self._not_before = time.monotonic() + DOWN_S
        self._to(State.DOWN)
        self._lost(str(error))

    def _drop(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None

    def _to(self, state: State) -> None:
        self.state = state
        self._since = time.monotonic()
