"""The sharded programs in IR, and the collectives that `shard` and `localize` make of them."""

from __future__ import annotations

from functools import cache

from oracles.sharding.drawn_programs import DrawnProgram, laid_program
from penstock.ir.attrs import Attr
from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES

from .moved import Moved, sent
from .programs import HEADS, PROGRAMS, WIDTH, ShardedProgram


class InIR:
    """The operations of programs, which write a graph."""

    def __init__(self, program: ShardedProgram) -> None:
        self.program, self.ops, self.inputs = program, list[Op](), list[Value]()
        self.vars: dict[str, Var] = {}

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        results = {"layer_norm": 3, "attention": 3, "cross_entropy": 2}.get(kind, 1)
        names = [f"v{len(self.ops)}" + (f".{i}" if i else "") for i in range(results)]
        self.ops.append(make(kind, ins, names, "", **attrs))
        return self.ops[-1].outs[0]

    def feed(self, name: str, *shape: int, dtype: str = "f32") -> Value:
        self.inputs.append(Value(name, TensorType(dtype, shape)))
        return self.inputs[-1]

    def parameter(self, name: str, *shape: int) -> Value:
        self.vars[name] = Var(name, TensorType("f32", shape), "param")
        value = Value(f"p.{name}", self.vars[name].type)
        self.ops.append(Op("read", (), (value,), {"var": name}))
        return value

    def named(self, name: str, x: Value) -> Value:
        op = self.ops[-1]
        assert op.outs[0] == x
        self.ops[-1] = Op(op.kind, op.ins, (Value(name, x.type), *op.outs[1:]), op.attrs)
        return self.ops[-1].outs[0]

    def matmul(self, x: Value, w: Value, tb: bool = False) -> Value:
        return self.emit("matmul", x, w, tb=tb)

    def add(self, x: Value, y: Value) -> Value:
        return self.emit("add", x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.emit("sub", x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.emit("mul", x, y)

    def gelu(self, x: Value) -> Value:
        return self.emit("gelu", x)

    def relu(self, x: Value) -> Value:
        return self.emit("relu", x)

    def rsqrt(self, x: Value) -> Value:
        eps, one = (self.emit("const", value=number, dtype="f32") for number in (1e-5, 1.0))
        return self.emit("div", one, self.emit("sqrt", self.emit("add", x, eps)))

    def mean(self, x: Value, axes: tuple[int, ...]) -> Value:
        return self.emit("mean", x, axes=axes, keep=True)

    def norm(self, x: Value, scale: Value, shift: Value) -> Value:
        return self.emit("layer_norm", x, scale, shift, axis=x.type.rank - 1, eps=1e-5)

    def reshape(self, x: Value, *shape: int) -> Value:
        return self.emit("reshape", x, shape=shape)

    def transpose(self, x: Value, *perm: int) -> Value:
        return self.emit("transpose", x, perm=perm)

    def joint(self, x: Value, name: str, width: int) -> tuple[Value, Value, Value]:
        weight, bias = self.parameter(f"{name}.weight", WIDTH, 3 * width), self.parameter(f"{name}.bias", 3 * width)
        y = self.add(self.matmul(x, weight), bias)
        rows = y.type.dims[:-1]
        q, k, v = (
            self.emit("slice", y, start=(0, 0, i * width), stop=(*rows, (i + 1) * width), step=(1, 1, 1))
            for i in range(3)
        )
        return q, k, v

    def attention(self, q: Value, k: Value, v: Value) -> Value:
        return self.emit("attention", q, k, v, scale=(WIDTH // HEADS) ** -0.5)

    def look_up(self, table: Value, ids: Value) -> Value:
        return self.emit("gather", table, ids, axis=0)

    def conv(self, x: Value, w: Value, stride: int, pad: int) -> Value:
        return self.emit("conv", x, w, strides=(stride, stride), pads=(pad,) * 4)

    def mse(self, x: Value, y: Value) -> Value:
        return self.emit("mse", x, y)

    def cross_entropy(self, x: Value, labels: Value) -> Value:
        return self.emit("cross_entropy", x, labels)


@cache
def case_of(name: str) -> DrawnProgram:
    """Return a program with its gradients and its update, laid out as given."""
    program = PROGRAMS[name]
    o = InIR(program)
    loss = program.write(o)
    main = Graph("main", tuple(o.inputs), (loss,), tuple(o.ops))
    module = Module("peer", tuple(o.inputs), (loss.name,), vars=o.vars, graphs={"main": main})
    calls = parse_pipeline("simplify, decompose, autodiff, optimizer{kind=sgd,lr=0.1}, simplify", PASSES)
    mesh = ",".join(f"{axis}={n}" for axis, n in program.mesh.items())
    given = tuple(f"{node}={layout}" for node, layout in program.given.items())
    return laid_program(run_passes(module, calls, PASSES), mesh, given)


def collectives(local: Module, graphs: str) -> list[Moved]:
    """Return the collectives of some graphs of what one device does."""
    mesh, moved = local.mesh_of(0), []
    for kind in graphs:
        graph = local.graphs.get(f"s0.{kind}")
        for call in calls_of(graph) if graph is not None else ():
            members, result = len(mesh.group(0, call.over)), call.op.outs[0].type.nbytes
            moved.append(Moved(call.op.kind, members, result, sent(call.op.kind, members, result)))
    return moved
