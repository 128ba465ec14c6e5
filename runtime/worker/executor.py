"""The actions of one stage, one method per kind. The program of the rank says what to do; nothing is decided here.

In: a loaded stage, its store, its transport. Out: a Step for every finished optimiser step on the stage that
computes the loss, an Output for every microbatch of an inference.

`run` works through an ActionStream. Before each action the receives that come soon are posted. The action is written
to the status slot, where the launcher reads it after a failure.

A value is let go as soon as no later action of its microbatch on this stage takes it. `D` lets go of all that are
left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType

import numpy as np
import torch

from penstock.backends.interface import StageProgram
from penstock.ir.action_kinds import AGAIN, COPY_IN, DROP, FORWARD, LET_GO, NORM_PARTS, PARTS, SUM, UPDATE
from penstock.ir.batch_shares import fed_inputs, leads, loss_stage, microbatch_size, share_of
from penstock.ir.collective_calls import coordinates_of
from penstock.ir.graph import COORDINATE, MICROBATCH, NORM, Graph, Module, Value
from penstock.ir.liveness import changed_vars
from penstock.ir.memory.items import version_read
from penstock.ir.memory.saved_sets import moves_saved
from penstock.ir.memory.walk import LOOK_AHEAD
from penstock.ir.schedule import ADDERS, COMPUTE, COPIES, HANDS, READERS, RECEIVES, SENDS, SUM_USERS, Action
from penstock.runtime.messages.control import LogEntry, Output, Record, Step
from penstock.runtime.messages.ledger import Ledger
from penstock.runtime.messages.status import Status
from penstock.runtime.state.held import hold_weights
from penstock.runtime.state.saved_sets import SavedSets
from penstock.runtime.state.settings import Settings, learning_rate, settings_of
from penstock.runtime.state.store import Store
from penstock.runtime.state.tensors import CPU, Recycled, as_array, fill
from penstock.runtime.telemetry.device_memory import DeviceMemory
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.transport.transport import RankTransport
from penstock.support.errors import VerifyError

from .actions import ActionStream, Feed
from .device_times import DeviceTimes
from .feeds import number_of
from .message_feeds import RequestFeed
from .pace import Pace, times_of
from .readings import Readings
from .stage_graphs import ONE_SIZE, StageGraphs

Report = Callable[[Record, Mapping[str, np.ndarray]], None]


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


@dataclass(frozen=True)
class Conduct:
    """The way an executor works. `retire`, `audit`, `pace`, `tables`, `offset` and `key` as in control.Setup; no tables
    are those of the module. `stop_at_nan`: a loss or norm that is not finite is an error. `check` is called before each
    action, and raises errors of threads beside the loop. `exchange` does the collectives of the stage. `stage` is
    one of the rank's, its first if not given, and `stages` gets the executors of all of them; `saved_sets` has what
    forwards of the stage saved, where that is elsewhere. `sizes` are the modules of all sizes of the model by rung, the
    largest first, and `called` gives the names of a rung's graphs in the library; of one size they are not needed."""

    retire: bool = True
    audit: bool = False
    trace: bool = False
    pace: Mapping[str, float] | None = None
    tables: Settings | None = None
    offset: int = 0
    key: int = 0
    stop_at_nan: bool = False
    check: Callable[[], None] = lambda: None
    exchange: RankExchange | None = None
    stage: int | None = None
    saved_sets: SavedSets | None = None
    stages: dict[int, Executor] | None = None
    sizes: Mapping[str, Module] = field(default_factory=dict)
    called: Callable[[str], Callable[[str], str]] = lambda rung: lambda graph: graph


