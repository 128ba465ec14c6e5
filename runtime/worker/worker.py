"""One rank of a run. In: a bundle, a rank, commands. Out: reports; the work itself is the loop of executor.Executor.

launch/forkserver.py forks the process of a local run, with one end of a socket pair. The first command is Setup; rank 0
answers where the group meets, the other ranks are told. Then the hash of module.ir is compared over the group, the
stage and its variables are loaded, and commands are obeyed until Stop. The end of the control connection, or of the
parent, ends the worker at once, whatever it is doing: no worker outlives its launcher.

Threads are set by the environment before anything is imported, and again here for torch.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.backends.interface import StageProgram, all_rungs
from penstock.backends.registry import backend_of
from penstock.ir.batch_shares import fed_to_rank, reports, share_of
from penstock.ir.collective_calls import groups_of, kept_sums
from penstock.ir.graph import PARAM, Edge, Module, summed_vars
from penstock.ir.sharding.between_meshes import edge_values
from penstock.ir.sharding.tile_messages import tile_messages
from penstock.runtime.checkpoint.saving import Saver
from penstock.runtime.data.samples import FileSamples, Samples, open_data
from penstock.runtime.group.group import RankGroup, ends_among, host_store, join_store
from penstock.runtime.group.sealed import SealedStore
from penstock.runtime.messages.control import (
    Arrays,
    Audit,
    Channel,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    FetchAudit,
    FetchParameters,
    Hosting,
    Join,
    Message,
    Parameters,
    Rank,
    Ready,
    Record,
    RunCommand,
    SaveCommand,
    Serve,
    Setup,
    Stop,
    TraceRecord,
)
from penstock.runtime.messages.defaults import STOP
from penstock.runtime.messages.status import Status
from penstock.runtime.state.lanes import lanes_of
from penstock.runtime.state.packs import PackState
from penstock.runtime.state.saved_sets import SavedSets
from penstock.runtime.state.settings import settings_of
from penstock.runtime.state.store import Store, SummedGradients
from penstock.runtime.state.tensors import as_array
from penstock.runtime.telemetry.device_memory import device_without_memory
from penstock.runtime.telemetry.resident import borrowed_bytes, peak_bytes, resident_bytes
from penstock.runtime.transport.carriers import Carriers
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.transport.overdue import Overdue
from penstock.runtime.transport.transport import RankTransport
from penstock.support.errors import DoesNotFit, PeerLost, PenstockError, VerifyError
from penstock.support.out_of_memory import is_out_of_memory
from penstock.support.terminal import say

from .evaluation import evaluate
from .executor import Conduct, Executor
from .feeds import DataFeed, InputCuts, LocalSamples, NoSamples, Prefetch
from .loading import StateSource, check_device, load_saved_sets, load_store
from .message_feeds import BatchFeed, Receive, RequestFeed
from .stage_graphs import library_name, sizes_of

Reply = Callable[[Record, Mapping[str, np.ndarray]], None]


class Worker:
    """One rank with its group, stage and state. Commands come one at a time; `reply` takes the answers."""

    def __init__(
        self, bundle: Bundle, rank: int, group: RankGroup, setup: Setup, reply: Reply, receive: Receive, status: Status
    ) -> None:
        self.bundle, self.rank, self.group, self.setup, self.reply, self.receive, self.status = (
            bundle,
            rank,
            group,
            setup,
            reply,
            receive,
            status,
        )
        self.entry, self.module = bundle.rank(rank), bundle.module
        # Why graphs are launched kernel by kernel, as far as it was said.
        self._said = set[tuple[str, str]]()
        # The modules of all sizes, and one with the graphs of all of them.
        self.sizes = sizes_of(bundle)
        self.whole = all_rungs(bundle.ladder) if self.module.bounds else self.module
        if group.world != bundle.world_size:
            raise VerifyError(
                f"the bundle is for {bundle.world_size} ranks, {group.world} were started", where=str(bundle.path)
            )
        status.show("joining")
        group.agree("module.ir", bundle.module_hash)
        status.show("loading")
        self._open_samples()
        exchange = RankExchange(self.whole, rank, setup.timeout)
        programs = self._load_programs(exchange)
        program = programs[self.entry.stage]
        assert self.module.schedule is not None
        near = group.connect_stages(self.module.schedule, program.device)
        mates = self.module.schedule.replicas()[rank]
        if len(mates) > 1:
            group.form_team(mates, program.device)
        # A device that waits for a rank that is gone keeps this one from any other way to end.
        overdue = Overdue(setup.timeout, group.lost)
        circles = group.form_circles(groups_of(self.whole), program.device)
        self.carriers = Carriers(circles, rank, setup.timeout, overdue)
        exchange.join(self.carriers.groups, self.carriers.devices)
        self.exchange = exchange
        self.base = resident_bytes()
        self.tables = setup.tables or settings_of(self.module)
        self.device = program.device
        self._load_stores(programs)
        self.state = _state_of(list(self.stores.values()))
        self.saver = Saver(bundle, rank, group, setup, self.state, status)
        homes = self.module.rank_stages()
        self.transport = RankTransport(
            rank, local_edges(self.module), homes, setup.timeout, program.device, setup.latency, group.team, near
        )
        self._tell_sizes(self.transport)
        if has_gpus(self.module):
            self._join_gpus(program.device, overdue)
        self.executor = self._executor_of(programs)
        self.loaded = peak_bytes()
        # The objects that are there stay: looking through them for garbage, again and again, would cost more than the
        # loop.
        gc.collect()
        gc.freeze()
        status.show(None)

    def _load_programs(self, exchange: RankExchange) -> dict[int, StageProgram]:
        """Load the code of all stages of the rank."""
        backend, bundle = backend_of(self.bundle.manifest.backend), self.bundle
        threads, device = self.entry.threads, self.entry.device
        return {
            stage: backend.load_stage(self.whole, stage, bundle.stage_files(stage), threads, device, exchange=exchange)
            for stage in self.entry.stages
        }

    def _tell_sizes(self, transport: RankTransport) -> None:
        """Tell the transport what it moves for each size of the model."""
        if len(self.sizes) > 1:
            transport.use_rungs({rung: local_edges(module) for rung, module in self.sizes.items()})
        if tile_messages(self.module):
            transport.use_tiles({rung: tile_messages(module) for rung, module in self.sizes.items()})

    def _executor_of(self, programs: Mapping[int, StageProgram]) -> Executor:
        """Return the executor of the rank's first stage, which knows those of the others."""
        executors: dict[int, Executor] = {}
        for stage, program in programs.items():
            conduct = replace(self._conduct(), stage=stage, stages=executors, saved_sets=self._saved_sets(stage))
            store = self.stores[stage]
            Executor(self.module, self.rank, program, store, self.transport, self.reply, self.status, conduct)
        return executors[self.entry.stage]

    def _join_gpus(self, device: torch.device, overdue: Overdue) -> None:
        """Let GPUs exchange messages without memory of the host, where they can."""
        assert self.module.schedule is not None
        direct = self.group.find_direct(self.module.schedule, device)
        lines = self.group.form_edges(self.module.schedule, device, direct)
        self.transport.use_library(lines, overdue, ends_among(direct, self.rank))

    def _open_samples(self) -> None:
        """Open the samples of training and of evaluation, where this stage takes any."""
        bundle, setup = self.bundle, self.setup
        self.samples: Samples = NoSamples()
        self.cuts = InputCuts(self.module, self.rank)
        self.evaluation: FileSamples | None = None
        names = fed_to_rank(self.module, self.rank)
        if setup.data is not None and names:
            samples = open_data(self.module, setup.data, names, bundle.renamed, setup.offset)
            self.samples = LocalSamples(samples, self.cuts)
        if setup.evaluation is not None and names:
            self.evaluation = FileSamples(self.module, setup.evaluation, names, bundle.renamed)

    def _conduct(self) -> Conduct:
        setup = self.setup
        return Conduct(
            retire=setup.retire,
            audit=setup.audit,
            trace=setup.trace,
            pace=setup.pace,
            tables=self.tables,
            offset=setup.offset,
            key=setup.key,
            stop_at_nan=setup.nan == STOP,
            check=self.saver.check,
            exchange=self.exchange,
            sizes=self.sizes,
            called=partial(library_name, self.bundle),
        )

    def obey(self, command: Message) -> bool:
        """Execute one command. Return False after Stop."""
        self.saver.check()
        match command:
            case RunCommand(first, batches):
                if batches is None:
                    self.executor.run(first, BatchFeed(self.module, self.rank, first, self.receive))
                else:
                    self._run_data(first, batches)
                self._finish_run()
            case Serve(first):
                cuts = {rung: InputCuts(module, self.rank) for rung, module in self.sizes.items()}
                number = first * self.executor.schedule.microbatches
                self.executor.serve(first, RequestFeed(number, self.receive, self.status, cuts))
                self._finish_run()
            case SaveCommand(directory, step, background, keep_last):
                waited = self.saver.save(Path(directory), step, background=background, keep_last=keep_last)
                self.reply(self._done(waited), {})
            case Evaluate(samples):
                losses = evaluate(self.executor, self.evaluation, samples, self.cuts)
                if reports(self.module, self.rank):
                    self.reply(Evaluated(losses), {})
                self.reply(self._done(), {})
            case FetchParameters():
                self.reply(
                    Parameters(),
                    {
                        name: as_array(self.state.newest(name))
                        for name, var in self.state.variables.items()
                        if var.role == PARAM
                    },
                )
            case FetchAudit():
                versioned, executors = self.state.versioned, self.executor.stages.values()
                self.reply(
                    Audit(
                        {name: v.most_live for name, v in versioned.items()},
                        {name: len(v.buffers) for name, v in versioned.items()},
                        sum(store.most_value_bytes for store in self.stores.values()),
                        tuple(entry for executor in executors for entry in executor.log or ()),
                    ),
                    {},
                )
            case Stop():
                self.saver.finish()
                self.carriers.close()
                self.group.leave()
                self.reply(self._done(), {})
                return False
            case _:
                raise VerifyError(f"command {type(command).__name__} is out of place", where=f"rank {self.rank}")
        return True

    def _run_data(self, first: int, batches: int) -> None:
        feed = DataFeed(self.samples, first, batches)
        names = fed_to_rank(self.module, self.rank)
        if self.setup.prefetch and names and self.setup.data is not None:
            share, total = share_of(self.module, self.rank), self.executor.schedule.microbatches
            feed = Prefetch(
                self.samples, first, batches, names=names, share=share, microbatches=total, ahead=self.setup.prefetch
            )
        try:
            self.executor.run(first, feed)
        finally:
            feed.close()

    def _finish_run(self) -> None:
        for stage in self.executor.stages.values():
            for graph, reason in stage.program.uncaptured().items():
                if (graph, reason) not in self._said:
                    self._said.add((graph, reason))
                    say(f"{graph} is launched kernel by kernel: {reason}")
        if self.executor.events is not None:
            blocks = () if self.executor.ledger is None else self.executor.ledger.taken()
            collectives = tuple(self.exchange.events or ())
            self.reply(TraceRecord(tuple(self.executor.events), blocks, collectives, self.lanes.copied()), {})
            self.executor.events.clear()
            self.exchange.events = []
        self.reply(self._done(), {})

    def _done(self, waited: float = 0.0) -> Done:
        # What is read at other ranks is theirs, and was read after all that is loaded was there.
        peak = max(self.loaded, peak_bytes() - (borrowed_bytes() if self.carriers.shares else 0))
        captured = sum(stage.program.captured_bytes() for stage in self.executor.stages.values())
        return Done(peak, self.base, waited, self.executor.device_memory.most, captured)

    def _load_stores(self, programs: Mapping[int, StageProgram]) -> None:
        """Load the variables of all stages of the rank, one after the other."""
        device = next(program.device for program in programs.values())
        self.lanes = lanes_of(device, self.setup.timeout)
        self.stores = {stage: self._load_store(stage, program.device) for stage, program in programs.items()}
        if self.setup.trace:
            self.lanes.trace()

    def _saved_sets(self, stage: int) -> SavedSets | None:
        return load_saved_sets(self.bundle, self.rank, stage, self.lanes)

    def _load_store(self, stage: int, device: torch.device) -> Store:
        place = None if self.setup.resume is None else Path(self.setup.resume)
        kept = kept_sums(self.module, stage)
        names = {name for call in kept for name in call.types}
        whole = summed_vars(self.module, stage) if self.group.team is not None else ()
        summed = SummedGradients([name for name in whole if name not in names], kept, self.exchange.lend)
        grow = not self.setup.retire
        source = StateSource(self.bundle, self.rank, stage, self.tables, place, self.lanes)
        return load_store(source, device, grow=grow, summed=summed)


