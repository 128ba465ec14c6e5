"""Products of 16-bit floats on tensor cores: the source that nvcc gets, run on the CPU with pieces of a warp spread over its threads, and what the
assembler makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.cuda.products import matmul, products
from oracles.cuda.resources import checked
from oracles.judge import wrong_results
from samples import Sample
from tvm import tirx
from tvm.sym.analyzer import Analyzer

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.cuda import build as cuda_build
from penstock.backends.tvm.cuda.kernels import tensor_cores
from penstock.backends.tvm.cuda.kernels.threads import ThreadEmitter
from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.ir.graph import Graph, Op
from penstock.ir.ops import make
from penstock.ir.types import numpy_dtype
from penstock.passes.kernels.fuse import choose_kernels

from ...cases import Shown, value
from .cuda_source import SourceProgram
from .test_source import check

MULTIPLY = "nvcuda::wmma::mma_sync("
# Eight elements at once, from memory to a panel.
MOVE = "*(uint4*)"


def text(graph: Graph, architecture: str = "sm_90") -> str:
    """The kernel of a graph as TIR."""
    (step,) = plan_kernels(graph, device_machine(architecture)).steps
    return str(step.kernel.function)


def kernel(s: Sample, architecture: str = "sm_90") -> str:
    return text(s.graph("s0.g"), architecture)


@pytest.mark.parametrize("full", [512, 1], ids=["low", "high"])
def test_products_of_16_bits_run_on_tensor_cores(full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one piece per warp and row, and of two."""
    monkeypatch.setattr(tensor_cores, "FULL", full)
    samples = products("bf16", "f16")
    assert all("tvm_mma_sync" in kernel(s) for s in samples)
    assert not check(samples, tmp_path)
    assert (tmp_path / "kernels.cpp").read_text().count(MULTIPLY) >= 4 * len(samples)


def test_what_tensor_cores_do_not_have_is_added_up_by_threads() -> None:
    bf16, f16 = products("bf16")[0], products("f16")[0]
    assert "tvm_mma_sync" in kernel(f16, "sm_75")
    few, short = matmul("bf16", "[63,64]", "[64,64]"), matmul("bf16", "[64,8]", "[8,64]")
    assert not [s for s in (*products("f32"), few, short) if "tvm_mma_sync" in kernel(s)]
    assert "tvm_mma_sync" not in kernel(bf16, "sm_75")


class Writer:
    """Operations of a graph."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def __call__(self, kind: str, *ins: Any, **attrs: Any) -> Any:
        self.ops.append(make(kind, list(ins), [f"v{len(self.ops)}"], "", **attrs))
        return self.ops[-1].outs[0]

    def part(self, x: Any, start: tuple[int, ...], stop: tuple[int, ...], step: int = 1) -> Any:
        """Some rows and columns, each `step`-th one."""
        return self("slice", x, start=start, stop=stop, step=(1, step))

    def graph(self, number: int, ins: Sequence[Any], out: Any) -> Graph:
        return choose_kernels(Graph(f"s0.g{number}", tuple(ins), (out,), tuple(self.ops)))


def layer(number: int, first: int) -> Graph:
    """gelu(part of x @ w + bias): columns of x from `first` on."""
    x, w, bias = value("x", "bf16[80,64]"), value("w", "bf16[40,72]"), value("bias", "bf16[72]")
    writer = Writer()
    total = writer("add", writer("matmul", writer.part(x, (0, first), (80, first + 40)), w), bias)
    return writer.graph(number, (x, w, bias), writer("gelu", total))


def test_operations_in_front_and_behind_are_in_the_kernel(tmp_path: Path) -> None:
    graphs = [layer(0, 8), layer(1, 3)]
    program, rng = SourceProgram(graphs, tmp_path), np.random.default_rng(3)
    for graph in graphs:
        given = [rng.standard_normal(v.type.dims).astype(numpy_dtype("bf16")) for v in graph.ins]
        assert not wrong_results(program, graph, given)
    # A part that begins on a boundary is moved by 16 bytes, another one by elements.
    begin = 'extern "C" __global__ void'
    first, second = (tmp_path / "kernels.cpp").read_text().split(begin)[-2:]
    assert first.count(MULTIPLY) == second.count(MULTIPLY) == 4
    assert [part.count(MOVE) // 2 for part in (first, second)] == [2, 1]


def lines_apart(form: str) -> Graph:
    """A product whose operands begin on boundaries of 16 bytes, with elements that are no neighbours, or lines that end between boundaries."""
    writer = Writer()
    x, y = (value(name, f"f16[{size}]") for name, size in zip("xy", LINES[form], strict=True))
    if form == "one number":
        out = writer("matmul", x, writer("broadcast", y, shape=(64, 64)), ta=True)
    elif form == "every eighth":
        out = writer("matmul", writer.part(x, (0, 0), (64, 512), 8), y)
    elif form == "every second":
        out = writer("matmul", x, writer.part(y, (0, 0), (64, 128), 2), tb=True)
    elif form == "both cut":
        out = writer("matmul", writer.part(x, (0, 0), (64, 67)), writer.part(y, (0, 0), (64, 67)), tb=True)
    else:
        out = writer("matmul", writer.part(x, (0, 0), (64, 67)), y)
    return writer.graph(0, (x, y), out)


LINES = {
    "one number": ("64,64", "1,1"),
    "every eighth": ("64,512", "64,64"),
    "every second": ("64,64", "64,128"),
    "both cut": ("64,72", "64,72"),
    "one cut": ("64,72", "67,64"),
}


QUICK = ("every second", "one cut")


@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in LINES])
def test_lines_that_cannot_be_moved_by_16_bytes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind a cut is nan, and is never added."""
    graph, rng = lines_apart(form), np.random.default_rng(3)
    given = [rng.standard_normal(v.type.dims).astype(np.float16) for v in graph.ins]
    for array in given:
        if array.shape[-1] == 72:
            array[:, 67:] = np.nan
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    assert not wrong_results(SourceProgram([graph], tmp_path / "right"), graph, given)
    # The control: all that begins on a boundary is moved by 16 bytes.
    right = tensor_cores._span_of
    monkeypatch.setattr(tensor_cores, "Analyzer", Trusting)
    monkeypatch.setattr(tensor_cores, "_span_of", lambda *known: right(*known[:-1], 8))
    if form != "one number":  # would read behind its memory
        assert wrong_results(SourceProgram([graph], tmp_path / "wrong"), graph, given)


