"""Tests of the cost of epilogues: behind a product they cost as much as by themselves, over vectors and without
denormals.

A result below 2^-126 takes a processor ten to thirty times as long as another one. It leaves a mark, which is asked for here: a kernel whose results
are no such numbers must not make any on the way. What is made of vectors is read in the code that LLVM is given.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import tvm

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.pipeline import PIPELINE
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of, tvm_target
from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import make

from ...cases import build, to_torch, value

TARGETS = ("host", "skylake-avx512", "portable")
# FE_UNDERFLOW of x86: a result was too small, and not exact.
UNDERFLOW = 0x10
FUNCTIONS: dict[str, tuple[str, dict[str, Attr]]] = {
    "exp": ("exp", {}),
    "tanh": ("tanh", {}),
    "sigmoid": ("sigmoid", {}),
    "erf": ("erf", {}),
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "gelu_grad": ("gelu_grad", {"approximate": "none"}),
    "gelu_grad_tanh": ("gelu_grad", {"approximate": "tanh"}),
}
M, K, N = 64, 64, 96


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(x)).numpy()


def inner(x: np.ndarray) -> np.ndarray:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu_slope(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_slope_tanh(x: np.ndarray) -> np.ndarray:
    s = sigmoid(inner(x))
    return s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


# In float64, right where results are small, too.
MEANING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "gelu": lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: x * sigmoid(inner(x)),
    "gelu_grad": gelu_slope,
    "gelu_grad_tanh": gelu_slope_tanh,
}


def function_of(name: str, x: Value, other: Value, kernel: str) -> Op:
    kind, attrs = FUNCTIONS[name]
    return make(kind, (x, other) if kind == "gelu_grad" else (x,), ["y"], "", kernel=kernel, **attrs)


def alone(name: str) -> Graph:
    """The function at every element; the gradient of gelu with 1 behind it."""
    x, dy = value("x", "f32[4096]"), value("dy", "f32[4096]")
    kind, attrs = FUNCTIONS[name]
    ins = (x, dy) if kind == "gelu_grad" else (x,)
    op = make(kind, ins, ["y"], "", **attrs)
    return Graph(f"s0.{name}", ins, op.outs, (op,))


def behind(name: str) -> Graph:
    """The function behind a product and its bias, as one kernel."""
    a, b, row, other = (
        value("a", f"f32[{M},{K}]"),
        value("b", f"f32[{K},{N}]"),
        value("row", f"f32[{N}]"),
        value("other", f"f32[{M},{N}]"),
    )
    p = make("matmul", (a, b), ["p"], "", kernel="k0")
    total = make("add", (p.outs[0], row), ["t"], "", kernel="k0")
    op = function_of(name, total.outs[0], other, "k0")
    return Graph(f"s0.p_{name}", (a, b, row, other)[: 4 if other in op.ins else 3], op.outs, (p, total, op))


class Floats:
    """What the processor notes of the floats it computes in this thread."""

    def __init__(self) -> None:
        self._libm = ctypes.CDLL("libm.so.6")

    def underflows(self, run: Callable[[], object]) -> bool:
        """Whether any result of a call was too small for a normal number."""
        self._libm.feclearexcept(UNDERFLOW)
        run()
        return bool(self._libm.fetestexcept(UNDERFLOW))


needs_notes = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the C library of Linux")


@pytest.fixture(scope="module", params=TARGETS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TvmProgram:
    if request.param == "skylake-avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    graphs = [g for name in FUNCTIONS for g in (alone(name), behind(name))]
    return build(graphs, tmp_path_factory.mktemp("epilogues"), request.param)


def operands(name: str) -> np.ndarray:
    """4096 numbers between -1000 and 1000 whose results are normal, or 0 as nearly as can be told."""
    drawn = np.concatenate([np.linspace(-1000, 1000, 8001), np.linspace(-20, 20, 8001), [-math.inf, math.inf]]).astype(
        np.float32
    )
    with np.errstate(all="ignore"):
        size = np.abs(MEANING[name](drawn.astype(np.float64)))
    kept = drawn[~((size > 1e-47) & (size < 1e-35))]
    return np.resize(np.random.default_rng(0).permutation(kept), 4096)


@needs_notes
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_normal_results_are_computed_by_normal_numbers(name: str, program: TvmProgram) -> None:
    args = [torch.from_numpy(operands(name)), torch.ones(4096)][: len(alone(name).ins)]
    assert not Floats().underflows(lambda: program.call(f"s0.{name}", args))


@needs_notes
@pytest.mark.parametrize("x", [-88.0, -95.0, -103.0])
def test_results_that_are_no_normal_numbers_are_noticed(x: float, program: TvmProgram) -> None:
    assert Floats().underflows(lambda: program.call("s0.exp", [torch.full((4096,), x)]))


@needs_notes
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"exp"}))
@pytest.mark.parametrize("size", [0.15, 5.0])
def test_behind_a_product_results_are_right_whatever_their_size(name: str, size: float, program: TvmProgram) -> None:
    rng = np.random.default_rng(3)
    a, b, row = (rng.uniform(0.1, size, dims).astype(np.float32) for dims in ((M, K), (K, N), (N,)))
    # Half of the columns are large and positive, half negative: all functions go to their ends.
    b[:, ::2] *= -1
    other = rng.standard_normal((M, N)).astype(np.float32)
    args = [to_torch(x) for x in (a, b, row, other)][: len(behind(name).ins)]
    found: list[torch.Tensor] = []
    noticed = Floats().underflows(lambda: found.extend(program.call(f"s0.p_{name}", args)))
    exact = MEANING[name](a.astype(np.float64) @ b.astype(np.float64) + row)
    exact = exact * other if len(args) == 4 else exact
    assert np.abs(found[0].double().numpy() - exact).max() <= 1e-5 * max(np.abs(exact).max(), 1)
    assert not noticed


# ---------------------------------------------------------------------------------------- vectors


def llvm_of(name: str, target: str) -> str:
    """What LLVM is given for the kernel of a function behind a product, optimised."""
    machine = machine_of(target)
    (step,) = plan_kernels(behind(name), machine).steps
    module = tvm.IRModule({tvm.ir.GlobalVar("kernel"): step.kernel.function.with_attr("global_symbol", "kernel")})
    return str(tvm.tirx.build(module, target=tvm_target(machine.name), pipeline=PIPELINE).inspect_source("ll"))


def scalar_work(code: str) -> list[str]:
    """Divisions of single floats, and calls of functions of the C library for them."""
    calls = re.findall(r"call [^\n@]*\bfloat @(?:llvm\.)?((?:exp|tanh|erf|log|pow|f?div)[\w.]*)\(", code)
    return [*re.findall(r"fdiv [^\n<]*\bfloat [^\n]*", code), *calls]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_what_stands_behind_a_product_is_done_over_vectors(name: str, target: str) -> None:
    code = llvm_of(name, target)
    assert scalar_work(code) == []
    lanes = machine_of(target).lanes
    assert re.search(rf"f(?:mul|div)[^\n]*<{lanes} x float>", code)


def test_work_on_single_floats_is_noticed() -> None:
    scalar = "%1 = call float @llvm.exp.f32(float %0)\n%2 = fdiv float 1.0, %1\n%3 = call fast float @tanhf(float %2)\n"
    assert len(scalar_work(scalar)) == 3
    assert not scalar_work("%2 = fdiv <16 x float> %0, %1\n%3 = call <16 x float> @llvm.fma.v16f32(<16 x float> %2)\n")
