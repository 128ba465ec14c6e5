"""`penstock inspect`: show facts of a bundle, a dump folder or an IR file, in the form that is asked for.

Data goes to stdout, words for people to stderr.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.commands.arguments import add_settings, settings_from
from penstock.commands.rare import show_rarely
from penstock.inspection.views import colours
from penstock.inspection.views.plain import as_json
from penstock.support.errors import UsageError
from penstock.support.settings import POSITIVE, setting
from penstock.support.terminal import Progress, say, terminal_width
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    from penstock.inspection.kernels.kernels import KernelRow
    from penstock.inspection.subject import Subject
    from penstock.ir.graph import Graph, Module


# The views by their flags; the files among them, those with a name, and those that can be JSON.
_VIEWS = (
    "graph",
    "flow",
    "op",
    "schedule",
    "memory",
    "where_time_goes",
    "params",
    "sharding",
    "links",
    "kernels",
    "measure",
    "source",
    "why",
    "export",
    "html",
)
# The most actions of all ranks that are shown or written.
_MOST_ACTIONS = 1_000_000
_FILES = ("export", "html")
_NAMED = ("why", "graph", "flow", "op", "source", "export", "html", "dumps", "trace", "checkpoint")
_AS_JSON = ("memory", "where_time_goes", "params", "sharding", "kernels", "measure", "why")


@dataclass(frozen=True)
class InspectOptions:
    """Settings of what is shown."""

    batches: int = setting(
        3, "batches to show with --schedule, --memory and --export (default: 3)", check=POSITIVE, shown="N"
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Add what to look at, and how it is shown."""
    parser.add_argument("file", metavar="BUNDLE|FILE.ir|DUMPS")
    parser.add_argument(
        "--why",
        metavar="NAME",
        help="all about an operation: its source, passes, stage, kernel and messages; NAME is a value, a variable, "
        "a kernel such as s0.F/k3, a node of the model or a module of it",
    )
    parser.add_argument(
        "--dumps",
        metavar="DIR",
        help="with --why or --html: the dump folder of the compilation, which knows all passes",
    )
    parser.add_argument(
        "--graph", action="append", metavar="NAME", help="print one graph, e.g. s0.F, or those of a stage, e.g. s0"
    )
    parser.add_argument(
        "--flow",
        action="append",
        metavar="NAME",
        help="draw the operations of a graph with the values that flow between them",
    )
    parser.add_argument("--op", metavar="REGEX", help="print operations whose text matches")
    _add_views(parser)
    _add_kernels(parser)
    parser.add_argument(
        "--export",
        action="append",
        metavar="FILE",
        help="write the model as .dot (Graphviz) or .onnx (Netron) with stages and devices, or the schedule as .json "
        "(Chrome trace, simulated) or .csv; may be given several times",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a report for a browser, from graph to kernels: one file, which needs nothing else (docs/report.md)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the summary, or --why, --memory, --where-time-goes, --params, --sharding or --kernels, as JSON",
    )
    add_settings(parser, InspectOptions)


def _add_views(parser: ArgumentParser) -> None:
    parser.add_argument("--schedule", action="store_true", help="print the schedule as a grid, and each rank's actions")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="print predicted peak memory per rank, and what lives over time, on the device and in other memory spaces",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="a run with --trace: with --memory what it held, beside the plan, and which blocks lay idle; with "
        "--where-time-goes where its time went; with --html that run beside the plan",
    )
    parser.add_argument(
        "--where-time-goes",
        action="store_true",
        help="with --trace: divide a step of that run into computing, waits and messages, rank by rank; with --measure "
        "also into the rates of this machine, kernels alone, and kernels together",
    )
    parser.add_argument(
        "--params",
        action="store_true",
        help="list parameters, buffers and state with sizes, and statistics of a bundle's weights",
    )
    parser.add_argument(
        "--sharding",
        action="store_true",
        help="list how tensors are split over devices, and the collectives with the bytes that they send",
    )
    parser.add_argument(
        "--links", action="store_true", help="list the edges between ranks: what carries their messages, and how fast"
    )
    checkpoint = parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="with --params: statistics of this checkpoint, or of the newest one in this directory",
    )
    show_rarely(checkpoint)


