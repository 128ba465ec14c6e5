"""The TVM back end for CPUs and CUDA devices: graphs become kernels in an order, and the kernels of a stage become one
library.

tvm/lower/plan.py orders the kernels, tvm/kernels/ and tvm/cuda/ generate their code, and tvm/lower/lower.py writes one
Relax function for each graph. tvm/compile/build.py makes the library of a stage, tvm/run/load.py opens it. Worker
processes compile (tvm/compile/pool.py, tvm/compile/jobs.py), and a cache keeps what they made
(src/penstock/support/cache.py). Where it is asked for, TVM's runtime library goes with the libraries of stages
(tvm/run/runtime_library.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.tvm.cuda.devices import check_memory, find_device, room_for_captures
from penstock.backends.tvm.run.runtime_library import CUDA_LIBRARY, carried_files, prepare_runtime
from penstock.ir.graph import Graph, Module
from penstock.ir.ops import OPS
from penstock.support.errors import VerifyError

from .interface import DEFAULTS, CompileOptions, Exchange, StageProgram, device_of, stage_graphs, target_of

if TYPE_CHECKING:
    import torch


class TvmBackend:
    """A back end that compiles a stage into `s<stage>.<cpu or architecture>.so`."""

    def compile_stages(
        self, module: Module, stages: Sequence[int], out_dir: Path, options: CompileOptions = DEFAULTS
    ) -> dict[int, tuple[str, ...]]:
        """Write the libraries of stages; return their file names inside `out_dir`, by stage."""
        from penstock.backends.tvm.compile.build import LibraryBuilder, LibraryPart  # lazy: heavy

        graphs = {stage: stage_graphs(module, stage) for stage in stages}
        for stage in stages:
            if not graphs[stage]:
                raise VerifyError(f"stage {stage} has no graphs", where=f"module {module.name}")
        names: dict[int, str] = {}
        targets = {stage: target_of(module, stage, options.target) for stage in stages}
        for stage in stages:
            device = device_of(module, stage)
            if device is not None and device.kind == "cuda":
                from penstock.backends.tvm.cuda.build import build_graphs as build_for_device  # lazy: heavy

                names[stage] = f"s{stage}.{targets[stage]}.so"
                build_for_device(graphs[stage], out_dir / names[stage], replace(options, target=targets[stage]))
        on_cpu = [stage for stage in stages if stage not in names]
        if on_cpu:
            with LibraryBuilder(options) as builder:
                names |= {stage: f"s{stage}.{_needed(builder.cpu, graphs[stage])}.so" for stage in on_cpu}
                builder.build([LibraryPart(graphs[stage], out_dir / names[stage]) for stage in on_cpu])
        if not options.with_runtime:
            return {stage: (names[stage],) for stage in stages}
        files = carried_files(out_dir, len(on_cpu) < len(stages))
        return {
            stage: (names[stage], *(f for f in files if stage not in on_cpu or f != CUDA_LIBRARY)) for stage in stages
        }

    def check_host(self, module: Module, stage: int, device: str | None = None) -> None:
        """Raise the UsageError of `load_stage` where this host lacks the GPU of a stage, or memory on it."""
        gpu = _gpu_of(module, stage, device)
        if gpu is not None:
            check_memory(module, stage, gpu, device)

    def prepare(self) -> None:
        """Load TVM's runtime, if this host has it, and the modules that loading a stage takes."""
        from penstock.backends.tvm.run import load  # lazy: heavy  # noqa: F401

        prepare_runtime()

    def allows(self, threads: int) -> bool:
        """Return whether no stage of another number of threads was loaded: TVM cannot change it."""
        from penstock.backends.tvm.run.load import allows_threads  # lazy: heavy

        return allows_threads(threads)

    def load_stage(
        self,
        module: Module,
        stage: int,
        files: Sequence[Path],
        threads: int = 1,
        device: str | None = None,
        *,
        exchange: Exchange | None = None,
    ) -> StageProgram:
        """Load the library of a stage for one of its devices: the first if none is named."""
        library, *carried = files
        gpu = _gpu_of(module, stage, device)
        if gpu is not None:
            from penstock.backends.tvm.cuda.load import CudaProgram  # lazy: heavy

            room = room_for_captures(module, stage, gpu, device)
            return CudaProgram(library, stage_graphs(module, stage), gpu, threads, exchange, carried, room)
        from penstock.backends.tvm.run.load import TvmProgram  # lazy: heavy

        return TvmProgram(library, stage_graphs(module, stage), threads, exchange=exchange, carried=carried)


def _gpu_of(module: Module, stage: int, name: str | None = None) -> torch.device | None:
    """Return the GPU of this host that a stage runs on: None for a stage on a CPU, UsageError where the host has no
    such GPU."""
    device = device_of(module, stage, name)
    if device is None or device.kind != "cuda":
        return None
    return find_device(device.target, device.gpu_on_host, stage)


def _needed(cpu: str, graphs: Sequence[Graph]) -> str:
    """Return the name of the CPU that a stage is compiled for. Features that follow the name are of use only in
    products of floats of up to 32 bits."""
    tiles = any(
        v.type.dtype in ("bf16", "f32")
        for g in graphs
        for op in g.ops
        if OPS[op.kind].family == "contract"
        for v in op.outs
    )
    return cpu if tiles else cpu.partition("+")[0]
