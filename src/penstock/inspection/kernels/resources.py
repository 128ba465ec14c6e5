"""The table of the resources that kernels on GPUs take: registers, spilled registers, shared memory, occupancy.

In: a module with stages on CUDA devices, and architectures; those of the devices if none is named. Out: rows for every
launch of every stage, and a table of them. The code is made anew, or found in the cache of compiled code: a bundle
holds machine code and not the words of the assembler. That needs nvcc and no GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from penstock.backends.interface import CompileOptions, Progress, StageSources, device_of, stage_graphs
from penstock.backends.tvm.cuda.resources import KernelResources, resources_of
from penstock.ir.graph import Module
from penstock.support.errors import UsageError
from penstock.support.terminal import table
from penstock.support.words import shown_bytes


class _Sources:
    """A viewer that keeps the code of one stage."""

    def __init__(self) -> None:
        self.stages: list[StageSources] = []

    def step(self, _: str) -> AbstractContextManager[list[str]]:
        return nullcontext([])

    def sources(self, _: str, sources: StageSources, /) -> None:
        self.stages.append(sources)


def resource_rows(
    module: Module, architectures: Sequence[str] = (), progress: Progress | None = None
) -> dict[int, list[KernelResources]]:
    """Return the launches of all stages on CUDA devices, by stage, for each architecture."""
    from penstock.backends.tvm.cuda.build import build_graphs  # lazy: heavy

    devices = {stage.index: device_of(module, stage.index) for stage in module.stages}
    on_gpus = {index: device for index, device in devices.items() if device is not None and device.kind == "cuda"}
    if not on_gpus:
        raise UsageError(
            "no stage is on a CUDA device", where=f"@{module.name}", hint="compile with --devices sm_90, for example"
        )
    rows: dict[int, list[KernelResources]] = {}
    for index, device in on_gpus.items():
        rows[index] = []
        for architecture in architectures or (device.target,):
            viewer = _Sources()
            with tempfile.TemporaryDirectory(prefix="penstock-ptxas-") as folder:
                options = CompileOptions(architecture, progress=progress, viewer=viewer)
                build_graphs(stage_graphs(module, index), Path(folder) / f"s{index}.so", options)
            rows[index] += [row for sources in viewer.stages for row in resources_of(sources)]
    return rows


def format_resources(rows: dict[int, list[KernelResources]], width: int | None = None) -> str:
    """Return a table for each stage, and a line on what is the most of each resource."""
    lines: list[str] = []
    for stage, of_stage in rows.items():
        lines += [f"stage {stage}:", _table(of_stage, width), ""]
    kernels = [row.kernel for of_stage in rows.values() for row in of_stage]
    if kernels:
        spilling = sum(kernel.spilled > 0 for kernel in kernels)
        most = max(kernel.registers for kernel in kernels)
        lines.append(f"{len(kernels)} launches, {spilling} with spilled registers, at most {most} registers")
    return "\n".join(lines).rstrip()


def _table(rows: Sequence[KernelResources], width: int | None) -> str:
    heads = ["for", "kernel", "operations", "threads", "registers", "spilled", "stack", "shared", "occupancy"]
    cells: list[list[object]] = []
    for row in rows:
        name, registers, frame, spilled, shared = row.kernel
        share = "-" if row.occupancy is None else f"{100 * row.occupancy:.0f}%"
        sizes = [shown_bytes(n) if n else "0" for n in (spilled, frame, shared)]
        kinds = " ".join(dict.fromkeys(row.kinds))
        cells.append([row.architecture, name, kinds, row.threads, registers, *sizes, share])
    return table(heads, cells, width, cut=(2, 1))


def resources_json(rows: dict[int, list[KernelResources]]) -> str:
    """Return the rows as JSON, nothing cut."""
    return json.dumps(
        [
            {
                "stage": stage,
                "architecture": row.architecture,
                "kernel": row.kernel.name,
                "operations": list(row.operations),
                "threads": row.threads,
                "registers": row.kernel.registers,
                "spilled_bytes": row.kernel.spilled,
                "stack_bytes": row.kernel.frame,
                "shared_bytes": row.kernel.shared,
                "occupancy": row.occupancy,
            }
            for stage, of_stage in rows.items()
            for row in of_stage
        ],
        indent=2,
    )
