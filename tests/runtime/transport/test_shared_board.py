"""What a rank keeps of its blocks on the board of its host: as many as the plan says, however far it is ahead."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.runtime.transport.shared_board import OwnBoard, SharedGroup, swap_boards

SECONDS = 20


class Whole:
    """A round in which both members send each other one block."""

    shape, dtype, alike, lent = (1024,), np.dtype("f4"), True, False

    def __init__(self, place: int) -> None:
        self.receivers = self.sources = (1 - place,)

    def fill(self, block: np.ndarray, x: np.ndarray, out: np.ndarray, member: int) -> None:
        np.copyto(block, x)


class Counted(OwnBoard):
    """A board that counts how often it hands memory out."""

    blocks = 0

    def allocate(self, nbytes: int) -> tuple[int, np.ndarray]:
        self.blocks += 1
        return super().allocate(nbytes)


class Member:
    """One of two members, in a thread of this process."""

    def __init__(self, place: int, line: socket.socket) -> None:
        self.place, self.board, self.round = place, Counted(), Whole(place)
        peer = swap_boards(self.board, {1 - place: line}, SECONDS)
        self.group = SharedGroup(self.board, peer, 0, place, 2, SECONDS)

    def begin(self, turn: int) -> None:
        x = np.full(1024, 1000 * self.place + turn, "f4")
        self.group.post(turn, b"turn", self.round, x, x)

    def read(self, turn: int) -> None:
        (block,) = self.group.collect(turn, b"turn", self.round).values()
        assert (block == 1000 * (1 - self.place) + turn).all()
        self.group.done(turn, self.round)


def pair() -> list[Member]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(Member, (0, 1), socket.socketpair()))


def run_ahead(ahead: Member, behind: Member, depth: int, seconds: float) -> threading.Thread:
    """Let a member begin twice as many turns as are under way at once, with the other one not having read any; give it
    so many seconds."""
    for turn in range(1, depth + 1):
        ahead.begin(turn)
        behind.begin(turn)
    for turn in range(1, depth + 1):
        ahead.read(turn)
    thread = threading.Thread(target=lambda: [ahead.begin(depth + turn) for turn in range(1, depth + 1)], daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_member_that_is_ahead_keeps_one_block_to_spare(depth: int) -> None:
    ahead, behind = pair()
    thread = run_ahead(ahead, behind, depth, SECONDS if depth == 1 else 0.2)
    assert thread.is_alive() == (depth > 1)
    for turn in range(1, depth + 1):
        behind.read(turn)
    thread.join(SECONDS)
    assert not thread.is_alive()
    for turn in range(depth + 1, 2 * depth + 1):
        behind.begin(turn)
        behind.read(turn)
        ahead.read(turn)
    assert (ahead.board.blocks, behind.board.blocks) == (depth + 1, depth)


def test_control_without_a_bound_it_keeps_more() -> None:
    ahead, behind = pair()
    ahead.group._most = dict.fromkeys([4096], 9)
    assert not run_ahead(ahead, behind, 3, SECONDS).is_alive()
    assert ahead.board.blocks == 6
