"""Small graphs for the kernel benchmark, made the way the compiler makes those of a model.

In: the operations of a forward computation, built in code. Out: a stage graph `s0.F`, or the pair `s0.F` and `s0.B`
that the passes decompose, autodiff and simplify make of it, with the gradients as plain results instead of additions to
variables.

The differentiating pass gives gradients of variables only, so an input x is written x + @x; the sum and the variable
are removed afterwards. The gradient of the result is an input: the loss is sum(result * dy), which is removed from F as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.passes.rewrite.decompose import DecomposeOptions, decompose
from penstock.passes.rewrite.simplify import SimplifyOptions, simplify
from penstock.passes.training.autodiff import AutodiffOptions, autodiff

FORWARD, BACKWARD = "s0.F", "s0.B"


@dataclass
class Builder:
    """A collector of operations. Values are named by their order unless a name is passed."""

    ops: list[Op] = field(default_factory=list)

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        return self.emit_all(kind, 1, *ins, **attrs)[0]

    def emit_all(self, kind: str, count: int, *ins: Value, **attrs: Attr) -> tuple[Value, ...]:
        names = [f"{kind}.{len(self.ops)}.{i}" if count > 1 else f"{kind}.{len(self.ops)}" for i in range(count)]
        self.ops.append(make(kind, ins, names, **attrs))
        return self.ops[-1].outs

    def read(self, name: str, text: str) -> Value:
        self.ops.append(Op("read", (), (Value(f"{name}.old", parse_type(text)),), {"var": name}))
        return self.ops[-1].outs[0]


# A function from a builder and the inputs, by name, to the results.
Body = Callable[[Builder, Mapping[str, Value]], Sequence[Value]]


def inputs_of(types: Mapping[str, str]) -> dict[str, Value]:
    return {name: Value(name, parse_type(text)) for name, text in types.items()}


def forward(types: Mapping[str, str], body: Body) -> Graph:
    """Make the stage graph of a forward computation."""
    ins, builder = inputs_of(types), Builder()
    outs = tuple(body(builder, ins))
    graph = Graph("main", tuple(ins.values()), outs, tuple(builder.ops))
    module = Module("kernel", graph.ins, tuple(v.name for v in outs), graphs={"main": graph})
    module = simplify(decompose(module, DecomposeOptions()), SimplifyOptions())
    main = module.graphs["main"]
    return Graph(FORWARD, main.ins, main.outs, main.ops)


def effects(ops: Sequence[Op], types: Mapping[str, str]) -> Graph:
    """Make a stage graph that ends in effects on variables and has no results."""
    return Graph(FORWARD, tuple(inputs_of(types).values()), (), tuple(ops))


def forward_and_backward(
    wanted: Mapping[str, str], constants: Mapping[str, str], body: Body, *, loss: bool = False
) -> tuple[Graph, Graph]:
    """Make both stage graphs.

    B gives one gradient for each of `wanted`, in that order. Its inputs are those that F saves, and `dy` unless the one
    result of `body` is a loss.
    """
    builder, values, taken_out = Builder(), inputs_of(constants), set[str]()
    ins = inputs_of(wanted)
    for name, text in wanted.items():
        shifted = Op("add", (ins[name], builder.read(name, text)), (Value(f"{name}.in", ins[name].type),))
        builder.ops.append(shifted)
        values[name] = shifted.outs[0]
        taken_out |= {f"{name}.old", f"{name}.in"}
    results = tuple(body(builder, values))
    main_ins = [*ins.values(), *(v for name, v in values.items() if name in constants)]
    outs = results
    if not loss:
        dy = Value("dy", results[0].type)
        main_ins.append(dy)
        product = builder.emit("mul", results[0], dy)
        outs = (builder.emit("sum", product, axes=tuple(range(dy.type.rank))), *results)
        taken_out |= {product.name, outs[0].name}
    graph = Graph("main", tuple(main_ins), outs, tuple(builder.ops))
    variables = {name: Var(name, v.type, "param") for name, v in ins.items()}
    module = Module("kernel", graph.ins, tuple(v.name for v in outs), vars=variables, graphs={"main": graph})
    module = decompose(simplify(module, SimplifyOptions()), DecomposeOptions())
    module = simplify(autodiff(module, AutodiffOptions()), SimplifyOptions())
    return _without_variables(module, ins, taken_out, loss)


def _without_variables(
    module: Module, wanted: Mapping[str, Value], taken_out: set[str], loss: bool
) -> tuple[Graph, Graph]:
    f, b = module.graphs["F"], module.graphs["B"]
    table = {Value(f"{name}.in", v.type): v for name, v in wanted.items()}

    def kept(graph: Graph) -> tuple[Op, ...]:
        left = [op for op in graph.ops if op.kind != "accum" and not any(v.name in taken_out for v in op.outs)]
        return tuple(Op(op.kind, tuple(table.get(v, v) for v in op.ins), op.outs, op.attrs) for op in left)

    saved = tuple(table.get(v, v) for v in b.ins)
    ops = kept(f)
    results = {v for op in ops for v in op.outs}
    outs = tuple(v for v in f.outs if loss or v.name not in taken_out)
    f_ins = tuple(v for v in f.ins if v.name != "dy")
    gradients = {op.var.removesuffix(".grad"): op.ins[0] for op in b.ops if op.kind == "accum"}
    return (
        Graph(FORWARD, f_ins, outs, ops, tuple(v for v in saved if v in results or v in f_ins)),
        Graph(BACKWARD, saved, tuple(gradients[name] for name in wanted), kept(b)),
    )


def fused(*graphs: Graph) -> Module:
    """Make the module of stage 0, with kernels chosen."""
    return fuse(Module("kernel", graphs={g.name: g for g in graphs}), FuseOptions())
