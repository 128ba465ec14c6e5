"""Parallel convolutions as one: the same numbers as torch's from any sum that is merged, and sums that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.memory.workspace import is_inline
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import check
from penstock.passes.rewrite.merge_convolutions import MergeConvolutionsOptions, merge_convolutions

CHANNELS, SIZES = 4, (9, 11)


@dataclass(frozen=True)
class Branches:
    """A sum of convolutions of one input, `(kernel, has a bias, has a norm)`, of a norm of the input, and of `z`."""

    out: int
    groups: int
    stride: int
    dilation: int
    kernels: tuple[tuple[tuple[int, int], bool, bool], ...]
    norm: bool
    z: bool

    def pads(self, kernel: tuple[int, int]) -> tuple[int, int]:
        return tuple((n - 1) // 2 * self.dilation for n in kernel)

    @property
    def dims(self) -> list[int]:
        return [2, self.out, *((n - 1) // self.stride + 1 for n in SIZES)]

    def text(self) -> str:
        """The sum as a module."""
        lines, y = [], f"f32[{','.join(map(str, self.dims))}]"
        variables = {}

        def read(name: str, *dims: int) -> str:
            kind = variables[name] = f"f32[{','.join(map(str, dims))}]"
            lines.append(f"%{name} : {kind} = read(@{name})")
            return f"%{name}"

        def emit(kind: str, arguments: str) -> str:
            lines.append(f"%e{len(lines)} : {y} = {kind}({arguments})")
            return f"%e{len(lines) - 1}"

        def normed(x: str, tail: str) -> str:
            return emit("batch_norm", ", ".join([x, *(read(name + tail, self.out) for name in "stmv"), "eps=0.01"]))

        terms = ["%z"] if self.z else []
        for i, (kernel, bias, norm) in enumerate(self.kernels):
            given = {"strides": [self.stride] * 2, "dilations": [self.dilation] * 2, "pads": [*self.pads(kernel)] * 2}
            attrs = ", ".join(f"{name}={value}" for name, value in given.items())
            weight = read(f"w{i}", self.out, CHANNELS // self.groups, *kernel)
            term = emit("conv", f"%x, {weight}, groups={self.groups}, {attrs}")
            if bias:
                shape = f"[1,{self.out},1,1]"
                lines.append(f"%r{i} : f32{shape} = reshape({read(f'b{i}', self.out)}, shape={shape})")
                term = emit("add", f"{term}, %r{i}")
            terms.append(normed(term, str(i)) if norm else term)
        terms += [normed("%x", "x")] if self.norm else []
        total = terms[0]
        for term in terms[1:]:
            total = emit("add", f"{total}, {term}")
        head = [f"var @{name} : {kind} param" for name, kind in variables.items()]
        x = f"f32[2,{CHANNELS},{SIZES[0]},{SIZES[1]}]"
        ins = [f"%x : {x}", f"%z : {y}"][: 1 + self.z]
        graph = [f"graph @main({', '.join(ins)}) {{", *lines, f"return {total}", "}"]
        inputs = [f"input {value}" for value in ins]
        return "\n".join(["module @m {", *inputs, f"output {total}", *head, *graph, "}", ""])

    def torch(self, x: torch.Tensor, z: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The sum by torch, in float64."""

        def normed(y: torch.Tensor, tail: str) -> torch.Tensor:
            scale, shift, mean, variance = (w[name + tail] for name in "stmv")
            return F.batch_norm(y, mean, variance, scale, shift, eps=0.01)

        total = z if self.z else torch.zeros_like(z)
        for i, (kernel, bias, norm) in enumerate(self.kernels):
            options = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
            y = F.conv2d(x, w[f"w{i}"], w[f"b{i}"] if bias else None, padding=self.pads(kernel), **options)
            total = total + (normed(y, str(i)) if norm else y)
        return total + normed(x, "x") if self.norm else total


def drawn(branches: Branches):
    """A module, its weights, inputs, and what torch computes."""
    module = parse_module(branches.text(), "text")
    check(module, ("typed",))
    rng = np.random.default_rng(5)
    weights = {name: rng.standard_normal(var.type.dims).astype(np.float32) for name, var in module.vars.items()}
    weights = {name: np.abs(w) + 0.5 if name[0] == "v" else w for name, w in weights.items()}
    x, z = (rng.standard_normal(dims).astype(np.float32) for dims in ((2, CHANNELS, *SIZES), branches.dims))
    wide = {name: torch.tensor(w, dtype=torch.float64) for name, w in weights.items()}
    expected = branches.torch(torch.tensor(x).double(), torch.tensor(z).double(), wide).numpy()
    return module, weights, [x, z][: 1 + branches.z], expected


def merged(module: Module) -> Module:
    after = merge_convolutions(module, MergeConvolutionsOptions())
    check(after, ("typed",))
    assert print_module(parse_module(print_module(after), "again")) == print_module(after)
    return after


def computed(module: Module, weights, ins):
    return run_graph(
        module.graphs["main"], ins, DictStore(initial_arrays(module, weights, module.vars, "f64")), precision="f64"
    )[0]


def count(module: Module, kind: str) -> int:
    return sum(op.kind == kind for op in module.graphs["main"].ops)


@st.composite
def sums(draw):
    """Sums that line up: kernels of odd sizes around one centre."""
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    stride, dilation, norm = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.booleans())
    norm &= stride == 1
    others = st.lists(st.sampled_from([(1, 1), (3, 1), (1, 3), (3, 3)]), min_size=0 if norm else 1, max_size=2)
    sizes = draw(st.permutations([draw(st.sampled_from([(3, 3), (5, 3)])), *draw(others)]))
    kernels = tuple((size, draw(st.booleans()), draw(st.booleans())) for size in sizes)
    return Branches(
        4 if norm else draw(st.sampled_from([4, 8])), groups, stride, dilation, kernels, norm, draw(st.booleans())
    )


