"""One rank's actions, followed block by block: what memory they take and give back.

In: a module, a stage, actions. Out: blocks as they
come and go (account.py), and sums and peaks of them for predict.py, which says what is counted.

The rules are those of the runtime, said a second time: a microbatch holds a value until no later action of it on this
rank takes it; a message has its memory from when its receive is posted until the last value in it is let go of; what a
send hands over stays until the peer has it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from penstock.ir.action_kinds import (
    AGAIN,
    BACKWARD,
    COPY_IN,
    COPY_OUT,
    DROP,
    FORWARD,
    LET_GO,
    NORM_PARTS,
    PARTS,
    SUM,
    UPDATE,
    WEIGHTS,
)
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.messages import Parcel, parcels
from penstock.ir.schedule import COMPUTE, HANDS, PHASES, RECEIVES, SAVERS, SENDS, Action, Schedule
from penstock.ir.sharding.tile_messages import EdgeEnds, ends_of, tile_messages

from .account import BEFORE, Life
from .saved_sets import moves_saved, saved_set
from .update_parts import computation_of, update_parts
from .workspace import planned_blocks

# The runtime posts the receives among the next so many actions; a computation with its sends, receives and drop is at
# most five of them. It posts at most so many of one channel: one that arrives while its predecessor is worked on, one
# to follow.
LOOK_AHEAD = 10
POSTED = 2
# Sends of a channel that may be noticed to have arrived together, in messages and in bytes
# (runtime/transport/senders.py).
SENDS_TOGETHER, BYTES_TOGETHER = 8, 1 << 20


def actions_of(schedule: Schedule, rank: int, batches: int, first: int = 0) -> list[Action]:
    """List what a rank does in a run. Where a schedule has no drops yet, each microbatch is dropped after its last
    action."""
    actions = list(schedule.expand(rank, batches, first))
    if any(action.kind == DROP for action in actions):
        return actions
    last = {(action.stage, action.mb): i for i, action in enumerate(actions) if not action.once}
    ends = set(last.values())
    return [b for i, a in enumerate(actions) for b in ((a, Action(DROP, a.stage, a.mb)) if i in ends else (a,))]


class BlockPool:
    """Blocks by size: those in use, and how many there were at most, which is how many there are."""

    def __init__(self) -> None:
        self.used: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.bytes = 0

    def change(self, size: int, sign: int) -> None:
        """Allocate a block (1), or free it (-1)."""
        self.used[size] = used = self.used[size] + sign
        if sign > 0 and used > self.most[size]:
            self.most[size] = used
            self.bytes += size


class PassingPool(BlockPool):
    """Blocks that are new each time, and given back to the system."""

    def change(self, size: int, sign: int) -> None:
        super().change(size, sign)
        self.bytes = sum(number * nbytes for nbytes, number in self.used.items())


# A channel of a rank: the kind of its actions, the peer, and the stage there where ranks run several.
Channel = tuple[str, int, int | None]
# A value that has memory: name, bytes, where they are from, and whether it is saved.
_Stored = tuple[str, int, BlockPool, bool]


@dataclass(slots=True, eq=False)
class _HeldBlock:
    """A block of memory with values in it: `names` are those that have ever been there, `held` how many still are."""

    nbytes: int
    pool: BlockPool
    names: tuple[str, ...]
    taken_at: int
    held: int = 0
    saved: bool = False


@dataclass(slots=True)
class _SentMessages:
    """The messages that were sent over a channel and are still held: `leaving` until the next send, `waiting` until
    there are enough, of so many sends and bytes."""

    leaving: list[tuple[BlockPool, int]] = field(default_factory=list)
    waiting: list[tuple[BlockPool, int]] = field(default_factory=list)
    sends: int = 0
    nbytes: int = 0


class Walk:
    """The walk over one rank's program, which counts the memory that it holds. `now` are the bytes of values that are
    saved (True), and of those that are passing through; `coming` those of messages that may come before their action.
    With `lives`, blocks are written down when they are given back."""

    def __init__(self, module: Module, stage: int, rank: int, *, posts: bool = True, lives: bool = False) -> None:
        self.graphs: dict[str, Graph] = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))}
        self.homes = module.rank_stages()
        parts = update_parts(module, stage).values()
        called = {**self.graphs, **{computation_of(part): part for part in parts}}
        self.workspaces = {name: planned_blocks(graph) for name, graph in called.items()}
        together = next((stages for stages in module.packs if stage in stages), (stage,))
        leaving = [e for e in module.edges if e.src == stage and e.dst not in together]
        self._rank, self._tiles = rank, tile_messages(module)
        self._edges = {(e.src, e.dst, e.phase): module.local_values(e.values, stage) for e in module.edges}
        self._carried: dict[tuple[EdgeEnds, int | None], tuple[tuple[Value, ...], tuple[Parcel, ...]]] = {}
        self.saved = {v.name for kind in SAVERS if kind in self.graphs for v in self.graphs[kind].saved}
        # The values that stay after each computation beside those to send: later computations take them.
        for_weights, for_backward, for_norm, for_update = (
            {v.name for v in self.graphs[kind].ins} if kind in self.graphs else set[str]()
            for kind in (WEIGHTS, BACKWARD, NORM_PARTS, UPDATE)
        )
        saved = {
            kind: {v.name for v in self.graphs[kind].saved} if kind in self.graphs else set()
            for kind in (FORWARD, AGAIN)
        }
        self.kept = {
            FORWARD: saved[FORWARD],
            AGAIN: for_backward | for_weights,
            BACKWARD: for_weights,
            WEIGHTS: set[str](),
        }
        self.sent = {kind: {v.name for e in leaving if e.phase == kind for v in e.values} for kind in PHASES}
        # What another stage of the rank takes counts here, too, until it is dropped: a bound, as it is one tensor.
        for edge in module.edges:
            if edge.src == stage and edge.dst in together and edge.phase in self.kept:
                self.kept[edge.phase] |= {v.name for v in edge.values}
                if edge.phase == FORWARD:
                    self.kept[AGAIN] |= {v.name for v in edge.values}
        self.kept |= {PARTS: for_norm | for_update, NORM_PARTS: for_update, UPDATE: set[str]()}
        self.kept[LET_GO] = self.kept[FORWARD] - saved[AGAIN]
        self._needed = {kind: kept | self.sent.get(kind, set()) for kind, kept in self.kept.items()}
        self.held: dict[int, dict[str, _HeldBlock]] = {}
        self.now = {True: 0, False: 0}
        # Memory of results and temporaries, of inputs of the module, and of messages; and which of
        # these a value that was not received is in.
        self.made, self.fed, self.messages = BlockPool(), BlockPool(), BlockPool()
        # The memory of saved sets that were elsewhere.
        self.brought, self.saved_set = PassingPool(), saved_set(module, stage)
        self.pools = (self.made, self.fed, self.messages, self.brought)
        self._inputs = module.given_names(stage)
        # The values that a graph takes (True) and returns, kept because every call needs them.
        self._stored = {
            (kind, takes): [*self._with_memory(g.ins if takes else g.results)]
            for kind, g in self.graphs.items()
            for takes in (True, False)
        }
        self._posts, self._unsent = posts, Counter[tuple[str, int]]()
        self._posted: dict[Channel, dict[int, list[_HeldBlock]]] = {}
        self._expected: dict[Channel, deque[Action]] = {}
        self._lingering: dict[Channel, _SentMessages] = {}
        self.lives: list[Life] | None = [] if lives else None
        self.step = BEFORE
        self.coming = self.activations = self.boundary = self.workspace = self.peak = self.in_flight = 0

    def follow(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Run through what a rank does from an empty pipeline to an empty one; each action is handed out when it is
        done."""
        actions = list(actions)
        self._unsent = Counter((a.phase, a.mb) for a in actions if a.kind in SENDS)
        ahead = 0
        for i, action in enumerate(actions):
            self.step += 1
            for later in actions[max(i, ahead) : i + 1 + LOOK_AHEAD]:
                if later.kind in RECEIVES:
                    self._expect(later)
            ahead = i + 1 + LOOK_AHEAD
            WALKS[action.kind](self, action)
            self.activations = max(self.activations, self.now[True])
            self.boundary = max(self.boundary, self.now[False] + self.coming)
            self.in_flight = max(self.in_flight, sum(mb >= 0 for mb in self.held))
            self._note()
            yield action
        self._flush()

    # ---------------------------------------------------------------------------------------- one method per kind

    def _compute(self, action: Action) -> None:
        kind, mb = action.kind, action.mb
        self._hold(mb, self._stored[kind, True])
        self._hold(mb, self._stored[kind, False])
        self._call(kind)
        self._keep(mb, self._needed[kind])

    def _hand_out(self, action: Action) -> None:
        self._hold(action.holder, self._stored[action.kind, False])
        self._call(action.kind)

    def _update(self, action: Action) -> None:
        sent = self.sent[UPDATE]
        self._hold(action.holder, [row for row in self._stored[action.kind, False] if row[0] in sent])
        self._call(action.computation)
        if not action.item:
            self._keep(action.holder, sent)

    def _send(self, action: Action) -> None:
        """Send a microbatch's values, which stay until they were sent to the last of several ranks."""
        phase, mb = action.phase, action.mb
        self._unsent[phase, mb] -= 1
        if not self._unsent[phase, mb]:
            del self._unsent[phase, mb]
            self._keep(action.holder, self.kept[phase])
        # What the update of the stage takes as well stays until that.
        if not action.once or not self.sent[phase] <= self.kept[phase]:
            self._linger(action)

    def _let_go(self, action: Action) -> None:
        """Let go of what is computed again, or of a saved set. Memory of variables is counted beside the walk
        (items.py)."""
        if not action.item:
            self._keep(action.mb, self.kept[LET_GO])
        elif moves_saved(action) and self.saved_set is not None:
            self._keep(action.mb, self.held.get(action.mb, {}).keys() - self.saved_set.values.keys())

    def _bring(self, action: Action) -> None:
        """Take memory for a saved set: one block, until its last value is dropped."""
        if moves_saved(action) and self.saved_set is not None:
            names, nbytes = tuple(sorted(self.saved_set.values)), self.saved_set.nbytes
            block = _HeldBlock(nbytes, self.brought, names, self.step, len(names), True)
            self.held.setdefault(action.mb, {}).update(dict.fromkeys(names, block))
            self.now[True] += nbytes
            self.brought.change(nbytes, 1)

    def _drop(self, action: Action) -> None:
        self._keep(action.mb, set())

    def _pass(self, action: Action) -> None:
        """Change no memory: the action works in buffers of variables, or with values that stay until the update."""

    # ---------------------------------------------------------------------------------------- messages

    def _message(self, action: Action) -> tuple[tuple[Value, ...], tuple[Parcel, ...]]:
        """Return the values that a send or receive moves, and the messages that they are in."""
        assert action.peer is not None
        ends = ends_of(action, self.homes)
        tiled = ends in self._tiles
        key = (ends, action.peer if tiled else None)
        if key not in self._carried:
            values = self._edges[ends]
            if tiled:
                ranks = (self._rank, action.peer) if action.kind not in RECEIVES else (action.peer, self._rank)
                values = tuple(piece.value for piece in self._tiles.slices(ends, *ranks))
            self._carried[key] = values, parcels(values)
        return self._carried[key]

    def _expect(self, action: Action) -> None:
        """Post a receive that lies ahead: it has memory from now on, or as soon as its channel has room."""
        assert action.peer is not None
        channel = (action.kind, action.peer, action.end)
        waiting = self._expected.setdefault(channel, deque())
        if waiting or len(self._posted.setdefault(channel, {})) >= POSTED:
            waiting.append(action)
        else:
            self._post(action)

    def _post(self, action: Action) -> None:
        assert action.peer is not None
        self._posted[action.kind, action.peer, action.end][action.mb] = blocks = (
            self._messages(action) if self._posts else []
        )
        for block in blocks:
            self.coming += block.nbytes

    def _messages(self, action: Action) -> list[_HeldBlock]:
        """Allocate memory for the values of a receive."""
        (values, messages), blocks = self._message(action), list[_HeldBlock]()
        for parcel in messages:
            names = tuple(sorted(values[i].name for i in parcel.numbers))
            block = _HeldBlock(parcel.nbytes, self.messages, names, self.step, saved=not self.saved.isdisjoint(names))
            block.pool.change(block.nbytes, 1)
            blocks.append(block)
        return blocks

    def _receive(self, action: Action) -> None:
        """Convert the memory of a message into that of values of its microbatch."""
        assert action.peer is not None
        channel = (action.kind, action.peer, action.end)
        posted = self._posted.setdefault(channel, {})
        blocks = posted.pop(action.mb, None)
        for block in blocks or ():
            self.coming -= block.nbytes
        waiting = self._expected.get(channel)
        if blocks is None and waiting and action in waiting:
            waiting.remove(action)
        held = self.held.setdefault(action.holder, {})
        for block in blocks or self._messages(action):
            self.now[block.saved] += block.nbytes
            for name in block.names:
                held[name] = block
                block.held += 1
        self._put_tiles(action)
        if waiting:
            self._post(waiting.popleft())

    def _put_tiles(self, action: Action) -> None:
        """Convert the memory of a message with tiles into that of the parts that they are copied to."""
        assert action.peer is not None
        ends = ends_of(action, self.homes)
        if ends not in self._tiles:
            return
        held, all_of = self.held[action.holder], set[str]()
        for piece in self._tiles.slices(ends, action.peer, self._rank):
            if piece.is_all:
                all_of.add(piece.whole)
        parts = [value for value in self._tiles.arriving(ends) if value.name not in all_of]
        self._hold(action.holder, [*self._with_memory(parts)])
        tiles = {value.name for value in self._message(action)[0]} - all_of
        self._keep(action.holder, held.keys() - tiles)

    def _linger(self, action: Action) -> None:
        """Hold what was sent until the transport notices that the peer has it: small messages until there are a few of
        a channel, and those until the next send of it, say. What is saved stays anyway; values that share a message
        were copied into it."""
        assert action.peer is not None
        line = self._lingering.setdefault((action.kind, action.peer, action.end), _SentMessages())
        for pool, size in line.leaving:
            pool.change(size, -1)
        line.leaving = []
        values, messages = self._message(action)
        copied = ends_of(action, self.homes) in self._tiles
        for parcel in messages:
            pool = self.messages if len(parcel.numbers) > 1 or copied else self.made
            if pool is self.messages or values[parcel.numbers[0]].name not in self.saved:
                pool.change(parcel.nbytes, 1)
                line.waiting.append((pool, parcel.nbytes))
            line.nbytes += parcel.nbytes
        line.sends += 1
        if line.sends >= SENDS_TOGETHER or line.nbytes >= BYTES_TOGETHER:
            line.leaving, line.waiting, line.sends, line.nbytes = line.waiting, [], 0, 0

    def _flush(self) -> None:
        """Release all sends: at the end of a run everything has arrived."""
        for line in self._lingering.values():
            for pool, size in (*line.leaving, *line.waiting):
                pool.change(size, -1)
        self._lingering.clear()

    # ---------------------------------------------------------------------------------------- values

    def _call(self, kind: str) -> None:
        """Call a graph, whose temporaries live during the call only."""
        for sign in (1, -1):
            for size in self.workspaces[kind]:
                self.made.change(size, sign)
        self._note()

    def _note(self) -> None:
        total = sum(pool.bytes for pool in self.pools)
        if total > self.peak:
            self.peak, self.workspace = total, total - sum(self.now.values()) - self.coming

    def _with_memory(self, values: Iterable[Value]) -> Iterator[_Stored]:
        for value in values:
            if size := value.type.nbytes:
                yield value.name, size, self.fed if value.name in self._inputs else self.made, value.name in self.saved

    def _hold(self, mb: int, values: Iterable[_Stored]) -> None:
        held = self.held.setdefault(mb, {})
        for name, size, pool, saved in values:
            if name not in held:
                held[name] = _HeldBlock(size, pool, (name,), self.step, 1, saved)
                self.now[saved] += size
                pool.change(size, 1)

    def _keep(self, mb: int, names: AbstractSet[str]) -> None:
        held = self.held.get(mb, {})
        for name in [n for n in held if n not in names]:
            block = held.pop(name)
            block.held -= 1
            if not block.held:
                self.now[block.saved] -= block.nbytes
                block.pool.change(block.nbytes, -1)
                if self.lives is not None:
                    self.lives.append(Life(_purpose(block), block.names, mb, block.nbytes, block.taken_at, self.step))
        if not held:
            self.held.pop(mb, None)

    def finish(self) -> list[Life]:
        """Return all blocks of the walk, with those that are still held."""
        assert self.lives is not None
        remaining = {id(block): (mb, block) for mb, held in self.held.items() for block in held.values()}
        left = [
            Life(_purpose(block), block.names, mb, block.nbytes, block.taken_at, None)
            for mb, block in remaining.values()
        ]
        return [*self.lives, *left]


WALKS: dict[str, Callable[[Walk, Action], None]] = {
    **dict.fromkeys((FORWARD, AGAIN, BACKWARD, WEIGHTS), Walk._compute),
    **dict.fromkeys((PARTS, NORM_PARTS), Walk._hand_out),
    UPDATE: Walk._update,
    **dict.fromkeys(SENDS, Walk._send),
    **dict.fromkeys(RECEIVES, Walk._receive),
    **dict.fromkeys(HANDS, Walk._linger),
    **dict.fromkeys((SUM, COPY_OUT), Walk._pass),
    COPY_IN: Walk._bring,
    LET_GO: Walk._let_go,
    DROP: Walk._drop,
}


def _purpose(block: _HeldBlock) -> str:
    return "activations" if block.saved else "boundary"
