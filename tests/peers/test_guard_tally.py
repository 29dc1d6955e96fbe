"""W of several nodes: which step counts, who is waited for, and for how long. With a clock of the test's."""

from __future__ import annotations

import random

import pytest
from everstep.errors import from_wire
from everstep.peers.hub import NO_STEP, QUIET_S, Tally
from everstep.peers.messages import Standing

TIMEOUT_S = 10.0
LIMIT_S = 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Nodes:
    """A tally, and what each node says."""

    def __init__(self, count: int, complete: int = NO_STEP) -> None:
        self.clock = Clock()
        self.names = [f"n{index}" for index in range(count)]
        self.said: dict[int, Standing] = {}
        """What the nodes that are connected repeat each second."""
        self.tally = Tally(
            self.names, timeout_s=TIMEOUT_S, limit_s=LIMIT_S, complete=complete, clock=self.clock
        )

    def say(self, index: int, valid: int, protected: int, moved: int = 0, error: str | None = None) -> None:
        wire = {"type": "PeerLost", "message": error} if error else None
        self.said[index] = Standing(self.names[index], 1, valid, protected, moved, wire)
        self.tally.heard(index, self.said[index])

    def lose(self, index: int) -> None:
        self.said.pop(index, None)
        self.tally.lost(index)

    def look(self, seconds: float = 0.0) -> tuple[int, list[tuple[str, bool]]]:
        """W after that time, and whose protection went (False) or came back (True)."""
        changes = []
        until = self.clock.now + seconds
        while True:
            changes += [(change.node, change.error is None) for change in self.tally.look()]
            if self.clock.now >= until:
                return self.tally.complete, changes
            self.clock.now = min(until, self.clock.now + 1.0)
            for index, standing in self.said.items():
                self.tally.heard(index, standing)


def test_w_is_the_newest_step_that_all_protect() -> None:
    nodes = Nodes(3)
    assert nodes.look() == (NO_STEP, [])
    for index, protected in enumerate((4, 3, 5)):
        nodes.say(index, 5, protected)
    assert nodes.look() == (3, [])
    nodes.say(1, 5, 5)
    assert nodes.look() == (4, [])


def test_before_all_were_heard_there_is_no_w() -> None:
    nodes = Nodes(2)
    nodes.say(0, 5, 5)
    assert nodes.look(TIMEOUT_S / 2) == (NO_STEP, [])
    assert nodes.look(TIMEOUT_S) == (5, [("n1", False)])


def test_a_node_without_progress_counts_by_what_it_has() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    assert nodes.look() == (1, [])
    nodes.say(0, 2, 2)
    nodes.say(1, 2, 1, error="the switch is off")
    assert nodes.look(TIMEOUT_S - 1) == (1, [])
    assert nodes.look(1) == (2, [("n1", False)])
    assert "the switch is off" in str(from_wire(nodes.tally.without["n1"]))
    nodes.say(0, 3, 3)
    assert nodes.look() == (2, []), "it has nothing newer"
    nodes.say(1, 3, 1)
    assert nodes.look() == (3, [])


def test_bytes_are_progress_but_not_the_same_bytes_again() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    nodes.look()
    nodes.say(0, 2, 2)
    for moved in (10, 20, 30):
        nodes.say(1, 2, 1, moved)
        assert nodes.look(TIMEOUT_S - 1) == (1, [])
    nodes.say(1, 2, 1, 30)
    assert nodes.look(2) == (2, [("n1", False)])


def test_a_step_may_not_take_longer_than_the_limit() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    nodes.say(0, 2, 2)
    seconds, moved = 0.0, 0
    while nodes.look(5)[0] == 1:
        moved += 1
        nodes.say(1, 2, 1, moved)
        seconds += 5
        assert seconds <= LIMIT_S + 5
    assert seconds >= LIMIT_S


def test_back_it_is_waited_for_again() -> None:
    """W stands still until the node has protected it, so that its protection means something."""
    nodes = Nodes(2)
    nodes.say(0, 9, 9)
    nodes.say(1, 9, 1)
    assert nodes.look(TIMEOUT_S) == (9, [("n1", False)])
    nodes.say(1, 9, 8)
    nodes.say(0, 10, 10)
    assert nodes.look() == (9, [])
    nodes.say(1, 9, 9)
    assert nodes.look() == (9, [("n1", True)])
    nodes.say(1, 10, 9)
    assert nodes.look(TIMEOUT_S - 1) == (9, [])
    assert nodes.look(1) == (10, [("n1", False)]), "told anew when it fails anew"


def test_an_unheard_node_does_not_count_until_it_is_back() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    nodes.look()
    nodes.lose(1)
    nodes.say(0, 2, 2)
    assert nodes.look(TIMEOUT_S - 1) == (1, [])
    assert nodes.look(1) == (2, [("n1", False)])
    nodes.say(0, 7, 7)
    assert nodes.look() == (7, [])
    nodes.say(1, 7, 7)
    assert nodes.look() == (7, [("n1", True)])


def test_a_short_loss_of_a_connection_is_not_told() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    for _ in range(5):
        nodes.lose(1)
        assert nodes.look(TIMEOUT_S / 2) == (1, [])
        nodes.say(1, 1, 1)


def test_who_falls_silent_is_lost_from_its_last_word_on() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 1, 1)
    nodes.look(5)
    del nodes.said[1]  # its connection stands, as that of a stopped process does
    nodes.say(0, 2, 2)
    assert nodes.look(QUIET_S + 1) == (1, [])
    assert nodes.look(TIMEOUT_S - QUIET_S - 2) == (1, [])
    assert nodes.look(1) == (2, [("n1", False)])


def test_nobody_is_late_while_training_pauses() -> None:
    nodes = Nodes(2)
    for index in range(2):
        nodes.say(index, 3, 3)
    assert nodes.look(100 * LIMIT_S) == (3, [])
    nodes.say(0, 4, 3)
    nodes.say(1, 4, 4)
    assert nodes.look(TIMEOUT_S - 1) == (3, [])


@pytest.mark.parametrize("seed", range(20))
def test_w_never_goes_back_nor_beyond_what_is_counted(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    nodes = Nodes(3)
    valid, protected, last = [0] * 3, [-1] * 3, NO_STEP
    for _ in range(300):
        index = rng.randrange(3)
        match rng.randrange(5):
            case 0 if valid[index] <= min(valid):
                valid[index] += 1
            case 1 | 2:
                protected[index] = min(valid[index], protected[index] + rng.randrange(3))
            case 3:
                nodes.lose(index)
            case _:
                nodes.clock.now += rng.choice([0.1, 1.0, TIMEOUT_S])
        nodes.say(index, valid[index], protected[index])
        complete, _ = nodes.look()
        assert last <= complete <= max(valid)
        if not nodes.tally.without:
            assert complete <= max(last, min(protected))
        last = complete
