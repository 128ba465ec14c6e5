"""The ranks that share this host's memory, and the sockets between them.

In: a group that has met, the channels of this rank, or its peers in collectives. Out: for each channel whose other end
is near, or each near peer, one end of a socket.

Two ranks are near if they run under one kernel (its boot's id), in one network namespace, and as one user. Each of them
listens on a Unix socket without a place in the file system, whose random name goes through the
group's store. A process that connects must be of the same user. A channel belongs to its sender, which connects.

`PENSTOCK_SHARED_MEMORY=0`, on any of the ranks, leaves it out: its messages go over gloo then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.schedule import HANDS, MESSAGES, SEND_OF, SENDS, Action, Schedule
from penstock.support.errors import PeerLost, UsageError

# A channel of a rank: the kind of its actions, and the peer. Where ranks run several stages the stages follow the kind,
# as in SF/0>3.
End = tuple[str, int]
# The word in place of a kind for a socket that belongs to no channel.
_PAIR = "pair"

_CREDENTIALS = struct.Struct("3i")
# Bytes of a hello, and how long a sender that connects has for it.
_HELLO, _HELLO_SECONDS = 256, 2.0
_HINT = "PENSTOCK_SHARED_MEMORY=0 lets ranks of one host talk over sockets instead"


class MeetingPlace(Protocol):
    """The place where ranks that know each other by number exchange values, such as a RankGroup."""

    rank: int
    timeout: float

    def put(self, key: str, value: bytes) -> None:
        """Publish a value."""

    def get(self, key: str, what: str) -> bytes:
        """Wait for a value of another rank; `what` says in an error what was waited for."""


def ends_of(schedule: Schedule, rank: int) -> set[End]:
    """Return the channels of a rank: (kind of action, peer)."""
    program = schedule.ranks[rank]
    return {end_of(a) for a in (*program.start, *program.batch) if a.kind in MESSAGES}


def end_of(action: Action) -> End:
    """Return the channel of a send or receive."""
    assert action.peer is not None
    if action.end is None:
        return action.kind, action.peer
    if action.kind in HANDS:
        return f"{SEND_OF[action.phase]}/{action.end}>{action.stage}", action.peer
    source, target = (action.stage, action.end) if action.kind in SENDS else (action.end, action.stage)
    return f"{action.kind}/{source}>{target}", action.peer


def partner_of(kind: str) -> str:
    """Return the kind of a channel as its other end calls it."""
    name, slash, stages = kind.partition("/")
    return f"{ACTION_KINDS[name].partner}{slash}{stages}"


def is_sent(kind: str) -> bool:
    """Return whether a rank sends over a channel of a kind."""
    return kind.partition("/")[0] in SENDS


def identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is the same for all ranks that can share memory with this one; empty where memory is not to be
    shared."""
    wanted = environment.get("PENSTOCK_SHARED_MEMORY", "1")
    if wanted not in ("0", "1"):
        raise UsageError(f"PENSTOCK_SHARED_MEMORY must be 0 or 1, got {wanted!r}")
    if wanted == "0" or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/net").stat()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space.st_dev} {space.st_ino} {os.getuid()}".encode()).hexdigest()


def can_see_stores() -> bool:
    """Return whether processes of this machine see each other's stores in their order, without asking the system."""
    return platform.machine().lower() in ("x86_64", "amd64")


def connect(group: MeetingPlace, ends: Iterable[End], host_key: str, key: str = "stages") -> dict[End, socket.socket]:
    """Open the sockets of channels whose other end has the same `identity`. All ranks that share a channel call this,
    each with its own. A group that does this more than once needs another `key` each time."""
    ends = sorted(ends)
    calls = {end: f"{partner_of(end[0])} {group.rank}" for end in ends if is_sent(end[0])}
    return _connect(group, ends, calls, host_key, key)


def connect_pairs(group: MeetingPlace, peers: Iterable[int], host_key: str, key: str) -> dict[int, socket.socket]:
    """Open one socket to each of these peers that has the same `identity`. They all call this."""
    ends = [(_PAIR, peer) for peer in sorted(peers)]
    calls = {end: f"{_PAIR} {group.rank}" for end in ends if end[1] > group.rank}
    return {peer: line for (_, peer), line in _connect(group, ends, calls, host_key, key).items()}


def _connect(
    group: MeetingPlace, ends: Sequence[End], calls: Mapping[End, str], host_key: str, key: str
) -> dict[End, socket.socket]:
    """Open the sockets of `ends`: this rank calls the peers of `calls` with these words, and answers the others."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets: dict[End, socket.socket] = {}
    until = time.monotonic() + group.timeout
    try:
        name = secrets.token_hex(16)
        if host_key:
            listener.bind(f"\0penstock-{name}")
            listener.listen(128)
        group.put(f"{key}/near/{group.rank}", json.dumps([host_key, name]).encode())
        peers = {
            peer: json.loads(group.get(f"{key}/near/{peer}", f"rank {peer}, which may share memory"))
            for peer in {peer for _, peer in ends}
        }
        near = [end for end in ends if host_key and peers[end[1]][0] == host_key]
        for end in near:
            if end in calls:
                sockets[end] = _call(f"\0penstock-{peers[end[1]][1]}", calls[end], until)
        expected = set(near) - calls.keys()
        while expected:
            end, connection = _answer(listener, until)
            if end in expected:
                expected.remove(end)
                sockets[end] = connection
            else:
                connection.close()
    except OSError as error:
        for connection in sockets.values():
            connection.close()
        what = f"could not share memory with the other ranks of this host: {error}"
        raise PeerLost(what, where=f"rank {group.rank}", hint=_HINT) from error
    finally:
        listener.close()
    return sockets


def _call(address: str, hello: str, until: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_left(until))
        connection.connect(address)
        _check_user(connection)
        connection.send(hello.encode())
    except OSError:
        connection.close()
        raise
    return connection


def _answer(listener: socket.socket, until: float) -> tuple[End, socket.socket]:
    """Return the next channel whose sender connects; other processes are turned away."""
    while True:
        listener.settimeout(_left(until))
        connection, _ = listener.accept()
        with contextlib.suppress(OSError, ValueError):
            _check_user(connection)
            connection.settimeout(min(_HELLO_SECONDS, _left(until)))
            kind, rank = connection.recv(_HELLO).decode().split()
            return (kind, int(rank)), connection
        connection.close()


def _check_user(connection: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError("another user is at the other end")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