def _add_kernels(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--kernels", action="store_true", help="list the kernels of every stage: operations, work, roofline time, share"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --kernels or --where-time-goes: compile each kernel by itself and time it on this machine",
    )
    resources = parser.add_argument(
        "--ptxas",
        nargs="?",
        const="",
        metavar="ARCH,...",
        help="with --kernels: registers, spilled registers, shared memory and occupancy of every kernel on GPUs, for "
        "the stage's architecture or for these; needs nvcc and no GPU",
    )
    show_rarely(resources)
    parser.add_argument("--source", metavar="NAME", help="print the source of one kernel, e.g. s0.F/k3")


def run(arguments: Namespace) -> None:
    """Print or write what is asked for."""
    from penstock.inspection.exports.outputs import check_outputs  # lazy: heavy
    from penstock.inspection.subject import open_subject  # lazy: heavy
    from penstock.ir.text import print_graph  # lazy: heavy

    wanted = [name for name in _VIEWS if getattr(arguments, name) not in (None, False)]
    _check(arguments, wanted)
    reads = {"what is looked at": arguments.file} | {
        f"--{name}": getattr(arguments, name) for name in ("dumps", "trace", "checkpoint")
    }
    check_outputs(arguments.export or (), arguments.html, reads)
    subject = open_subject(arguments.file, arguments.dumps)
    batches = settings_from(InspectOptions, arguments).batches
    _check_batches(subject.module, wanted, batches)
    if arguments.why:
        _show_why(subject, arguments)
    for name in arguments.graph or ():
        for graph in _graphs(subject.module, name):
            text = print_graph(graph)
            print(colours.paint_ir(text) if colours.wanted() else text)
    for name in arguments.flow or ():
        _show_flow(subject.module, name)
    if arguments.op:
        _show_matching(subject.module, arguments.op)
    if arguments.schedule:
        _show_schedule(subject.module, batches)
    if arguments.memory:
        _show_memory(subject.module, batches, arguments)
    if arguments.params:
        _show_params(subject, arguments)
    if arguments.sharding:
        _show_sharding(subject, arguments.json)
    if arguments.links:
        from penstock.inspection.views.links import show_links  # lazy: heavy

        print(show_links(subject.module, terminal_width()))
    if arguments.ptxas is not None:
        _show_resources(subject.module, arguments)
        return
    rows = _kernel_rows(subject, arguments)
    if arguments.where_time_goes:
        _show_time(subject.module, rows, arguments)
    if arguments.kernels or arguments.source or (arguments.measure and not arguments.where_time_goes):
        _show_kernels(subject.module, rows, arguments)
    if arguments.export:
        from penstock.inspection.exports.exports import export_files  # lazy: heavy

        for path in export_files(subject, arguments.export, batches):
            say(f"wrote {path}")
    if arguments.html:
        _write_report(subject, arguments)
    if not wanted:
        _show_summary(subject, arguments.json)


def _check(arguments: Namespace, wanted: Sequence[str]) -> None:
    """Refuse options that do not go together, all of them at once, before anything is read."""
    problems = [f"--{name} without a name" for name in _NAMED if "" in _listed(getattr(arguments, name))]
    measured = "where_time_goes" if arguments.where_time_goes and not arguments.kernels else "kernels"
    views = {measured if name == "measure" else name for name in wanted if name not in _FILES}
    if arguments.json and (len(views) > 1 or not views <= set(_AS_JSON)):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in _AS_JSON)
        problems.append(f"--json is of one thing: the summary, {flags}")
    if arguments.checkpoint and not arguments.params:
        problems.append("--checkpoint goes with --params")
    if arguments.trace and not (arguments.memory or arguments.html or arguments.where_time_goes):
        problems.append("--trace goes with --memory, --where-time-goes or --html")
    if arguments.where_time_goes and not arguments.trace:
        problems.append("--where-time-goes needs --trace FILE, which `penstock run BUNDLE --trace FILE` writes")
    if arguments.ptxas is not None and wanted != ["kernels"]:
        problems.append("--ptxas goes with --kernels alone")
    if arguments.dumps and not (arguments.why or arguments.html):
        problems.append("--dumps goes with --why or --html")
    if problems:
        raise UsageError("; ".join(problems))


