"""The commands inspect and diff: which facts are asked for, in which form. Data goes to stdout, words for people to stderr."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.registry import check_cache
from penstock.inspection.exports.outputs import check_outputs, write_whole
from penstock.inspection.views.plain import as_json
from penstock.ir.graph import Graph, Module
from penstock.ir.text import print_graph, print_module, print_op
from penstock.support.errors import UsageError
from penstock.support.terminal import Progress, say, terminal_width
from penstock.support.words import shown_bytes

from .subject import Subject, load_module, open_subject
from .views import colours

if TYPE_CHECKING:
    from penstock.inspection.kernels.kernels import KernelRow

# What can be shown, by the flag that asks for it; and what can be JSON.
_VIEWS = (
    "graph",
    "flow",
    "op",
    "schedule",
    "memory",
    "params",
    "kernels",
    "measure",
    "source",
    "why",
    "export",
    "html",
)
# Of all ranks, in what is shown or written.
_MOST_ACTIONS = 1_000_000
_FILES = ("export", "html")
_NAMED = ("why", "graph", "flow", "op", "source", "export", "html", "dumps", "trace", "checkpoint")
_AS_JSON = ("memory", "params", "kernels", "measure", "why")


def inspect_command(arguments: Namespace) -> None:
    asked = [name for name in _VIEWS if getattr(arguments, name) not in (None, False)]
    _check(arguments, asked)
    reads = {"what is looked at": arguments.file} | {
        f"--{name}": getattr(arguments, name) for name in ("dumps", "trace", "checkpoint")
    }
    check_outputs(arguments.export or (), arguments.html, reads)
    subject = open_subject(arguments.file, arguments.dumps)
    _check_batches(subject.module, asked, arguments)
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
        _show_schedule(subject.module, arguments.batches)
    if arguments.memory:
        _show_memory(subject.module, arguments)
    if arguments.params:
        _show_params(subject, arguments)
    if arguments.kernels or arguments.measure or arguments.source:
        _show_kernels(subject, arguments)
    if arguments.export:
        from penstock.inspection.exports.exports import export_files

        for path in export_files(subject, arguments.export, arguments.batches):
            say(f"wrote {path}")
    if arguments.html:
        _write_report(subject, arguments)
    if not asked:
        _show_summary(subject.module, arguments.json)


def _check(arguments: Namespace, asked: Sequence[str]) -> None:
    """Options that do not go together, all of them at once, before anything is read."""
    problems = [f"--{name} without a name" for name in _NAMED if "" in _listed(getattr(arguments, name))]
    views = {"kernels" if name == "measure" else name for name in asked if name not in _FILES}
    if arguments.json and (len(views) > 1 or not views <= set(_AS_JSON)):
        problems.append(f"--json is of one thing: the summary, {', '.join(f'--{name}' for name in _AS_JSON)}")
    if arguments.checkpoint and not arguments.params:
        problems.append("--checkpoint goes with --params")
    if arguments.trace and not (arguments.memory or arguments.html):
        problems.append("--trace goes with --memory or --html")
    if arguments.dumps and not (arguments.why or arguments.html):
        problems.append("--dumps goes with --why or --html")
    if problems:
        raise UsageError("; ".join(problems))


def _check_batches(module: Module, asked: Sequence[str], arguments: Namespace) -> None:
    """UsageError where so many batches are asked for that nobody would see the end."""
    if module.schedule is None or not {"schedule", "memory", "export"} & set(asked):
        return
    per_batch = sum(len(program.batch) for program in module.schedule.ranks.values())
    most = max(1, _MOST_ACTIONS // max(1, per_batch))
    if arguments.batches > most:
        raise UsageError(
            f"--batches {arguments.batches} are {arguments.batches * per_batch} actions",
            hint=f"at most {most} can be shown",
        )


def _listed(given: str | Sequence[str] | None) -> Sequence[str]:
    return () if given is None else [given] if isinstance(given, str) else given


def _write_report(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.report.page import page_of
    from penstock.inspection.report.reading import read_material

    text = page_of(read_material(subject, arguments.trace)).encode()
    write_whole(Path(arguments.html), text)
    say(f"wrote {arguments.html}, {shown_bytes(len(text))}")


def _show_summary(module: Module, as_data: bool) -> None:
    from penstock.inspection.views.text import show_summary

    from .summary import summarize

    facts = summarize(module)
    print(as_json(facts) if as_data else show_summary(facts, terminal_width()))


# ------------------------------------------------------------------------------------------------ operations and graphs


def _show_why(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.views.text import show_why

    from .why import why

    found = why(subject, arguments.why)
    print(as_json(found) if arguments.json else show_why(found, colours.wanted()))


def _graphs(module: Module, name: str) -> list[Graph]:
    """One graph by its name, or those of a stage: `s0` and `0` are alike."""
    stage = name.removeprefix("s")
    found = [
        graph
        for graph in module.graphs.values()
        if graph.name == name or (stage.isdecimal() and graph.name.startswith(f"s{stage}."))
    ]
    if not found:
        stages = [
            f"s{stage.index}"
            for stage in module.stages
            if any(graph.startswith(f"s{stage.index}.") for graph in module.graphs)
        ]
        raise UsageError(f"no graph {name!r}", hint=f"there are {', '.join([*module.graphs, *stages])}")
    return found


def _show_flow(module: Module, name: str) -> None:
    from penstock.inspection.views.text import show_flow

    from .flow import draw

    for graph in _graphs(module, name):
        print(show_flow(graph.name, draw(graph), terminal_width(), colours.wanted()))


def _show_matching(module: Module, pattern: str) -> None:
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
    from penstock.ir.grid import format_grid

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    lines = [format_grid(module.schedule, batches, width=terminal_width())]
    lines += [
        f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in module.schedule.expand_all(batches).items()
    ]
    text = "\n".join(lines)
    print(colours.paint_schedule(text) if colours.wanted() else text)


def _show_memory(module: Module, arguments: Namespace) -> None:
    if arguments.trace:
        _show_traced_memory(module, arguments)
        return
    from penstock.inspection.views.text import show_memory

    from .memory import memory_curves

    curves = memory_curves(module, arguments.batches)
    print(as_json(curves) if arguments.json else show_memory(curves, terminal_width()))


def _show_traced_memory(module: Module, arguments: Namespace) -> None:
    from penstock.inspection.traces.memory import traced_memory
    from penstock.inspection.views.traced_memory import show_traced_memory
    from penstock.runtime.telemetry.memory_trace import read_trace

    found = traced_memory(module, read_trace(arguments.trace), arguments.trace)
    print(as_json(found) if arguments.json else show_traced_memory(found, terminal_width()))


def _show_params(subject: Subject, arguments: Namespace) -> None:
    from penstock.inspection.views.text import show_params

    from .weights import checkpoint_arrays, statistics

    arrays = {} if subject.bundle is None else subject.bundle.weights()
    if arguments.checkpoint:
        arrays, step = checkpoint_arrays(arguments.checkpoint, subject.module)
        say(f"elements after {step} steps")
    found = {name: statistics(array) for name, array in arrays.items() if name in subject.module.vars}
    print(as_json(found) if arguments.json else show_params(subject.module, found, terminal_width()))


# ------------------------------------------------------------------------------------------------ kernels


def _show_kernels(subject: Subject, arguments: Namespace) -> None:
    from .kernels import kernels

    module = subject.module
    rows = kernels.kernel_rows(module)
    if arguments.measure:
        from penstock.inspection.kernels.timing import check_devices, measure_rows

        backend, threads = _measured_with(subject)
        check_cache(backend)
        check_devices(rows, module, backend)
        say(f"measuring {len(rows)} kernels on this machine, one by one, back end {backend}, threads: {threads}")
        rows = measure_rows(rows, module, backend, threads, Progress("kernels"))
        _keep_times(rows, backend, threads)
    if arguments.json:
        print(kernels.report_json(rows))
    elif arguments.kernels or arguments.measure:
        print(kernels.format_report(rows, module, terminal_width()))
    if arguments.source:
        print(kernels.kernel_source(rows, arguments.source))


def _keep_times(rows: Sequence[KernelRow], backend: str, threads: int) -> None:
    """Measured kernels go into the table that plans may use."""
    from penstock.calibration.measured import Measured
    from penstock.passes.kernels.divide import Kernel

    table = Measured(backend)
    for row in rows:
        if row.device.kind == "cpu" and row.measured_s:
            table.keep(Kernel(row.names[0], row.ops, row.body), threads, row.measured_s)
    if table.store.trouble:
        say(f"measured times are not kept: {table.store.trouble}")


def _measured_with(subject: Subject) -> tuple[str, int]:
    """The back end, and the smallest number of threads any rank of a bundle has, as this process has one number of them only."""
    threads = [] if subject.bundle is None else [rank.threads for rank in subject.bundle.manifest.ranks]
    return subject.backend, min(threads, default=1)


# ------------------------------------------------------------------------------------------------ diff


def diff_command(arguments: Namespace) -> None:
    from .diff import differences

    a, b = (load_module(path) for path in (arguments.a, arguments.b))
    if arguments.lines:
        before, after = (print_module(module).splitlines() for module in (a, b))
        lines = difflib.unified_diff(before, after, arguments.a, arguments.b, lineterm="", n=3)
    else:
        lines = differences(a, b)
    coloured = colours.wanted()
    found = False
    for line in lines:
        found = True
        print(colours.paint_changes(line) if coloured else line)
    if not found:
        say("no difference")
