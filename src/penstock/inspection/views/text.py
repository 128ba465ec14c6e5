"""Facts as text for a terminal.

In: the facts of summary, memory, weights, flow and why. Out: text, with colours only on request.

Lines are cut or wrapped to the width of a terminal; elsewhere they are as long as they need to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.inspection.flow import FlowLine
from penstock.inspection.memory.curves import CacheRoom, Curve, Point
from penstock.inspection.memory.homes import HomePoint, HomeRoom
from penstock.inspection.sources import ONNX, SourceNode
from penstock.inspection.summary import RungFacts, StageFacts, Summary
from penstock.inspection.weights import Statistics
from penstock.inspection.why import KernelUse, OperationUse, Why
from penstock.ir.graph import Module
from penstock.ir.ops import BLOCK
from penstock.passes.costs.prices import shown_seconds
from penstock.passes.memory.lifetimes import COLUMNS
from penstock.support.terminal import table
from penstock.support.words import counted, numbered, shown_bytes, visible

from .colours import paint, paint_changes, paint_ir

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLOT_ROWS, _PLOT_WIDTH = 4, 100
# Where the upper of two curves fills half of a cell or more, and the lower one none of it.
_BETWEEN = "░"
# This many parts and sources are printed in full; the others are counted.
_MOST_PARTS, _MOST_SOURCES = 8, 6
# The items that go to another space of a rank.
_MOST_ITEMS = 12


# ------------------------------------------------------------------------------------------------ the summary


def show_summary(facts: Summary, width: int | None = None) -> str:
    """Return the tables of a module's facts."""
    return "\n".join(_summary(facts, width))


_STAGES = (
    "stage",
    "devices",
    "ops",
    "kernels",
    "parameters",
    "stored",
    "GFLOP",
    "time",
    "of slowest",
    "peak memory",
    "sent",
)


def _turn(rung: RungFacts) -> str:
    """Say what a turn does with caches; nothing where there are none."""
    turn = rung.turn
    if turn is None:
        return ""
    return (
        f", {counted(turn.sequences, 'sequence')} at most; writes {shown_bytes(turn.written)} to caches, reads at most "
        f"{shown_bytes(turn.read)} in {counted(turn.blocks, 'block')}"
    )


def _summary(facts: Summary, width: int | None) -> Iterator[str]:
    yield (
        f"module {facts.name}: {counted(facts.tensors, 'parameter tensor')} with {facts.parameters:,} elements, facts: "
        f"{', '.join(facts.facts) or 'none'}"
    )
    for name, type, is_data in facts.inputs:
        yield f"input {name}: {type}" + ("" if is_data else ", which the runtime gives")
    yield from (f"output {name}" for name in facts.outputs)
    if facts.schedule:
        yield (
            f"schedule {facts.schedule}: {counted(facts.microbatches, 'microbatch')} per batch, "
            f"{counted(facts.ranks, 'rank')}"
        )
    if facts.rungs:
        yield f"{counted(len(facts.rungs), 'size')} with code, of which the tables show the largest:"
        times = ["-" if rung.seconds is None else f"{1e3 * rung.seconds:.3f} ms" for rung in facts.rungs]
        yield from (f"  {rung.sizes}: {time}{_turn(rung)}" for rung, time in zip(facts.rungs, times, strict=True))
    if facts.stages:
        yield from _stages(facts.stages, width)
    yield ""
    graphs = [[g.name, g.operations, g.kernels or "-", g.inputs, g.outputs, shown_bytes(g.saved)] for g in facts.graphs]
    yield table(["graph", "ops", "kernels", "inputs", "outputs", "saved"], graphs)
    if facts.messages:
        sent = [
            [f"{m.source}>{m.target}", m.phase, shown_bytes(m.nbytes), f"per {m.per}", ", ".join(m.values)]
            for m in facts.messages
        ]
        yield ""
        yield table(["edge", "phase", "bytes", "", "values"], sent, width, cut=(4,))
    if facts.notes:
        yield ""
        yield from (f"note {origin}: {text}" for origin, text in facts.notes)


def _stages(stages: Sequence[StageFacts], width: int | None) -> Iterator[str]:
    slowest = max((row.seconds or 0.0 for row in stages), default=0.0)
    rows: list[list[object]] = []
    for row in stages:
        time = (
            ["-", "-"]
            if row.seconds is None
            else [f"{row.seconds * 1e3:.3f} ms", f"{row.seconds / slowest:.0%}" if slowest else "-"]
        )
        work = f"{row.flops / 1e9:.4g}"
        peak = "-" if row.peak is None else shown_bytes(row.peak)
        rows.append(
            [
                row.stage,
                " ".join(row.devices),
                row.operations,
                row.kernels or "-",
                f"{row.parameters:,}",
                shown_bytes(row.stored),
                work,
                *time,
                peak,
                shown_bytes(row.sent),
            ]
        )
    yield ""
    yield table(_STAGES, rows, width, cut=(1,))
    yield (
        "GFLOP, time (predicted, ends of messages among it) and what is sent are per batch; stored are parameters, "
        "state and buffers with all their versions"
    )


