"""Attention and its gradients as one kernel each: against the interpreter, and against torch in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.backends.tvm.kernels.attention import forward as attention
from penstock.backends.tvm.kernels.attention import gradient as attention_grad
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import apply_op
from penstock.ir.ops import make
from penstock.ir.types import TensorType, dtype_of, parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

from ...cases import build, compare

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def value_of(name: str, array: np.ndarray) -> Value:
    return Value(name, TensorType(dtype_of(array.dtype), array.shape))


def case(
    q: tuple[int, ...],
    keys: int,
    value_depth: int,
    causal: bool,
    mask: np.ndarray | None = None,
    dtype: str = "float32",
):
    """Operands of attention, and of its gradient: those, what it gives in float64, and a gradient."""
    arrays = [
        normal(*q, dtype=dtype),
        normal(*q[:2], keys, q[3], dtype=dtype),
        normal(*q[:2], keys, value_depth, dtype=dtype),
    ]
    masks = [] if mask is None else [mask if mask.dtype == bool else mask.astype(dtype)]
    attrs = {"causal": causal, "scale": 0.3}
    op = make(
        "attention", [value_of(f"x{i}", x) for i, x in enumerate([*arrays, *masks])], ["y", "top", "total"], **attrs
    )
    results = apply_op(op, [*arrays, *masks], "f64")
    statistics = [x.astype(dtype) for x in results]
    dy = normal(*results[0].shape, dtype=dtype)
    operands = [dy, *arrays, *statistics, *masks]
    grad = make("attention_grad", [value_of(f"g{i}", x) for i, x in enumerate(operands)], ["dq", "dk", "dv"], **attrs)
    return (op, [*arrays, *masks]), (grad, operands)


def hidden(*shape: int) -> np.ndarray:
    """Nine of ten are seen, but in one row nothing is."""
    mask = RNG.random(shape) < 0.9
    mask.reshape(-1, shape[-1])[0] = False
    return mask


CASES = {
    "one position": case((1, 1, 1, 1), 1, 1, True),
    "small": case((1, 2, 7, 5), 7, 3, True),
    "causal": case((2, 3, 100, 64), 100, 64, True),
    "not causal, ragged": case((2, 1, 50, 20), 133, 33, False),
    "whole panels": case((1, 2, 12, 16), 128, 64, False),
    "more keys than queries": case((1, 2, 70, 64), 150, 64, True),
    "fewer keys than queries": case((1, 2, 150, 36), 70, 20, True),
    "several blocks, deep": case((1, 1, 300, 80), 300, 130, True),
    "float64": case((1, 2, 70, 20), 90, 33, True, dtype="float64"),
    "mask of keys": case((2, 2, 40, 16), 70, 16, False, hidden(2, 1, 1, 70)),
    "mask of pairs": case((2, 2, 40, 16), 70, 16, False, hidden(40, 70)),
    "mask and causal": case((2, 2, 130, 16), 130, 16, True, hidden(2, 1, 130, 130)),
    "numbers added": case((2, 2, 40, 16), 70, 16, False, normal(2, 1, 70) * 3),
    "numbers that hide": case(
        (2, 1, 40, 16), 70, 16, False, np.where(hidden(2, 1, 40, 70), 0.0, np.finfo(np.float32).min)
    ),
    "infinite numbers": case((2, 1, 40, 16), 70, 16, False, np.where(hidden(2, 1, 40, 70), 0.0, -np.inf)),
    "large scores": case((1, 1, 20, 64), 20, 4, False, normal(20, 20) * 50),
}


def graphs_of(*ops: Op) -> list[Graph]:
    return [Graph(f"s0.c{i}", op.ins, op.outs, (op,)) for i, op in enumerate(ops)]


# Those that `make test` has time for; compiling all takes three times as long.
QUICK = (
    "small",
    "causal",
    "not causal, ragged",
    "float64",
    "mask and causal",
    "numbers that hide",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory):
    """The quick cases in one library, and the others."""

    @cache
    def made(quick: bool):
        ops = [op for name in CASES if (name in QUICK) == quick for op, _ in CASES[name]]
        graphs = graphs_of(*ops)
        return build(graphs, tmp_path_factory.mktemp("attention")), dict(zip(map(id, ops), graphs, strict=True))

    return made


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_kernels_equal_the_interpreter(name: str, programs) -> None:
    program, graphs = programs(name in QUICK)
    for op, arrays in CASES[name]:
        assert not compare(program, graphs[id(op)], arrays)


@pytest.mark.parametrize(("causal", "size"), [(True, 200), (False, 130)])
def test_kernels_equal_torch(causal: bool, size: int, tmp_path: Path) -> None:
    (op, arrays), (grad, operands) = case((2, 3, size, 64), size, 64, causal)
    program = build(graphs_of(op, grad), tmp_path)
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]
    y = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3)
    expected = torch.autograd.grad(y, leaves, torch.tensor(operands[0]).double())
    found, top, total = program.call("s0.c0", [torch.tensor(x) for x in arrays])
    torch.testing.assert_close(found.double(), y.detach(), rtol=1e-5, atol=1e-5)
    scores = (leaves[0] @ leaves[1].mT * 0.3).detach()
    scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf) if causal else scores
    torch.testing.assert_close(top.double() + total.double().log(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)
    results = program.call("s0.c1", [*(torch.tensor(x) for x in (operands[0], *arrays)), found, top, total])
    for mine, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("portable", "causal"),
        ("x86-64", "mask of pairs"),
        pytest.param("portable", "mask of pairs", marks=pytest.mark.slow),
        pytest.param("x86-64", "causal", marks=pytest.mark.slow),
    ],
)
def test_other_instruction_sets(target: str, name: str, tmp_path: Path) -> None:
    chosen = CASES[name]
    graphs = graphs_of(*(op for op, _ in chosen))
    program = build(graphs, tmp_path, target)
    for (_, arrays), graph in zip(chosen, graphs, strict=True):
        assert not compare(program, graph, arrays)


@pytest.mark.parametrize(
    "operands",
    [
        ((1, 2, 300, 20), 300, 33, True),
        pytest.param(((1, 1, 150, 16), 190, 16, True, hidden(150, 190)), marks=pytest.mark.slow),
        ((1, 1, 150, 16), 190, 80, False, normal(150, 190)),
    ],
    ids=["causal", "masked", "numbers added"],
)
def test_long_sums_are_done_in_blocks_of_keys(
    operands: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 64 keys: the largest score and the sums are carried from block to block."""
    monkeypatch.setattr(attention, "_KEYS", 64)
    monkeypatch.setattr(attention_grad, "_QUERIES", 24)
    chosen = case(*operands)
    graphs = graphs_of(*(op for op, _ in chosen))
    program = build(graphs, tmp_path)
    for (_, arrays), graph in zip(chosen, graphs, strict=True):
        assert not compare(program, graph, arrays)


