"""Tests of the results of GPU kernels without a GPU: the TIR of every row's samples, with loops in place of blocks and
threads, against the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from oracles.judge import to_tensor, wrong_results
from samples import Sample, samples_of
from tvm import tirx

from penstock import api
from penstock.backends.interface import StageProgram
from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.cuda import torch_calls
from penstock.backends.tvm.cuda.kernels.generate import KINDS
from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.cuda.torch_calls import CALLS, register
from penstock.backends.tvm.group import LibraryCall
from penstock.backends.tvm.kernels.tools.elements import POINTWISE
from penstock.backends.tvm.lower.lower import plan_kernels, relax_module
from penstock.backends.tvm.pipeline import PIPELINE
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import PORTABLE
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Op, Value, signature
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.store import initial_arrays
from penstock.ir.ops import OPS, make
from penstock.ir.training.optimizers import Momentum
from penstock.ir.types import FLOATS, parse_type
from penstock.models import write_cnn, write_gpt
from penstock.passes.kernels.fuse import choose_kernels
from penstock.runtime.state.tensors import TORCH_DTYPES, as_array

from ...cases import compare, difference, make_args, random_array
from .serial_threads import count_barriers, serial_module

# What is judged here is the TIR: LLVM only has to carry it out.
UNOPTIMISED = tvm.target.Target({"kind": "llvm", "mcpu": PORTABLE, "opt-level": 0})


# The samples of a variable's rows are turns (test_caches.py).
SAMPLED = sorted(KINDS - {"put"})


def build_serial(
    graphs: Sequence[Graph], folder: Path, *, forwards: bool = True, drop_barriers: bool = False
) -> TvmProgram:
    """GPU kernels of graphs as a program for this machine."""
    module = serial_module(lower_for_device(graphs), forwards, drop_barriers)
    library = folder / f"serial{forwards}{drop_barriers}.so"
    tvm.compile(module, target=UNOPTIMISED, relax_pipeline="default_build", tir_pipeline=PIPELINE).export_library(
        str(library)
    )
    return TvmProgram(library, graphs)


def lower_for_device(graphs: Sequence[Graph]) -> Any:
    return relax_module([plan_kernels(graph, device_machine("sm_90")) for graph in graphs], declared=False)


def check(samples: Sequence[Sample], folder: Path) -> list[str]:
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    program = build_serial(graphs, folder)
    with np.errstate(all="ignore"):
        return [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


def test_every_row_has_a_kernel_for_gpus() -> None:
    assert {name for name, row in OPS.items() if row.family not in ("state", "collective") or name == "put"} == KINDS


@pytest.mark.parametrize("kind", SAMPLED)
def test_samples_of_every_row(kind: str, tmp_path: Path) -> None:
    samples = samples_of(kind)
    assert not check(samples[:: max(len(samples) // 8, 1)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLED)
def test_every_sample_of_a_row(kind: str, tmp_path: Path) -> None:
    assert not check(samples_of(kind), tmp_path)


def test_a_wrong_formula_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels take their formulas from the same table as those for CPUs."""
    monkeypatch.setitem(POINTWISE, "gelu_grad", lambda f, a, x, dy: dy * f.gelu_slope(x, "tanh"))
    assert check([s for s in samples_of("gelu_grad") if s.attrs.get("approximate") != "tanh"], tmp_path)


# Operations whose kernels have barriers.
TOGETHER = ("matmul", "softmax", "layer_norm", "sum", "cross_entropy", "layer_norm_grad_weight")


def some_results(program: TvmProgram, graphs: Sequence[Graph], samples: Sequence[Sample]) -> list[bytes]:
    calls = [
        program.call(g.name, [to_tensor(a, program.device) for a in s.arrays()])
        for g, s in zip(graphs, samples, strict=True)
    ]
    return [as_array(x).tobytes() for results in calls for x in results]


def test_the_order_of_threads_between_barriers_does_not_matter(tmp_path: Path) -> None:
    samples = [
        s for kind in TOGETHER for s in samples_of(kind)[:4] if s.dtype == "f32" and all(v.type.size for v in s.op.ins)
    ]
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    functions = [f for _, f in lower_for_device(graphs).functions_items() if isinstance(f, tirx.PrimFunc)]
    barriers = sum(count_barriers(f.body) for f in functions)
    assert barriers > len(TOGETHER)
    forwards, backwards, loose = (
        some_results(build_serial(graphs, tmp_path, forwards=f, drop_barriers=d), graphs, samples)
        for f, d in ((True, False), (False, False), (True, True))
    )
    assert forwards == backwards
    # The control: without barriers, results change.
    assert sum(a != b for a, b in zip(forwards, loose, strict=True)) > len(samples) // 4


