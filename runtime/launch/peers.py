"""The connections between keepers of ranks, one TCP connection for each pair of them.

In: where all keepers listen, the token of this start of the group, and what its members trust (group/trust.py). Out:
their records, and the ranks whose connection ended.

    4 bytes: length · a record in msgpack; inside of TLS where that was asked for

A keeper connects to those of lower ranks and is connected to by those of higher ones. Nothing here waits: bytes that
cannot be sent at once are kept, up to a limit. A connection begins with three records, which show both ends that the
other one has the key of this start:

    PeerHello(rank, nonce) >    < Welcome(nonce, proof)    Proof(proof) >

The key is made of the token, which the ranks that met at the store know, and of the secret where there is one. No
other process has them. A connection that cannot prove to have it is cut off and changes nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Sequence

import msgspec

from penstock.runtime.group.trust import Trust, is_proof, proof
from penstock.runtime.messages.control import Record

_HEAD = struct.Struct("<I")
_LARGEST = 1 << 20
# The largest record of an end that has not proved its rank.
_GREETING = 1024
_CONNECTS, _ACCEPTS = "connects", "accepts"
_CHUNK = 1 << 16
# Connections of ends that have not proved their rank.
_MOST_UNKNOWN = 64


class PeerHello(Record, frozen=True):
    """The first record of the keeper that connects."""

    rank: int
    nonce: str


class Welcome(Record, frozen=True):
    """The answer of the keeper that was connected to."""

    nonce: str
    proof: str


class Proof(Record, frozen=True):
    """The second record of the keeper that connects; anything else follows it."""

    proof: str


class Pulse(Record, frozen=True):
    """A sign of life, several times per second. It says what the rank is at, how many steps it has finished, and how
    many seconds it has computed."""

    doing: str
    steps: int
    busy: float = 0.0


class Told(Record, frozen=True):
    """The trouble of the sender's own rank. `kind` is one of keeper.KINDS; the other fields are as in
    control.Failed."""

    kind: str
    doing: str
    error: str
    what: str
    where: str = ""
    hint: str = ""


class JobVerdict(Record, frozen=True):
    """The exit code that the job ends with; the sender has told the user."""

    code: int


class Bye(Record, frozen=True):
    """The rank has finished, and well."""


Said = PeerHello | Welcome | Proof | Pulse | Told | JobVerdict | Bye


class _Link:
    """One connection to another keeper. `rank` is that of its other end: known from the beginning where we connected,
    and once it is proved where another keeper did. `unsent` goes out as it can, `later` once the other end has proved
    its rank."""

    def __init__(self, connection: socket.socket, rank: int | None, context: ssl.SSLContext | None) -> None:
        connection.setblocking(False)
        self.secured = None
        if context is not None:
            accepts = rank is None
            connection = self.secured = context.wrap_socket(
                connection, server_side=accepts, do_handshake_on_connect=False
            )
        self.connection, self.rank = connection, rank
        self.shaking = context is not None
        self.broken: ssl.SSLError | None = None
        self.received, self.unsent, self.later = bytearray(), bytearray(), bytearray()
        self.nonce = secrets.token_hex(16)
        self.hello: PeerHello | None = None
        self.proved = False

    def shake(self) -> None:
        """Continue the TLS handshake; raise while it waits."""
        if self.shaking and self.secured is not None:
            self.secured.do_handshake()
            self.shaking = False

    def receive(self) -> bool:
        """Read the bytes that arrived. Return whether the connection has ended."""
        if self.broken is not None:
            raise self.broken
        self.shake()
        while True:
            data = self.connection.recv(_CHUNK)
            self.received += data
            if not data or self.secured is None or not self.secured.pending():
                return not data

    def flush(self) -> None:
        try:
            self.shake()
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ssl.SSLError as error:
            self.broken = error
        except OSError:
            return  # a connection that broke is noticed when it is read


class Peers:
    """The connections of one keeper. `hear` gives (rank, record), and (rank, None) when a connection ended, (rank,
    "...") when the bytes are no record."""

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        token: str,
        timeout: float,
        trust: Trust,
    ) -> None:
        self._rank, self._world, self._trust, self._key = rank, len(addresses), trust, trust.key(token)
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
            # All keepers listen since before the group met: one that cannot be reached within moments is lost. The time
            # is that of
            # all of them.
            left = max(deadline - time.monotonic(), timeout / 20)
            try:
                connection = socket.create_connection(addresses[other], left, (listener.getsockname()[0], 0))
                link = _Link(connection, other, trust.client)
            except OSError:
                self._lost.append(other)
                continue
            self._links[other] = link
            self._selector.register(link.connection, selectors.EVENT_READ, link)
            self._send(link, PeerHello(rank, link.nonce))

    def hear(self, timeout: float) -> list[tuple[int, Said | str | None]]:
        """Return the records that have arrived, or those that arrive within the timeout if there are none."""
        heard: list[tuple[int, Said | str | None]] = [(rank, None) for rank in self._lost]
        self._lost.clear()
        for key, _ in self._selector.select(0 if heard else timeout):
            if key.fileobj is self._listener:
                self._accept()
            else:
                heard += self._read(key.data)
        for link in [*self._links.values(), *self._unknown]:
            link.flush()
        return heard

    def send(self, rank: int, record: Said) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        if link.proved:
            self._send(link, record)
        elif len(link.later) < _LARGEST:
            link.later += self._framed(record)

    def _send(self, link: _Link, record: Said) -> None:
        # Where the peer does not read, its rank will count as silent.
        if len(link.unsent) < _LARGEST:
            link.unsent += self._framed(record)
        link.flush()

    def _framed(self, record: Said) -> bytes:
        data = self._encode(record)
        return _HEAD.pack(len(data)) + data

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
            link = _Link(connection, None, self._trust.server)
            self._unknown.append(link)
            self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> list[tuple[int, Said | str | None]]:
        heard: list[tuple[int, Said | str | None]] = []
        if link.connection.fileno() < 0:
            return []  # it has just made room for another one
        ended = False
        try:
            ended = link.receive()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not link.received:
                return []
        except ssl.SSLError as error:
            if link.rank is not None:
                heard.append((link.rank, f"TLS: {error.reason or error}"))
            ended = True
        except OSError:
            ended = True
        try:
            # The first ones may say whose connection this is.
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
        records = []
        while len(link.received) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(link.received)
            if length > (_LARGEST if link.proved else _GREETING):
                raise msgspec.DecodeError(f"a record of {length} bytes")
            if len(link.received) < _HEAD.size + length:
                break
            record = self._decode(bytes(link.received[_HEAD.size : _HEAD.size + length]))
            del link.received[: _HEAD.size + length]
            if link.proved:
                records.append(record)
            elif not (self._meet_lower(link, record) if link.rank is not None else self._meet_higher(link, record)):
                raise msgspec.DecodeError("it does not know the secret of this start")
        return records

    def _meet_lower(self, link: _Link, record: Said) -> bool:
        """Return whether the keeper that we connected to shows that it belongs to the group."""
        assert link.rank is not None
        ranks = (self._rank, link.rank)
        if not isinstance(record, Welcome) or not is_proof(
            record.proof, self._key, _ACCEPTS, ranks, (link.nonce, record.nonce)
        ):
            return False
        link.proved = True
        self._send(link, Proof(proof(self._key, _CONNECTS, ranks, (link.nonce, record.nonce))))
        link.unsent += link.later
        link.later.clear()
        return True

    def _meet_higher(self, link: _Link, record: Said) -> bool:
        """Return whether a keeper that connected to us goes on as one that belongs to the group."""
        if link.hello is None:
            if not isinstance(record, PeerHello) or not self._rank < record.rank < self._world:
                return False
            link.hello, ranks = record, (record.rank, self._rank)
            self._send(link, Welcome(link.nonce, proof(self._key, _ACCEPTS, ranks, (record.nonce, link.nonce))))
            return True
        hello, ranks = link.hello, (link.hello.rank, self._rank)
        known = isinstance(record, Proof) and is_proof(
            record.proof, self._key, _CONNECTS, ranks, (hello.nonce, link.nonce)
        )
        if not known or hello.rank in self._links:
            return False
        self._unknown.remove(link)
        link.rank, link.proved = hello.rank, True
        self._links[hello.rank] = link
        return True

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        if link in self._unknown:
            self._unknown.remove(link)
        if link.rank is not None and self._links.get(link.rank) is link:
            del self._links[link.rank]
