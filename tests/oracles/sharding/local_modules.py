"""A tensor-parallel MLP in local form, made by rules that are written out here, and the whole module it came from.

Two blocks of layer norm, a product that is split by columns, gelu, and a product that is split by rows, then the mean
cross entropy. The rules know the operations of this model alone. Where a sum over a split dimension ends, an all_reduce
brings it together, under the name of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import LOCAL, Graph, Module, Namer, Op, Value, Var
from penstock.ir.text import parse_module
from penstock.ir.types import part_size
from penstock.passes.manager import Call, run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline

AXIS = "tp"
# The dimension of each parameter that is split; state and gradients follow.
SPLIT = {f"{name}{i}": dim for i in range(2) for name, dim in (("up", 1), ("bias", 0), ("down", 0))}


# Where stages start but the first one, by their number.
_STARTS = {1: (), 2: ("n1",), 4: ("z0", "n1", "z1")}


@dataclass(frozen=True)
class LocalCase:
    """A module in local form, the module on one device with the same meaning, and whole weights for both."""

    local: Module
    whole: Module
    weights: Mapping[str, np.ndarray]

    def batches(self, count: int) -> list[dict[str, np.ndarray]]:
        """Return whole batches of random data."""
        assert self.local.schedule is not None
        rng, (x, labels) = np.random.default_rng(1), self.local.inputs
        rows = x.type.dims[0] * self.local.schedule.microbatches
        width = x.type.dims[1]
        return [
            {"x": rng.standard_normal((rows, width)), labels.name: rng.integers(0, width, (rows,))}
            for _ in range(count)
        ]


def local_mlp(
    kind: str = "1f1b",
    stages: int = 1,
    dp: int = 1,
    tp: int = 2,
    *,
    microbatches: int = 4,
    rows: int = 3,
    width: int = 4,
    hidden: int = 6,
    optimizer: str = "momentum",
    guard: dict[str, Attr] | None = None,
    last: str = "",
) -> LocalCase:
    """Return the MLP trained under a schedule on meshes (dp, tp). `last` is the last pass to run; all if not given."""
    x = f"f32[{rows},{width}]"
    lines = ["module @mlp {", f"  input %x : {x}", f"  input %labels : i64[{rows}]", "  output %loss"]
    body, source = [], "x"
    for i in range(2):
        shapes = {"scale": [width], "shift": [width], "up": [width, hidden], "bias": [hidden], "down": [hidden, width]}
        types = {name: f"f32[{','.join(map(str, shape))}]" for name, shape in shapes.items()}
        lines += [f"  var @{name}{i} : {text} param" for name, text in types.items()]
        body += [f"    %p.{name}{i} : {text} = read(@{name}{i})" for name, text in types.items()]
        h = f"f32[{rows},{hidden}]"
        body += [
            f"    %n{i} : {x}, %mean{i} : f32[{rows}], %rstd{i} : f32[{rows}] = "
            f"layer_norm(%{source}, %p.scale{i}, %p.shift{i}, axis=1, eps=1e-05)",
            f"    %z{i} : {h} = matmul(%n{i}, %p.up{i})",
            f"    %b{i} : {h} = add(%z{i}, %p.bias{i})",
            f"    %a{i} : {h} = gelu(%b{i})",
            f"    %y{i} : {x} = matmul(%a{i}, %p.down{i})",
        ]
        source = f"y{i}"
    loss = f"    %loss : f32[], %lse : f32[{rows}] = cross_entropy(%{source}, %labels)"
    lines += [f"  graph @main(%x : {x}, %labels : i64[{rows}]) {{", *body, loss, "    return %loss", "  }", "}"]
    model = parse_module("\n".join(lines), "mlp.ir").but(cluster=Cluster.local(stages * dp * tp))
    calls = training_pipeline(
        {"kind": optimizer, "lr": 0.1},
        {"stages": stages, "split_at": _STARTS[stages], "mesh": f"dp={dp},{AXIS}={tp}"},
        PipelineOptions(schedule=kind, microbatches=microbatches, recompute="none", guard=guard),
    )
    names = [call.name for call in calls]
    cut, converted = names.index("partition"), names.index("recompute") + 1
    whole = _passed(model, calls[:cut])
    local = _localized(_passed(whole, calls[cut:converted]), tp)
    rest = [call for call in calls[converted:] if not last or names.index(call.name) <= names.index(last)]
    return LocalCase(_passed(local, rest), whole, _weights(model))


def _passed(module: Module, calls: Sequence[Call]) -> Module:
    return run_passes(module, calls, PASSES)


def _weights(model: Module) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(var.type.dims) * 0.5 for name, var in model.vars.items()}


# ------------------------------------------------------------------------------------------------ to local form

# The dimension in which a value is split.
Split = int | None


def _localized(module: Module, tp: int) -> Module:
    """Return the module with split parameters, and with graphs that are what one device does."""
    split = {name: dim for name in module.vars if (dim := SPLIT.get(name.partition(".")[0])) is not None}
    # The loss scale and counters have no dimensions.
    vars = {
        name: _laid(var, split[name]) if name in split and var.type.rank else var for name, var in module.vars.items()
    }
    known: dict[str, Split] = {}
    graphs: dict[str, Graph] = {}
    for kind in ("F", "B", "W", "P", "N", "U"):
        for stage in module.stages:
            graph = module.stage_graph(stage.index, kind)
            if graph is not None:
                graphs[graph.name] = _Localizer(vars, known, tp, Namer.of(graph)).graph(graph)
    listed = {name: graphs[name] for name in module.graphs}
    return module.but(vars=vars, graphs=listed, facts=(*module.facts, LOCAL))


def _laid(var: Var, dim: int) -> Var:
    return replace(var, type=var.type.laid([(AXIS,) if i == dim else () for i in range(var.type.rank)]))


class _Localizer:
    """The rules. `known` are the dimensions in which values are split, over all graphs: equal names, equal tensors."""

    def __init__(self, vars: Mapping[str, Var], known: dict[str, Split], tp: int, namer: Namer) -> None:
        self.vars, self.known, self.tp, self.namer = vars, known, tp, namer

    def graph(self, graph: Graph) -> Graph:
        ops = tuple(new for op in graph.ops for new in self.op(op))
        ins, outs, saved = (tuple(map(self.value, values)) for values in (graph.ins, graph.outs, graph.saved))
        return Graph(graph.name, ins, outs, ops, saved)

    def value(self, value: Value) -> Value:
        return self.part(value, self.known.get(value.name))

    def part(self, value: Value, dim: Split) -> Value:
        if dim is None:
            return value
        shape = [part_size(n, self.tp) if i == dim else n for i, n in enumerate(value.type.dims)]
        return Value(value.name, value.type.with_shape(tuple(shape)))

    def op(self, op: Op) -> list[Op]:
        dims, partial = self.rule(op)
        attrs = dict(op.attrs)
        for out, dim in zip(op.outs, dims, strict=True):
            self.known[out.name] = dim
        outs = tuple(map(self.value, op.outs))
        if "shape" in attrs and outs:
            attrs["shape"] = outs[0].type.dims
        if not partial:
            return [Op(op.kind, tuple(map(self.value, op.ins)), outs, attrs, op.loc)]
        (out,) = outs
        part = Value(self.namer.fresh(f"{out.name}.part"), out.type)
        gathered = {"over": AXIS} | {name: attrs[name] for name in ("of", "stage") if name in attrs}
        return [
            Op(op.kind, tuple(map(self.value, op.ins)), (part,), attrs, op.loc),
            Op("all_reduce", (part,), (out,), gathered, op.loc),
        ]

    def rule(self, op: Op) -> tuple[list[Split], bool]:
        """Return the dimension in which each result is split, and whether the result is a part of a sum."""
        split = [self.known.get(value.name) for value in op.ins]
        if op.kind in ("read", "take"):
            axes = self.vars[op.var].type.axes
            return [next((i for i, names in enumerate(axes) if names), None)], False
        if all(dim is None for dim in split):
            return [None for _ in op.outs], False
        if op.kind == "matmul":
            turned = [bool(op.attrs.get(name)) for name in ("ta", "tb")]
            left, right = (None if d is None else d ^ t for d, t in zip(split, turned, strict=True))
            if left == 1 or right == 0:
                assert (left, right) == (1, 0), f"one side of {op} is split alone"
                return [None], True
            assert left is None or right is None, f"both sides of {op} are split"
            return [left if right is None else right], False
        if op.kind == "sum":
            axes = [int(axis) % op.ins[0].type.rank for axis in op.attrs["axes"]]
            if split[0] in axes:
                return [None], True
            lost = 0 if op.attrs.get("keepdims") else sum(axis < split[0] for axis in axes)
            return [split[0] - lost], False
        if op.kind in ("accum", "write"):
            return [], False
        return [self.aligned(op, out, split) for out in op.outs], False

    def aligned(self, op: Op, out: Value, split: Sequence[Split]) -> Split:
        """Return the split of a result of an operation that takes elements one by one: dimensions count from the
        last."""
        behind = {value.type.rank - dim for value, dim in zip(op.ins, split, strict=True) if dim is not None}
        assert len(behind) == 1, f"{op} has operands that are split in different dimensions"
        dim = out.type.rank - behind.pop()
        sizes = [value.type.dims[value.type.rank - out.type.rank + dim] for value in op.ins if value.type.rank]
        assert all(size in (1, out.type.dims[dim]) for size in sizes), f"no rule for {op}"
        for value, own in zip(op.ins, split, strict=True):
            whole = own is None and value.type.rank and value.type.dims[value.type.rank - out.type.rank + dim] > 1
            assert not whole, f"%{value.name} of {op} is whole"
        return dim