# ------------------------------------------------------------------------------------------------ variables and memory


def show_params(module: Module, statistics: Mapping[str, Statistics], width: int | None = None) -> str:
    """Return one row per variable, with statistics of those whose elements are available."""
    heads = ["variable", "role", "stage", "type", "versions", "size"]
    heads += ["min", "max", "mean", "std", "norm", "zeros", "not finite"] if statistics else []
    rows: list[list[object]] = []
    for v in module.vars.values():
        row = [
            v.name,
            v.role,
            "-" if v.stage is None else v.stage,
            v.type,
            v.versions,
            shown_bytes(v.type.nbytes * v.versions),
        ]
        rows.append([*row, *(_statistics(statistics.get(v.name)) if statistics else ())])
    return table(heads, rows, width, cut=(3,))


def _statistics(statistics: Statistics | None) -> list[str]:
    if statistics is None:
        return ["-"] * 7
    numbers = (statistics.least, statistics.most, statistics.mean, statistics.std, statistics.norm)
    bad = ", ".join(
        f"{count} {what}" for count, what in ((statistics.nans, "NaN"), (statistics.infinities, "inf")) if count
    )
    return [*("-" if x is None else f"{x:.4g}" for x in numbers), f"{statistics.share_of_zeros:.1%}", bad or "0"]


def show_memory(curves: Sequence[Curve], width: int | None = None) -> str:
    """Return a table of memory by purpose, and the curves of every rank: of its device, and of each other space."""
    rows = [
        [
            c.rank,
            c.device,
            *(shown_bytes(getattr(c.memory, name)) for name in COLUMNS),
            shown_bytes(c.budget) if c.budget else "-",
        ]
        for c in curves
    ]
    parts = [table(["rank", "device", *COLUMNS, "available"], rows)]
    for curve in curves:
        if curve.caches is not None:
            parts += ["", _cache_line(curve.rank, curve.caches)]
        for home in curve.homes:
            parts += ["", _home_line(curve.rank, home), *_absences(home, curve.timed)]
        if curve.captured:
            parts += ["", _captured_line(curve.rank, curve.captured)]
        parts += ["", *_plots(curve, min(width or _PLOT_WIDTH, _PLOT_WIDTH) - 12)]
    return "\n".join(parts)


def _home_line(rank: int, home: HomeRoom) -> str:
    room = "" if home.room is None else f" of {shown_bytes(home.room)}"
    return (
        f"rank {rank}: {shown_bytes(home.bytes)}{room} at home in {home.space}, at most "
        f"{shown_bytes(home.on_device)} of it on the device; a batch copies {shown_bytes(home.moved_per_batch)}"
    )


def _absences(home: HomeRoom, timed: bool) -> Iterator[str]:
    """Say why items go: for how long each is away, until what, and what a copy of it takes."""
    rows: list[list[object]] = []
    for item in home.absences[:_MOST_ITEMS]:
        away = shown_seconds(item.away) if timed else counted(round(item.away), "action")
        copy = shown_seconds(item.copy) if item.copy else "nothing"
        ways = [item.out or "no copy", item.back]
        rows.append([f"{item.item} of stage {item.stage}", shown_bytes(item.bytes), *ways, away, item.until, copy])
    if rows:
        yield table(["goes", "size", "out", "back", "away for", "until", "a copy takes"], rows)
    if len(home.absences) > _MOST_ITEMS:
        yield f"and {counted(len(home.absences) - _MOST_ITEMS, 'item')} more"


def _captured_line(rank: int, nbytes: int) -> str:
    return (
        f"rank {rank}: with PENSTOCK_CUDA_GRAPHS=1, captured calls keep up to {shown_bytes(nbytes)} beside the peak, "
        "as far as that is free"
    )


def _cache_line(rank: int, room: CacheRoom) -> str:
    return (
        f"rank {rank}: {counted(room.variables, 'cache')} of {counted(room.blocks, 'block')} of {BLOCK} positions, "
        f"{shown_bytes(room.bytes)} of the buffers; a token takes {shown_bytes(room.bytes_per_position)}"
    )


