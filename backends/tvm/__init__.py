"""The TVM back end for CPUs and CUDA devices: graphs become kernels (kernels/), one Relax function each (lower.py), one library per stage (build.py, load.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.ir.errors import VerifyError
from penstock.ir.graph import Module

from ..interface import Progress, StageProgram, device_of, stage_graphs


class TvmBackend:
    """Compiles a stage into `s<stage>.<cpu or architecture>.so`."""

    name = "tvm"

    def compile_stage(
        self,
        module: Module,
        stage: int,
        out_dir: Path,
        *,
        target: str = "host",
        progress: Progress | None = None,
        dump_dir: Path | None = None,
    ) -> tuple[str, ...]:
        """Write the library of a stage; gives its file name inside `out_dir`."""
        from .build import build_graphs
        from .cuda.build import build_graphs as build_for_device
        from .cuda.target import is_cuda
        from .target import machine_of

        graphs = stage_graphs(module, stage)
        if not graphs:
            raise VerifyError(f"stage {stage} has no graphs", where=f"module {module.name}")
        if is_cuda(target):
            name = f"s{stage}.{target}.so"
            build_for_device(graphs, out_dir / name, target=target, progress=progress, dump_dir=dump_dir)
            return (name,)
        name = f"s{stage}.{machine_of(target).name}.so"
        build_graphs(graphs, out_dir / name, target=target, progress=progress, dump_dir=dump_dir)
        return (name,)

    def load_stage(self, module: Module, stage: int, files: Sequence[Path], threads: int = 1) -> StageProgram:
        from .load import TvmProgram

        (library,) = files
        device = device_of(module, stage)
        if device is not None and device.kind == "cuda":
            from .cuda.load import CudaProgram, find_device

            assert module.cluster is not None
            own = [d.name for d in module.cluster.devices if d.kind == "cuda" and d.host == device.host]
            chosen = find_device(device.target, own.index(device.name), stage)
            return CudaProgram(library, stage_graphs(module, stage), chosen, threads)
        return TvmProgram(library, stage_graphs(module, stage), threads)
