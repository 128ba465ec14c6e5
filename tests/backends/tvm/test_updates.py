"""Update graphs of every optimiser, compiled, against the interpreter over several steps; and what does not depend on the learning rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.group import rename
from penstock.backends.tvm.kernels.tools.elements import POINTWISE
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import GRAD, Graph, Module, Var, signature
from penstock.ir.training.optimizers import OPTIMIZERS
from penstock.ir.types import TensorType
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.passes.training.optimizer import OptimizerOptions, optimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (24, 70),
    "tall": (70, 24),
    "bias": (37,),
    "filter": (5, 3, 2, 2),
    "one": (),
}
STEPS = 4


def module_of(dtype: str = "f32", **options: object) -> Module:
    variables = {}
    for name, shape in SHAPES.items():
        variables[name] = Var(name, TensorType(dtype, shape), "param")
        variables[f"{name}.grad"] = Var(f"{name}.grad", TensorType(dtype, shape), GRAD, init="zeros")
    return optimizer(Module("updates", vars=variables), OptimizerOptions(**options))  # type: ignore[arg-type]


def graph_of(module: Module) -> Graph:
    graph = simplify(module, SimplifyOptions()).graphs["U"]
    staged = module.but(graphs={"s0.U": Graph("s0.U", (), (), graph.ops)})
    return fuse(staged, FuseOptions()).graphs["s0.U"]


def start(var: Var) -> torch.Tensor:
    if isinstance(var.init, tuple):
        return torch.tensor(var.init, dtype=torch.float64).reshape(var.type.dims)
    kinds = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64}
    if var.init == "zeros":
        return torch.zeros(var.type.dims, dtype=kinds[var.type.dtype])
    return torch.randn(var.type.dims, dtype=kinds[var.type.dtype], generator=torch.Generator().manual_seed(1))


def errors(module: Module, program: TvmProgram, graph: Graph) -> dict[str, float]:
    """Variables after some steps: the largest difference, as a part of the largest element."""
    ours, theirs = ({name: start(var) for name, var in module.vars.items()} for _ in range(2))
    slots = signature(graph).slots
    random = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for name, var in module.vars.items():
            if var.role == GRAD:
                drawn = torch.randn(var.type.dims, dtype=ours[name].dtype, generator=random)
                ours[name].copy_(drawn)
                theirs[name].copy_(drawn)
        program.call(graph.name, [ours[slot.var] for slot in slots])
        NumpyProgram([graph]).call(graph.name, [theirs[slot.var] for slot in slots])
    pairs = {name: (ours[name].double(), theirs[name].double()) for name in module.vars}
    return {name: float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "f32") for kind in OPTIMIZERS),
        *(pytest.param(kind, "f64", marks=pytest.mark.slow if i % 2 else ()) for i, kind in enumerate(OPTIMIZERS)),
    ],
)
def test_compiled_updates_agree_with_the_interpreter(kind: str, dtype: str, tmp_path: Path) -> None:
    extra = {"nesterov": True} if kind == "momentum" else {}
    groups = ("bias{lr=0.5,weight_decay=0.0}", "filter{kind=lion}")
    module = module_of(dtype, kind=kind, weight_decay=0.1, rate="cosine{steps=5,warmup=2}", groups=groups, **extra)
    graph = graph_of(module)
    built = build_graphs([graph], tmp_path / "stage.so", CompileOptions("host"))
    found = errors(module, TvmProgram(built.path, [graph]), graph)
    assert {name: e for name, e in found.items() if not e <= (2e-5 if dtype == "f32" else 1e-12)} == {}
    assert found["step"] == 0


def test_control_a_wrong_rule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments exchanged. Compiled in this process, and not found in a cache, or nobody would see the wrong rule."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    right = POINTWISE["adamw"]
    monkeypatch.setitem(
        POINTWISE, "adamw", lambda f, a, *x: right(f, {**a, "beta1": a["beta2"], "beta2": a["beta1"]}, *x)
    )
    module = module_of(kind="adamw")
    graph = graph_of(module)
    built = build_graphs([graph], tmp_path / "stage.so", CompileOptions("host", jobs=1))
    assert errors(module, TvmProgram(built.path, [graph]), graph)["bias"] > 1e-3


def test_no_kernel_knows_the_learning_rate() -> None:
    """Rates, schedules and the factors of groups: the texts of kernels, by which they are found again, are the same."""

    def texts(**options: object) -> list[str]:
        graph = graph_of(module_of(kind="muon", **options))
        return [rename(step.group).text for step in plan_kernels(graph, machine_of("host")).steps]

    plain = texts(groups=("bias{lr=0.5}",))
    for changed in ({"lr": 0.7}, {"adamw_lr": 0.1}, {"rate": "cosine{steps=9,warmup=2}"}, {"rate": "step{every=3}"}):
        assert texts(**{"groups": ("bias{lr=0.25}",), **changed}) == plain
    assert texts(groups=("bias{lr=0.5}",), beta=0.5) != plain
    assert np.size(plain) > 5


def test_another_learning_rate_compiles_nothing(kept: Path, tmp_path: Path) -> None:
    def cached(**options: object) -> bool:
        graph = graph_of(module_of(kind="adamw", **options))
        return build_graphs([graph], tmp_path / "stage.so", CompileOptions("host")).cached

    assert not cached()
    assert cached(lr=0.7, rate="cosine{steps=9,warmup=2}")
    assert not cached(beta1=0.5)
