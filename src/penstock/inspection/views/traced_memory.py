"""The memory of a traced run as text: its agreement with the plan, its peak, and its idle blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.inspection.traces.memory import BlockKind, TracedMemory
from penstock.passes.costs.prices import shown_seconds
from penstock.support.terminal import table
from penstock.support.words import counted, numbered, shown_bytes

_ROWS = 12
_HEADER = ("purpose", "what", "made by", "blocks", "bytes", "there", "idle", "between", "to move", "at the peak")


def show_traced_memory(ranks: Sequence[TracedMemory], width: int | None = None) -> str:
    """Return a part for every rank."""
    return "\n\n".join("\n".join(_rank(rank, width)) for rank in ranks)


def _rank(memory: TracedMemory, width: int | None) -> Iterator[str]:
    head = f"rank {memory.rank}, {numbered('stage', memory.stages)} on {memory.device}"
    if not memory.points:
        yield f"{head}: no action"
        return
    most = memory.most_live
    yield (
        f"{head}: at most {shown_bytes(most.measured)} live, after {most.action} at {shown_seconds(most.seconds)}; "
        f"{counted(len(memory.blocks), 'block')}"
    )
    if memory.difference is None:
        yield f"as planned in every block after each of {counted(len(memory.points), 'action')}"
    else:
        yield f"not as planned: {memory.difference}"
    calls = [f"{graph} {shown_bytes(sum(sizes))}" for graph, sizes in memory.temporaries.items() if sizes]
    also = [f"{', '.join(calls)} while a graph is called"] if calls else []
    also += [f"at most {shown_bytes(memory.on_the_way)} that was sent and had not arrived"] if memory.on_the_way else []
    if also:
        yield f"beside that: {'; '.join(also)}"
    candidates = [kind for kind in memory.kinds if kind.candidate]
    others = sum(kind.count for kind in memory.kinds) - sum(kind.count for kind in candidates)
    yield (
        f"to {memory.place} and back at {shown_bytes(memory.bandwidth)}/s: "
        f"{counted(sum(kind.count for kind in candidates), 'block')} of "
        f"{len(candidates)} kinds lie idle for longer than that takes, {others} do not; when most lives, "
        f"{shown_bytes(sum(kind.at_peak for kind in candidates))} could be elsewhere"
    )
    if candidates:
        yield table(_HEADER, [_row(kind) for kind in candidates[:_ROWS]], width, cut=(2, 1))
    if len(candidates) > _ROWS:
        yield f"and {len(candidates) - _ROWS} more; --json has all"


def _row(kind: BlockKind) -> list[object]:
    names = " ".join(kind.names)
    times = [shown_seconds(kind.live_s), shown_seconds(kind.idle_s), kind.between, shown_seconds(kind.move_s)]
    return [
        kind.purpose,
        names,
        kind.made_by or "",
        kind.count,
        shown_bytes(kind.nbytes),
        *times,
        shown_bytes(kind.at_peak),
    ]
