"""A timeline of a run as Chrome-trace JSON, which Perfetto opens. It has one row per rank, one slice per action, an
arrow from every send to its receive. A rank that does collectives has a second row for those. A slice there is from the
begin of a collective to its result, and says how long the program waited. So have copies between memory spaces a row,
with their bytes.

In: (action, start, end) of each rank, on one clock (runtime/group/clocks.py where there are several). Out: a file.

The entries of a rank's memory (messages/ledger.py) become a counter. It has the live bytes of values and messages, and
beside them those that were sent and have not arrived. Each entry becomes an instant, too. It says what happened, the
number of the action, the block and its bytes. A block is an address, as blocks are used again; of a variable it is the
number of its buffer. It says name, microbatch and operation of a value, and variable and version of a parameter. Of a
call's temporaries it says the first and the last kernel that work in them. Where a rank runs several stages, it says
which one ran. `memory_trace.read_trace` reads all of this back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.ir.graph import Module
from penstock.ir.schedule import HANDS, RECEIVES, SENDS, Action
from penstock.runtime.messages.ledger import CopyTimes, LedgerEntry
from penstock.support.errors import PenstockError
from penstock.support.words import numbered

from .blocks import VALUES, Stays

Event = tuple[str, float, float]
# A collective: what it was, when it began, and when the program waited for it and went on.
CollectiveTimes = tuple[str, float, float, float]
_Entry = dict[str, object]


def write_trace(
    path: Path,
    ranks: Sequence[Sequence[Event]],
    *,
    module: Module | None = None,
    held: Sequence[Sequence[LedgerEntry]] = (),
    collectives: Sequence[Sequence[CollectiveTimes]] = (),
    copies: Sequence[Sequence[CopyTimes]] = (),
) -> None:
    """Write the timeline. Times count from the first action of all. With a module, rows say stage and device."""
    origin = min((event[1] for events in ranks for event in events), default=0.0)
    entries: list[_Entry] = []
    for rank in range(len(ranks)):
        entries.append(
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": _row_name(rank, module)}}
        )
        entries.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    for rank, events in enumerate(ranks):
        for action, start, end in events:
            times = {"ts": _micros(start, origin), "dur": round((end - start) * 1e6, 1)}
            entries.append({"name": action, "cat": _kind(action), "ph": "X", "pid": rank, "tid": 0, **times})
    for rank, done in enumerate(collectives):
        entries += _collectives(rank, done, origin)
    for rank, copied in enumerate(copies):
        entries += _copies(rank, copied, origin)
    entries += _arrows(ranks, origin)
    for rank, changes in enumerate(held):
        entries += _memory(rank, changes, origin, {} if module is None else makers(module, module.rank_packs()[rank]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"cannot write the trace: {error.strerror or error}", where=str(path)) from error


def _row_name(rank: int, module: Module | None) -> str:
    if module is None:
        return f"rank {rank}"
    stages = module.rank_packs()[rank]
    named = numbered("stage", stages)
    return f"rank {rank} ({named}, {module.rank_devices()[rank]})"


def _collectives(rank: int, done: Sequence[CollectiveTimes], origin: float) -> Iterator[_Entry]:
    """Yield the row of a rank's collectives, which may overlap each other and its computations."""
    if done:
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": 1, "args": {"name": "collectives"}}
    for number, (text, begun, waited, ended) in enumerate(done):
        shared = {"name": text, "cat": "collective", "pid": rank, "tid": 1, "id": number}
        yield {**shared, "ph": "b", "ts": _micros(begun, origin), "args": {"waited us": _micros(ended, waited)}}
        yield {**shared, "ph": "e", "ts": _micros(ended, origin)}


def _copies(rank: int, done: Sequence[CopyTimes], origin: float) -> Iterator[_Entry]:
    """Yield the row of a rank's copies between memory spaces; those of both directions may overlap."""
    if done:
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": 2, "args": {"name": "copies"}}
    for number, copy in enumerate(done):
        shared = {"name": copy.text, "cat": "copy", "pid": rank, "tid": 2, "id": number}
        waited = round(copy.waited * 1e6, 1)
        yield {
            **shared,
            "ph": "b",
            "ts": _micros(copy.begun, origin),
            "args": {"bytes": copy.nbytes, "waited us": waited},
        }
        yield {**shared, "ph": "e", "ts": _micros(copy.ended, origin)}


