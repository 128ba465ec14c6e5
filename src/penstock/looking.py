"""Commands that look into a bundle or an IR file, inspect and diff; and what other commands share with them."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.differing import differences
from penstock.ir.errors import UsageError
from penstock.ir.graph import GRAD, PARAM, Module
from penstock.ir.schedule import PER_BATCH
from penstock.ir.text import parse_module, print_graph, print_module, print_op
from penstock.ir.words import counted
from penstock.terminal import Progress, say, size, table, terminal_width

if TYPE_CHECKING:
    from penstock.kernel_report import KernelRow


def check_cache(backend: str) -> None:
    """The settings of the cache, where the back end has one: now, because compiling reads them when much of the work is done."""
    if backend == "tvm":
        from penstock.backends.tvm.store import cache_bound

        cache_bound()


def load_module(path: str) -> Module:
    """The module of a bundle directory or of an IR file."""
    if Path(path).is_dir():
        from penstock.backends.bundle import open_bundle

        return open_bundle(path).module
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="expected a bundle directory or an IR file") from error
    return parse_module(text, path)


def inspect_command(arguments: Namespace) -> None:
    if arguments.json and not (arguments.kernels or arguments.measure):
        raise UsageError("--json is for --kernels", hint="add --kernels")
    module = load_module(arguments.file)
    shown = False
    if arguments.graph:
        graph = module.graphs.get(arguments.graph)
        if graph is None:
            raise UsageError(f"no graph {arguments.graph!r}", hint=f"there are {', '.join(module.graphs)}")
        print("\n".join(print_graph(graph)))
        shown = True
    if arguments.op:
        _print_matching(module, arguments.op)
        shown = True
    if arguments.schedule:
        _print_schedule(module, arguments.batches)
        shown = True
    if arguments.memory:
        _print_memory(module)
        shown = True
    if arguments.params:
        rows = [
            [v.name, v.role, "-" if v.stage is None else v.stage, str(v.type), v.versions, size(v.type.nbytes * v.versions)]
            for v in module.vars.values()
        ]
        print(table(["variable", "role", "stage", "type", "versions", "size"], rows))
        shown = True
    if arguments.kernels or arguments.measure or arguments.source:
        _print_kernels(module, arguments)
        shown = True
    if not shown:
        _print_summary(module)


def _print_kernels(module: Module, arguments: Namespace) -> None:
    from penstock import kernel_report

    rows = kernel_report.kernel_rows(module)
    if arguments.measure:
        from penstock.kernel_timing import check_devices, measure_rows

        backend, threads = _measured_with(arguments.file)
        check_cache(backend)
        check_devices(rows, module, backend)
        say(f"measuring {len(rows)} kernels on this machine, one by one, back end {backend}, threads: {threads}")
        rows = measure_rows(rows, module, backend, threads, Progress("kernels"))
        _keep_times(rows, backend, threads)
    if arguments.json:
        print(kernel_report.report_json(rows))
    elif arguments.kernels or arguments.measure:
        print(kernel_report.format_report(rows, module, terminal_width()))
    if arguments.source:
        print(kernel_report.kernel_source(rows, arguments.source))


def _keep_times(rows: Sequence[KernelRow], backend: str, threads: int) -> None:
    """Measured kernels go into the table that plans may use."""
    from penstock.measured import Measured
    from penstock.passes.kernels import Kernel

    table = Measured(backend)
    for row in rows:
        if row.device.kind == "cpu" and row.measured_s:
            table.keep(Kernel(row.names[0], row.ops, row.body), threads, row.measured_s)
    if table.store.trouble:
        say(f"measured times are not kept: {table.store.trouble}")


def _measured_with(path: str) -> tuple[str, int]:
    """The back end of a bundle, and the smallest number of threads any of its ranks has, as this process has one number of them only."""
    if not Path(path).is_dir():
        return "tvm", 1
    from penstock.backends.bundle import open_bundle

    manifest = open_bundle(path).manifest
    return manifest.backend, min(rank.threads for rank in manifest.ranks)


def _print_matching(module: Module, pattern: str) -> None:
    try:
        regex = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"bad pattern {pattern!r}: {error}") from error
    for graph in module.graphs.values():
        for number, op in enumerate(graph.ops):
            text = print_op(op)
            if regex.search(text):
                print(f"@{graph.name} {number}: {text}")


def _print_schedule(module: Module, batches: int) -> None:
    from penstock.ir.simulate import format_grid

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    print(format_grid(module.schedule, batches))
    for rank, actions in module.schedule.expand_all(batches).items():
        print(f"rank {rank}: {' '.join(map(str, actions))}")


def _print_memory(module: Module) -> None:
    from penstock.passes.lifetimes import memory_table

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `lifetimes`, or a bundle")
    memory = memory_table(module)
    columns = list(next(iter(memory.values())))
    print(table(["rank", *columns], [[rank, *(size(row[c]) for c in columns)] for rank, row in memory.items()]))


def _print_summary(module: Module) -> None:
    from penstock.backends.bundle import stage_vars

    params = [v for v in module.vars.values() if v.role == PARAM]
    count = sum(v.type.size for v in params)
    print(f"module {module.name}: {len(params)} parameter tensors with {count:,} elements, facts: {', '.join(module.facts) or 'none'}")
    for value in module.inputs:
        print(f"input {value.name}: {value.type}" + ("" if value in module.data_inputs else ", which the runtime gives"))
    for name in module.outputs:
        print(f"output {name}")
    rows = []
    for graph in module.graphs.values():
        kernels = len({op.attrs["kernel"] for op in graph.ops if "kernel" in op.attrs})
        saved = sum(v.type.nbytes for v in graph.saved)
        rows.append([graph.name, len(graph.ops), kernels or "-", len(graph.ins), len(graph.outs), size(saved)])
    print(table(["graph", "ops", "kernels", "inputs", "outputs", "saved"], rows))
    for stage in module.stages:
        own = [v for v in stage_vars(module, stage.index).values() if v.role != GRAD]
        print(
            f"stage {stage.index} on {', '.join(module.devices_of(stage.index))}: {size(sum(v.type.nbytes * v.versions for v in own))} of parameters and state"
        )
    for edge in module.edges:
        unit = "batch" if edge.phase in PER_BATCH else "microbatch"
        values = ", ".join(f"%{v.name} {v.type}" for v in edge.values)
        print(f"edge {edge.src}>{edge.dst} {edge.phase}: {size(sum(v.type.nbytes for v in edge.values))} per {unit} ({values})")
    if module.schedule is not None:
        print(
            f"schedule {module.schedule.name}: {counted(module.schedule.microbatches, 'microbatch')} per batch, {counted(len(module.schedule.ranks), 'rank')}"
        )
    for note in module.notes:
        print(f"note {note.origin}: {note.text}")


def diff_command(arguments: Namespace) -> None:
    a, b = (load_module(path) for path in (arguments.a, arguments.b))
    if arguments.lines:
        before, after = (print_module(module).splitlines() for module in (a, b))
        lines = difflib.unified_diff(before, after, arguments.a, arguments.b, lineterm="", n=3)
    else:
        lines = differences(a, b)
    found = False
    for line in lines:
        found = True
        print(line)
    if not found:
        say("no difference")
