"""Random training programs, and random layouts for them: what every legal split has to compute as one device does."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from random import Random

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Mesh, Module, Op, Stage, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.passes.sharding.localize import localize
from penstock.passes.sharding.shard import ShardOptions, shard

MESHES = ("a=2", "a=3", "a=2,b=2")
SIZES = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class DrawnProgram:
    """A program with random layouts: on one device, in whole form with layouts, and the same as the graphs of a stage,
    of which `local` is what one device does."""

    whole: Module
    laid: Module
    sharded: Module
    mesh: Mesh
    given: tuple[str, ...]

    @property
    def local(self) -> Module:
        return localize(self.sharded)

    def weights(self) -> dict[str, np.ndarray]:
        """Return numbers that are not all alike: the factors of products are around one."""
        rng = np.random.default_rng(len(self.given))
        variables = {n: v for n, v in self.whole.vars.items() if v.init == "file"}
        return {name: rng.standard_normal(var.type.dims) * 0.7 for name, var in variables.items()}

    def batch(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        lookups = [op for op in self.whole.graphs["F"].ops if op.kind == "gather"]
        rows = {op.ins[1].name: op.ins[0].type.dims[0] for op in lookups}
        return {
            v.name: rng.integers(0, rows.get(v.name, 1), v.type.dims)
            if v.type.dtype == "i64"
            else rng.standard_normal(v.type.dims)
            for v in self.whole.inputs
        }


def f64(*shape: int) -> TensorType:
    return TensorType("f64", shape)


class _Writer:
    """A forward graph that grows by random operations."""

    def __init__(self, random: Random) -> None:
        self.random, self.ops = random, list[Op]()
        self.vars: dict[str, Var] = {}
        self.inputs: list[Value] = []
        self.values: list[Value] = []

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        names = [f"v{len(self.ops)}" + ("" if i == 0 else f".{i}") for i in range(3 if kind == "layer_norm" else 1)]
        op = make(kind, ins, names, "", **attrs)
        self.ops.append(op)
        self.values.append(op.outs[0])
        return op.outs[0]

    def feed(self, *shape: int, dtype: str = "f64") -> Value:
        value = Value(f"x{len(self.inputs)}", TensorType(dtype, shape))
        self.inputs.append(value)
        if dtype == "f64":
            self.values.append(value)
        return value

    def parameter(self, *shape: int) -> Value:
        name = f"w{len(self.vars)}"
        self.vars[name] = Var(name, f64(*shape), "param")
        value = Value(f"p.{name}", f64(*shape))
        self.ops.append(Op("read", (), (value,), {"var": name}))
        return value

    def value(self, least: int = 0) -> Value:
        """Return a random value with that many dimensions at least, more often a late one."""
        fitting = [v for v in self.values if v.type.rank >= least]
        return fitting[max(self.random.randrange(len(fitting)), self.random.randrange(len(fitting)))]

    # -------------------------------------------------------------------------------------------- kinds of steps

    def unary(self) -> None:
        self.emit(self.random.choice(["tanh", "gelu", "relu", "neg", "sigmoid", "sin"]), self.value())

    def binary(self) -> None:
        x = self.value()
        shape = x.type.dims[self.random.randrange(x.type.rank + 1) :]
        alike = [v for v in self.values if v.type.dims == x.type.dims]
        other = self.random.choice([self.random.choice(alike), self.parameter(*shape)])
        self.emit(self.random.choice(["add", "mul", "sub"]), x, other)

    def product(self) -> None:
        x = self.value(2)
        k, n, turned = x.type.dims[-1], self.random.choice(SIZES), self.random.random() < 0.3
        self.emit("matmul", x, self.parameter(*((n, k) if turned else (k, n))), tb=turned)

    def norm(self) -> None:
        x = self.value(1)
        kind = self.random.choice(["layer_norm", "softmax", "log_softmax"])
        axis = x.type.rank - 1
        n = x.type.dims[-1]
        if kind == "layer_norm":
            self.emit(kind, x, self.parameter(n), self.parameter(n), axis=axis, eps=1e-2)
        else:
            self.emit(kind, x, axis=self.random.randrange(x.type.rank))

    def reduction(self) -> None:
        x = self.value(2)
        axis = self.random.randrange(x.type.rank)
        self.emit(self.random.choice(["sum", "mean"]), x, axes=(axis,), keep=self.random.random() < 0.5)

    def view(self) -> None:
        x = self.value(2)
        shape, at = x.type.dims, self.random.randrange(x.type.rank - 1)
        choice = self.random.randrange(3)
        if choice == 0:
            self.emit("transpose", x, perm=tuple(self.random.sample(range(x.type.rank), x.type.rank)))
        elif choice == 1:
            self.emit("reshape", x, shape=(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))
        elif divisors := [d for d in SIZES if shape[at] % d == 0 and d < shape[at]]:
            d = self.random.choice(divisors)
            self.emit("reshape", x, shape=(*shape[:at], d, shape[at] // d, *shape[at + 1 :]))

    def join(self) -> None:
        x = self.value(1)
        axis = self.random.randrange(x.type.rank)
        if self.random.random() < 0.5:
            alike = [v for v in self.values if v.type.dims == x.type.dims]
            self.emit("concat", x, self.random.choice(alike), axis=axis)
        elif x.type.dims[axis] > 2:
            start, stop = [0] * x.type.rank, list(x.type.dims)
            start[axis], stop[axis] = 1, x.type.dims[axis] - 1
            self.emit("slice", x, start=tuple(start), stop=tuple(stop), step=(1,) * x.type.rank)

    def lookup(self) -> None:
        rows, width = self.random.choice(SIZES), self.random.choice(SIZES)
        indices = self.feed(self.random.choice(SIZES), dtype="i64")
        self.emit("gather", self.parameter(rows, width), indices, axis=0)

    def loss(self) -> Value:
        """Return the sum of the means of all values that nothing reads."""
        read = {v.name for op in self.ops for v in op.ins}
        total: Value | None = None
        for leaf in [v for v in self.values if v.name not in read]:
            mean = self.emit("mean", self.emit("mul", leaf, leaf), axes=tuple(range(leaf.type.rank)))
            total = mean if total is None else self.emit("add", total, mean)
        assert total is not None
        return total


_STEPS = (
    *(_Writer.unary, _Writer.binary, _Writer.binary, _Writer.product, _Writer.product, _Writer.norm),
    *(_Writer.reduction, _Writer.view, _Writer.join, _Writer.lookup),
)


def drawn_training(random: Random) -> Module:
    """Return a random program with its gradients and its update."""
    writer = _Writer(random)
    for _ in range(random.randint(1, 2)):
        writer.feed(*random.choices(SIZES, k=random.randint(2, 3)))
    for _ in range(random.randint(4, 9)):
        random.choice(_STEPS)(writer)
    writer.product()
    loss = writer.loss()
    main = Graph("main", tuple(writer.inputs), (loss,), tuple(writer.ops))
    module = Module("drawn", tuple(writer.inputs), (loss.name,), vars=writer.vars, graphs={"main": main})
    calls = parse_pipeline("simplify, autodiff, optimizer{kind=momentum,lr=0.1}, simplify", PASSES)
    return run_passes(module, calls, PASSES)


def drawn_layouts(random: Random, module: Module, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return layouts of some variables, inputs and values: each axis splits one dimension at most."""
    nodes = {name: var.type for name, var in module.vars.items() if var.role == "param"}
    nodes |= {v.name: v.type for v in module.inputs}
    made = {v.name: v.type for op in module.graphs["F"].ops for v in op.outs}
    for name in random.sample(sorted(made), min(len(made), random.randint(0, 4))):
        nodes[name] = made[name]
    given = []
    for name, t in nodes.items():
        dims: list[list[str]] = [[] for _ in t.dims]
        for axis in sizes:
            if t.rank and random.random() < 0.6:
                dims[random.randrange(t.rank)].append(axis)
        if any(dims) and all(n >= prod(sizes[a] for a in axes) for n, axes in zip(t.dims, dims, strict=True)):
            words = ["".join(f"/{axis}" for axis in axes) or random.choice("_?") for axes in dims]
            given.append(f"{name}=[{','.join(words)}]")
    return tuple(given)


def drawn_program(number: int) -> DrawnProgram:
    """Return the program of a number."""
    random = Random(number)
    text = random.choice(MESHES)
    whole = drawn_training(random)
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    given = drawn_layouts(random, whole, sizes)
    return laid_program(whole, text, given)


def laid_program(whole: Module, mesh_text: str, given: tuple[str, ...]) -> DrawnProgram:
    """Return a training program with given layouts on one stage."""
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in mesh_text.split(","))}
    laid = shard(whole, ShardOptions(mesh_text, given))
    cluster = Cluster.local(prod(sizes.values()))
    mesh = Mesh("m", tuple(sizes.items()), tuple(device.name for device in cluster.devices))
    graphs = {f"s0.{name}": Graph(f"s0.{name}", g.ins, g.outs, g.ops, g.saved) for name, g in laid.graphs.items()}
    sharded = laid.but(cluster=cluster, meshes=(mesh,), stages=(Stage(0, "m"),), graphs=graphs, facts=("sharded",))
    return DrawnProgram(whole, laid, sharded, mesh, given)
