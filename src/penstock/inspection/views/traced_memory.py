"""Memory of a traced run as text: whether it was as planned, what lived when most did, and what lay idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.inspection.traces.memory import BlockKind, TracedMemory
from penstock.passes.costs.prices import shown_seconds
from penstock.support.terminal import table
from penstock.support.words import counted, shown_bytes

_ROWS = 12
_HEADER = ("purpose", "what", "made by", "blocks", "bytes", "there", "idle", "between", "to move", "at the peak")


def show_traced_memory(ranks: Sequence[TracedMemory], width: int | None = None) -> str:
    """A part for every rank."""
    return "\n\n".join("\n".join(_rank(rank, width)) for rank in ranks)


def _rank(found: TracedMemory, width: int | None) -> Iterator[str]:
    head = f"rank {found.rank}, stage {found.stage} on {found.device}"
    if not found.points:
        yield f"{head}: no action"
        return
    most = found.most_live
    yield (
        f"{head}: at most {shown_bytes(most.measured)} live, after {most.action} at {shown_seconds(most.seconds)}; "
        f"{counted(len(found.blocks), 'block')}"
    )
    if found.difference is None:
        yield f"as planned in every block after each of {counted(len(found.points), 'action')}"
    else:
        yield f"not as planned: {found.difference}"
    calls = [f"{graph} {shown_bytes(sum(sizes))}" for graph, sizes in found.temporaries.items() if sizes]
    beside = [f"{', '.join(calls)} while a graph is called"] if calls else []
    beside += [f"at most {shown_bytes(found.on_the_way)} that was sent and had not arrived"] if found.on_the_way else []
    if beside:
        yield f"beside that: {'; '.join(beside)}"
    worth = [kind for kind in found.kinds if kind.candidate]
    rest = sum(kind.count for kind in found.kinds) - sum(kind.count for kind in worth)
    yield (
        f"to {found.place} and back at {shown_bytes(found.bandwidth)}/s: {counted(sum(kind.count for kind in worth), 'block')} of "
        f"{len(worth)} kinds lie idle for longer than that takes, {rest} do not; when most lives, "
        f"{shown_bytes(sum(kind.at_peak for kind in worth))} could be elsewhere"
    )
    if worth:
        yield table(_HEADER, [_row(kind) for kind in worth[:_ROWS]], width, cut=(2, 1))
    if len(worth) > _ROWS:
        yield f"and {len(worth) - _ROWS} more; --json has all"


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
