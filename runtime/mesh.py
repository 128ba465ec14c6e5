"""What keepers of ranks tell each other, over one TCP connection for each pair of them. In: where everybody listens, and the token of this start of
the group. Out: their records, and whose connection ended.

    4 bytes: length · a record in msgpack

A keeper connects to those of lower ranks and is connected to by those of higher ones. Nothing here waits: what cannot be sent now is kept, up to
a limit. Whoever does not begin with the token, which only those who met at the store know, is cut off and changes nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from .control import Record

_HEAD = struct.Struct("<I")
_LARGEST = 1 << 20
_CHUNK = 1 << 16
# Connections of which nobody knows yet whose they are.
_MOST_UNKNOWN = 64


class Hello(Record, frozen=True):
    """The first record of the one who connects."""

    rank: int
    token: str


class Pulse(Record, frozen=True):
    """A sign of life, several times per second: what the rank is at, and how many steps it has finished."""

    doing: str
    steps: int


class Told(Record, frozen=True):
    """What befell the sender's own rank. `kind` is one of keeper.KINDS; the rest is as in control.Failed."""

    kind: str
    doing: str
    error: str
    what: str
    where: str = ""
    hint: str = ""


class Verdict(Record, frozen=True):
    """What the job ends with; the sender has told the user."""

    code: int


class Bye(Record, frozen=True):
    """The rank has finished, and well."""


Said = Hello | Pulse | Told | Verdict | Bye


class _Link:
    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        self.connection, self.rank = connection, rank
        self.received, self.unsent = bytearray(), bytearray()


class Mesh:
    """`hear` gives (rank, record), and (rank, None) when a connection ended, (rank, "...") when what came is no record."""

    def __init__(self, listener: socket.socket, rank: int, addresses: Sequence[tuple[str, int]], token: str, timeout: float) -> None:
        self._rank, self._world, self._token = rank, len(addresses), token
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Said).decode
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._links: dict[int, _Link] = {}
        self._unknown: list[_Link] = []
        self._lost: list[int] = []
        deadline = time.monotonic() + timeout
        for other in range(rank):
            # Everybody listens since before the group met: who cannot be reached within moments is lost. The time is that of all of them.
            left = max(deadline - time.monotonic(), timeout / 20)
            try:
                self._take(_Link(socket.create_connection(addresses[other], left, (listener.getsockname()[0], 0)), other))
            except OSError:
                self._lost.append(other)
                continue
            self.send(other, Hello(rank, token))

    def hear(self, timeout: float) -> list[tuple[int, Said | str | None]]:
        """What came until now, or within the timeout if nothing did."""
        heard: list[tuple[int, Said | str | None]] = [(rank, None) for rank in self._lost]
        self._lost.clear()
        for key, _ in self._selector.select(0 if heard else timeout):
            if key.fileobj is self._listener:
                self._accept()
            else:
                heard += self._read(key.data)
        for rank in list(self._links):
            self._flush(rank)
        return heard

    def send(self, rank: int, record: Said) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        data = self._encode(record)
        # Nobody reads there: it will be found silent.
        if len(link.unsent) < _LARGEST:
            link.unsent += _HEAD.pack(len(data)) + data
        self._flush(rank)

    def send_all(self, record: Said) -> None:
        for rank in list(self._links):
            self.send(rank, record)

    def close(self) -> None:
        for link in [*self._links.values(), *self._unknown]:
            link.connection.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._drop(self._unknown[0])
            link = _Link(connection, None)
            self._unknown.append(link)
            self._selector.register(connection, selectors.EVENT_READ, link)

    def _take(self, link: _Link) -> None:
        assert link.rank is not None
        self._links[link.rank] = link
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _flush(self, rank: int) -> None:
        link = self._links[rank]
        # A connection that broke is noticed when it is read.
        with contextlib.suppress(OSError):
            while link.unsent:
                del link.unsent[: link.connection.send(link.unsent)]

    def _read(self, link: _Link) -> list[tuple[int, Said | str | None]]:
        heard: list[tuple[int, Said | str | None]] = []
        if link.connection.fileno() < 0:
            return []  # it made room for another one, just now
        ended = False
        try:
            data = link.connection.recv(_CHUNK)
            ended = not data
            link.received += data
        except BlockingIOError:
            return []
        except OSError:
            ended = True
        try:
            # The first record may say whose connection this is.
            records = self._records(link)
            heard += [(link.rank, record) for record in records if link.rank is not None]
        except msgspec.MsgspecError as error:
            if link.rank is not None:
                heard.append((link.rank, str(error)))
            ended = True
        if ended:
            if link.rank is not None:
                heard.append((link.rank, None))
            self._drop(link)
        return heard

    def _records(self, link: _Link) -> list[Said]:
        found = []
        while len(link.received) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(link.received)
            if length > (_LARGEST if link.rank is not None else 1024):
                raise msgspec.DecodeError(f"a record of {length} bytes")
            if len(link.received) < _HEAD.size + length:
                break
            record = self._decode(bytes(link.received[_HEAD.size : _HEAD.size + length]))
            del link.received[: _HEAD.size + length]
            if link.rank is not None:
                found.append(record)
            elif not self._introduce(link, record):
                raise msgspec.DecodeError("a stranger")
        return found

    def _introduce(self, link: _Link, record: Said) -> bool:
        """Whether the first record of a connection says who it is, and with the right token."""
        known = isinstance(record, Hello) and hmac.compare_digest(record.token.encode(), self._token.encode())
        if not known or not isinstance(record, Hello) or not self._rank < record.rank < self._world or record.rank in self._links:
            return False
        self._unknown.remove(link)
        link.rank = record.rank
        self._links[record.rank] = link
        return True

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        if link in self._unknown:
            self._unknown.remove(link)
        if link.rank is not None and self._links.get(link.rank) is link:
            del self._links[link.rank]
