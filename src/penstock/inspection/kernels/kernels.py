"""The report on the kernels of a compiled module: their work, predicted times, and measured times on this machine.

In: a module with stage graphs and kernels chosen (`fuse`). Out: one row per distinct kernel of a stage: its operations
and shapes, work, time by the roofline of the stage's device, measured time, and calls. Kernels of one graph that differ
only in names are one row with several names. Each row holds its kernel as a graph that any back end can compile and
run: values read from other kernels are inputs, values that others read are results, and variables stay variables.

    operations of a graph = operations in kernels + operations computed where they are read (or constant tables)
                            + reads of variables
    bytes of a kernel     = the bytes it reads from memory, seen through layout changes, + those it stores; nothing in
                            between
    roofline              = max(flops / rate, bytes / bandwidth), by the rates of the plan; of measured rows, by those
                            measured
    share                 = calls * time of the whole stage's, per batch: forward and backward run once per microbatch,
                            the update and its kernels once

Measured times come from timing.py.

Limits: the report shows the choice in the IR. A back end may split a kernel that it cannot make in one, and then all
parts are measured. A mesh counts as its first device. Sources are those for this machine's CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.backends.tvm.target import machine_of
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Graph, Module, Op
from penstock.ir.memory.captured import never_captured
from penstock.ir.ops import cost_of
from penstock.ir.schedule import COMPUTE, PER_BATCH
from penstock.passes.costs.prices import bound
from penstock.passes.kernels.divide import divide, kernels_of
from penstock.passes.kernels.libraries import left_to_kernels
from penstock.support.errors import UsageError
from penstock.support.terminal import table
from penstock.support.words import shown_bytes, shown_rate


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one stage graph that are alike: `names` in the graph; `body` is the first of them as a graph."""

    stage: int
    graph: str
    names: tuple[str, ...]
    ops: tuple[Op, ...]
    body: Graph
    flops: float
    moved: float
    roofline_s: float
    per: str
    calls_per_batch: int
    device: Device
    measured_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.roofline_s if self.measured_s is None else self.measured_s

    @property
    def batch_s(self) -> float:
        """The time of all calls in one batch."""
        return self.seconds * self.calls_per_batch

    @property
    def label(self) -> str:
        return f"{self.graph}/{self.names[0]}"


# ------------------------------------------------------------------------------------------------ finding kernels


def kernel_rows(module: Module) -> list[KernelRow]:
    """Return all distinct kernels, stage by stage, in the order of their first call."""
    if "fused" not in module.facts:
        raise UsageError(
            "no kernels are chosen yet", where=f"@{module.name}", hint="run the pass `fuse`, or inspect a bundle"
        )
    microbatches = module.schedule.microbatches if module.schedule is not None else 1
    rows: list[KernelRow] = []
    for stage in module.stages:
        device = _device_of(module, module.devices_of(stage.index)[0])
        for kind in COMPUTE:
            graph = module.stage_graph(stage.index, kind)
            if graph is not None:
                per, times = ("update", 1) if kind in PER_BATCH else ("microbatch", microbatches)
                rows += _rows_of(graph, stage.index, device, per, times)
    return rows


def _device_of(module: Module, place: str) -> Device:
    if module.cluster is None:
        raise UsageError(
            "the module names no devices", where=f"@{module.name}", hint="inspect a bundle, or a dump after `partition`"
        )
    name = next((mesh.devices[0] for mesh in module.meshes if mesh.name == place), place)
    return next(device for device in module.cluster.devices if device.name == name)


def _rows_of(graph: Graph, stage: int, device: Device, per: str, times: int) -> list[KernelRow]:
    alike: dict[object, KernelRow] = {}
    for kernel in kernels_of(graph):
        if kernel.shape in alike:
            row = alike[kernel.shape]
            alike[kernel.shape] = replace(
                row, names=(*row.names, kernel.name), calls_per_batch=row.calls_per_batch + times
            )
            continue
        flops = sum(cost_of(op).flops for op in kernel.body.ops)
        roofline = bound(kernel.body.ops, kernel.moved, device)
        alike[kernel.shape] = KernelRow(
            stage,
            graph.name,
            (kernel.name,),
            kernel.ops,
            kernel.body,
            flops,
            kernel.moved,
            roofline,
            per,
            times,
            device,
        )
    return list(alike.values())


# ------------------------------------------------------------------------------------------------ sources


def kernel_source(rows: Sequence[KernelRow], name: str) -> str:
    """Return the TIR of a kernel named `s0.F/k3`, or `k3` where only one graph has it."""
    matches = [row for row in rows if any(name in (n, f"{row.graph}/{n}") for n in row.names)]
    if len(matches) != 1:
        problem = f"{len(matches)} graphs have a kernel {name!r}" if matches else f"no kernel {name!r}"
        labels = [f"{row.graph}/{n}" for row in (matches or rows) for n in row.names if not matches or n == name]
        shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        raise UsageError(
            problem, where="--source", hint=f"there are {shown}" if labels else "the module has no kernels"
        )
    from penstock.backends.tvm.group import LibraryCall  # lazy: heavy
    from penstock.backends.tvm.lower.lower import plan_kernels  # lazy: heavy

    (row,) = matches
    machine = machine_of("host")
    steps = plan_kernels(row.body, machine).steps
    parts = []
    for number, step in enumerate(steps, 1):
        part = f", part {number} of {len(steps)}" if len(steps) > 1 else ""
        parts.append(
            f"# {row.graph}/{name.rpartition('/')[2]} for {machine.name}{part}: "
            f"{' '.join(op.kind for op in step.group.ops)}"
        )
        function = step.kernel.function
        parts.append(f"# a call of {function.name}" if isinstance(function, LibraryCall) else function.script())
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------ printing


