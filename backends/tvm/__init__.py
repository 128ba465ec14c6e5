"""The TVM back end for CPUs: graphs become kernels (kernels/), one Relax function each (lower.py), one library per stage (build.py, load.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.ir.errors import VerifyError
from penstock.ir.graph import Module

from ..interface import Progress, StageProgram, stage_graphs


class TvmBackend:
    """Compiles a stage into `s<stage>.<cpu>.so`."""

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
        from .target import machine_of

        graphs = stage_graphs(module, stage)
        if not graphs:
            raise VerifyError(f"stage {stage} has no graphs", where=f"module {module.name}")
        name = f"s{stage}.{machine_of(target).name}.so"
        build_graphs(graphs, out_dir / name, target=target, progress=progress, dump_dir=dump_dir)
        return (name,)

    def load_stage(self, module: Module, stage: int, files: Sequence[Path], threads: int = 1) -> StageProgram:
        from .load import TvmProgram

        (library,) = files
        return TvmProgram(library, stage_graphs(module, stage), threads)