class Executor:
    """The actions of a stage of a rank. `stages` has the executors of all stages of the rank, by stage: `run` of any of
    them is the loop of the rank."""

    def __init__(
        self,
        module: Module,
        rank: int,
        program: StageProgram,
        store: Store,
        transport: RankTransport,
        report: Report,
        status: Status,
        conduct: Conduct = Conduct(),
    ) -> None:
        assert module.schedule is not None
        self.module, self.rank = module, rank
        self.stage = module.rank_stages()[rank] if conduct.stage is None else conduct.stage
        self.stages = {} if conduct.stages is None else conduct.stages
        first = next(iter(self.stages.values()), self)
        self.stages[self.stage] = self
        self._pack = module.rank_packs()[rank]
        self.program, self.store, self.transport = program, store, transport
        self.saved_sets, stage = conduct.saved_sets, self.stage
        self._finished: dict[int, int] = {}
        self.report, self.status, self.retire = report, status, conduct.retire
        self.schedule = module.schedule
        self.log: list[LogEntry] | None = [] if conduct.audit else None
        self.events: list[tuple[str, float, float]] | None = [] if conduct.trace else None
        self.ledger: Ledger | None = self._traced(first, conduct.trace)
        self._exchange = conduct.exchange
        if self._exchange is not None and conduct.trace:
            self._exchange.events = []
        # Where the rank lies in its mesh: values of its graphs that nobody feeds.
        self._coordinates = {
            f"{COORDINATE}{axis}": torch.tensor(at, dtype=torch.int64, device=store.device)
            for axis, at in coordinates_of(module, rank).items()
        }
        self._watched, self._keeping = set[str](), set[int]()
        self._started = 0.0
        sizes = conduct.sizes or {ONE_SIZE: module}
        self._sizes = {rung: StageGraphs(one, stage, self._pack, conduct.called(rung)) for rung, one in sizes.items()}
        self._largest = next(iter(self._sizes.values()))
        # The size of the model that a microbatch runs on, where there are several.
        self.rung_of: Callable[[int], str] | None = None
        self.graphs, self.touched = self._largest.graphs, self._largest.touched
        self.fed = {value.name: value.type for value in module.inputs if value.name in fed_inputs(module, stage)}
        # Memory that one stage of the rank is done with serves the others.
        self._buffers: Recycled = Recycled() if first is self else first._buffers
        self._copies = None if store.device == CPU else transport.copies
        self._readings = Readings(self._copies, self._finish_step)
        self._times = None if self._copies is None else DeviceTimes(store.device, self._spent)
        self.device_memory = DeviceMemory(store.device)
        self.tables = settings_of(module) if conduct.tables is None else conduct.tables
        self._check = conduct.check
        self._ahead, self._key = conduct.offset // microbatch_size(module), conduct.key
        self.pace = Pace(times_of(conduct.pace or {}, stage), self.graphs)
        self._stop_at_nan = conduct.stop_at_nan
        self._survey()
        self._handlers: dict[str, Callable[[Action], None]] = {
            kind: MethodType(handler, self) for kind, handler in HANDLERS.items()
        }

    def _traced(self, first: Executor, trace: bool) -> Ledger | None:
        """Return the ledger that all stages of the rank write into, if there is one."""
        ledger = (Ledger() if trace else None) if first is self else first.ledger
        if ledger is not None:
            ledger.stage = self.stage if len(self._pack) > 1 else None
            self.store.trace(ledger)
            self.transport.ledger = ledger
        return ledger

    def _survey(self) -> None:
        """Find what the program of the rank has to do, and what it reports."""
        self._sends = self.schedule.sends(self.rank)
        # The number of sends of a microbatch that are still ahead, where there are several.
        self._unsent: dict[tuple[str, int], int] = {}
        forward = self.graphs.get(FORWARD)
        outputs = {v.name for v in forward.outs} if forward is not None else set()
        self.is_loss_stage = loss_stage(self.module) == self.stage and leads(self.module, self.rank)
        # What the module hands out is whole on every rank of a team: its first one reports it.
        self.outputs = (
            ()
            if loss_stage(self.module) is not None or not leads(self.module, self.rank)
            else tuple(name for name in self.module.outputs if name in outputs)
        )
        program = self.schedule.ranks[self.rank].batch
        kinds = {action.kind for action in program if action.stage == self.stage}
        # The microbatches of a batch that this rank runs.
        self._share = share_of(self.module, self.rank)
        self._updates, self._drops = UPDATE in kinds, DROP in kinds
        self._changes = bool(changed_vars(self.graphs.values()))
        self._held = False
        # A rank that updates weights for others runs no microbatches.
        self._last_kind = next((kind for kind in reversed(READERS) if kind in kinds), UPDATE)

    # -------------------------------------------------------------------------------------------- the loop

    def serve(self, first: int, feed: RequestFeed) -> None:
        """Run the microbatches of requests, each at its size of the model."""
        if len(self._sizes) > 1:
            self.transport.rung_of = feed.rung
            for stage in self.stages.values():
                stage.rung_of = feed.rung
        self.run(first, feed, unit=1)

    def run(self, first: int, feed: Feed, unit: int | None = None) -> None:
        """Run the batches of a feed, from an empty pipeline to an empty pipeline. `unit` as in ActionStream."""
        unit = unit or self.schedule.microbatches
        for stage in self.stages.values():
            stage.begin(feed)
        stream, expect = ActionStream(self.schedule, self.rank, first, feed, unit, self._settle), self.transport.expect
        if self.ledger is not None:
            self.ledger.run(first)
        if self._times is not None:
            self._times.start()
        while (upcoming := stream.pop()) is not None:
            action, retires = upcoming
            if self.ledger is not None:
                self.ledger.begin(action.stage)
            for later in stream.receives(LOOK_AHEAD):
                expect(later)
            self._check()
            self.status.show(action)
            kind, stage = action.kind, self.stages[action.stage]
            if kind in SUM_USERS:
                # Waiting for other ranks is no part of the computation's time.
                stage.finish_sum(action)
            if stage.touched:
                stage.store.await_items(stage.touched.get(action.computation, ()), version_read(action))
            if stage.saved_sets is not None and kind in stage.saved_sets.saved.users:
                stage.saved_sets.wait(action.mb)
            begun = None if self._times is None else self._times.mark()
            started = stage._started = time.monotonic()
            stage.perform(action)
            if kind in stage.pace.asked and not action.item:
                stage.pace.keep(action, started)
            if self._times is None or begun is None:
                self._spent(action, started, time.monotonic())
            else:
                self._times.end(action, begun)
            if retires is not None and self.retire:
                stage.store.retire(retires)
            if kind == stage._last_kind:
                is_last = not self._share or action.mb % self.schedule.microbatches == self._share[-1]
                if unit == 1 or is_last:
                    self._finish_unit(action.mb if action.once else action.mb // unit)
                if self._times is not None and is_last and not stage._updates and not stage.is_loss_stage:
                    stage._end_batch(action.mb // self.schedule.microbatches, None)
            if self._times is not None:
                stage._readings.look()
                self._times.look()
        self._settle()
        if self._times is not None:
            self._times.settle()
        self.status.show(None)
        self.transport.flush()
        for stage in self.stages.values():
            # An error of the last copy would be raised by an action that no batch follows.
            stage.store.settle()
            assert not stage.store.values or not stage._drops, f"values are left over: {stage.store.values.keys()}"

    def begin(self, feed: Feed) -> None:
        """Take the feed of a run."""
        self.feed = feed
        if not self._held and not self._changes:
            # Variables keep their values as long as the job runs.
            hold_weights(self.program, self.store, self._every_graph())
            self._held = True

    def _every_graph(self) -> list[Graph]:
        """Return the graphs of all sizes, by their names in the library of the stage."""
        return [
            replace(graph, name=size.calls[kind][0])
            for size in self._sizes.values()
            for kind, graph in size.graphs.items()
        ]

    def _of(self, mb: int) -> StageGraphs:
        """Return the graphs of the size of the model that a microbatch runs on."""
        return self._largest if self.rung_of is None else self._sizes[self.rung_of(mb)]

    def _settle(self) -> None:
        for stage in self.stages.values():
            stage._readings.settle()

    def _finish_unit(self, unit: int) -> None:
        """Let the feed go of a batch or microbatch that all stages of the rank are done with."""
        done = self._finished[unit] = self._finished.get(unit, 0) + 1
        if done == len(self.stages):
            del self._finished[unit]
            self.feed.finish(unit)

    # -------------------------------------------------------------------------------------------- one method per kind

    def forward(self, action: Action) -> None:
        size = self._of(action.mb)
        results = self._call(FORWARD, action, [self._value(action.mb, value) for value in size.graphs[FORWARD].ins])
        self._note(action)
        if self.is_loss_stage:
            self._take_loss(action.mb, results[self.module.outputs[0]])
        if self.outputs:
            arrays = {name: as_array(results[name]).copy() for name in self.outputs if name in results}
            self.pace.keep(action, self._started)
            self.report(Output(action.mb), arrays)
        self.store.keep_only(action.mb, size.after_forward)

    def again(self, action: Action) -> None:
        """Compute again what the forward did not keep, for the backward."""
        self._call(AGAIN, action, [self._value(action.mb, value) for value in self.graphs[AGAIN].ins])
        self._note(action)
        self.store.keep_only(action.mb, self._of(action.mb).after_again)

    def backward(self, action: Action) -> None:
        kind = action.kind
        self._call(kind, action, [self._value(action.mb, value) for value in self.graphs[kind].ins])
        self._note(action)
        self.store.keep_only(action.mb, self._of(action.mb).after_backward[kind])

    def sum_up(self, action: Action) -> None:
        """Sum the gradients of a batch over the ranks of the stage; the sum goes on in the background."""
        self.transport.sum_up(action, self.store.sums(action.mb))
        if kept := self.store.kept(action.mb):
            assert self._exchange is not None
            self._exchange.enter(action)
            for call, gradients in kept:
                self._exchange.begin(call, gradients, gradients)
            self._keeping.add(action.mb)

    def copy_item(self, action: Action) -> None:
        """Begin to copy an item of the stage to the device or to its home; it goes on in the background."""
        begin = self.store.bring if action.kind == COPY_IN else self.store.store
        begin(action.item, str(action), action.version)

    def finish_sum(self, action: Action) -> None:
        """Wait for the sum of the batch that an action uses, the whole one and this rank's parts."""
        self.transport.finish_sum(action)
        if action.mb in self._keeping:
            assert self._exchange is not None
            self._keeping.remove(action.mb)
            self._exchange.enter(action)
            for call, _ in self.store.kept(action.mb):
                self._exchange.wait(call)

    def agree(self, action: Action) -> None:
        """Run P or N: their results stay here until the update."""
        self._call(action.kind, action, [self._value(action.holder, value) for value in self.graphs[action.kind].ins])

    def update(self, action: Action) -> None:
        version = self.store.version + 1 if action.version is None else action.version
        # No microbatch reads weights that are updated here for other stages.
        live = {v for versions in self.store.versioned.values() for v in versions.live()} if not self._share else set()
        for old in live if self.retire else ():
            self.store.retire(old)
        self.store.start_update(version)
        ins = [self._value(action.holder, value) for value in self._largest.taken[action.computation]]
        results = self._call(action.computation, action._replace(version=version), ins)
        if action.item:
            return
        self.store.finish_update(version)
        self.store.keep_only(action.holder, frozenset())
        self.store.put_all(action.holder, {name: results[name] for name in self._largest.new_weights})
        self._note(action._replace(version=version))
        self._end_batch(action.mb, results.get(NORM))

    def send(self, action: Action) -> None:
        edge, holder, once = self.transport.edge_of(action), action.holder, action.once
        self.transport.send(action, {value.name: self._value(holder, value) for value in edge.values})
        # A value that several ranks take stays until it was sent to the last of them.
        number = 0 if once else action.mb % self.schedule.microbatches
        left = self._unsent.pop((action.kind, action.mb), self._sends[action.kind, action.stage, number]) - 1
        if left:
            self._unsent[action.kind, action.mb] = left
        else:
            size = self._largest if once else self._of(action.mb)
            self.store.keep_only(holder, size.sent_later[action.kind])

    def hand_on(self, action: Action) -> None:
        edge = self.transport.edge_of(action)
        self.transport.hand_on(action, {value.name: self._value(action.holder, value) for value in edge.values})

    def receive(self, action: Action) -> None:
        self.store.put_all(action.holder, self.transport.receive(action))

    def let_go(self, action: Action) -> None:
        if action.item:
            self.store.let_item_go(action.item, action.version)
            return
        self.store.keep_only(action.mb, self._of(action.mb).after_letting_go)

    def drop(self, action: Action) -> None:
        self.store.keep_only(action.mb, frozenset())

    # -------------------------------------------------------------------------------------------- parts of them

    def perform(self, action: Action) -> None:
        """Run one action, also for evaluation.py."""
        if self.saved_sets is not None and moves_saved(action):
            self.saved_sets.move(action, self.store)
        else:
            self._handlers[action.kind](action)

    def compute(self, kind: str, action: Action) -> dict[str, torch.Tensor]:
        """Call a graph on the values of a microbatch, and nothing else: for evaluation.py."""
        return self._call(kind, action, [self._value(action.mb, value) for value in self.graphs[kind].ins])

    def _call(self, kind: str, action: Action, ins: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        size = self._of(action.mb)
        name, slots, names = size.calls[kind]
        if self._exchange is not None:
            self._exchange.enter(action)
        buffers = self.store.buffers(name, slots, action.version, action.batch(self.schedule.microbatches))
        results = dict(zip(names, self._run(kind, name, [*ins, *buffers]), strict=True))
        if action.kind != UPDATE:
            self.store.put_all(action.holder, results)
            for stage, values in size.handed.get(kind, ()):
                self.stages[stage].store.put_all(action.holder, {value: results[value] for value in values})
        return results

    def _run(self, kind: str, name: str, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the graph's results. Its temporaries are the same in every call, so only the first call is watched."""
        if self.ledger is None or kind in self._watched:
            return self.program.call(name, args)
        self._watched.add(kind)
        results, blocks = self.program.watch(name, args)
        if blocks is not None:
            self.ledger.call(kind, blocks)
        return results

    def _value(self, mb: int, value: Value) -> torch.Tensor:
        """Return a value of a microbatch, or of a batch: `Action.holder` says under which number."""
        if value.name in self._coordinates:
            return self._coordinates[value.name]
        tensor = self.store.get(mb, value.name)
        if tensor is None:
            if value.name not in self.fed and value.name != MICROBATCH:
                owner = f"microbatch {mb}" if mb >= 0 else f"batch {-1 - mb}"
                raise VerifyError(f"%{value.name} of {owner} is not there", where=f"stage {self.stage}")
            array = (
                number_of(mb, self._ahead, self._key)
                if value.name == MICROBATCH
                else self.feed.microbatch(mb, value.name)
            )
            if self._copies is None:
                tensor = fill(self._buffers.tensor(value.type, self._room(value)), array)
            else:
                tensor = self._copies.feed(array, value.type)
            self.store.put(mb, value.name, tensor)
        return tensor

    def _room(self, value: Value) -> int:
        """Return the bytes of the memory that an input goes into: of the largest size, if there are several."""
        return self.fed[value.name].nbytes if self.rung_of is not None and value.name in self.fed else 0

    def _note(self, action: Action) -> None:
        if self.log is not None and action.version is not None:
            self.log.append(LogEntry(action.stage, action.mb, action.kind, action.version))

    def _take_loss(self, mb: int, loss: torch.Tensor) -> None:
        batch = mb // self.schedule.microbatches
        if self._readings.take(batch, loss) == len(self._share) and not self._updates:
            self._end_batch(batch, None)

    def _end_batch(self, batch: int, norm: torch.Tensor | None) -> None:
        """Do what comes once a batch, behind all of its actions."""
        self._readings.end(batch, norm)
        self.device_memory.look()

    def _spent(self, action: Action, began: float, ended: float) -> None:
        """Enter the time of an action."""
        if action.kind in COMPUTE:
            self.status.spend(ended - began)
        if self.events is not None:
            self.events.append((str(action), began, ended))

    def _finish_step(self, batch: int, losses: tuple[float, ...], norm: float | None) -> None:
        """Report a step."""
        strange = [
            f"{name} {value}"
            for name, value in (*(("loss", x) for x in losses), ("norm of the gradient", norm))
            if not _is_finite(value)
        ]
        if self._stop_at_nan and strange:
            hint = (
                "checkpoints are of steps before; --nan warn goes on, and --skip-nonfinite when compiling leaves "
                "such updates out"
            )
            raise VerifyError(f"step {batch} has a {strange[0]}", where=f"rank {self.rank}, step {batch}", hint=hint)
        self.status.finish(batch)
        self.report(
            Step(batch, sum(losses) / len(losses), losses, learning_rate(self.tables, batch), time.monotonic(), norm),
            {},
        )


# The function that runs every kind of action on a rank.
HANDLERS: dict[str, Callable[[Executor, Action], None]] = {
    FORWARD: Executor.forward,
    AGAIN: Executor.again,
    **dict.fromkeys(ADDERS, Executor.backward),
    PARTS: Executor.agree,
    NORM_PARTS: Executor.agree,
    UPDATE: Executor.update,
    **dict.fromkeys(SENDS, Executor.send),
    **dict.fromkeys(RECEIVES, Executor.receive),
    **dict.fromkeys(HANDS, Executor.hand_on),
    SUM: Executor.sum_up,
    **dict.fromkeys(COPIES, Executor.copy_item),
    LET_GO: Executor.let_go,
    DROP: Executor.drop,
}