def _plots(curve: Curve, columns: int) -> Iterator[str]:
    """Yield what lives on the device over time, and below it what is in each other space."""
    most, held = curve.most_live, max(point.held for point in curve.points)
    over = shown_seconds(curve.points[-1].seconds) if curve.timed else f"{len(curve.points)} actions"

    def at(point: Point | HomePoint) -> str:
        return f"most at {point.action}" + (f" after {shown_seconds(point.seconds)}" if curve.timed else "")

    yield (
        f"rank {curve.rank}, {numbered('stage', curve.stages)} on {curve.device}: live over {over}, {at(most)}: "
        f"{shown_bytes(most.live)}; {shown_bytes(held)} held in the end"
    )
    yield from _plot([(point.seconds, point.live, point.live) for point in curve.points], columns)
    for home in curve.homes:
        most_there, changes = home.most_there, len({point.there for point in home.points}) > 1
        yield (
            f"rank {curve.rank}, {home.space}: there over {over}, {at(most_there) if changes else 'at all times'}: "
            f"{shown_bytes(most_there.there)}; {_BETWEEN} is on the device as well"
        )
        yield from _plot([(point.seconds, point.alone, point.there) for point in home.points], columns)


# The end of an action, and the bytes after it: of two curves, the lower one first.
_Step = tuple[float, int, int]


def _plot(steps: Sequence[_Step], columns: int) -> Iterator[str]:
    """Yield bytes over time in blocks, from the least to the most; a column shows the maximum of its time."""
    lower, upper = _heights([step[:2] for step in steps], columns), _heights([step[::2] for step in steps], columns)
    least, most = min(step[1] for step in steps), max(upper)
    for row in reversed(range(_PLOT_ROWS)):
        cells = (
            _cell(*((height - least) / (most - least or 1) * _PLOT_ROWS * 8 - 8 * row for height in heights))
            for heights in zip(lower, upper, strict=True)
        )
        label = shown_bytes(most) if row == _PLOT_ROWS - 1 else shown_bytes(least) if not row else ""
        yield f"{label:>10} ┤{''.join(cells).rstrip()}"


def _cell(lower: float, upper: float) -> str:
    """Return a cell whose eighths two curves fill."""
    block = _BLOCKS[max(0, min(8, round(lower)))]
    return _BETWEEN if block == _BLOCKS[0] and upper >= 4 else block


def _heights(steps: Sequence[tuple[float, int]], columns: int) -> list[int]:
    """Return the maximum of bytes in each of `columns` equal parts of the time.

    Bytes that are there after an action are there until the next one ends.
    """
    heights = [0] * columns
    (end, _), (start, before) = steps[-1], (0.0, steps[0][1])
    for seconds, after in steps:
        first = min(columns - 1, int(start / end * columns)) if end else 0
        last = min(columns - 1, int(seconds / end * columns)) if end else 0
        for column in range(first, last + 1):
            heights[column] = max(heights[column], before)
        heights[last] = max(heights[last], after)
        start, before = seconds, after
    return heights


# ------------------------------------------------------------------------------------------------ the flow of a graph


def show_flow(name: str, lines: Sequence[FlowLine], width: int | None = None, colours: bool = False) -> str:
    """Return a graph with its rails, columns aligned."""
    names = [_results(line) for line in lines]
    kinds = max((len(line.kind) for line in lines), default=0)
    kernels = max((len(line.kernel) for line in lines), default=0)
    wide = min(max(map(len, names), default=0), 60)
    shown = [f"@{name}: {counted(sum(line.op is not None for line in lines), 'operation')}"]
    for line, result in zip(lines, names, strict=True):
        marks = " ".join(word for word, holds in (("saved", line.saved), ("returned", line.returned)) if holds)
        loc = f"; {line.op.loc}" if line.op is not None and line.op.loc else ""
        details = " ".join(word for word in (", ".join(line.named), marks, loc) if word)
        text = f"{line.kind:<{kinds}} {line.kernel:<{kernels}} {result:<{wide}} {details}".rstrip()
        if width is not None and len(line.rails) + 1 + len(text) > width:
            text = text[: max(0, width - len(line.rails) - 4)] + "..."
        shown.append(f"{paint(line.rails, 'rail')} {paint_ir(text)}" if colours else f"{line.rails} {text}".rstrip())
    return "\n".join(shown)


def _results(line: FlowLine) -> str:
    """Return the first result in full and the number of further ones."""
    more = f" +{len(line.result) - 1}" if line.result[1:] else ""
    return "".join(f"%{v.name} {v.type}" for v in line.result[:1]) + more


# ------------------------------------------------------------------------------------------------ why


def show_why(facts: Why, colours: bool = False) -> str:
    """Return the explanation of a name as text."""
    return "\n".join(_why(facts, colours))


