"""Gradients of random graphs on several stages, with parameters that several stages read and values that travel: each is summed once.

The judge is torch's autograd on the whole graph. A step of SGD with rate 1 makes the gradient visible in the weights: W(1) = W(0) - g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.manager import Call, run_passes
from penstock.passes.partition.chain import chain_of
from penstock.passes.partition.partition import PartitionOptions
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.support.errors import UnsupportedModel

UNARY = {"neg": torch.neg, "sin": torch.sin, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
ROWS, SIZE = 2, 3
TYPE = TensorType("f64", (ROWS, SIZE))


@st.composite
def tied_models(draw: st.DrawFn) -> tuple[Module, list[tuple[str, list[int]]], int]:
    """Values are the parameters, then the input, then what is made of these: any of them may be used again much later."""
    shapes = [draw(st.sampled_from([(SIZE,), (1,), (ROWS, SIZE), ()])) for _ in range(draw(st.integers(1, 3)))]
    ops = [
        Op("read", (), (Value(f"p{i}", TensorType("f64", shape)),), {"var": f"p{i}"}) for i, shape in enumerate(shapes)
    ]
    x = Value("x", TYPE)
    values, steps = [*(op.outs[0] for op in ops), x], []
    last = x
    for n in range(draw(st.integers(6, 12))):
        kind = draw(st.sampled_from([*UNARY, *BINARY, *BINARY]))
        others = [values.index(last)] + [draw(st.integers(0, len(values) - 1)) for _ in range(kind in BINARY)]
        ops.append(make(kind, [values[i] for i in others], [f"v{n}"]))
        steps.append((kind, others))
        last = ops[-1].outs[0]
        values.append(last)
    ops.append(make("mul", [last, last], ["squared"]))
    ops.append(make("mean", [ops[-1].outs[0]], ["loss"], axes=(0, 1)))
    variables = {f"p{i}": Var(f"p{i}", TensorType("f64", shape), "param") for i, shape in enumerate(shapes)}
    main = drop_dead(Graph("main", (x,), (ops[-1].outs[0],), tuple(ops)))
    variables = {op.var: variables[op.var] for op in main.ops if op.kind == "read"}  # as a loss leaves them
    return Module("m", (x,), ("loss",), vars=variables, graphs={"main": main}), steps, draw(st.integers(0, 1000))


def trained(
    module: Module, arrays: dict[str, np.ndarray], x: np.ndarray, cuts: Sequence[int]
) -> tuple[dict[str, np.ndarray], Module]:
    """Variables after one step of two microbatches, on stages that start at these places of the simplified model, in percent."""
    calls = training_pipeline({"kind": "sgd", "lr": 1.0}, {}, PipelineOptions(schedule="1f1b", microbatches=2))

    def cut(call: Call, before: Module) -> Call:
        if call.name != "partition":
            return call
        chain = chain_of(before)
        starts = sorted({1 + percent * (len(chain) - 1) // 100 for percent in cuts if len(chain) > 1})
        return Call(
            call.name, PartitionOptions(split_at=tuple(chain[i].outs[0].name for i in starts), stages=len(starts) + 1)
        )

    found = run_passes(module.but(cluster=Cluster.local(len(cuts) + 1)), calls, PASSES, before=cut)
    return run_schedule(found, arrays, [{"x": x}]).variables, found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(tied_models(), st.data())
def test_random_graphs_on_stages_equal_torch(
    model: tuple[Module, list[tuple[str, list[int]]], int], data: st.DataObject
) -> None:
    module, steps, seed = model
    rng = np.random.default_rng(seed)
    if not module.vars:
        return
    arrays = {name: rng.normal(size=var.type.shape) for name, var in module.vars.items()}
    x = rng.normal(size=(2 * ROWS, SIZE))
    count = steps[0][1][0]  # the first operation takes the input, which stands behind the parameters
    leaves = [torch.tensor(arrays.get(f"p{i}", np.zeros(())), requires_grad=True) for i in range(count)]
    total = torch.zeros((), dtype=torch.float64)
    for part in np.split(x, 2):
        values = [*leaves, torch.tensor(part)]
        for kind, picks in steps:
            values.append({**UNARY, **BINARY}[kind](*(values[i] for i in picks)))
        total = total + (values[-1] * values[-1]).mean() / 2
    grads = {
        f"p{i}": grad
        for i, grad in enumerate(torch.autograd.grad(total, leaves, allow_unused=True))
        if grad is not None
    }
    for cuts in ([], [50], data.draw(st.lists(st.integers(0, 99), min_size=3, max_size=3))):
        found, planned = trained(module, arrays, x, cuts)
        assert set(grads) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_allclose(
                array - found[name], grads[name].numpy(), rtol=1e-6, atol=1e-10, err_msg=f"{name}, cuts {cuts}"
            )
        _check_graphs(planned)


def _check_graphs(module: Module) -> None:
    """Backward graphs hold no zeros and nothing that nobody needs; the gradient of a parameter is added once on each stage."""
    for graph in module.graphs.values():
        if not graph.name.endswith((".B", ".W")):
            continue
        needed = {*graph.outs, *graph.saved, *(v for op in graph.ops for v in op.ins)}
        assert all(needed.intersection(op.outs) for op in graph.ops if op.outs), (
            f"{graph.name} computes what nobody uses"
        )
        zeros = [op for op in graph.ops if op.kind == "const" and op.attrs["value"] == 0]
        assert not zeros, f"{graph.name} keeps zeros"
        added = [op.var for op in graph.ops if op.kind == "accum"]
        assert len(set(added)) == len(added)


def test_control_a_gradient_that_is_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One `accum` more on one stage of a chain x * p * p on two stages: the step is another one."""
    x, p = Value("x", TYPE), Value("p", TensorType("f64", (SIZE,)))
    ops = [Op("read", (), (p,), {"var": "p"}), make("mul", [x, p], ["a"]), make("mul", [Value("a", TYPE), p], ["b"])]
    ops.append(make("mean", [Value("b", TYPE)], ["loss"], axes=(0, 1)))
    module = Module(
        "m",
        (x,),
        ("loss",),
        vars={"p": Var("p", p.type, "param")},
        graphs={"main": Graph("main", (x,), (ops[-1].outs[0],), tuple(ops))},
    )
    arrays, batch = {"p": np.full(SIZE, 2.0)}, np.ones((2 * ROWS, SIZE))
    found, planned = trained(module, arrays, batch, [0])
    np.testing.assert_allclose(found["p"], 2.0 - 4.0 / SIZE)  # d mean(x p^2) / dp
    for name, graph in planned.graphs.items():
        again = [op for op in graph.ops if op.kind == "accum"]
        if not name.endswith(".B") or not again:
            continue
        twice = planned.with_graph(replace(graph, ops=(*graph.ops, *again)))
        wrong = run_schedule(twice, arrays, [{"x": batch}]).variables["p"]
        assert np.abs(wrong - found["p"]).max() > 0.1