@settings(max_examples=60, deadline=None)
@given(sums())
def test_a_sum_of_parallel_convolutions_is_one_with_the_same_numbers(branches):
    module, weights, ins, expected = drawn(branches)
    after = merged(module)
    assert (count(after, "conv"), count(after, "batch_norm")) == (1, 0)
    np.testing.assert_allclose(computed(module, weights, ins), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(computed(after, weights, ins), expected, rtol=1e-9, atol=1e-9)


REP = Branches(4, 1, 1, 1, (((3, 3), True, True), ((1, 1), False, False)), True, True)


def test_a_kernel_at_another_place_is_seen():
    """A control: one tap to the side gives other numbers."""
    module, weights, ins, expected = drawn(REP)
    after = merged(module)
    main = after.graphs["main"]
    aside = {"low": (0, 0, 1, 0), "high": (0, 0, 1, 2)}
    ops = tuple(op.with_attrs(**aside) if op.kind == "pad" else op for op in main.ops)
    wrong = after.but(graphs={"main": replace(main, ops=ops)})
    assert count(wrong, "pad") == 2
    assert np.abs(computed(wrong, weights, ins) - expected).max() > 0.1


STAY = {
    "two places that share no taps": [((2, 2), (0, 0, 1, 1), False, False), ((2, 2), (1, 1, 0, 0), False, False)],
    "rows and columns": [((3, 1), (1, 0, 1, 0), False, False), ((1, 3), (0, 1, 0, 1), False, False)],
}


def test_what_does_not_pay_stays():
    for kernels in STAY.values():
        lines = "\n".join(
            f"    %w{i} : f32[4,4,{k[0]},{k[1]}] = read(@w{i})\n"
            f"    %y{i} : f32[1,4,6,6] = conv(%x, %w{i}, pads=[{','.join(map(str, pads))}])"
            for i, (k, pads, _, _) in enumerate(kernels)
        )
        vars = "\n".join(f"  var @w{i} : f32[4,4,{k[0]},{k[1]}] param" for i, (k, *_) in enumerate(kernels))
        module = parse_module(
            f"module @m {{\n{vars}\n  graph @main(%x : f32[1,4,6,6]) {{\n{lines}\n"
            "    %y : f32[1,4,6,6] = add(%y0, %y1)\n    return %y\n  }\n}\n",
            "text",
        )
        check(module, ("typed",))
        assert merge_convolutions(module, MergeConvolutionsOptions()) is module


SUM = """module @m {
  var @a : f32[4,4,3,3] param
  var @b : f32[4,4,1,1] param
  graph @main(%x : f32[1,4,6,6]) {
    %a : f32[4,4,3,3] = read(@a)
    %b : f32[4,4,1,1] = read(@b)
    %p : f32[1,4,6,6] = conv(%x, %a, pads=[1,1,1,1])
    %q : f32[1,4,6,6] = conv(%x, %b)
    %y : f32[1,4,6,6] = add(%p, %q)
    return %y
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %y", "return %y, %q"),
        ("conv(%x, %b)", "conv(%a.x, %b)"),
        ("    return", "    write(@b, %b)\n    return"),
        ("f32", "f64"),
    ],
    ids=["used twice", "another input", "trained", "other type"],
)
def test_sums_that_stay(old, new):
    text = SUM.replace(old, new)
    if "%a.x" in text:
        text = text.replace("    %p ", "    %a.x : f32[1,4,6,6] = relu(%x)\n    %p ", 1)
    module = parse_module(text, "text")
    check(module, ("typed",))
    assert merge_convolutions(module, MergeConvolutionsOptions()) is module


def test_weights_are_not_merged_where_a_gpu_would_do_it_with_every_call():
    module = parse_module(SUM, "text")
    assert count(merge_convolutions(module.but(cluster=Cluster.local(2)), MergeConvolutionsOptions()), "conv") == 1
    gpus = module.but(cluster=Cluster.listed("cpu,sm_90"))
    assert merge_convolutions(gpus, MergeConvolutionsOptions()) is gpus


class Parallel(nn.Module):
    """Two convolutions and their input, each with a norm, whose statistics are lists of numbers in the module."""

    def __init__(self, groups):
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1, groups=groups)
        self.b = nn.Conv2d(4, 4, 1, groups=groups)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        a, b, c = self.norms
        return torch.relu(a(self.a(x)) + b(self.b(x)) + c(x))


@pytest.mark.parametrize("groups", [1, 4])
def test_merged_weights_are_packed_once_and_compiled_code_gives_the_numbers_of_torch(groups, tmp_path):
    torch.manual_seed(3)
    parallel, x = Parallel(groups).eval(), torch.randn(2, 4, 14, 15)
    plan = ps.plan(ps.from_torch(parallel, (x,)), ps.Cluster.local(1, threads=[1]))
    graph = plan.module.graphs["s0.F"]
    (conv,) = [op for op in graph.ops if op.kind == "conv"]
    assert conv.attrs["packed"]
    assert is_inline(graph.producers()[conv.ins[1]])
    loaded = ps.load(ps.compile(plan, tmp_path / "bundle"))
    (result,) = loaded({plan.module.inputs[0].name: x.numpy()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(result, parallel(x).numpy(), rtol=1e-4, atol=1e-4)