def _check_batches(module: Module, wanted: Sequence[str], batches: int) -> None:
    """Raise UsageError where so many batches are asked for that a reader would not come to the end."""
    if module.schedule is None or not {"schedule", "memory", "export"} & set(wanted):
        return
    per_batch = sum(len(program.batch) for program in module.schedule.ranks.values())
    most = max(1, _MOST_ACTIONS // max(1, per_batch))
    if batches > most:
        raise UsageError(
            f"--batches {batches} are {batches * per_batch} actions",
            hint=f"at most {most} can be shown",
        )


def _listed(words: str | Sequence[str] | None) -> Sequence[str]:
    return () if words is None else [words] if isinstance(words, str) else words


def _write_report(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.exports.outputs import write_whole  # lazy: heavy
    from penstock.inspection.report.page import page_of  # lazy: heavy
    from penstock.inspection.report.reading import read_material  # lazy: heavy

    text = page_of(read_material(subject, arguments.trace)).encode()
    write_whole(Path(arguments.html), text)
    say(f"wrote {arguments.html}, {shown_bytes(len(text))}")


def _show_summary(subject: Subject, as_data: bool) -> None:
    from penstock.inspection.summary import summarize  # lazy: heavy
    from penstock.inspection.views.text import show_summary  # lazy: heavy

    facts = summarize(subject.module, subject.renamed, subject.ladder)
    print(as_json(facts) if as_data else show_summary(facts, terminal_width()))


# ------------------------------------------------------------------------------------------------ operations and graphs


def _show_why(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.views.text import show_why  # lazy: heavy
    from penstock.inspection.why import why  # lazy: heavy

    explanation = why(subject, arguments.why)
    print(as_json(explanation) if arguments.json else show_why(explanation, colours.wanted()))


def _graphs(module: Module, name: str) -> list[Graph]:
    """Return one graph by its name, or those of a stage: `s0` and `0` are alike."""
    stage = name.removeprefix("s")
    graphs = [
        graph
        for graph in module.graphs.values()
        if graph.name == name or (stage.isdecimal() and graph.name.startswith(f"s{stage}."))
    ]
    if not graphs:
        stages = [
            f"s{stage.index}"
            for stage in module.stages
            if any(graph.startswith(f"s{stage.index}.") for graph in module.graphs)
        ]
        raise UsageError(f"no graph {name!r}", hint=f"there are {', '.join([*module.graphs, *stages])}")
    return graphs


def _show_flow(module: Module, name: str) -> None:
    from penstock.inspection.flow import draw  # lazy: heavy
    from penstock.inspection.views.text import show_flow  # lazy: heavy

    for graph in _graphs(module, name):
        print(show_flow(graph.name, draw(graph), terminal_width(), colours.wanted()))


def _show_matching(module: Module, pattern: str) -> None:
    from penstock.ir.text import print_op  # lazy: heavy

    try:
        regex = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"bad pattern {pattern!r}: {error}") from error
    coloured = colours.wanted()
    for graph in module.graphs.values():
        for number, op in enumerate(graph.ops):
            text = print_op(op)
            if regex.search(text):
                print(f"@{graph.name} {number}: {colours.paint_ir(text) if coloured else text}")


# ------------------------------------------------------------------------------------------------ time and memory


def _show_schedule(module: Module, batches: int) -> None:
    from penstock.inspection.views.schedule_grid import format_grid  # lazy: heavy

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    lines = [format_grid(module.schedule, batches, width=terminal_width())]
    lines += [
        f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in module.schedule.expand_all(batches).items()
    ]
    text = "\n".join(lines)
    print(colours.paint_schedule(text) if colours.wanted() else text)


def _show_memory(module: Module, batches: int, arguments: Namespace) -> None:
    if arguments.trace:
        _show_traced_memory(module, arguments)
        return
    from penstock.inspection.memory.curves import memory_curves  # lazy: heavy
    from penstock.inspection.views.text import show_memory  # lazy: heavy

    curves = memory_curves(module, batches)
    print(as_json(curves) if arguments.json else show_memory(curves, terminal_width()))


def _show_traced_memory(module: Module, arguments: Namespace) -> None:
    from penstock.inspection.traces.memory import traced_memory  # lazy: heavy
    from penstock.inspection.views.traced_memory import show_traced_memory  # lazy: heavy
    from penstock.runtime.telemetry.memory_trace import read_trace  # lazy: heavy

    memory = traced_memory(module, read_trace(arguments.trace), arguments.trace)
    print(as_json(memory) if arguments.json else show_traced_memory(memory, terminal_width()))


def _show_params(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.views.text import show_params  # lazy: heavy
    from penstock.inspection.weights import checkpoint_arrays, statistics  # lazy: heavy

    arrays = {} if subject.bundle is None else subject.bundle.weights()
    if arguments.checkpoint:
        arrays, step = checkpoint_arrays(arguments.checkpoint, subject.module)
        say(f"elements after {step} steps")
    numbers = {name: statistics(array) for name, array in arrays.items() if name in subject.module.vars}
    print(as_json(numbers) if arguments.json else show_params(subject.module, numbers, terminal_width()))


def _show_sharding(subject: Subject, as_data: bool) -> None:
    from penstock.inspection.sharding.layouts import split_facts  # lazy: heavy
    from penstock.inspection.views.sharding import show_sharding  # lazy: heavy

    whole = subject.bundle.reference if subject.bundle is not None else None
    facts = split_facts(subject.module, whole, subject.plan.get("shard", ()) if whole is not None else ())
    print(as_json(facts) if as_data else show_sharding(facts, terminal_width()))


# ------------------------------------------------------------------------------------------------ kernels


def _kernel_rows(subject: Subject, arguments: Namespace) -> list[KernelRow]:
    """Return the kernels if they are asked for, and time them if that is."""
    if not (arguments.kernels or arguments.measure or arguments.source):
        return []
    from penstock.inspection.kernels.kernels import kernel_rows  # lazy: heavy

    module = subject.module
    rows = kernel_rows(module)
    if arguments.measure:
        from penstock.backends.registry import check_cache  # lazy: heavy
        from penstock.inspection.kernels.timing import check_devices, measure_rows  # lazy: heavy

        backend, threads = _measured_with(subject)
        check_cache(backend)
        check_devices(rows, module, backend)
        say(f"measuring {len(rows)} kernels on this machine, one by one, back end {backend}, threads: {threads}")
        rows = measure_rows(rows, module, backend, threads, Progress("kernels"))
        _keep_times(rows, backend, threads)
    return rows


def _show_kernels(module: Module, rows: Sequence[KernelRow], arguments: Namespace) -> None:
    from penstock.inspection.kernels import kernels  # lazy: heavy

    if arguments.json:
        print(kernels.report_json(rows))
    elif arguments.kernels or arguments.measure:
        print(kernels.format_report(rows, module, terminal_width()))
    if arguments.source:
        print(kernels.kernel_source(rows, arguments.source))


def _show_resources(module: Module, arguments: Namespace) -> None:
    from penstock.inspection.kernels import resources  # lazy: heavy

    architectures = [word.strip() for word in arguments.ptxas.split(",") if word.strip()]
    rows = resources.resource_rows(module, architectures, Progress("ptxas"))
    print(resources.resources_json(rows) if arguments.json else resources.format_resources(rows, terminal_width()))


def _show_time(module: Module, rows: Sequence[KernelRow], arguments: Namespace) -> None:
    from penstock.inspection.traces.time import step_time  # lazy: heavy
    from penstock.inspection.traces.trace import load_trace  # lazy: heavy
    from penstock.inspection.views.step_time import show_step_time  # lazy: heavy

    measured = rows if arguments.measure else ()
    times = step_time(module, load_trace(arguments.trace), measured)
    print(as_json(times) if arguments.json else show_step_time(times, terminal_width()))


def _keep_times(rows: Sequence[KernelRow], backend: str, threads: int) -> None:
    """Store measured kernels in the table that plans may use."""
    from penstock.calibration.measured import Measured  # lazy: heavy
    from penstock.passes.kernels.divide import Kernel  # lazy: heavy

    table = Measured(backend)
    for row in rows:
        if row.device.kind == "cpu" and row.measured_s:
            table.keep(Kernel(row.names[0], row.ops, row.body), threads, row.measured_s)
    if table.store.trouble:
        say(f"measured times are not kept: {table.store.trouble}")


def _measured_with(subject: Subject) -> tuple[str, int]:
    """Return the back end, and the smallest number of threads any rank of a bundle has, as this process has one number
    of them only."""
    threads = [] if subject.bundle is None else [rank.threads for rank in subject.bundle.manifest.ranks]
    return subject.backend, min(threads, default=1)
