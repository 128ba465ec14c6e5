"""Whole stage graphs: fused groups, state in place, training steps of real models, the cache, and what loading refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tvm import tirx

import penstock as ps
from penstock.backends.interface import CompileOptions, StageSources, stage_graphs
from penstock.backends.registry import backend_of
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.kernels.tools.elements import POINTWISE
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import make
from penstock.ir.training.optimizers import optimizer_of
from penstock.ir.verify.verifier import check
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.errors import PenstockError, UsageError, VerifyError

from .cases import Shown, build, compare, difference, make_args, value


class Writer:
    """Operations written one after the other."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def __call__(self, kind: str, *ins: Value, **attrs: object) -> Value:
        self.ops.append(make(kind, ins, [f"v{len(self.ops)}"], "", **attrs))  # type: ignore[arg-type]
        return self.ops[-1].outs[0]

    def state(self, kind: str, var: str, given: Value) -> Value:
        reads = kind in ("read", "take")
        out = Value(f"v{len(self.ops)}", given.type)
        self.ops.append(Op(kind, () if reads else (given,), (out,) if reads else (), {"var": var}))
        return out

    def graph(self, ins: Sequence[Value], outs: Sequence[Value], saved: Sequence[Value] = ()) -> Graph:
        return Graph("s0.F", tuple(ins), tuple(outs), tuple(self.ops), tuple(saved))


def fused(graph: Graph) -> Graph:
    module = Module("m", graphs={graph.name: graph})
    done = fuse(module, FuseOptions())
    check(done.but(facts=("fused",)), ("fused",))
    return done.graphs[graph.name]


def kernels_of(graph: Graph) -> int:
    return len(plan_kernels(graph, machine_of("host")).steps)


def agrees(graph: Graph, folder: Path, shared: bool = True, seed: int = 0) -> list[str]:
    program = build([graph], folder)
    return compare(program, graph, make_args(graph, np.random.default_rng(seed), shared=shared), shared)