@pytest.mark.parametrize("kind", sorted(set(CALLS) & KINDS))
def test_library_calls_mean_the_same(kind: str, tmp_path: Path) -> None:
    """Torch does here on the CPU what it is asked to do on a GPU."""
    register()
    samples = [s for s in samples_of(kind) if s.dtype in FLOATS and all(v.type.size for v in (*s.op.ins, *s.op.outs))]
    graphs = [with_library(s.graph(f"s0.g{i}")) for i, s in enumerate(samples)]
    for s, g in zip(samples, graphs, strict=True):
        assert isinstance(plan_kernels(g, device_machine("sm_90")).steps[0].kernel.function, LibraryCall), s
    program = build_serial(graphs, tmp_path)
    assert not [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


def with_library(graph: Graph) -> Graph:
    """The graph with everything left to torch. Its statistics of attention are others with the same meaning."""
    ops = tuple(op.with_attrs(library="torch") if op.kind in CALLS else op for op in graph.ops)
    return replace(graph, ops=ops, outs=graph.outs[:1] if ops[0].kind == "attention" else graph.outs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", ["torch", None])
def test_attention_forward_by_torch_and_backward_by_either(causal: bool, backward: str | None, tmp_path: Path) -> None:
    register()
    q, k, v, dy = (Value(name, parse_type("f32[2,3,37,16]")) for name in ("q", "k", "v", "dy"))
    forward = make("attention", [q, k, v], ["y", "largest", "sum"], "", scale=0.25, causal=causal, library="torch")
    gradients = make("attention_grad", [dy, q, k, v, *forward.outs], ["dq", "dk", "dv"], "", scale=0.25, causal=causal)
    graph = Graph(
        "s0.F", (q, k, v, dy), (forward.outs[0], *gradients.outs), (forward, gradients.with_attrs(library=backward))
    )
    assert not compare(build_serial([graph], tmp_path), graph, make_args(graph, np.random.default_rng(5)))


def test_layout_changes_in_front_of_library_calls_are_views(tmp_path: Path) -> None:
    register()
    x, w = Value("x", parse_type("f32[6,8,10]")), Value("w", parse_type("f32[1,5,12]"))
    split = make("reshape", [x], ["a"], "", shape=(6, 8, 2, 5), kernel="inline0")
    turned = make("transpose", split.outs, ["b"], "", perm=(2, 0, 1, 3), kernel="inline1")
    part = make(
        "slice", turned.outs, ["c"], "", start=(0, 1, 0, 0), stop=(2, 6, 8, 5), step=(1, 2, 1, 1), kernel="inline2"
    )
    spread = make("broadcast", [w], ["d"], "", shape=(3, 5, 12), kernel="inline3")
    product = make("matmul", [part.outs[0], spread.outs[0]], ["y"], "", library="torch", kernel="k0")
    graph = Graph("s0.F", (x, w), product.outs, (split, turned, part, spread, product))
    assert [len(step.group.ops) for step in plan_kernels(graph, device_machine("sm_90")).steps] == [1]
    assert not compare(build_serial([graph], tmp_path), graph, make_args(graph, np.random.default_rng(4)))


def gradient(dtype: str) -> Graph:
    """A product of a library, whose result is added to a variable in float32."""
    x, y = Value("x", parse_type(f"{dtype}[2,12,40]")), Value("y", parse_type(f"{dtype}[24,33]"))
    flat = make("reshape", [x], ["flat"], "", shape=(24, 40))
    dw = make("matmul", [flat.outs[0], y], ["dw"], "", ta=True, library="torch")
    ops = [flat, dw, *([make("cast", dw.outs, ["wide"], "", dtype="f32")] if dtype != "f32" else [])]
    ops.append(Op("accum", ops[-1].outs, (), {"var": "w.grad"}))
    ops.append(make("relu", [y], ["z"], ""))
    return choose_kernels(Graph("s0.B", (x, y), ops[-1].outs, tuple(ops)))


@pytest.mark.parametrize("added", [True, False], ids=["added", "control: stored"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_products_are_added_to_variables_where_they_are_made(
    dtype: str, added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    graph = gradient(dtype)
    steps = plan_kernels(graph, device_machine("sm_90")).steps
    (call,) = (step for step in steps if isinstance(step.kernel.function, LibraryCall))
    assert ([op.kind for op in call.group.ops], call.kernel.outs) == (["matmul", "accum"], ())
    if not added:
        stores = {"matmul": lambda a, total, x, y: total.copy_(x.mT.float() @ y.float())}
        monkeypatch.setattr(torch_calls, "ADDED", stores)
    rng = np.random.default_rng(4)
    given = [torch.tensor(random_array(rng, v.type).astype(np.float32)).to(TORCH_DTYPES[dtype]) for v in graph.ins]
    before = torch.randn(40, 33)
    total = before.clone()
    build_serial([graph], tmp_path).call(graph.name, [*given, total])
    expected = before.double() + given[0].double().reshape(24, 40).mT @ given[1].double()
    # Rounding to 16 bits on the way would be a thousand times as much.
    assert torch.allclose(total.double(), expected, rtol=1e-5, atol=1e-5) == added


@pytest.mark.parametrize(
    ("name", "library", "precision"),
    [*product(["gpt", "cnn"], ["torch", "none"], ["f32"]), ("gpt", "torch", "bf16")],
)
def test_the_graphs_of_a_training(name: str, library: str, precision: str, tmp_path: Path) -> None:
    """Fused kernels, state updated in place, kernels with several launches, and library calls between them."""
    register()
    if name == "gpt":
        path = write_gpt(tmp_path / "gpt.onnx", layers=1, width=16, heads=2, vocab=20, positions=8)
    else:
        path = write_cnn(tmp_path / "cnn.onnx")
    model = api.from_onnx(path, dims={"batch": 2})
    training = Training(loss="cross_entropy", optimizer=Momentum(lr=0.1), microbatches=2)
    plan = api.plan(model, Cluster.listed("sm_90"), training, cuda_libraries=library, precision=precision)
    graphs = [g for g in plan.module.graphs.values() if g.name.startswith("s0.")]
    assert {g.name for g in graphs} == {"s0.F", "s0.B", "s0.U"}
    inference = api.plan(model, Cluster.listed("sm_90"), None, cuda_libraries=library).module.graphs["s0.F"]
    graphs.append(replace(inference, name="s1.F"))
    called = sum(op.attrs.get("library") == "torch" for g in graphs for op in g.ops)
    assert (called > 0) == (library == "torch")
    assert any(note.origin == "libraries" for note in plan.module.notes) == (library == "torch")
    program = build_serial(graphs, tmp_path)
    assert not compare(program, graphs[-1], make_args(graphs[-1], np.random.default_rng(3)))
    # Rounded to 8 bits, a number in between may fall to either side.
    tolerance = 0.02 if precision == "bf16" else None
    # Two steps: what the backward graph gets is what the forward graph saved, on both sides.
    first, second = (initial_state(plan) for _ in range(2))
    rng, interpreter = np.random.default_rng(4), NumpyProgram(graphs)
    for _ in range(2):
        fed = {v.name: random_array(rng, v.type) for v in plan.module.inputs}
        found, expected = one_step(program, graphs[:3], fed, first), one_step(interpreter, graphs[:3], fed, second)
        assert not difference(found, expected, tolerance)
    differences = {name: difference(first[name], second[name], tolerance) for name in first}
    assert not {name: wrong for name, wrong in differences.items() if wrong}


def initial_state(plan: api.Plan) -> dict[str, torch.Tensor]:
    arrays = initial_arrays(plan.module, plan.model.imported.weights, list(plan.module.vars), TYPED)
    return {name: to_tensor(array, torch.device("cpu")) for name, array in arrays.items()}


def one_step(
    program: StageProgram, graphs: Sequence[Graph], fed: dict[str, np.ndarray], state: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Forward, backward and update; gives the loss."""
    held = {name: torch.tensor(array) for name, array in fed.items()}
    losses = []
    for graph in graphs:
        sig = signature(graph)
        results = program.call(graph.name, [*(held[v.name] for v in sig.ins), *(state[slot.var] for slot in sig.slots)])
        held |= dict(zip((v.name for v in graph.results), results, strict=True))
        losses += results[:1]
    return losses[0]