def _kind(action: str) -> str:
    return action.lstrip("0123456789").split("@")[0].rstrip("0123456789<>").rstrip("0123456789")


def _micros(at: float, origin: float) -> float:
    return round((at - origin) * 1e6, 1)


def _arrows(ranks: Sequence[Sequence[Event]], origin: float) -> Iterator[_Entry]:
    """Yield arrows from sends to receives of the same message: source, destination, phase and number. A message of
    which one end is missing has no arrow."""
    ends: Mapping[str, dict[tuple[int, int, str, int], float]] = {"s": {}, "f": {}}
    for rank, events in enumerate(ranks):
        for text, start, end in events:
            if not set(text) & set("<>"):
                continue
            action = Action.parse(text)
            assert action.peer is not None
            # A time inside of the slice binds an arrow to it.
            middle = (start + end) / 2
            if action.kind in SENDS or action.kind in HANDS:
                ends["s"][rank, action.peer, action.phase, action.mb] = middle
            elif action.kind in RECEIVES:
                ends["f"][action.peer, rank, action.phase, action.mb] = middle
    for number, message in enumerate(sorted(ends["s"].keys() & ends["f"].keys())):
        source, destination, phase, _ = message
        shared = {"name": f"message {phase}", "cat": "message", "id": number, "tid": 0}
        yield {**shared, "ph": "s", "pid": source, "ts": _micros(ends["s"][message], origin)}
        yield {**shared, "ph": "f", "bp": "e", "pid": destination, "ts": _micros(ends["f"][message], origin)}


def makers(module: Module, stages: Sequence[int]) -> dict[str, str]:
    """Return the maker of each value that some stages may hold. It is an operation, here or on the stage it comes from,
    with the source's name for it."""
    names = {value.name: "input" for value in module.inputs}
    prefixes = tuple(f"s{stage}." for stage in stages)
    for name, graph in sorted(module.graphs.items(), key=lambda item: item[0].startswith(prefixes)):
        names |= {
            out.name: f"{name}: {op.kind}{f' ({op.loc})' if op.loc else ''}" for op in graph.ops for out in op.outs
        }
    return names


def _memory(rank: int, entries: Sequence[LedgerEntry], origin: float, makers: Mapping[str, str]) -> Iterator[_Entry]:
    stays = Stays()
    for entry in entries:
        shared = {"pid": rank, "tid": 0, "ts": _micros(entry.at, origin)}
        name, fields = _fields(entry, makers)
        yield {
            **shared,
            "cat": "memory",
            "ph": "i",
            "s": "t",
            "name": f"{entry.what} {name}",
            "args": {"step": entry.step, **({} if entry.stage is None else {"stage": entry.stage}), **fields},
        }
        if entry.what in VALUES:
            stays.follow(entry)
            yield {**shared, "name": "live", "ph": "C", "args": {"bytes": stays.nbytes, "on the way": stays.away}}


def _fields(entry: LedgerEntry, makers: Mapping[str, str]) -> tuple[str, _Entry]:
    """Return a name for people, and the other fields of an entry; `memory_trace._entry` is the inverse."""
    if entry.what == "run":
        return f"from batch {entry.owner}", {"batch": entry.owner}
    if entry.what == "call":
        graph, first, last = entry.name.split(" ")
        return graph, {"graph": graph, "first": first, "last": last, "block": entry.block, "bytes": entry.nbytes}
    if entry.what in ("own", "give", "write", "retire"):
        return f"@{entry.name}", {
            "variable": entry.name,
            "version": entry.version,
            "block": entry.block,
            "bytes": entry.nbytes,
        }
    owner = {"microbatch": entry.owner} if entry.owner >= 0 else {"batch": -1 - entry.owner}
    place = {"bytes": entry.nbytes, "block": hex(entry.block)}
    if entry.what in ("post", "send", "sent"):
        return entry.name, {"message": entry.name, **owner, **place}
    maker = {"op": makers[entry.name]} if entry.name in makers else {}
    return f"%{entry.name}", {"value": entry.name, **owner, **maker, **place}
