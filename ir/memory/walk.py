"""One rank's actions, followed block by block: what memory they take and give back.

In: a module, a rank with its stages, actions. Out: blocks as they come and go (account.py), and sums and peaks of them
for predict.py, which says what is counted.

The rules are those of the runtime, said a second time: a microbatch holds a value until no later action of it on this
rank takes it; a message has its memory from when its receive is posted until the last value in it is let go of; what a
send hands over stays until the peer has it. What one stage of the rank hands to another is one block, until neither
holds it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from penstock.ir.graph import Module, Value
from penstock.ir.messages import Parcel, parcels
from penstock.ir.schedule import HANDS, RECEIVES, SENDS, Action, Schedule
from penstock.ir.sharding.tile_messages import EdgeEnds, ends_of, tile_messages

from .account import BEFORE, Life
from .saved_sets import moves_saved
from .stage_values import StageValues, StoredValue, saved_values
from .workspace import Change

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


# A channel of a rank: the kind of its actions, the peer, the stage, and that at the other end where ranks run several.
Channel = tuple[str, int, int, int | None]
# Who holds a value: a stage, for a microbatch or a batch.
_Holder = tuple[int, int]


@dataclass(slots=True, eq=False)
class _HeldBlock:
    """A block of memory with values in it: `names` are those that have ever been there, `held` how many still are, once
    for each stage that holds them. It was taken for `stage`."""

    nbytes: int
    pool: BlockPool
    names: tuple[str, ...]
    taken_at: int
    stage: int
    held: int = 0
    saved: bool = False

    def life(self, owner: int, given_at: int | None) -> Life:
        """Return the life of the block."""
        purpose = "activations" if self.saved else "boundary"
        return Life(purpose, self.names, owner, self.nbytes, self.taken_at, given_at, stage=self.stage)


@dataclass(slots=True)
class _SentMessages:
    """The messages that were sent over a channel and are still held: `leaving` until the next send, `waiting` until
    there are enough, of so many sends and bytes."""

    leaving: list[tuple[BlockPool, int]] = field(default_factory=list)
    waiting: list[tuple[BlockPool, int]] = field(default_factory=list)
    sends: int = 0
    nbytes: int = 0


class Walk:
    """The walk over one rank's program, which counts the memory that it holds: all of its stages share what is free.
    `now` are the bytes of values that are saved (True), and of those that are passing through; `coming` those of
    messages that may come before their action. With `lives`, blocks are written down when they are given back."""

    def __init__(
        self, module: Module, stages: Sequence[int], rank: int, *, posts: bool = True, lives: bool = False
    ) -> None:
        self.stages = {stage: StageValues(module, stage, stages) for stage in stages}
        self.homes = module.rank_stages()
        self._rank, self._tiles = rank, tile_messages(module)
        self._edges = {
            (e.src, e.dst, e.phase): module.local_values(e.values, e.src if e.src in self.stages else e.dst)
            for e in module.edges
        }
        self._carried: dict[tuple[EdgeEnds, int | None], tuple[tuple[Value, ...], tuple[Parcel, ...]]] = {}
        self.saved = frozenset[str]().union(*(saved_values(module, stage) for stage in stages))
        # The blocks of values by stage, and by microbatch or batch: those that one stage of the rank hands to another
        # are held by both.
        self.held: dict[_Holder, dict[str, _HeldBlock]] = {}
        self.now = {True: 0, False: 0}
        # Memory of results and temporaries, of inputs of the module, and of messages.
        self.made, self.fed, self.messages = BlockPool(), BlockPool(), BlockPool()
        # The memory of saved sets that were elsewhere.
        self.brought = PassingPool()
        self.pools = (self.made, self.fed, self.messages, self.brought)
        self._posts, self._unsent = posts, Counter[tuple[int, str, int]]()
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
        self._unsent = Counter((a.stage, a.phase, a.mb) for a in actions if a.kind in SENDS)
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
            self.in_flight = max(self.in_flight, sum(mb >= 0 for _, mb in self.held))
            self._note()
            yield action
        self._flush()

    # ---------------------------------------------------------------------------------------- one method per kind

    def _compute(self, action: Action) -> None:
        stage, kind, holder = self.stages[action.stage], action.kind, _holder(action)
        self._hold(holder, stage.stored[kind, True])
        self._call(holder, stage.calls[kind], stage.stored[kind, False])
        self._hand_over(action)
        self._keep(holder, stage.needed[kind])

    def _hand_out(self, action: Action) -> None:
        stage = self.stages[action.stage]
        self._call(_holder(action), stage.calls[action.kind], stage.stored[action.kind, False])
        self._hand_over(action)

    def _hand_over(self, action: Action) -> None:
        """Let other stages of the rank hold what they take of a computation."""
        held = self.held[_holder(action)]
        for stage, names in self.stages[action.stage].handed.get(action.kind, ()):
            theirs = self.held.setdefault((stage, action.holder), {})
            for name in names & held.keys():
                theirs[name] = held[name]
                held[name].held += 1

    def _update(self, action: Action) -> None:
        stage, holder = self.stages[action.stage], _holder(action)
        sent = stage.sent[UPDATE]
        left = [row for row in stage.stored[action.kind, False] if row[0] in sent]
        self._call(holder, stage.calls[action.computation], left)
        if not action.item:
            self._keep(holder, sent)

    def _send(self, action: Action) -> None:
        """Send a microbatch's values, which stay until they were sent to the last of several ranks."""
        stage, phase = self.stages[action.stage], action.phase
        left = (action.stage, phase, action.mb)
        self._unsent[left] -= 1
        if not self._unsent[left]:
            del self._unsent[left]
            self._keep(_holder(action), stage.kept[phase])
        # What the update of the stage takes as well stays until that.
        if not action.once or not stage.sent[phase] <= stage.kept[phase]:
            self._linger(action)

    def _let_go(self, action: Action) -> None:
        """Let go of what is computed again, or of a saved set. Memory of variables is counted beside the walk
        (items.py)."""
        stage, holder = self.stages[action.stage], _holder(action)
        if not action.item:
            self._keep(holder, stage.kept[LET_GO])
        elif moves_saved(action) and stage.saved_set is not None:
            self._keep(holder, self.held.get(holder, {}).keys() - stage.saved_set.values.keys())

    def _bring(self, action: Action) -> None:
        """Take memory for a saved set: one block, until its last value is dropped."""
        saved = self.stages[action.stage].saved_set
        if moves_saved(action) and saved is not None:
            names = tuple(sorted(saved.values))
            block = _HeldBlock(saved.nbytes, self.brought, names, self.step, action.stage, len(names), True)
            self.held.setdefault(_holder(action), {}).update(dict.fromkeys(names, block))
            self.now[True] += saved.nbytes
            self.brought.change(saved.nbytes, 1)

    def _drop(self, action: Action) -> None:
        self._keep(_holder(action), set())

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
        channel = _channel(action)
        waiting = self._expected.setdefault(channel, deque())
        if waiting or len(self._posted.setdefault(channel, {})) >= POSTED:
            waiting.append(action)
        else:
            self._post(action)

    def _post(self, action: Action) -> None:
        self._posted[_channel(action)][action.mb] = blocks = self._messages(action) if self._posts else []
        for block in blocks:
            self.coming += block.nbytes

    def _messages(self, action: Action) -> list[_HeldBlock]:
        """Allocate memory for the values of a receive."""
        (values, messages), blocks = self._message(action), list[_HeldBlock]()
        for parcel in messages:
            names = tuple(sorted(values[i].name for i in parcel.numbers))
            saved = not self.saved.isdisjoint(names)
            block = _HeldBlock(parcel.nbytes, self.messages, names, self.step, action.stage, saved=saved)
            block.pool.change(block.nbytes, 1)
            blocks.append(block)
        return blocks

    def _receive(self, action: Action) -> None:
        """Convert the memory of a message into that of values of its microbatch."""
        channel = _channel(action)
        posted = self._posted.setdefault(channel, {})
        blocks = posted.pop(action.mb, None)
        for block in blocks or ():
            self.coming -= block.nbytes
        waiting = self._expected.get(channel)
        if blocks is None and waiting and action in waiting:
            waiting.remove(action)
        held = self.held.setdefault(_holder(action), {})
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
        held, all_of = self.held[_holder(action)], set[str]()
        for piece in self._tiles.slices(ends, action.peer, self._rank):
            if piece.is_all:
                all_of.add(piece.whole)
        parts = [value for value in self._tiles.arriving(ends) if value.name not in all_of]
        self._hold(_holder(action), self.stages[action.stage].with_memory(parts))
        tiles = {value.name for value in self._message(action)[0]} - all_of
        self._keep(_holder(action), held.keys() - tiles)

    def _linger(self, action: Action) -> None:
        """Hold what was sent until the transport notices that the peer has it: small messages until there are a few of
        a channel, and those until the next send of it, say. What is saved stays anyway; values that share a message
        were copied into it."""
        line = self._lingering.setdefault(_channel(action), _SentMessages())
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

    def _call(self, holder: _Holder, changes: Sequence[Change], results: Sequence[StoredValue]) -> None:
        """Call a graph: its temporaries come and go, and what a kernel makes of the results stays. Results that none
        makes, such as variables, are copied ahead."""
        rows, by_kernels = {row[0]: row for row in results}, {change.result for change in changes}
        self._hold(holder, [row for row in results if row[0] not in by_kernels])
        for nbytes, result in changes:
            if not result:
                self.made.change(abs(nbytes), 1 if nbytes > 0 else -1)
            elif result in rows:
                self._hold(holder, (rows[result],))
        self._note()

    def _note(self) -> None:
        total = sum(pool.bytes for pool in self.pools)
        if total > self.peak:
            self.peak, self.workspace = total, total - sum(self.now.values()) - self.coming

    def _hold(self, holder: _Holder, values: Iterable[StoredValue]) -> None:
        held = self.held.setdefault(holder, {})
        for name, size, is_fed in values:
            if name not in held:
                pool, saved = self.fed if is_fed else self.made, name in self.saved
                held[name] = _HeldBlock(size, pool, (name,), self.step, holder[0], 1, saved)
                self.now[saved] += size
                pool.change(size, 1)

    def _keep(self, holder: _Holder, names: AbstractSet[str]) -> None:
        held = self.held.get(holder, {})
        for name in [n for n in held if n not in names]:
            block = held.pop(name)
            block.held -= 1
            if not block.held:
                self.now[block.saved] -= block.nbytes
                block.pool.change(block.nbytes, -1)
                if self.lives is not None:
                    self.lives.append(block.life(holder[1], self.step))
        if not held:
            self.held.pop(holder, None)

    def finish(self) -> list[Life]:
        """Return all blocks of the walk, with those that are still held."""
        assert self.lives is not None
        remaining = {id(block): (owner, block) for (_, owner), held in self.held.items() for block in held.values()}
        return [*self.lives, *(block.life(owner, None) for owner, block in remaining.values())]


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


def _holder(action: Action) -> _Holder:
    return action.stage, action.holder


def _channel(action: Action) -> Channel:
    assert action.peer is not None
    return action.kind, action.peer, action.stage, action.end