def _state_of(stores: Sequence[Store]) -> Store | PackState:
    return stores[0] if len(stores) == 1 else PackState(stores)


def local_edges(module: Module) -> tuple[Edge, ...]:
    """Return the edges with the types of what one rank hands out."""
    return tuple(replace(edge, values=edge_values(module, edge, edge.src), to=()) for edge in module.edges)


def has_gpus(module: Module) -> bool:
    """Return whether a stage of the module runs on a GPU."""
    cluster = module.cluster
    return cluster is not None and any(cluster.device(name).kind == "cuda" for name in module.rank_devices())


# ------------------------------------------------------------------------------------------------ the process


class Commands:
    """The control connection: a thread reads it, so that its end is noticed at any time."""

    def __init__(self, channel: Channel, parent: int) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[tuple[Message, Arrays]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="control", daemon=True).start()
        threading.Thread(target=self._watch, args=(parent,), name="parent", daemon=True).start()

    def receive(self, wait: bool) -> tuple[Message, Arrays] | None:
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._queue.put(message)
        except VerifyError as error:
            self._channel.send(describe_failure(error))
            os._exit(error.exit_code)
        os._exit(1)

    def _watch(self, parent: int) -> None:
        # A process that the launcher forked for its own ends may hold the connection open after the launcher is gone.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)


