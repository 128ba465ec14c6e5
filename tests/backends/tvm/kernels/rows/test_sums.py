"""Sums that share a sweep over memory: which ones do, that they are right whatever the sizes, and that threads do not change them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.kernels.rows import sums
from penstock.ir.graph import Graph
from penstock.ir.ops import make

from ...cases import build, value
from ...test_graphs import Writer, agrees, fused, kernels_of


def norm_gradients(shape: tuple[int, ...], width: int) -> Graph:
    """The backward half of a layer norm behind a residual, with the sum of columns that a bias in front of it wants."""
    w = Writer()
    dims = ",".join(map(str, shape))
    rows = ",".join(map(str, shape[:-1]))
    dy, x, other = (value(name, f"f32[{dims}]") for name in ("dy", "x", "other"))
    scale, mean, rstd = value("scale", f"f32[{width}]"), value("mean", f"f32[{rows}]"), value("rstd", f"f32[{rows}]")
    dx = w("add", w("layer_norm_grad", dy, x, scale, mean, rstd), other)
    weights = make("layer_norm_grad_weight", [dy, x, mean, rstd], ["dscale", "dbias"], "")
    w.ops.append(weights)
    w.state("accum", "scale.grad", weights.outs[0])
    w.state("accum", "bias.grad", weights.outs[1])
    w.state("accum", "before.grad", w("sum", dx, axes=tuple(range(len(shape) - 1))))
    return w.graph((dy, x, other, scale, mean, rstd), (dx,))


@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 33), (700, 768), (64, 17, 523), (1, 5, 7)])
def test_all_gradients_of_a_layer_norm_take_one_sweep(shape: tuple[int, ...], tmp_path: Path) -> None:
    graph = fused(norm_gradients(shape, shape[-1]))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def per_channel(shape: tuple[int, ...]) -> Graph:
    """Scale and shift of channels, backwards: sum(dy * (x - mean)) and sum(dy) over everything else."""
    w = Writer()
    text, channels = ",".join(map(str, shape)), shape[1]
    dy, x, mean = value("dy", f"f32[{text}]"), value("x", f"f32[{text}]"), value("mean", f"f32[{channels}]")
    axes = tuple(i for i in range(len(shape)) if i != 1)
    column = w("reshape", mean, shape=(channels, *(1,) * (len(shape) - 2)))
    product = w("mul", dy, w("sub", x, column))
    return w.graph((dy, x, mean), (w("sum", product, axes=axes), w("sum", dy, axes=axes), product))


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 6, 28, 28), (3, 40), (64, 200, 1), (2, 3, 5, 1), (600, 5000)])
def test_sums_of_what_a_kernel_makes_are_taken_on_the_way(shape: tuple[int, ...], tmp_path: Path) -> None:
    graph = fused(per_channel(shape))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_sums_of_one_value_share_a_sweep(tmp_path: Path) -> None:
    w = Writer()
    x = value("x", "f32[40,300]")
    total, mean, top = w("sum", x, axes=(0,)), w("mean", x, axes=(0,)), w("max", x, axes=(0,))
    scaled = w("mul", total, mean)
    graph = fused(w.graph((x,), (scaled, top)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_other_axes_other_kernels(tmp_path: Path) -> None:
    """What cannot share a sweep does not: other axes, a sum that the other one needs, an operand that is not passed by."""
    w = Writer()
    x = value("x", "f32[12,12]")
    columns, rows = w("sum", x, axes=(0,)), w("sum", x, axes=(1,))
    needs = w("sum", w("mul", x, columns), axes=(0,))
    graph = fused(w.graph((x,), (columns, rows, needs)))
    assert kernels_of(graph) == 3
    assert not agrees(graph, tmp_path)


def test_what_is_laid_out_anew_or_kept_is_not_part_of_a_sweep(tmp_path: Path) -> None:
    w = Writer()
    x = value("x", "f32[6,4,8]")
    y = w("mul", x, x)
    total = w("sum", y, axes=(0,))
    w.state("accum", "kept", y)
    turned = w("transpose", y, perm=(1, 0, 2))
    again = w("neg", w("reshape", turned, shape=(24, 8)))
    graph = fused(w.graph((x,), (total, again)))
    assert not agrees(graph, tmp_path)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((3000,), (0,)),
        ((1 << 20,), (0,)),
        ((1 << 20) + 7, (0,)),
        ((64, 100, 201), (0, 1, 2)),
        ((1, 1 << 19), (0, 1)),
        ((64, 5, 4099), (0, 2)),
        ((700, 4100), (0,)),
        ((8, 33, 1030), (1,)),
        ((2048, 3), (0,)),
        ((5, 1, 40, 1), (0, 2)),
    ],
)
def test_long_sums(shape: tuple[int, ...] | int, axes: tuple[int, ...], tmp_path: Path) -> None:
    dims = (shape,) if isinstance(shape, int) else shape
    x = value("x", f"f32[{','.join(map(str, dims))}]")
    ops = [make(kind, [x], [kind], "", axes=axes) for kind in ("sum", "max")]
    graph = Graph("s0.F", (x,), tuple(op.outs[0] for op in ops), tuple(ops))
    assert not agrees(graph, tmp_path)


def test_an_epilogue_that_is_smaller_than_the_row_keeps_its_places(tmp_path: Path) -> None:
    """A row of two dimensions is run through by one coordinate, unless somebody needs both."""
    w = Writer()
    x, scale, column = value("x", "f32[6,5,7]"), value("scale", "f32[5,7]"), value("column", "f32[5,1]")
    norm = make("layer_norm", [x, scale, scale], ["y", "mean", "rstd"], "", axis=1)
    w.ops.append(norm)
    graph = fused(w.graph((x, scale, column), (w("mul", norm.outs[0], column),)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_a_wrong_total_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are not added up must not pass."""
    monkeypatch.setattr(sums, "combined", lambda body, combine, values: values[0])
    monkeypatch.setattr(sums, "_LEAST_WORK", 64)
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    assert agrees(fused(norm_gradients((64, 40), 40)), tmp_path)