def test_integers_and_shapes_are_left_alone() -> None:
    """Indices, conditions and counts on the way of a gradient: nothing is computed for them, and what they choose is."""
    table, scale = Value("table", TensorType("f64", (5, 3))), Value("scale", TensorType("f64", ()))
    i = Value("i", TensorType("i64", (4,)))
    ops = [Op("read", (), (table,), {"var": "table"}), Op("read", (), (scale,), {"var": "scale"})]

    def emit(kind: str, *ins: Value, **attrs: object) -> Value:
        ops.append(make(kind, ins, [f"{kind}.{len(ops)}"], **attrs))  # type: ignore[arg-type]
        return ops[-1].outs[0]

    two = emit("const", value=2, dtype="i64")
    places = emit("rem", emit("add", emit("mul", i, two), two), emit("const", value=5, dtype="i64"))
    rows = emit("mul", emit("gather", table, places), scale)
    count = emit("cast", emit("sum", places, axes=(0,)), dtype="f64")
    chosen = emit("where", emit("less", rows, emit("const", value=0.0, dtype="f64")), emit("neg", rows), rows)
    best = emit("cast", emit("argmax", i, axis=0), dtype="f64")
    loss = emit(
        "mean",
        emit("add", emit("div", chosen, emit("add", count, emit("const", value=1.0, dtype="f64"))), best),
        axes=(0, 1),
    )
    variables = {v.name: Var(v.name, v.type, "param") for v in (table, scale)}
    module = Module("m", (i,), (loss.name,), vars=variables, graphs={"main": Graph("main", (i,), (loss,), tuple(ops))})
    rng = np.random.default_rng(0)
    arrays, batch = {"table": rng.normal(size=(5, 3)), "scale": np.array(0.7)}, rng.integers(0, 5, 8)
    sgd = {"kind": "sgd", "lr": 1.0}
    planned = run_passes(
        module.but(cluster=Cluster.local(2)),
        training_pipeline(sgd, {"stages": 2}, PipelineOptions(schedule="1f1b", microbatches=2)),
        PASSES,
    )
    found = run_schedule(planned, arrays, [{"i": batch}]).variables
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in arrays.items()}
    total = torch.zeros((), dtype=torch.float64)
    for part in np.split(batch, 2):
        p = (torch.tensor(part) * 2 + 2) % 5
        total = (
            total
            + ((leaves["table"][p] * leaves["scale"]).abs() / (p.sum() + 1) + torch.tensor(part).argmax()).mean() / 2
        )
    total.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        np.testing.assert_allclose(arrays[name] - found[name], leaf.grad.numpy(), rtol=1e-9, atol=1e-12)
    moving = {"f64"}
    for graph in planned.graphs.values():
        made = {v.type.dtype for op in graph.ops if graph.name.endswith(".B") and "of" in op.attrs for v in op.outs}
        assert made <= moving | {"bool"}, f"{graph.name} computes {made}"