def test_nan_is_not_lost(tmp_path: Path) -> None:
    (op, arrays), _ = CASES["causal"]
    arrays = [x.copy() for x in arrays]
    arrays[0][0, 0, 5, 3] = arrays[1][1, 0, 50, 3] = arrays[2][0, 2, 0, 7] = np.nan
    (graph,) = graphs_of(op)
    assert not [w for w in compare(build([graph], tmp_path), graph, arrays) if "%y" in w]


def transformer_block() -> Graph:
    """q, k and v are slices of one tensor, heads are turned; and the gradients are put side by side again."""
    ops: list[Op] = []

    def emit(kind: str, *ins: Value, outs: int = 1, **attrs: object):
        ops.append(make(kind, ins, [f"v{len(ops)}.{i}" for i in range(outs)], **attrs))  # type: ignore[arg-type]
        return ops[-1].outs if outs > 1 else ops[-1].outs[0]

    x, dy = (Value(n, parse_type(t)) for n, t in (("x", "f32[2,70,96]"), ("dy", "f32[2,70,32]")))

    def heads(part: Value) -> Value:
        return emit("transpose", emit("reshape", part, shape=(2, 70, 2, 16)), perm=(0, 2, 1, 3))

    parts = [emit("slice", x, start=(0, 0, 32 * i), stop=(2, 70, 32 * i + 32), step=(1, 1, 1)) for i in range(3)]
    q, k, v = map(heads, parts)
    attrs = {"causal": True, "scale": 0.25}
    y, top, total = emit("attention", q, k, v, outs=3, **attrs)
    merged = emit("reshape", emit("transpose", y, perm=(0, 2, 1, 3)), shape=(2, 70, 32))
    again = emit("transpose", emit("reshape", merged, shape=(2, 70, 2, 16)), perm=(0, 2, 1, 3))
    grads = emit("attention_grad", heads(dy), q, k, v, again, top, total, outs=3, **attrs)
    flat = [emit("reshape", emit("transpose", g, perm=(0, 2, 1, 3)), shape=(2, 70, 32)) for g in grads]
    return Graph("s0.F", (x, dy), (merged, emit("concat", *flat, axis=2)), tuple(ops))


def test_a_transformer_block_needs_no_copies(tmp_path: Path) -> None:
    graph = fuse(Module("m", graphs={"s0.F": transformer_block()}), FuseOptions()).graphs["s0.F"]
    kernels = {str(op.attrs["kernel"]) for op in graph.ops}
    assert {k for k in kernels if not k.startswith("inline")} == {"k0", "k1"}
    # And no group is refused, which would take it apart.
    lowered = plan_kernels(graph, machine_of("host"))
    assert len(lowered.steps) == 2
    arrays = [normal(2, 70, 96), normal(2, 70, 32)]
    assert not compare(build([graph], tmp_path), graph, arrays)


def test_parts_that_others_read_are_stored_whole(tmp_path: Path) -> None:
    """A gradient that is also a result cannot disappear in the concatenation."""
    block = transformer_block()
    grad = next(op for op in block.ops if op.kind == "attention_grad")
    block = Graph(block.name, block.ins, (*block.outs, grad.outs[1]), block.ops)
    graph = fuse(Module("m", graphs={"s0.F": block}), FuseOptions()).graphs["s0.F"]
    arrays = [normal(2, 70, 96), normal(2, 70, 32)]
    assert not compare(build([graph], tmp_path), graph, arrays)


def test_control_a_wrong_kernel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must fail when tiles on the diagonal are not tested key by key."""
    from penstock.backends.tvm.kernels.attention.tiles import Tiles

    monkeypatch.setattr(Tiles, "only_visible", lambda self, x, key, limit, otherwise: x)
    for op, arrays in CASES["small"]:
        (graph,) = graphs_of(op)
        assert compare(build([graph], tmp_path / op.kind), graph, arrays)


def test_control_a_shifted_diagonal_is_another_function() -> None:
    (op, arrays), _ = CASES["small"]
    free = make("attention", op.ins, ["y", "top", "total"], causal=False, scale=0.3)
    one, other = (run_graph(Graph("m", op.ins, o.outs, (o,)), arrays)[0] for o in (op, free))
    assert np.abs(one - other).max() > 0.1