def rates_text(device: Device) -> str:
    """Return the rates of a device as text."""
    return f"{shown_rate(device.flops, 'FLOP/s')}, {shown_rate(device.bandwidth)}"


def format_report(rows: Sequence[KernelRow], module: Module, width: int | None = None) -> str:
    """Return a table for each stage, largest share first, then a line on how each graph was divided.

    Lines are at most `width` wide, if it is set.
    """
    lines: list[str] = []
    for stage in module.stages:
        of_stage = sorted((row for row in rows if row.stage == stage.index), key=lambda row: -row.batch_s)
        device = _device_of(module, module.devices_of(stage.index)[0])
        total = sum(row.batch_s for row in of_stage)
        measure, origin = (
            ("measured", "measured") if any(row.measured_s is not None for row in of_stage) else ("roofline", "planned")
        )
        rates = rates_text(of_stage[0].device if of_stage else device)
        lines += [
            f"stage {stage.index} on {device.name} ({origin}: {rates}): {total * 1e3:.3f} ms per batch, {measure}",
            _table(of_stage, total, width),
            "",
        ]
        for kind in COMPUTE:
            graph = module.stage_graph(stage.index, kind)
            if graph is not None:
                lines.append(_division_line(graph, of_stage))
                lines += _library_lines(graph)
                if device.kind == "cuda" and (reason := never_captured(graph)):
                    lines.append(f"{graph.name}: never a CUDA graph, as {reason}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _table(rows: Sequence[KernelRow], total: float, width: int | None) -> str:
    heads = ["graph", "kernel", "calls", "operations", "shapes", "MFLOP", "bytes", "roofline ms"]
    measured = any(row.measured_s is not None for row in rows)
    heads += ["measured ms", "of roofline"] if measured else []
    cells: list[list[object]] = []
    for row in rows:
        line: list[object] = [
            row.graph,
            _names(row.names),
            f"{len(row.names)} per {row.per}",
            shown_kinds(row.ops),
            _shapes(row),
        ]
        line += [f"{row.flops / 1e6:.3f}", shown_bytes(row.moved), f"{row.roofline_s * 1e3:.4f}"]
        if measured:
            # Collectives are not measured.
            known = row.measured_s is not None
            line += [f"{row.seconds * 1e3:.4f}", f"{100 * row.roofline_s / row.seconds:.0f}%"] if known else ["-", "-"]
        cells.append([*line, f"{100 * row.batch_s / total:.1f}%" if total else "-"])
    # Shapes say least beside the operations: they are cut first.
    return table([*heads, "share"], cells, width, cut=(4, 3))


def report_json(rows: Sequence[KernelRow]) -> str:
    """Return the rows as JSON, nothing cut: seconds and bytes of one call."""
    return json.dumps([_plain(row) for row in rows], indent=2)


def _plain(row: KernelRow) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "graph": row.graph,
        "kernels": list(row.names),
        "calls_per_batch": row.calls_per_batch,
        "operations": [
            {"kind": op.kind, "ins": [str(v.type) for v in op.ins], "outs": [str(v.type) for v in op.outs]}
            for op in row.ops
        ],
        "flops": row.flops,
        "bytes": row.moved,
        "flops_per_s": row.device.flops,
        "bytes_per_s": row.device.bandwidth,
        "roofline_s": row.roofline_s,
        "measured_s": row.measured_s,
    }


def _division_line(graph: Graph, rows: Sequence[KernelRow]) -> str:
    division = divide(graph)
    inside = sum(map(len, division.kernels.values()))
    flops = sum(row.flops * len(row.names) for row in rows if row.graph == graph.name)
    return (
        f"{graph.name}: {len(graph.ops)} operations = {inside} in {len(division.kernels)} kernels + "
        f"{len(division.inline)} without "
        f"memory or in tables + {len(division.reads)} reads; {flops / 1e6:.3f} MFLOP"
    )


def _library_lines(graph: Graph) -> list[str]:
    """Say how many contractions a library computes, and which it leaves to kernels; nothing where none is asked."""
    count = Counter(op.attrs["library"] for op in graph.ops if "library" in op.attrs)
    if not count:
        return []
    left = left_to_kernels(graph)
    total = sum(count.values()) + len(left)
    calls = ", ".join(f"{n} of {total} products, convolutions and attentions by {name}" for name, n in count.items())
    return [f"{graph.name}: {calls}", *(f"{graph.name}: {text}" for text in left)]


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} alike"


def shown_kinds(ops: Sequence[Op]) -> str:
    """Return kinds in order; repeated kinds are counted."""
    runs: list[tuple[str, int]] = []
    for op in ops:
        if runs and runs[-1][0] == op.kind:
            runs[-1] = (op.kind, runs[-1][1] + 1)
        else:
            runs.append((op.kind, 1))
    words = [kind if count == 1 else f"{count}*{kind}" for kind, count in runs]
    return " ".join(words if len(words) <= 6 else [*words[:4], f"+{len(words) - 4}"])


def _shapes(row: KernelRow) -> str:
    """Return the operand and result types of the operation with the most work."""
    main = max(row.ops, key=lambda op: (cost_of(op).flops, cost_of(op).bytes))
    ins, outs = (
        ", ".join(str(v.type) for v in values[:3]) + (", ..." if len(values) > 3 else "")
        for values in (main.ins, main.outs)
    )
    return f"{ins} -> {outs}" if outs else ins