def test_all_that_breaks_a_path_is_named_at_once() -> None:
    """A flat operation and three statistics of attention, in one error; a statistic that is only compared is none."""
    q = Value("q", TensorType("f64", (1, 1, 2, 3)))
    ops = [Op("read", (), (q,), {"var": "q"})]

    def emit(kind: str, *ins: Value, outs: int = 1, **attrs: object) -> tuple[Value, ...]:
        ops.append(make(kind, ins, [f"{kind}.{len(ops)}.{i}" for i in range(outs)], f"/{kind}{len(ops)}", **attrs))  # type: ignore[arg-type]
        return ops[-1].outs

    y, top, total = emit("attention", q, q, q, outs=3, scale=1.0)
    _, other, _ = emit("attention", q, y, y, outs=3, scale=1.0)
    (fine,) = emit("less", emit("attention", y, y, y, outs=3, scale=1.0)[1], emit("const", value=0.0, dtype="f64")[0])
    (flat,) = emit("floor", y)
    parts = [emit("sum", v, axes=tuple(range(v.type.rank)))[0] for v in (y, top, total, other, flat)]
    loss = parts[0]
    for part in parts[1:]:
        (loss,) = emit("add", loss, part)
    (chosen,) = emit("where", emit("slice", fine, start=(0, 0, 0), stop=(1, 1, 1), step=(1, 1, 1))[0], loss, loss)
    (loss,) = emit("sum", chosen, axes=(0, 1, 2))
    module = Module(
        "m",
        (),
        (loss.name,),
        vars={"q": Var("q", q.type, "param")},
        graphs={"main": Graph("main", (), (loss,), tuple(ops))},
    )
    with pytest.raises(UnsupportedModel) as caught:
        autodiff(module, AutodiffOptions())
    said = str(caught.value)
    assert said.count("\n  - ") == 4
    for name in (top.name, total.name, other.name):
        assert f"%{name} of attention" in said
    assert "floor" in said
