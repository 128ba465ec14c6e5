"""Every sample of every row, compiled for this host's GPU and run on it, against the interpreter; and the same bits in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.cuda.products import products
from oracles.judge import to_tensor, wrong_results
from samples import Sample, samples_of

from penstock.backends.interface import CompileOptions, StageProgram
from penstock.backends.tvm.cuda.build import build_graphs
from penstock.backends.tvm.cuda.devices import find_device
from penstock.backends.tvm.cuda.kernels.generate import KINDS
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.backends.tvm.cuda.torch_calls import CALLS
from penstock.ir.graph import Graph
from penstock.ir.types import FLOATS
from penstock.runtime.state.tensors import as_array


def build(graphs: Sequence[Graph], folder: Path, architecture: str) -> StageProgram:
    built = build_graphs(graphs, folder / "stage.so", CompileOptions(architecture))
    return CudaProgram(built.path, graphs, find_device(architecture, "0", 0))


def check(samples: Sequence[Sample], graphs: Sequence[Graph], program: StageProgram) -> list[str]:
    with np.errstate(all="ignore"):
        return [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


@pytest.mark.parametrize("kind", [*sorted(KINDS - {"put"}), "tensor cores"])
def test_kernels_agree_with_the_interpreter(kind: str, architecture: str, tmp_path: Path) -> None:
    samples = products("bf16", "f16") if kind == "tensor cores" else samples_of(kind)
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    program = build(graphs, tmp_path, architecture)
    assert not check(samples, graphs, program)
    # Nothing depends on the order in which blocks run.
    for s, g in zip(samples, graphs, strict=True):
        runs = [program.call(g.name, [to_tensor(a, program.device) for a in s.arrays()]) for _ in range(2)]
        assert [as_array(x).tobytes() for x in runs[0]] == [as_array(x).tobytes() for x in runs[1]], s


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_library_calls_agree_with_the_interpreter(kind: str, architecture: str, tmp_path: Path) -> None:
    samples = [s for s in samples_of(kind) if s.dtype in FLOATS and all(v.type.size for v in (*s.op.ins, *s.op.outs))]
    plain = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    graphs = [replace(g, ops=tuple(op.with_attrs(library="torch") for op in g.ops)) for g in plain]
    assert not check(samples, graphs, build(graphs, tmp_path, architecture))


def test_control_a_wrong_result_is_noticed(architecture: str, tmp_path: Path) -> None:
    """The comparison fails when the GPU computes something else."""
    samples = samples_of("add")[:3]
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    others = [replace(g, ops=tuple(replace(op, kind="sub") for op in g.ops)) for g in graphs]
    assert check(samples, graphs, build(others, tmp_path, architecture))
