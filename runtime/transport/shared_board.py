"""Blocks of collectives between ranks of one host: each rank writes to its own board, and the others read there.

In: blocks that members of a group send to each other, in numbered turns. Out: the blocks of the others, read in place.

A board is memory of one rank (memfd, sealed against any change of size) that the ranks beside it map for reading. It
holds for each group of the rank what it says to the other members:

    standing     text: the action that the rank is in
    entries      for each of the last turns: its number, where its blocks lie, and a text that says what it is
    marks        for each member and turn: the number of the last turn whose blocks were read

and behind all groups the blocks. A member writes its blocks, then the entry with the number last. The others look at
that number until it is there, at first without a pause, then with longer and longer ones. They read the blocks in
place, add them up and mark the turn. A block is used again once all receivers have marked it. So a small all_reduce
takes two writes and two reads.

Of each size a member has the most blocks that it had under way at once, and one to spare. It is under way from its
entry until this member itself marks the turn. Where all of them are unread, the member is ahead of the others and
waits. Members do turns in the same order, so the last of them always has a block: the others have marked all that it
has marked.

The end of a process ends its sockets, which the others look at while they wait.

Known limits: Linux on x86-64, where stores of one core are seen in their order (group/neighbours.py); 127 turns of a
group under way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.runtime.messages.status import Deadline
from penstock.runtime.telemetry.resident import BOARD
from penstock.support.errors import DoesNotFit

from .rounds import Array, Round, nbytes_of
from .shared_memory import ADD_SEALS, FIXED_SIZE

# Bytes of a board, of what a group says, and of a piece that is mapped at once. Pages that are not used take no memory.
_BOARD, _GROUP, _WINDOW = 1 << 40, 1 << 20, 64 << 20
_MOST_GROUPS = 1024
_WORD = 8
_STANDING, _FIRST_ENTRY, _TURNS, _ENTRY = 32, 64, 128, 32
_FIRST_MARK = _FIRST_ENTRY + _TURNS * _ENTRY
# Words of an entry: the number of the turn, the place of its blocks, the bytes of one block and from one to the next.
_NUMBER, _PLACE, _BYTES, _STRIDE, _LENGTH, _TEXT = range(6)
_LONGEST = (_ENTRY - _TEXT) * _WORD
# Looks without a pause, then with the processor lent out, then with sleeps; and seconds between looks at sockets.
_EAGER, _POLITE = 100, 800
_SHORTEST, _LONGEST_SLEEP, _LOOK = 2e-5, 1e-3, 0.05


class MemberLost(RuntimeError):
    """The error that a member of a group is gone, or did not answer in time. `standing` says where it is, if known."""

    def __init__(self, member: int, what: str, standing: str = "", late: bool = False) -> None:
        super().__init__(what)
        self.member, self.standing, self.late = member, standing, late


class MemberElsewhere(RuntimeError):
    """The error that a member does another collective where this one is expected."""

    def __init__(self, member: int, standing: str) -> None:
        super().__init__(standing)
        self.member, self.standing = member, standing


class OwnBoard:
    """The board of this rank."""

    def __init__(self) -> None:
        try:
            self.file = os.memfd_create(BOARD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.file, _BOARD)
            fcntl.fcntl(self.file, ADD_SEALS, FIXED_SIZE)
        except OSError as error:
            raise _no_memory(error) from error
        self._used = self._end = _MOST_GROUPS * _GROUP
        self._window: memoryview | None = None
        self._start = 0
        # Where memory that was handed out lies, by its address.
        self._places: dict[int, int] = {}

    def words(self, group: int) -> memoryview:
        """Return what is said to a group, to be written."""
        assert group < _MOST_GROUPS
        return self._map(group * _GROUP, _GROUP).cast("q")

    def allocate(self, nbytes: int) -> tuple[int, Array]:
        """Return the place of new memory, in whole pages, and the memory."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._window is None or self._used + size > self._end:
            length = -(-size // _WINDOW) * _WINDOW
            self._used = self._start = self._end
            self._end += length
            self._window = self._map(self._start, length)
        place, self._used = self._used, self._used + size
        assert self._window is not None
        memory = np.frombuffer(self._window, np.uint8, nbytes, place - self._start)
        self._places[memory.ctypes.data] = place
        return place, memory

    def place_of(self, memory: Array) -> int:
        """Return the place of memory that was allocated here."""
        return self._places[memory.ctypes.data]

    def _map(self, place: int, length: int) -> memoryview:
        try:
            return memoryview(mmap.mmap(self.file, length, offset=place))
        except OSError as error:
            raise _no_memory(error) from error

    def close(self) -> None:
        os.close(self.file)


class PeerBoard:
    """The board of another rank, for reading. `line` is a socket to it, which ends with it."""

    def __init__(self, file: int, line: socket.socket) -> None:
        self._file, self.line = file, line
        self._blocks: dict[tuple[int, int], Array] = {}

    def words(self, group: int) -> memoryview:
        """Return what is said to a group."""
        return self._map(group * _GROUP, _GROUP).cast("q")

    def block(self, place: int, nbytes: int) -> Array:
        """Return the memory of blocks; blocks of one place and size are mapped once."""
        known = self._blocks.get((place, nbytes))
        if known is None:
            start = place // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapped = self._map(start, place - start + max(nbytes, 1))
            known = self._blocks[place, nbytes] = np.frombuffer(mapped, np.uint8, nbytes, place - start)
        return known

    def _map(self, place: int, length: int) -> memoryview:
        try:
            return memoryview(mmap.mmap(self._file, length, prot=mmap.PROT_READ, offset=place))
        except OSError as error:
            raise _no_memory(error) from error

    def close(self) -> None:
        os.close(self._file)
        self.line.close()


def _no_memory(error: OSError) -> DoesNotFit:
    hint = "`ulimit -f`, `-n` and `-v` set limits; PENSTOCK_SHARED_MEMORY=0 lets ranks of one host talk over sockets"
    return DoesNotFit(f"no memory to share with other ranks: {error.strerror or error}", hint=hint)


def swap_boards(own: OwnBoard, lines: Mapping[int, socket.socket], seconds: float) -> dict[int, PeerBoard]:
    """Hand the own board to peers and take theirs, through one socket to each. All of them do this at the same time."""
    for line in lines.values():
        line.settimeout(seconds)
        socket.send_fds(line, [b"board"], [own.file])
    boards = {}
    for peer, line in lines.items():
        _, files, _, _ = socket.recv_fds(line, 16, 1)
        if not files:
            raise ConnectionResetError("end of file")
        line.setblocking(False)
        boards[peer] = PeerBoard(files[0], line)
    return boards


@dataclass(slots=True)
class _Block:
    """Memory for the blocks of a turn, the last turn that used it, and who reads it."""

    place: int
    memory: Array
    turn: int = 0
    receivers: tuple[int, ...] = ()


@dataclass(slots=True)
class _Member:
    """Another member of a group: its board, and what it says to the group."""

    board: PeerBoard
    words: memoryview
    views: dict[tuple[int, tuple[int, ...]], Array] = field(default_factory=dict)


class SharedGroup:
    """A group of ranks of one host. `boards` are those of the other members, by their places; `number` is that of the
    group, the same on all of them. Turns have numbers from 1 on."""

    def __init__(
        self, own: OwnBoard, boards: Mapping[int, PeerBoard], number: int, place: int, members: int, seconds: float
    ) -> None:
        self.place, self.members, self._seconds, self._own = place, members, seconds, own
        self._words = own.words(number)
        self._text = self._words.cast("B")
        self._others = {member: _Member(board, board.words(number)) for member, board in boards.items()}
        self._pool: dict[int, list[_Block]] = {}
        # The turns whose blocks are under way, with the bytes of these; the most of a size that were so at once.
        self._under_way: dict[int, int] = {}
        self._most: dict[int, int] = {}
        # The receivers of the last turn in each entry.
        self._receivers: dict[int, tuple[int, ...]] = {}
        self._lines = select.poll()
        for member in self._others.values():
            self._lines.register(member.board.line, select.POLLIN)

    def stand(self, text: bytes) -> None:
        """Say where this rank is, to members that wait for it."""
        text = text[: _STANDING * _WORD]
        self._text[: _STANDING * _WORD] = text.ljust(_STANDING * _WORD, b"\0")

    def post(self, turn: int, text: bytes, blocks: Round, x: Array, out: Array) -> None:
        """Send the blocks of a turn."""
        nbytes, receivers = nbytes_of(blocks), blocks.receivers
        entry = turn % _TURNS
        before = turn - _TURNS
        if before > 0 and self._receivers.get(entry):
            self._until(self._receivers[entry], lambda member: self._mark(member, entry) >= before)
        self._receivers[entry] = receivers
        if not receivers:
            return
        count = 1 if blocks.alike else len(receivers)
        stride = 0 if blocks.alike else -(-nbytes // 64) * 64
        if blocks.lent:
            place = self._own.place_of(x)
        else:
            block = self._block(stride * (count - 1) + nbytes, turn, receivers)
            place = block.place
            for i in range(count):
                memory = block.memory[i * stride : i * stride + nbytes]
                blocks.fill(memory.view(blocks.dtype).reshape(blocks.shape), x, out, receivers[i])
        words, at = self._words, _FIRST_ENTRY + entry * _ENTRY
        words[at + _PLACE], words[at + _BYTES], words[at + _STRIDE] = place, nbytes, stride
        text = text[:_LONGEST]
        words[at + _LENGTH] = len(text)
        first = (at + _TEXT) * _WORD
        self._text[first : first + len(text)] = text
        words[at + _NUMBER] = turn

    def collect(self, turn: int, text: bytes, blocks: Round) -> dict[int, Array]:
        """Wait for the blocks of a turn, and return them where they lie; `done` lets go of them."""
        at = _FIRST_ENTRY + turn % _TURNS * _ENTRY
        # Of members that this one hears nothing from, it would not notice that they are elsewhere.
        self._until(blocks.sources, lambda member: self._others[member].words[at] == turn)
        blocks_of = {}
        for member in blocks.sources:
            other = self._others[member]
            self._check(member, other.words, at, text, nbytes_of(blocks))
            stride = other.words[at + _STRIDE]
            place = other.words[at + _PLACE] + stride * self._position(member)
            key = (place, blocks.shape)
            view = other.views.get(key)
            if view is None or view.dtype != blocks.dtype:
                memory = other.board.block(place, nbytes_of(blocks))
                view = other.views[key] = memory.view(blocks.dtype).reshape(blocks.shape)
            blocks_of[member] = view
        return blocks_of

    def done(self, turn: int, blocks: Round) -> None:
        """Mark a turn as read; wait until the others have read what was lent to them."""
        entry = turn % _TURNS
        for member in blocks.sources:
            self._words[_FIRST_MARK + member * _TURNS + entry] = turn
        self._under_way.pop(turn, None)
        if blocks.lent:
            self._until(blocks.receivers, lambda member: self._mark(member, entry) >= turn)

    def lend(self, nbytes: int) -> Array | None:
        """Return memory that the other members can read."""
        return self._own.allocate(nbytes)[1]

    def _position(self, member: int) -> int:
        """Return the number of this member among the receivers of another one: they begin behind that one."""
        return (self.place - member) % self.members - 1

    def _mark(self, member: int, entry: int) -> int:
        return self._others[member].words[_FIRST_MARK + self.place * _TURNS + entry]

    def _check(self, member: int, words: memoryview, at: int, text: bytes, nbytes: int) -> None:
        first = (at + _TEXT) * _WORD
        said = bytes(words.cast("B")[first : first + min(words[at + _LENGTH], _LONGEST)])
        if said != text[:_LONGEST] or words[at + _BYTES] != nbytes:
            raise MemberElsewhere(member, said.decode(errors="replace"))

    def _block(self, nbytes: int, turn: int, receivers: tuple[int, ...]) -> _Block:
        """Return memory that no receiver is going to read. New memory only up to one block more than are under way."""
        blocks = self._pool.setdefault(nbytes, [])
        self._under_way[turn] = nbytes
        at_once = sum(each == nbytes for each in self._under_way.values())
        most = self._most[nbytes] = max(self._most.get(nbytes, 0), at_once)
        block = next((block for block in blocks if not self._unread(block)), None)
        if block is None and len(blocks) > most:
            block = min((each for each in blocks if each.turn not in self._under_way), key=lambda each: each.turn)
            last, entry = block.turn, block.turn % _TURNS
            self._until(block.receivers, lambda member: self._mark(member, entry) >= last)
        if block is None:
            block = _Block(*self._own.allocate(nbytes))
            blocks.append(block)
        block.turn, block.receivers = turn, receivers
        return block

    def _unread(self, block: _Block) -> bool:
        entry = block.turn % _TURNS
        return any(self._mark(member, entry) < block.turn for member in block.receivers)

    def _until(self, members: Sequence[int], ready: Callable[[int], bool]) -> None:
        """Wait until all members are ready."""
        looks, pause, looked = 0, _SHORTEST, 0.0
        deadline: Deadline | None = None
        missing = [member for member in members if not ready(member)]
        while missing:
            looks += 1
            if looks > _POLITE:
                time.sleep(pause)
                pause = min(pause * 1.3, _LONGEST_SLEEP)
                now = time.monotonic()
                if now - looked > _LOOK:
                    looked, deadline = now, deadline or Deadline(self._seconds)
                    self._look(missing, ready, deadline)
            elif looks > _EAGER:
                os.sched_yield()
            missing = [member for member in missing if not ready(member)]

    def _look(self, missing: Sequence[int], ready: Callable[[int], bool], deadline: Deadline) -> None:
        """Raise an error where a member that is waited for is gone, or the time is over."""
        gone = {descriptor for descriptor, _ in self._lines.poll(0)}
        for member in missing:
            other = self._others[member]
            if other.board.line.fileno() in gone and not ready(member):
                raise MemberLost(member, "Connection closed by peer", self._standing(other))
        if deadline.is_over():
            raise MemberLost(missing[0], "timed out", self._standing(self._others[missing[0]]), late=True)

    @staticmethod
    def _standing(other: _Member) -> str:
        return bytes(other.words.cast("B")[: _STANDING * _WORD]).rstrip(b"\0").decode(errors="replace")
