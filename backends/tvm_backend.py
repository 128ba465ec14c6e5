"""The TVM back end for CPUs and CUDA devices: graphs become kernels (kernels/) in an order (plan.py), one Relax function each (lower.py),
one library per stage (build.py, load.py). Code is made by worker processes (pool.py, jobs.py) and kept (store.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.ir.graph import Graph, Module
from penstock.ir.ops import OPS
from penstock.support.errors import VerifyError

from .interface import DEFAULTS, CompileOptions, StageProgram, device_of, stage_graphs, target_of

if TYPE_CHECKING:
    import torch


class TvmBackend:
    """Compiles a stage into `s<stage>.<cpu or architecture>.so`."""

    name = "tvm"

    def compile_stages(
        self, module: Module, stages: Sequence[int], out_dir: Path, options: CompileOptions = DEFAULTS
    ) -> dict[int, tuple[str, ...]]:
        """Write the libraries of stages; gives their file names inside `out_dir`."""
        from penstock.backends.tvm.compile.build import LibraryBuilder, LibraryPart

        graphs = {stage: stage_graphs(module, stage) for stage in stages}
        for stage in stages:
            if not graphs[stage]:
                raise VerifyError(f"stage {stage} has no graphs", where=f"module {module.name}")
        names: dict[int, str] = {}
        targets = {stage: target_of(module, stage, options.target) for stage in stages}
        for stage in stages:
            device = device_of(module, stage)
            if device is not None and device.kind == "cuda":
                from penstock.backends.tvm.cuda.build import build_graphs as build_for_device

                names[stage] = f"s{stage}.{targets[stage]}.so"
                build_for_device(graphs[stage], out_dir / names[stage], replace(options, target=targets[stage]))
        rest = [stage for stage in stages if stage not in names]
        if rest:
            with LibraryBuilder(options) as builder:
                names |= {stage: f"s{stage}.{_needed(builder.cpu, graphs[stage])}.so" for stage in rest}
                builder.build([LibraryPart(graphs[stage], out_dir / names[stage]) for stage in rest])
        return {stage: (names[stage],) for stage in stages}

    def check_host(self, module: Module, stage: int) -> None:
        _gpu_of(module, stage)

    def prepare(self) -> None:
        from penstock.backends.tvm.run import load  # noqa: F401
        from penstock.backends.tvm.run.machine import load_runtime

        load_runtime()

    def load_stage(
        self, module: Module, stage: int, files: Sequence[Path], threads: int = 1, device: str | None = None
    ) -> StageProgram:
        (library,) = files
        gpu = _gpu_of(module, stage, device)
        if gpu is not None:
            from penstock.backends.tvm.cuda.load import CudaProgram

            return CudaProgram(library, stage_graphs(module, stage), gpu, threads)
        from penstock.backends.tvm.run.load import TvmProgram

        return TvmProgram(library, stage_graphs(module, stage), threads)


def _gpu_of(module: Module, stage: int, name: str | None = None) -> torch.device | None:
    """The GPU of this host that a stage runs on; None for a stage on a CPU, UsageError where the host has no such GPU."""
    device = device_of(module, stage, name)
    if device is None or device.kind != "cuda":
        return None
    from penstock.backends.tvm.cuda.load import find_device

    assert module.cluster is not None
    own = [d.name for d in module.cluster.devices if d.kind == "cuda" and d.host == device.host]
    return find_device(device.target, own.index(device.name), stage)


def _needed(cpu: str, graphs: Sequence[Graph]) -> str:
    """The CPU that a stage runs on, for the name of its library: features behind it are of use in
    products of floats of up to 32 bits only."""
    tiles = any(
        v.type.dtype in ("bf16", "f32")
        for g in graphs
        for op in g.ops
        if OPS[op.kind].family == "contract"
        for v in op.outs
    )
    return cpu if tiles else cpu.partition("+")[0]