def _why(facts: Why, colours: bool) -> Iterator[str]:
    def head(text: str) -> str:
        return paint(text, "head") if colours else text

    mark = {"value": "%", "variable": "@"}.get(facts.kind, "")
    total = counted(len(facts.parts), "operation") if facts.parts else "nothing of it is in the program"
    yield head(f"{facts.kind} {mark}{visible(facts.name)}: {total}")
    for source in facts.sources[:_MOST_SOURCES]:
        yield f"  from {visible(told_source(source))}"
    if len(facts.sources) > _MOST_SOURCES:
        yield f"  and from {counted(len(facts.sources) - _MOST_SOURCES, 'more node')}"
    last_label = ""
    for part in facts.parts[:_MOST_PARTS]:
        yield ""
        yield head(f"@{part.graph}, operation {part.position}") + f", {_where(part)}"
        yield f"  {paint_ir(part.text) if colours else part.text}"
        label = part.kernel.label if part.kernel is not None else ""
        yield from (
            f"  {line}"
            for line in (_kernel(part) if not label or label != last_label else [f"the same kernel {label}"])
        )
        last_label = label
    if len(facts.parts) > _MOST_PARTS:
        kinds = ", ".join(f"@{part.graph} {part.position}" for part in facts.parts[_MOST_PARTS:][:_MOST_PARTS])
        yield ""
        yield f"and {counted(len(facts.parts) - _MOST_PARTS, 'more operation')}: {kinds}" + (
            ", ..." if len(facts.parts) > 2 * _MOST_PARTS else ""
        )
    if facts.followers:
        yield ""
        yield "backward pass: " + ", ".join(
            f"{counted(number, 'operation')} of it in @{graph}" for graph, number in facts.followers.items()
        )
    if facts.crossings:
        yield ""
        yield head("on the wire")
        for crossing in facts.crossings:
            per = (
                f"{crossing.times} times per batch, {shown_bytes(crossing.nbytes * crossing.times)}"
                if crossing.times > 1
                else "once per batch"
            )
            yield (
                f"  stage {crossing.source} > {crossing.target}, {crossing.phase}: %{crossing.value} "
                f"{crossing.type}, {shown_bytes(crossing.nbytes)}, {per}"
            )
    elif facts.parts and any(part.stage is not None for part in facts.parts):
        yield ""
        yield "nothing of it goes to another stage"
    for stage, reasons in facts.reasons.items():
        yield ""
        yield head(f"why stage {stage}")
        yield from (f"  {reason}" for reason in reasons)
    yield ""
    yield head("passes") + f": {facts.record}"
    for change in facts.changes:
        did = "made it" if change.made else "removed it" if change.removed else "changed it"
        yield f"  {change.number:02d} {change.call}: {did}"
        text = "\n".join(f"    {line}" for line in change.lines)
        yield paint_changes(text) if colours else text


def told_source(source: SourceNode) -> str:
    """Describe a node of the source in one line."""
    if source.module:
        return f"{source.kind} {source.op_type} in module {source.module}"
    if not source.op_type or source.kind != ONNX:
        return f"{source.kind} {source.name}".strip()
    attributes = f" {{{', '.join(source.attributes)}}}" if source.attributes else ""
    return (
        f"{source.kind} {source.name}: {', '.join(source.outputs)} = "
        f"{source.op_type}({', '.join(source.inputs)}){attributes}"
    )


def _where(part: OperationUse) -> str:
    if part.stage is None:
        return "before stages are made"
    place = f"stage {part.stage} on {' '.join(part.devices)}" if part.devices else f"stage {part.stage}"
    return place + (f", gradient of %{part.follows}" if part.follows else "")


def _kernel(part: OperationUse) -> Iterator[str]:
    if part.kernel is not None:
        yield from _kernel_lines(part.kernel)
    elif part.fused:
        yield "no kernel: it is a read of a variable, or computed where it is read"


def _short(seconds: float) -> str:
    """Return seconds as text, in microseconds where they are few, as for kernels."""
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else shown_seconds(seconds)


def _kernel_lines(kernel: KernelUse) -> Iterator[str]:
    alike = f", {kernel.alike} alike" if kernel.alike else ""
    yield f"kernel {kernel.label}{alike}: {' '.join(kernel.operations)}"
    measured = f", {_short(kernel.measured_s)} measured on this machine" if kernel.measured_s is not None else ""
    yield (
        f"{kernel.flops / 1e6:.3f} MFLOP, {shown_bytes(kernel.moved)} moved; {_short(kernel.roofline_s)} by "
        f"the roofline{measured}; "
        f"{counted(kernel.calls, 'call')} per batch"
    )
    if kernel.elsewhere:
        others = sorted(kernel.elsewhere.items(), key=lambda item: item[1])[:4]
        yield "elsewhere: " + ", ".join(f"{name} {_short(seconds)}" for name, seconds in others)