class Trusting(Analyzer):
    """Takes all elements for neighbours."""

    def simplify(self, *_: Any) -> Any:
        return tirx.IntImm("int32", 0)


def wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take the elements of others."""
    load, other = tensor_cores._Tile._load, {"row_major": "col_major", "col_major": "row_major"}
    monkeypatch.setattr(tensor_cores._Tile, "_load", lambda tile, *given: load(tile, *given[:-1], other[given[-1]]))


def wrong_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the second operand come from the other half of the panel."""
    load = tensor_cores._Tile._load

    def other(tile: Any, fragment: Any, number: int, panel: Any, across: Any, step: int, layout: str) -> None:
        load(tile, fragment, number, panel, across, 16 - step if "b" in panel.buffer.name else step, layout)

    monkeypatch.setattr(tensor_cores._Tile, "_load", other)


def wrong_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces on no boundary that tensor cores can load from."""
    monkeypatch.setattr(tensor_cores, "_BESIDE", 4)
    monkeypatch.setattr(tensor_cores, "_span_of", lambda *_: 1)


def without_barrier(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """One barrier of each kernel is left out: behind filled panels, behind panels that were read, behind the sums."""

    def fault(monkeypatch: pytest.MonkeyPatch) -> None:
        barrier, calls = ThreadEmitter.barrier, dict[int, int]()

        def some(emit: ThreadEmitter) -> None:
            calls[id(emit)] = calls.get(id(emit), -1) + 1
            kept.append(emit)
            if calls[id(emit)] != number:
                barrier(emit)

        kept: list[ThreadEmitter] = []
        monkeypatch.setattr(ThreadEmitter, "barrier", some)

    return fault


@pytest.mark.parametrize(
    "fault",
    [wrong_layout, wrong_tile, wrong_lines, *map(without_barrier, range(3))],
    ids=["layout", "tile", "lines", "filled", "read", "sums"],
)
def test_control_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert check(products("bf16"), tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_assembler_spills_nothing(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of both heights, with panels of both layouts."""
    if architecture not in cuda_build.known_architectures():
        pytest.skip(f"nvcc makes no code for {architecture}")
    shapes: Sequence[tuple[str, str, bool, bool]] = [
        ("[4096,512]", "[512,2048]", False, False),
        ("[512,4096]", "[2048,512]", True, True),
        ("[100,40]", "[40,70]", False, False),
    ]
    graphs = [matmul("bf16", x, y, ta=ta, tb=tb).graph(f"s0.g{i}") for i, (x, y, ta, tb) in enumerate(shapes)]
    viewer = Shown()
    cuda_build.build_graphs(graphs, tmp_path / "stage.so", CompileOptions(architecture, viewer=viewer))
    assert viewer.stages["stage"].device.count(MULTIPLY) == 2 * 2 * (4 + 4 + 2) / 2
    rows = checked(viewer.stages["stage"])
    assert len(rows) == len(graphs)
    assert all(not row.kernel.spilled and row.kernel.registers <= 128 and row.kernel.shared <= 48 << 10 for row in rows)
