"""The time of a step as text: a column per rank, the calls of its graphs, and the slowest kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.inspection.traces.time import RankTime, StepTime
from penstock.passes.costs.prices import shown_seconds
from penstock.support.terminal import table
from penstock.support.words import counted

# Ranks beside each other in one table, and kernels that are listed.
_RANKS, _KERNELS = 4, 12


def show_step_time(times: StepTime, width: int | None = None) -> str:
    """Return the parts of a step for every rank, and the kernels that cost the most above full rate."""
    return "\n\n".join(_parts(times, width))


def _parts(times: StepTime, width: int | None) -> Iterator[str]:
    yield f"a step takes {shown_seconds(times.seconds)}, the mean of {counted(times.steps, 'step')}"
    for first in range(0, len(times.ranks), _RANKS):
        yield _ranks(times.ranks[first : first + _RANKS], width)
    yield _graphs(times.ranks, width)
    if times.kernels:
        yield _kernels(times, width)
    else:
        yield "--measure says how fast the kernels are alone, and how fast this machine could compute them"


def _copies(ranks: Sequence[RankTime]) -> Iterator[tuple[str, list[float]]]:
    if any(rank.copies_s for rank in ranks):
        yield "copies to and from other memory", [rank.copies_s for rank in ranks]


def _ranks(ranks: Sequence[RankTime], width: int | None) -> str:
    rows: list[tuple[str, list[float]]] = [("computing", [rank.computing_s for rank in ranks])]
    if all(graph.alone_s is not None for rank in ranks for graph in rank.graphs):
        full = [sum(graph.full_rate_s or 0.0 for graph in rank.graphs) for rank in ranks]
        alone = [sum(graph.alone_s or 0.0 for graph in rank.graphs) for rank in ranks]
        rows.append(("  at full rate", full))
        rows.append(("  kernels alone, above that", [a - f for a, f in zip(alone, full, strict=True)]))
        rows.append(
            ("  in the run, above kernels alone", [r.computing_s - a for r, a in zip(ranks, alone, strict=True)])
        )
    rows += [
        ("waiting for a rank that is behind", [rank.behind_s for rank in ranks]),
        ("waiting for messages on the way", [rank.on_the_way_s for rank in ranks]),
        ("sending", [rank.sending_s for rank in ranks]),
        ("sums over replicas", [rank.sums_s for rank in ranks]),
        *_copies(ranks),
        ("dropping values", [rank.drops_s for rank in ranks]),
        ("between actions", [rank.between_s for rank in ranks]),
        ("step", [rank.step_s for rank in ranks]),
    ]
    cells: list[list[object]] = []
    for label, seconds in rows:
        line: list[object] = [label]
        for rank, each in zip(ranks, seconds, strict=True):
            line += [shown_seconds(each), f"{100 * each / rank.step_s:.1f}%"]
        cells.append(line)
    header = ["", *(word for rank in ranks for word in (rank.name, ""))]
    return table(header, cells, width, cut=range(1, len(header), 2))


def _graphs(ranks: Sequence[RankTime], width: int | None) -> str:
    measured = any(graph.alone_s is not None for rank in ranks for graph in rank.graphs)
    header = ["rank", "graph", "calls", "in the run", "of the step"]
    header += ["kernels alone", "at full rate", "of full rate"] if measured else []
    cells: list[list[object]] = []
    for rank in ranks:
        for graph in rank.graphs:
            line: list[object] = [rank.rank, graph.graph, f"{graph.calls:g}", shown_seconds(graph.run_s)]
            line.append(f"{100 * graph.run_s / rank.step_s:.1f}%")
            if graph.alone_s is not None and graph.full_rate_s is not None:
                share = f"{100 * graph.full_rate_s / graph.run_s:.1f}%" if graph.run_s else "-"
                line += [shown_seconds(graph.alone_s), shown_seconds(graph.full_rate_s), share]
            elif measured:
                line += ["-"] * 3
            cells.append(line)
    return table(header, cells, width)


def _kernels(times: StepTime, width: int | None) -> str:
    shown = times.kernels[:_KERNELS]
    header = ["kernel", "operations", "calls", "alone", "at full rate", "above", "of a step"]
    cells: list[list[object]] = [
        [
            kernel.kernel,
            kernel.operations,
            f"{kernel.calls:g}",
            shown_seconds(kernel.alone_s),
            shown_seconds(kernel.full_rate_s),
            shown_seconds(kernel.above_s),
            f"{100 * kernel.above_s / times.seconds:.1f}%",
        ]
        for kernel in shown
    ]
    more = len(times.kernels) - len(shown)
    text = (
        f"kernels with the most time above full rate, in a step of all ranks:\n{table(header, cells, width, cut=(1,))}"
    )
    return f"{text}\nand {more} more; --json has all" if more > 0 else text
