"""Make graphs smaller without changing what they compute: constant folding, identities, common subexpressions, dead
code.

In: any module. Out: the same meaning, and the same object when there is nothing to do. One walk over a graph in order
folds operations with known operands and applies the rules of passes/rewrite/identities.py and
passes/rewrite/recognize.py. It also merges equal operations (same kind, operands, attributes and annotations). Then it
drops unused operations. Walks repeat until nothing changes.

Kept: names of graph inputs, results and saved values (other graphs and the user know them by name), writes,
accumulations and takes, in their order. A read is merged with an earlier read of the variable unless it was written or
taken in between. A value that a forward graph saves and its backward graph does not use is not saved.

A folded constant has at most `fold_limit` elements, or one value in all of them; a larger one stays an expression.
Constants are folded twice, in their declared element types and in float64, and the float64 number is written down where
both agree up to rounding: the same program then means the same when all of it is computed in float64. Where they do not
agree (a floor, a comparison, an overflow) the declared type decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Module, Namer, Op, Value, graph_kind, substitute
from penstock.ir.interpreter.ops import F64, Array, apply_op
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import OPS

from .identities import IDENTITIES, Found
from .recognize import PATTERNS

_KNOWN_LIMIT = 1 << 16  # elements of an intermediate constant that are worth evaluating at compile time
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class SimplifyOptions:
    """Options of `simplify`. `fold_limit` is the largest number of elements that a folded constant may list."""

    fold_limit: int = 64


def simplify(module: Module, options: SimplifyOptions) -> Module:
    """Fold constants, apply identities, merge equal operations and drop dead ones."""
    namer = Namer.of(*module.graphs.values())
    graphs: dict[str, Graph] = {}
    gone: dict[str, str] = {}
    for name, graph in module.graphs.items():
        graphs[name], names = _simplify_graph(graph, options, namer)
        gone |= names
    _drop_unused_saves(graphs)
    if all(graphs[name] is graph for name, graph in module.graphs.items()):
        return module
    return module.but(graphs={name: _with_origins(graph, graphs, gone) for name, graph in graphs.items()})


def _simplify_graph(graph: Graph, options: SimplifyOptions, namer: Namer) -> tuple[Graph, dict[str, str]]:
    """Return the simplified graph, and the remaining name that stands for each result that is gone."""
    gone: dict[str, str] = {}
    for _ in range(_ROUNDS):
        walk = _Walk(graph, options, namer)
        after = drop_dead(walk.run())
        if after == graph:
            return graph, gone
        names = {old.name: new.name for old, new in walk.replaced().items()}
        gone = {old: names.get(new, new) for old, new in gone.items()} | names
        graph = after
    return graph, gone


class _Walk:
    """One walk of simplification over a graph, and the `Scene` that identities see."""

    def __init__(self, graph: Graph, options: SimplifyOptions, namer: Namer) -> None:
        self.graph, self.options, self.namer = graph, options, namer
        self.kept = {*graph.ins, *graph.outs, *graph.saved}
        self.table: dict[Value, Value] = {}  # results that are gone -> the values that stand for them
        self.renamed: dict[Value, Value] = {}  # results that take over the name of a kept one
        self.makers: dict[Value, Op] = {}
        self.known: dict[Value, tuple[Array, Array]] = {}  # constants, as computed in the declared type and in float64
        self.equal: dict[tuple[object, ...], Op] = {}
        self.epochs: Counter[str] = Counter()
        self.counts = Counter(v for op in graph.ops for v in op.ins) + Counter((*graph.outs, *graph.saved))
        self.ops: list[Op] = []

    # the interface of rules

    def maker(self, value: Value) -> Op | None:
        return self.makers.get(value)

    def uses(self, value: Value) -> int:
        return self.counts[value]

    def fresh(self, base: str) -> str:
        return self.namer.fresh(base)

    # the walk

    def run(self) -> Graph:
        for op in self.graph.ops:
            ins = substitute(op.ins, self.table)
            self._add(op if ins == op.ins else op.with_ins(ins))
        graph = self.graph
        if not self.table:
            return (
                graph
                if tuple(self.ops) == graph.ops
                else Graph(graph.name, graph.ins, graph.outs, tuple(self.ops), graph.saved)
            )
        ops = tuple(Op(op.kind, self._final(op.ins), self._final(op.outs), op.attrs, op.loc) for op in self.ops)
        return Graph(graph.name, graph.ins, self._final(graph.outs), ops, self._final(graph.saved))

    def _final(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return substitute(substitute(values, self.table), self.renamed)

    def replaced(self) -> dict[Value, Value]:
        aliases = {old: self.renamed.get(new, new) for old, new in self.table.items()}
        return {old: new for old, new in {**aliases, **self.renamed}.items() if old != new}

    def _add(self, op: Op) -> None:
        folded = self._fold(op)
        if folded is not None:
            op = folded
        replacement: Found = None
        for rule in (*IDENTITIES.get(op.kind, ()), *PATTERNS.get(op.kind, ())):
            replacement = rule(self, op)
            if isinstance(replacement, Value) and not self._alias(op.outs, (replacement,)):
                replacement = None
            if replacement is not None:
                break
        if isinstance(replacement, Value):
            return
        for new in (op,) if replacement is None else replacement:
            self._merge_or_append(new)

    def _merge_or_append(self, op: Op) -> None:
        key = self._key(op)
        first = self.equal.get(key) if key is not None else None
        if first is not None and self._alias(op.outs, first.outs):
            return
        if key is not None:
            self.equal.setdefault(key, op)
        self.makers |= dict.fromkeys(op.outs, op)
        self.ops.append(op)

    def _key(self, op: Op) -> tuple[object, ...] | None:
        """Return a key; equal keys mean equal results. None for an operation that must not be merged."""
        epoch = 0
        if OPS[op.kind].effect:
            if op.kind != "read":
                self.epochs[op.var] += 1
                return None
            epoch = self.epochs[op.var]
        # By repr: 0.0 and -0.0, 1 and 1.0 and true are equal as Python values.
        return (op.kind, op.ins, repr(sorted(op.attrs.items())), epoch)

    def _alias(self, outs: Sequence[Value], values: Sequence[Value]) -> bool:
        """Replace `outs` by `values`, unless that would lose names that must stay."""
        pairs = [(old, new) for old, new in zip(outs, values, strict=True) if old != new]
        taking = [(old, new) for old, new in pairs if old in self.kept]
        if any(new in self.kept or new in self.renamed for _, new in taking):
            return False
        for old, new in taking:
            self.renamed[new] = old
            self.kept.add(new)
        self.table |= dict(pairs)
        for old, new in pairs:
            self.counts[new] += self.counts[old]
        return True

    def _fold(self, op: Op) -> Op | None:
        """Return the constant that an operation on constants gives, when it is small enough to write down."""
        if (
            OPS[op.kind].effect
            or len(op.outs) != 1
            or not op.outs[0].type.is_static
            or op.outs[0].type.size > _KNOWN_LIMIT
        ):
            return None
        if not all(v in self.known for v in op.ins):
            return None
        (typed,) = apply_op(op, [self.known[v][0] for v in op.ins])
        (exact,) = apply_op(op, [self.known[v][1] for v in op.ins], F64)
        if not _agree(typed, exact, op.outs[0].type.dtype):
            exact = typed if exact.dtype == typed.dtype else typed.astype(exact.dtype)
        self.known[op.outs[0]] = typed, exact
        if op.kind in ("const", "iota"):
            return None
        value = _literal(exact, self.options.fold_limit)
        if value is None:
            return None
        attrs: dict[str, Attr] = {"value": value, "dtype": op.outs[0].type.dtype}
        return Op("const", (), op.outs, attrs | ({"shape": exact.shape} if exact.shape else {}), op.loc)


_ROUNDING = {"f64": 2.0**-49, "f32": 2.0**-20, "f16": 2.0**-7, "bf16": 2.0**-4}  # a few units in the last place


def _agree(typed: Array, exact: Array, dtype: str) -> bool:
    if dtype not in _ROUNDING:
        return bool(np.array_equal(typed, exact))
    with np.errstate(all="ignore"):
        return bool(np.allclose(typed.astype(np.float64), exact, rtol=_ROUNDING[dtype], atol=0.0))


def _literal(array: Array, limit: int) -> Attr | None:
    """Return an array as the value of a constant: one number for all elements, or a list."""
    if array.dtype.kind == "f" and np.isnan(array).any():
        return None
    flat = array.reshape(-1)
    if (
        flat.size
        and (flat == flat[0]).all()
        and (array.dtype.kind != "f" or (np.signbit(flat) == np.signbit(flat[0])).all())
    ):
        same: Attr = flat[0].item()
        return same
    return tuple(flat.tolist()) if flat.size <= limit else None


# ---------------------------------------------------------------------------------------- dead code


def _drop_unused_saves(graphs: dict[str, Graph]) -> None:
    """Save only what the backward graph of the same stage uses."""
    for name, forward in list(graphs.items()):
        backward = graphs.get(name[:-1] + "B") if name.endswith("F") else None
        if backward is None:
            continue
        used = {v for op in backward.ops for v in op.ins} | {*backward.outs, *backward.saved}
        unused = set(forward.saved).intersection(backward.ins) - used
        if unused:
            graphs[backward.name] = Graph(
                backward.name,
                tuple(v for v in backward.ins if v not in unused),
                backward.outs,
                backward.ops,
                backward.saved,
            )
            saved = tuple(v for v in forward.saved if v not in unused)
            graphs[name] = drop_dead(Graph(name, forward.ins, forward.outs, forward.ops, saved))


def _with_origins(graph: Graph, graphs: Mapping[str, Graph], gone: Mapping[str, str]) -> Graph:
    """Update `of`, which names forward operations: follow those that were merged or renamed, and forget those that are
    gone."""
    if not any("of" in op.attrs for op in graph.ops):
        return graph
    forwards = [other for name, other in graphs.items() if graph_kind(name) == "F"]
    first = {v.name: op.outs[0].name for other in forwards for op in other.ops for v in op.outs}
    ops = []
    for op in graph.ops:
        if "of" in op.attrs:
            name = str(op.attrs["of"])
            origin = first.get(name) or first.get(gone.get(name, ""))
            if origin != name:
                op = op.with_attrs(of=origin)
        ops.append(op)
    return graph if tuple(ops) == graph.ops else Graph(graph.name, graph.ins, graph.outs, tuple(ops), graph.saved)
