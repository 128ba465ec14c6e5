"""The memory of a run that was traced.

In: a trace, as a job has it or as a file of `--trace`, and the module that ran. Out: an account per rank
(ir/memory/account.py), and beside it the one that the plan has for the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.ir.graph import Module, stage_vars
from penstock.ir.memory.account import BEFORE, Account, Life, Version
from penstock.ir.memory.predict import called_graph, planned_account, purpose_of, with_uses
from penstock.ir.memory.stage_values import saved_values
from penstock.ir.schedule import Action
from penstock.runtime.messages.ledger import LedgerEntry
from penstock.support.errors import UsageError

from .blocks import Stays
from .times import reading_trace, seconds_of
from .trace import CollectiveTimes, Event


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank: its actions with seconds of begin and end, the entries of its memory, and its
    collectives."""

    events: tuple[Event, ...]
    entries: tuple[LedgerEntry, ...]
    collectives: tuple[CollectiveTimes, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(Action.parse(name) for name, _, _ in self.events)


def read_trace(path: str | Path) -> list[RankTrace]:
    """Read the ranks of a file that `run --trace` wrote; UsageError if it is none."""
    hint = "it takes a file that `penstock run BUNDLE --trace FILE` of this version wrote"
    with reading_trace(path, hint) as listed:
        ranks = sorted(e["pid"] for e in listed if e["name"] == "process_name")
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(f"ranks {ranks[:8]}")
        events: list[list[Event]] = [[] for _ in ranks]
        entries: list[list[LedgerEntry]] = [[] for _ in ranks]
        for e in listed:
            if e["ph"] == "X":
                Action.parse(e["name"])
                events[e["pid"]].append((e["name"], *seconds_of(e)))
            elif e.get("cat") == "memory":
                entries[e["pid"]].append(_entry(e["name"].partition(" ")[0], e["ts"] / 1e6, e["args"]))
        exchanges = [_collectives(listed, rank) for rank in ranks]
        traces = [RankTrace(tuple(a), tuple(b), c) for a, b, c in zip(events, entries, exchanges, strict=True)]
        for trace in traces:
            _check(trace)
    return traces


def _collectives(listed: Iterable[Mapping[str, Any]], rank: int) -> tuple[CollectiveTimes, ...]:
    """Return the collectives of a rank: what each was, when it began, was waited for, and ended."""
    entries = [e for e in listed if e.get("cat") == "collective" and e["pid"] == rank]
    ends = {e["id"]: float(e["ts"]) / 1e6 for e in entries if e["ph"] == "e"}
    return tuple(
        (str(e["name"]), float(e["ts"]) / 1e6, ends[e["id"]] - float(e["args"]["waited us"]) / 1e6, ends[e["id"]])
        for e in entries
        if e["ph"] == "b"
    )


def _check(trace: RankTrace) -> None:
    """Check that entries are of actions that are there, and that nothing is dropped that was not kept."""
    stays = Stays()
    for entry in trace.entries:
        msgspec.convert(tuple(entry), LedgerEntry)
        if not BEFORE <= entry.step <= len(trace.events) - (entry.what != "run"):
            raise ValueError(f"{entry.what} {entry.name} of action {entry.step}, there are {len(trace.events)}")
        stays.follow(entry)


def _entry(what: str, at: float, args: Mapping[str, Any]) -> LedgerEntry:
    """Read an entry back from the form in which trace.py wrote it."""
    return _without_stage(what, at, args)._replace(stage=args.get("stage"))


def _without_stage(what: str, at: float, args: Mapping[str, Any]) -> LedgerEntry:
    step = args["step"]
    match what:
        case "run":
            return LedgerEntry(at, step, what, "", args["batch"], 0, 0)
        case "call":
            return LedgerEntry(
                at, step, what, f"{args['graph']} {args['first']} {args['last']}", 0, args["block"], args["bytes"]
            )
        case "own" | "give" | "write" | "retire":
            return LedgerEntry(at, step, what, args["variable"], 0, args["block"], args["bytes"], args["version"])
    owner = args["microbatch"] if "microbatch" in args else -1 - args["batch"]
    return LedgerEntry(
        at,
        step,
        what,
        args["message" if what in ("post", "send", "sent") else "value"],
        owner,
        int(args["block"], 16),
        args["bytes"],
    )


def measured_account(module: Module, rank: int, trace: RankTrace) -> Account:
    """Return the account of a rank's memory, as it was written down."""
    stages = module.rank_packs()[rank]
    actions = trace.actions
    stays = Stays()
    for entry in trace.entries:
        stays.follow(entry)
    lives = list(_variables(module, stages, trace.entries))
    saved = frozenset[str]().union(*(saved_values(module, stage) for stage in stages))
    for stay in stays.all:
        # Two stages may hold a value that one has handed to the other.
        names = tuple(sorted({*stay.names}))
        purpose = "boundary" if saved.isdisjoint(names) else "activations"
        life = Life(purpose, names, stay.owner, stay.nbytes, stay.begun, stay.ended, block=hex(stay.block))
        lives.append(life._replace(stage=_stage(stay.stage, stages)))
    newest = next((entry.owner for entry in trace.entries if entry.what == "run"), 0)
    workspace: dict[str, tuple[int, ...]] = {}
    for entry in trace.entries:
        if entry.what == "call":
            kind = called_graph(stages, _stage(entry.stage, stages), entry.name.partition(" ")[0])
            workspace[kind] = workspace.get(kind, ()) + ((entry.nbytes,) if entry.nbytes else ())
    times = tuple((start, end) for _, start, end in trace.events)
    return Account(
        rank,
        actions,
        tuple(with_uses(module, stages, newest, actions, lives)),
        tuple(_versions(trace.entries)),
        workspace,
        times,
    )


def most_away(trace: RankTrace) -> int:
    """Return the most bytes that a rank held at once only because they were sent and had not arrived, of which no plan
    is made."""
    stays = Stays()
    for entry in trace.entries:
        stays.follow(entry)
    return stays.most_away


def planned_beside(module: Module, rank: int, trace: RankTrace) -> Account:
    """Return the account that the plan has for the batches of a trace."""
    return planned_account(module, rank, runs_of(module, trace))


def runs_of(module: Module, trace: RankTrace) -> list[tuple[int, int]]:
    """Return first batch and number of batches of every run, each from an empty pipeline to an empty one. UsageError
    where batches between them have no action."""
    assert module.schedule is not None
    per_batch, actions = module.schedule.microbatches, trace.actions
    starts = [(entry.step, entry.owner) for entry in trace.entries if entry.what == "run"]
    runs = []
    for (begin, first), (end, _) in zip(starts, [*starts[1:], (len(trace.events), 0)], strict=True):
        batches = {action.batch(per_batch) for action in actions[begin:end]}
        last = max(batches, default=first - 1)
        # A plan of batches that no rank ran would have no end.
        if last - first >= len(batches):
            raise UsageError(f"the trace has a run of batches {first} to {last}, and actions of {len(batches)} of them")
        if last >= first:
            runs.append((first, last - first + 1))
    return runs


def _stage(written: int | None, stages: Sequence[int]) -> int:
    """Return the stage of an entry, which says it where the rank runs several."""
    return stages[0] if written is None else written


def _variables(module: Module, stages: Sequence[int], entries: Sequence[LedgerEntry]) -> Iterable[Life]:
    variables = {stage: stage_vars(module, stage) for stage in stages}
    ends = [(_stage(e.stage, stages), e.name, e.block, e.step) for e in entries if e.what == "give"]
    for entry in entries:
        if entry.what == "own" and entry.nbytes:
            stage = _stage(entry.stage, stages)
            var = variables.get(stage, {}).get(entry.name)
            purpose = "buffers" if var is None else purpose_of(var)
            key = [stage, entry.name, entry.block]
            end = next((step for *other, step in ends if other == key and step > entry.step), None)
            yield Life(purpose, (entry.name,), None, entry.nbytes, entry.step, end, entry.block, stage=stage)


def _versions(entries: Sequence[LedgerEntry]) -> list[Version]:
    begun: dict[tuple[int | None, str, int], tuple[int, int]] = {}
    ended: dict[tuple[int | None, str, int], int] = {}
    for entry in entries:
        if entry.version is not None:
            key = (entry.stage, entry.name, entry.version)
            if entry.what == "retire":
                ended[key] = entry.step
            else:
                begun[key] = (entry.block, entry.step)
    return [
        Version(name, version, buffer, step, ended.get((stage, name, version)))
        for (stage, name, version), (buffer, step) in begun.items()
    ]