# ------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize(("m", "n", "k"), [(16, 64, 24), (33, 50, 48), (1, 20, 30), (5, 3, 4500)])
def test_a_product_with_everything_behind_it_is_one_kernel(m: int, n: int, k: int, tmp_path: Path) -> None:
    """Bias, saved pre-activation, gelu, residual, scaling: two results from one kernel."""
    w = Writer()
    x, weight, bias, rest = (
        value("x", f"f32[{m},{k}]"),
        value("w", f"f32[{k},{n}]"),
        value("b", f"f32[{n}]"),
        value("r", f"f32[{m},{n}]"),
    )
    u = w("add", w("matmul", x, weight), bias)
    half = w("const", value=0.5, dtype="f32", shape=())
    y = w("mul", w("add", w("gelu", u, approximate="tanh"), rest), half)
    graph = fused(w.graph((x, weight, bias, rest), (y,), (u,)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_what_nobody_reads_is_not_run(tmp_path: Path) -> None:
    """Alone, and beside what is read."""
    w = Writer()
    x = value("x", "f32[5,7]")
    w("less", x, x)
    w("softmax", w("exp", x), axis=1)
    y = w("tanh", x)
    graph = fused(w.graph((x,), (y,)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_batches_that_share_an_operand(tmp_path: Path) -> None:
    """Indices of two batches in one register were cut wrongly by a pass of LLVM 22.1.0 (target.py): the kernel read far outside of its tensor."""
    w = Writer()
    queries, memory = value("q", "f32[2,4,64]"), value("m", "f32[2,4,8,8]")
    heads = w("transpose", w("reshape", queries, shape=(2, 4, 8, 8)), perm=(0, 2, 1, 3))
    first = w("slice", heads, start=(0, 0, 0, 0), stop=(2, 8, 1, 8), step=(1, 1, 1, 1))
    groups = w("broadcast", w("reshape", memory, shape=(2, 4, 1, 8, 8)), shape=(2, 4, 2, 8, 8))
    y = w("matmul", first, w("reshape", groups, shape=(2, 8, 8, 8)))
    graph = fused(w.graph((queries, memory), (w("mul", y, w("const", value=0.5, dtype="f32", shape=())),)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (33, 50, 48), (20, 33, 5000)])
def test_a_gradient_is_added_to_its_variable_by_the_product_itself(m: int, n: int, k: int, tmp_path: Path) -> None:
    w = Writer()
    dy, x = value("dy", f"f32[{k},{n}]"), value("x", f"f32[{k},{m}]")
    w.state("accum", "w.grad", w("matmul", x, dy, ta=True))
    graph = fused(w.graph((dy, x), ()))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


@pytest.mark.parametrize("geometry", [(5, 40, 3, 1), (20, 48, 3, 2), (24, 30, 1, 1), (6, 4, 3, 1)])
def test_a_convolution_with_everything_behind_it_is_one_kernel(
    geometry: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """Bias, normalisation with known statistics, residual, relu, with the sum saved: channels in lanes, positions in lanes, one tap."""
    channels, filters, kernel, stride = geometry
    w = Writer()
    x, weight = value("x", f"f32[2,{channels},17,19]"), value("w", f"f32[{filters},{channels},{kernel},{kernel}]")
    made = w("conv", x, weight, strides=(stride, stride), pads=(kernel // 2,) * 4)
    bias, rest = value("b", f"f32[{filters},1,1]"), value("r", str(made.type))
    statistics = [value(name, f"f32[{filters}]") for name in ("scale", "shift", "mean", "variance")]
    u = w("add", w("batch_norm", w("add", made, bias), *statistics), rest)
    y = w("relu", u)
    graph = fused(w.graph((x, weight, bias, rest, *statistics), (y,), (u,)))
    assert kernels_of(graph) == 1
    args = make_args(graph, np.random.default_rng(5))
    args[-1] = np.abs(args[-1]) + 0.1
    assert not compare(build([graph], tmp_path), graph, args)


@pytest.mark.parametrize(("groups", "channels", "filters"), [(1, 20, 40), (1, 40, 20), (2, 36, 72), (12, 12, 12)])
def test_a_gradient_is_added_to_its_variable_by_the_convolution_itself(
    groups: int, channels: int, filters: int, tmp_path: Path
) -> None:
    w = Writer()
    x, dy = value("x", f"f32[3,{channels},9,11]"), value("dy", f"f32[3,{filters},9,11]")
    shape = (filters, channels // groups, 3, 3)
    w.state("accum", "w.grad", w("conv_grad_weight", x, dy, shape=shape, groups=groups, pads=(1, 1, 1, 1)))
    graph = fused(w.graph((x, dy), ()))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


@pytest.mark.parametrize(("axis", "reverse"), [(1, False), (1, True), (0, False)])
def test_a_running_sum_with_what_is_around_it_is_one_kernel(axis: int, reverse: bool, tmp_path: Path) -> None:
    w = Writer()
    x, y = value("x", "f32[37,45]"), value("y", "f32[45]")
    total = w("cumsum", x, axis=axis, reverse=reverse)
    z = w("mul", w("add", total, y), x)
    w.state("accum", "w.grad", z)
    graph = fused(w.graph((x, y), (z,), (total,)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_what_only_a_sum_reads_is_not_stored(tmp_path: Path) -> None:
    """Gradients of scales: products summed over images and space. The control is read by others, too, and has to be stored on the way."""
    w = Writer()
    x, dy = value("x", "f32[3,5,9,7]"), value("dy", "f32[3,5,9,7]")
    product = w("mul", dy, x)
    w.state("accum", "w.grad", w("sum", product, axes=(0, 2, 3)))
    graph = fused(w.graph((x, dy), ()))
    assert kernels_of(graph) == 1
    (step,) = plan_kernels(graph, machine_of("host")).steps
    assert not step.group.outs
    assert not agrees(graph, tmp_path)
    stored = fused(replace(graph, outs=(product,)))
    (step,) = plan_kernels(stored, machine_of("host")).steps
    assert step.group.outs == (product,)
    assert not agrees(stored, tmp_path / "stored")


def test_heads_are_split_and_merged_without_copies(tmp_path: Path) -> None:
    """Attention over one projection: slices, reshapes and transpositions become addresses, also of what is stored."""
    w = Writer()
    x, weight = value("x", "f32[2,20,48]"), value("w", "f32[48,144]")
    qkv = w("matmul", x, weight)

    def head(i: int) -> Value:
        part = w("slice", qkv, start=(0, 0, 48 * i), stop=(2, 20, 48 * (i + 1)), step=(1, 1, 1))
        return w("transpose", w("reshape", part, shape=(2, 20, 3, 16)), perm=(0, 2, 1, 3))

    q, k, v = head(0), head(1), head(2)
    scores = w("softmax", w("mul", w("matmul", q, k, tb=True), w("const", value=0.25, dtype="f32", shape=())))
    mixed = w("reshape", w("transpose", w("matmul", scores, v), perm=(0, 2, 1, 3)), shape=(2, 20, 48))
    graph = fused(w.graph((x, weight), (mixed,)))
    assert kernels_of(graph) == 4
    assert not agrees(graph, tmp_path)
    apart = replace(graph, ops=tuple(op.with_attrs(kernel=None) for op in graph.ops))
    assert kernels_of(apart) == 16
    assert not agrees(apart, tmp_path)


def test_a_product_of_products_is_split(tmp_path: Path) -> None:
    """A group that no generator can make into one kernel is made into several: one for each operation with loops of its own."""
    w = Writer()
    a = value("a", "f32[17,17]")
    y = w("relu", w("matmul", w("softmax", w("matmul", a, a)), a))
    graph = w.graph((a,), (y,))
    graph = replace(graph, ops=tuple(op.with_attrs(kernel="k0") for op in graph.ops))
    assert kernels_of(graph) == 3
    assert not agrees(graph, tmp_path)


def test_groups_that_wait_for_each_other_are_given_up(tmp_path: Path) -> None:
    w = Writer()
    a = value("a", "f32[5,20]")
    b = w("exp", a)
    c = w("sum", b, axes=(0,))
    d = w("add", b, c)
    graph = w.graph((a,), (d,))
    kernels = ["k0", "k1", "k0"]
    graph = replace(graph, ops=tuple(op.with_attrs(kernel=k) for op, k in zip(graph.ops, kernels, strict=True)))
    assert kernels_of(graph) == 3
    assert not agrees(graph, tmp_path)
    assert kernels_of(fused(replace(graph, ops=tuple(op.with_attrs(kernel=None) for op in graph.ops)))) == 2


def test_residual_and_norm_run_in_the_row_kernel(tmp_path: Path) -> None:
    w = Writer()
    dy, x, scale, stat = value("dy", "f32[6,40]"), value("x", "f32[6,40]"), value("s", "f32[40]"), value("m", "f32[6]")
    dx = w("add", w("layer_norm_grad", dy, x, scale, stat, stat), dy)
    graph = fused(w.graph((dy, x, scale, stat), (dx,)))
    assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path)


def test_a_wrong_epilogue_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = Writer()
    x, bias = value("x", "f32[20,20]"), value("b", "f32[20]")
    graph = fused(w.graph((x, bias), (w("sub", w("matmul", x, x), bias),)))
    assert kernels_of(graph) == 1
    monkeypatch.setitem(POINTWISE, "sub", lambda f, a, x, y: y - x)
    assert agrees(graph, tmp_path)


# ------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("annotate", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_updates_may_write_over_what_they_read(annotate: bool, shared: bool, tmp_path: Path) -> None:
    """AdamW with one buffer for the latest and the next version, and with two; the gradient is left at zero."""
    w = Writer()
    t = value("t", "f32[9,37]")
    p, m, v = (w.state("read", n, t) for n in ("w", "w.adam_m", "w.adam_v"))
    g = w.state("take", "w.grad", t)
    c = [w("const", value=x, dtype="f32", shape=()) for x in (0.1, 0.001, 0.01)]
    op = make("adamw", [p, g, m, v, *c], ["w.new", "m.new", "v.new"], "", weight_decay=0.1)
    w.ops.append(op)
    for name, out in zip(("w", "w.adam_m", "w.adam_v"), op.outs, strict=True):
        w.state("write", name, out)
    graph = replace(w.graph((), ()), name="s0.U")
    if annotate:
        graph = fused(graph)
        assert kernels_of(graph) == 1
    assert not agrees(graph, tmp_path, shared)


def test_what_was_read_stays_what_it_was(tmp_path: Path) -> None:
    """The old value is used, and handed back, after the variable got a new one; a transposed copy of it is what is written."""
    w = Writer()
    t = value("t", "f32[20,20]")
    old = w.state("read", "w", t)
    w.state("write", "w", w("transpose", old, perm=(1, 0)))
    late = w("exp", old)
    for graph in (w.graph((), (late, old)), fused(w.graph((), (late, old)))):
        assert not agrees(graph, tmp_path / str(id(graph)))


def test_a_gradient_read_twice_is_zeroed_after_both(tmp_path: Path) -> None:
    """As global-norm clipping does: the norm of all gradients comes before any update."""
    w = Writer()
    t = value("t", "f32[7,20]")
    p, g = w.state("read", "w", t), w.state("take", "w.grad", t)
    norm = w("sqrt", w("sum", w("mul", g, g), axes=(0, 1)))
    lr = w("const", value=0.1, dtype="f32", shape=())
    w.state("write", "w", w("sgd", p, w("div", g, norm), lr))
    for graph in (w.graph((), (norm,)), fused(w.graph((), (norm,)))):
        assert not agrees(graph, tmp_path / str(id(graph)))


def test_two_gradients_of_one_variable_are_both_added(tmp_path: Path) -> None:
    """A tied embedding: a lookup's gradient and a product's go to the same variable."""
    w = Writer()
    dy, places, x, dz = (
        value("dy", "f32[6,24]"),
        value("i", "i64[6]"),
        value("x", "f32[6,24]"),
        value("dz", "f32[6,11]"),
    )
    w.state("accum", "e.grad", w("gather_grad", dy, places, shape=(11, 24)))
    w.state("accum", "e.grad", w("matmul", dz, x, ta=True))
    graph = fused(w.graph((dy, places, x, dz), ()))
    assert kernels_of(graph) == 2
    assert not agrees(graph, tmp_path)


def test_results_that_are_inputs_and_constants_come_back(tmp_path: Path) -> None:
    w = Writer()
    x = value("x", "f32[3]")
    c = w("const", value=(1.0, 2.0, 3.0), dtype="f32", shape=(3,))
    graph = w.graph((x,), (x, c, w("add", x, c)))
    assert not agrees(graph, tmp_path)


# ------------------------------------------------------------------------------------------------ models


def plan_of(folder: Path, which: str) -> Module:
    if which == "gpt":
        path = write_gpt(folder / "m.onnx", layers=1, width=48, heads=3, vocab=61, positions=20, seed=1)
    elif which == "mlp":
        path = write_mlp(folder / "m.onnx", [20, 48, 10], seed=1)
    else:
        path = write_cnn(folder / "m.onnx", seed=1)
    optimizer = {"gpt": "adamw", "mlp": "sgd", "cnn": "momentum"}[which]
    training = ps.Training(loss="cross_entropy", optimizer=optimizer_of(optimizer, lr=1e-2), microbatches=2)
    return ps.plan(ps.from_onnx(path, dims={"batch": 3}), ps.Cluster.local(2), training, schedule="2bw").module


@pytest.mark.parametrize("which", ["gpt", "mlp", "cnn"])
def test_stages_of_models_agree_with_the_interpreter(which: str, tmp_path: Path) -> None:
    module = plan_of(tmp_path, which)
    backend = backend_of("tvm")
    for stage in (0, 1):
        (name,) = backend.compile_stages(module, [stage], tmp_path)[stage]
        program = backend.load_stage(module, stage, [tmp_path / name])
        for graph in stage_graphs(module, stage):
            args = make_args(graph, np.random.default_rng(stage))
            assert not compare(program, graph, args)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [6, 300])
def test_chains_of_bools_compile(size: int, tmp_path: Path) -> None:
    """A remainder with the sign of the divisor, twice: put back into one another, its conditions kept TVM's simplifier busy for minutes."""
    w = Writer()
    x, y = value("x", f"i32[{size}]"), value("y", f"i32[{size}]")
    zero = w("const", value=0, dtype="i32")
    total = x
    for _ in range(2):
        rest = w("rem", total, y)
        differ = w("not", w("equal", w("less", rest, zero), w("less", y, zero)))
        total = w("where", w("and", w("not", w("equal", rest, zero)), differ), w("add", rest, y), rest)
    graph = w.graph((x, y), (total,))
    rng = np.random.default_rng(0)
    args = [
        rng.integers(-50, 50, size).astype(np.int32),
        rng.integers(1, 9, size).astype(np.int32) * rng.choice([-1, 1], size).astype(np.int32),
    ]
    (found,) = build([graph], tmp_path).call("s0.F", [torch.from_numpy(a) for a in args])
    once = np.mod(args[0], args[1])
    np.testing.assert_array_equal(found.numpy(), np.mod(once, args[1]))


# ------------------------------------------------------------------------------------------------ building and loading


@pytest.fixture
def small() -> Graph:
    w = Writer()
    x = value("x", "f32[4,20]")
    return w.graph((x,), (w("exp", x),))


def test_progress_is_told(small: Graph, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    build_graphs([small], tmp_path / "a.so", CompileOptions(progress=lambda *x: seen.append(x)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]


def test_sources_are_the_same_from_anywhere(small: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache, with everything in it, and with code in it that nobody has looked at: then only texts are made."""
    found: list[StageSources] = []
    shown = [Shown() for _ in range(3)]
    for cache, viewer, steps in (
        ("a", shown[0], ["kernels", "link"]),
        ("a", shown[1], []),
        ("b", None, None),
        ("b", shown[2], ["kernels", "link"]),
    ):
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / cache))
        built = build_graphs([small], tmp_path / "s0.x.so", CompileOptions(viewer=viewer))
        if viewer is not None:
            assert built.cached == (cache == "b" or viewer is shown[1])
            assert viewer.steps == steps
            found.append(viewer.stages["s0"])
    assert found[0] == found[1] == found[2]
    (call,) = found[0].calls
    assert (call.graph, call.operations) == ("s0.F", ("%v0 = exp",))
    assert call.source in found[0].kernels[call.source]
    assert "T.prim_func" in found[0].kernels[call.source]
    assert "def s0_F" in found[0].functions
    assert call.source in found[0].functions
    assert "T.prim_func" not in found[0].functions


def test_arguments_are_checked(small: Graph, tmp_path: Path) -> None:
    """Tensors may lie at any address. Inputs that are not contiguous are copied, slots are refused, and so is what has another type, shape
    or device, which kernels themselves do not look at; nothing is changed then."""
    w = Writer()
    g = value("g", "f32[20]")
    w.state("accum", "w.grad", g)
    accumulate = replace(w.graph((g,), ()), name="s0.B")
    program = build([small, accumulate], tmp_path)
    flat = torch.arange(200, dtype=torch.float32) / 100
    crooked = flat[1:81].view(4, 20)
    (found,) = program.call("s0.F", [crooked])
    assert not difference(found, crooked.exp())
    (found,) = program.call("s0.F", [flat[:80].view(20, 4).t()])
    assert not difference(found, flat[:80].view(20, 4).t().exp())
    total = flat[101:121].clone()
    total = torch.cat([torch.zeros(1), total])[1:]
    expected = total + flat[1:21]
    program.call("s0.B", [flat[1:21], total])
    assert not difference(total, expected)
    spread = torch.zeros(40)
    with pytest.raises(VerifyError, match=r"buffer of @w.grad is not contiguous\n"):
        program.call("s0.B", [flat[:20], spread[::2]])
    assert not spread.any()
    wrong = [
        crooked.double(),
        flat[:80].view(5, 16),
        flat[:76].view(4, 19),
        flat[:80],
        flat[:80].view(4, 20, 1),
        flat[:0].view(0, 20),
    ]
    for x in wrong:
        with pytest.raises(VerifyError, match=r"argument 0 must be f32\[4,20\], it is torch\.float") as error:
            program.call("s0.F", [x])
        assert error.value.where == "graph s0.F"
    for slot in (torch.zeros(20, dtype=torch.float64), torch.zeros(21), torch.zeros(19), torch.zeros(4, 5)):
        with pytest.raises(VerifyError, match=r"argument 1 must be f32\[20\], it is torch\.float"):
            program.call("s0.B", [flat[:20], slot])
        assert not slot.any()
    freed = crooked.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(VerifyError, match="argument 0 has no memory"):
        program.call("s0.F", [freed])
    with pytest.raises(VerifyError, match="argument 0 is on meta, the stage is on cpu"):
        program.call("s0.F", [crooked.to("meta")])
    with pytest.raises(VerifyError, match="takes 1 inputs and 0 slots, got 2 tensors"):
        program.call("s0.F", [crooked, crooked])


@pytest.mark.parametrize("trusting", [True, False])
def test_kernels_look_at_no_arguments(
    trusting: bool, small: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is told by what they would say; without the pass that takes the checks out, it is there."""
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    if not trusting:
        monkeypatch.setattr(tirx.transform, "SkipAssert", tirx.transform.RemoveNoOp)
    build([small], tmp_path)
    assert (b"Mismatched type on argument" in (tmp_path / "stage.so").read_bytes()) is not trusting


def test_settings_that_cannot_be(small: Graph, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown target CPU 'z80'"):
        build_graphs([small], tmp_path / "a.so", CompileOptions("z80"))
    with pytest.raises(UsageError, match="unknown target CPU 'sm_90'"):
        backend_of("tvm").compile_stages(
            Module("m", graphs={small.name: small}), [0], tmp_path, CompileOptions("sm_90")
        )
    with pytest.raises(UsageError, match="threads"):
        backend_of("tvm").load_stage(Module("m"), 0, [tmp_path / "a.so"], threads=0)
    with pytest.raises(PenstockError, match="has no graphs"):
        backend_of("tvm").compile_stages(Module("m"), [3], tmp_path)