def describe_failure(error: BaseException, device: torch.device | None = None) -> Failed:
    """Return an error as a message; one that is not meant for users goes with its traceback. `device` is that of the
    rank, if it has one."""
    if isinstance(error, PenstockError):
        return Failed(type(error).__name__, error.what, error.where, error.hint)
    if is_out_of_memory(error):
        hint = (
            "`penstock inspect --memory` says what was expected of tensors; "
            "a `memory` in the cluster file, or --recompute all, makes plans that need less"
        )
        if on_device := device_without_memory(error, device):
            return Failed(DoesNotFit.__name__, on_device, hint=hint)
        try:
            reached = f", at {peak_bytes() / 2**20:.0f} MiB"
        except MemoryError:  # not even for looking that up
            reached = ""
        return Failed(DoesNotFit.__name__, f"the system gave no more memory{reached}", hint=hint)
    if isinstance(error, RuntimeError | OSError) and "Too many open files" in str(error):
        return Failed(DoesNotFit.__name__, "the system let this process open no more files", hint="raise `ulimit -n`")
    return Failed("Internal", "".join(traceback.format_exception(error)).strip())


def serve_rank(rank: Rank, parent: int) -> int:
    """Run as this rank until Stop, and return the exit code. `parent` is the process that it must not outlive."""
    torch.set_num_threads(rank.threads)
    channel = Channel(socket.socket(fileno=rank.control))
    status = Status(rank.status, rank.rank)
    status.show("starting")
    status.start_heart()
    commands = Commands(channel, parent)

    def reply(message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        channel.send(message, arrays)

    def receive(wait: bool) -> tuple[Message, Arrays] | None:
        return commands.receive(wait)

    worker: Worker | None = None
    try:
        first = receive(True)
        assert first is not None
        setup = first[0]
        assert isinstance(setup, Setup)
        bundle = open_bundle(setup.bundle, rank.rank)
        check_device(bundle, rank.rank)
        if rank.rank == 0:
            store = host_store(rank.world, setup.timeout)
            reply(Hosting(store.port), {})
        else:
            second = receive(True)
            assert second is not None
            assert isinstance(second[0], Join)
            store = join_store(second[0].port, rank.world, setup.timeout)
        met = SealedStore(store, setup.secret.encode()) if setup.secret else store
        group = RankGroup(met, rank.rank, rank.world, setup.timeout, reports=False)

        def end_with(error: PenstockError) -> None:
            reply(describe_failure(error), {})
            os._exit(error.exit_code)

        group.lost = end_with
        worker = Worker(bundle, rank.rank, group, setup, reply, receive, status)
        reply(Ready(), {})
        while (command := receive(True)) is not None and worker.obey(command[0]):
            pass
    except BaseException as error:
        failure = describe_failure(error, None if worker is None else worker.device)
        if isinstance(error, PeerLost) and not error.where:
            failure = describe_failure(PeerLost(error.what, where=f"rank {rank.rank}, {status.text}", hint=error.hint))
        if worker is not None:
            worker.saver.settle()
        reply(failure, {})
        return error.exit_code if isinstance(error, PenstockError) else 1
    return 0