THREADS = """
import sys, numpy as np, torch
from pathlib import Path
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.text import parse_module
library, text, out, threads = sys.argv[1:]
graphs = list(parse_module(Path(text).read_text()).graphs.values())
program = TvmProgram(Path(library), graphs, threads=int(threads))
arrays = np.load(out + ".in.npz")
found = {}
for graph in graphs:
    args = [torch.tensor(arrays[f"{graph.name}:{i}"]) for i in range(len([k for k in arrays if k.startswith(graph.name + ":")]))]
    results = program.call(graph.name, args)
    found |= {f"{graph.name}:{i}": x.numpy() for i, x in enumerate([*results, *args])}
np.savez(f"{out}.{threads}.npz", **found)
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    from dataclasses import replace

    from penstock.backends.tvm.compile.build import build_graphs
    from penstock.ir.graph import Module
    from penstock.ir.text import print_module

    from ...cases import make_args

    def single(kind: str, name: str, *types: str, **attrs: object) -> Graph:
        ins = tuple(value(f"x{i}", t) for i, t in enumerate(types))
        op = make(kind, ins, ["y"], "", **attrs)  # type: ignore[arg-type]
        return Graph(name, ins, op.outs, (op,))

    wide, images = fused(norm_gradients((1024, 768), 768)), "f32[2,64,28,28]"
    graphs = [
        replace(wide, name="s0.norm"),
        single("sum", "s0.all", "f32[1024,1024]", axes=(0, 1)),
        single("sum", "s0.columns", "f32[1024,1024]", axes=(0,)),
        single("softmax", "s0.softmax", "f32[512,200]"),
        single("gelu", "s0.gelu", "f32[512,200]"),
        single("max_pool", "s0.pool", "f32[2,16,64,64]", window=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        # On tile registers, where there are some.
        single("matmul", "s0.product", "f32[256,768]", "f32[768,1024]"),
        single("matmul", "s0.long", "f32[200,1500]", "f32[300,1500]", tb=True),
        single("matmul", "s0.batch", "f32[6,160,128]", "f32[6,160,192]", ta=True),
        single("conv", "s0.conv", images, "f32[64,64,3,3]", pads=(1, 1, 1, 1)),
        single("conv_grad_input", "s0.images", images, "f32[64,64,3,3]", shape=(2, 64, 28, 28), pads=(1, 1, 1, 1)),
        single("conv_grad_weight", "s0.filters", images, images, shape=(64, 64, 3, 3), pads=(1, 1, 1, 1)),
    ]
    built = build_graphs(graphs, tmp_path / "stage.so")
    (tmp_path / "module.ir").write_text(print_module(Module("m", graphs={g.name: g for g in graphs})))
    rng = np.random.default_rng(3)
    arrays = {f"{g.name}:{i}": a for g in graphs for i, a in enumerate(make_args(g, rng))}
    np.savez(tmp_path / "run.in.npz", **arrays)
    for threads in ("1", "2"):
        command = [
            sys.executable,
            "-c",
            THREADS,
            str(built.path),
            str(tmp_path / "module.ir"),
            str(tmp_path / "run"),
            threads,
        ]
        subprocess.run(command, check=True, timeout=120)
    one, two = (np.load(tmp_path / f"run.{threads}.npz") for threads in ("1", "2"))
    assert set(one) == set(two)
    for key in one:
        assert np.array_equal(one[key], two[key]), key
    expected = torch.from_numpy(arrays["s0.all:0"]).double().sum().item()
    assert abs(float(one["s0.all:0"]) - expected) <= 1e-5 * np.abs(arrays["s0.all:0"]).sum() ** 0.5


@pytest.mark.parametrize("rows", [7, 512, 5000])
def test_a_loss_is_the_mean_of_its_rows_to_the_last_digit(rows: int, tmp_path: Path) -> None:
    """However many there are: losses of a batch do not depend on the size of its microbatches. The control: a plain sum in float32 is further off."""
    w = Writer()
    logits, labels = value("logits", f"f32[{rows},11]"), value("labels", f"i64[{rows}]")
    w.ops.append(make("cross_entropy", [logits, labels], ["loss", "lse"], ""))
    graph = fused(w.graph((logits, labels), (w.ops[-1].outs[0],)))
    random = np.random.default_rng(rows)
    given = [
        torch.tensor(random.standard_normal((rows, 11)) * 4, dtype=torch.float32),
        torch.tensor(random.integers(0, 11, rows)),
    ]
    expected = torch.nn.functional.cross_entropy(given[0].double(), given[1], reduction="none")
    found = build([graph], tmp_path).call(graph.name, given)[0]
    assert abs(float(found) / float(expected.mean()) - 1) < 1e-7
    if rows == 5000:
        plain = np.cumsum(expected.numpy().astype(np.float32))[-1] / rows
        assert abs(plain / float(expected.mean()) - 1) > 3e-7
