"""The carriers of a rank's groups: shared memory where all members are on one host, else gloo, or NCCL between GPUs.

In: the groups as they were formed (group/group.py). Out: what the exchange takes (collectives.py).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from penstock.runtime.group.group import Circle
from penstock.support.errors import PeerLost

from .collectives import Carrier, DeviceGroup
from .gloo_blocks import GlooGroup
from .library_group import LibraryGroup
from .overdue import Overdue
from .shared_board import OwnBoard, SharedGroup, swap_boards


class Carriers:
    """The carriers of one rank, with the memory and the sockets that they share."""

    def __init__(self, circles: Sequence[Circle], rank: int, seconds: float, overdue: Overdue) -> None:
        self.groups: dict[tuple[int, ...], Carrier] = {}
        self.devices: dict[tuple[int, ...], DeviceGroup] = {}
        self._closing = contextlib.ExitStack()
        lines = {peer: line for circle in circles for peer, line in circle.lines.items()}
        if lines:
            self._share([circle for circle in circles if circle.lines], lines, rank, seconds)
        for circle in circles:
            if circle.group is None:
                continue
            if circle.kind == "gloo":
                self.groups[circle.ranks] = GlooGroup(circle.group, circle.ranks, rank, circle.number, seconds)
            else:
                self.devices[circle.ranks] = LibraryGroup(circle.group, circle.ranks, rank, overdue)

    def _share(self, circles: Sequence[Circle], lines: Mapping[int, socket.socket], rank: int, seconds: float) -> None:
        """Share boards with the peers at these lines, for the groups whose members are all among them."""
        board = OwnBoard()
        self._closing.callback(board.close)
        try:
            boards = swap_boards(board, lines, seconds)
        except OSError as error:
            what = f"could not share memory with the other ranks of this host: {error}"
            raise PeerLost(what, where=f"rank {rank}") from error
        for peer in boards.values():
            self._closing.callback(peer.close)
        for circle in circles:
            place, members = circle.ranks.index(rank), len(circle.ranks)
            near = {circle.ranks.index(peer): boards[peer] for peer in circle.lines}
            self.groups[circle.ranks] = SharedGroup(board, near, circle.number, place, members, seconds)

    @property
    def shares(self) -> bool:
        """Say whether the rank reads memory of others."""
        return any(isinstance(carrier, SharedGroup) for carrier in self.groups.values())

    def close(self) -> None:
        """Release memory and sockets."""
        self._closing.close()
