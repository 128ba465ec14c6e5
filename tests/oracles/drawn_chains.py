"""Small chains to be cut, and the costs of their cuts, counted the slow way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import op_seconds
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.passes.training.optimizer import OptimizerOptions, optimizer


def chain_model(widths: list[int], skips: list[tuple[int, int]], tied: bool = False, rows: int = 4) -> Module:
    """Linear layers with relu, residual additions from layer a to layer b where widths agree, and a mean-square loss."""
    x = Value("x", TensorType("f32", (rows, widths[0])))
    labels = Value("labels", TensorType("f32", (rows, widths[-1])))
    ops: list[Op] = []
    vars: dict[str, Var] = {}
    layers = [x]
    for i, (a, b) in enumerate(pairwise(widths)):
        name = f"shared{a}" if tied and a == b else f"w{i}"
        weight = Value(f"w{i}.value", TensorType("f32", (a, b)))
        vars[name] = Var(name, weight.type, "param")
        ops.append(Op("read", (), (weight,), {"var": name}))
        ops.append(make("matmul", (layers[-1], weight), [f"h{i}"], f"layer{i}"))
        ops.append(make("relu", (ops[-1].outs[0],), [f"a{i}"]))
        out = ops[-1].outs[0]
        for n, (source, target) in enumerate(skips):
            if target == i and source < len(layers) and layers[source].type == out.type:
                ops.append(make("add", (out, layers[source]), [f"skip{i}.{n}"]))
                out = ops[-1].outs[0]
        layers.append(out)
    ops.append(make("mse", (layers[-1], labels), ["loss"]))
    return Module(
        "chain",
        (x, labels),
        ("loss",),
        vars=vars,
        graphs={"main": Graph("main", (x, labels), ops[-1].outs, tuple(ops))},
    )


def differentiate(module: Module) -> Module:
    return optimizer(autodiff(module, AutodiffOptions(2)), OptimizerOptions(kind="adamw", lr=0.1))


models = st.builds(
    chain_model,
    st.lists(st.sampled_from([3, 8, 32]), min_size=3, max_size=7),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=3),
    st.booleans(),
)


def bottleneck(module: Module, cuts: tuple[int, ...], extra: Sequence[float] = (), microbatches: int = 1) -> float:
    """The objective, computed the slow way from the annotated graphs: no prefix sums, no dynamic programme. `extra` seconds of each stage are added.
    What tied parameters move, they move once per batch."""
    assert module.cluster is not None
    chain = [op for op in module.graphs["F"].ops if op.kind != "read"]
    bounds = [0, *cuts, len(chain)]
    stage_of = {op.outs[0].name: s for s, (a, b) in enumerate(pairwise(bounds)) for op in chain[a:b]}
    devices = module.cluster.devices
    load = list(extra) or [0.0] * (len(cuts) + 1)
    for stage in range(len(load)):
        for op, spent in zip(module.graphs["F"].ops, op_seconds(module.graphs["F"], devices[stage]), strict=True):
            if op.outs and stage_of.get(op.outs[0].name) == stage:
                load[stage] += spent
        for op, spent in zip(module.graphs["B"].ops, op_seconds(module.graphs["B"], devices[stage]), strict=True):
            if stage_of.get(str(op.attrs.get("of"))) == stage:
                load[stage] += spent
    for stage, cut in enumerate(cuts, 1):
        made = {v for op in chain[:cut] for v in op.outs}
        crossing = sum(v.type.nbytes for v in {v for op in chain[cut:] for v in op.ins} & made)
        before, after = ({v for op in part for v in op.ins} for part in (chain[:cut], chain[cut:]))
        readers = {op.outs[0]: op.var for op in module.graphs["F"].ops if op.kind == "read"}
        parted = {readers[v] for v in before & readers.keys()} & {readers[v] for v in after & readers.keys()}
        crossing += sum(module.vars[name].type.nbytes for name in parted) / microbatches
        link = module.cluster.link(devices[stage - 1].name, devices[stage].name)
        load[stage] += 2 * crossing / link.bandwidth + 2 * link.latency
    return max(load)


def stages_of(module: Module, graph: str) -> dict[str, int]:
    return {v.name: int(op.attrs["stage"]) for op in module.graphs[graph].ops if "stage" in op.attrs for v in op.outs}  # type: ignore[arg-type]
