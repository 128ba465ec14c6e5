"""Round weights to fewer bits: products and lookups of parameters read them in 8 or 4 bits, or in bf16.

In: a module that does not train, before it is cut, so that costs count the bytes that are read. Out: the same module
where matrices of products by parameters are variables `from @w` (ir/interpreter/derived.py says how they are rounded).
`matmul` becomes `matmul_q` and `gather` becomes `gather_q`; with 16 bits a variable of bf16 is widened where it is
read. With `act=i8` products round the other operand, too, which is fastest.

A weight stays as it is where anything else reads it, where its rows do not divide into groups, and where it is small.
`keep` names others that stay, by regular expressions. Weights that are looked up (embeddings), and those of products
whose result is an output (the head), have 8 bits where others have 4: few of them carry much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, PARAM, Graph, Module, Namer, Op, Value, Var
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import OPS, complete_attrs, make
from penstock.ir.ops.quantised import ACTS, GROUPS
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError
from penstock.support.words import counted

BITS = (16, 8, 4)
# Smaller weights cost more in steps than they save in bytes.
_LEAST = 1024


@dataclass(frozen=True, slots=True)
class QuantiseOptions:
    """Options of `quantise`. `group` is the most elements with one scale; `keep` names variables that stay."""

    bits: int = 8
    group: int = 32
    act: str = "i8"
    keep: tuple[str, ...] = ()


def quantise(module: Module, options: QuantiseOptions) -> Module:
    """Make weights of products and lookups variables of fewer bits."""
    main = module.graphs.get("main")
    if options.bits not in BITS or options.group not in GROUPS or options.act not in ACTS:
        raise UsageError(
            f"bits={options.bits}, group={options.group}, act={options.act}",
            hint=f"bits: {', '.join(map(str, BITS))}; group: {', '.join(map(str, GROUPS))}; act: {', '.join(ACTS)}",
        )
    if main is None:
        raise UsageError(
            f"there is no graph main, only {', '.join(module.graphs)}", hint="run `quantise` before `partition`"
        )
    changed = {op.var for op in main.ops if OPS[op.kind].effect and op.kind != "read"}
    rewriting = _Rewriting(module, main, changed, options)
    chosen = rewriting.choose()
    if not chosen:
        return module.noted("quantise", "no weight is read by products and lookups alone, in whole groups")
    graph = drop_dead(rewriting.run(chosen))
    left = {op.var for op in graph.ops if "var" in op.attrs}
    gone = {weight.var.name for weight in chosen.values()} - left
    variables = {name: var for name, var in module.vars.items() if name not in gone} | rewriting.made
    widths: dict[int, int] = {}
    for weight in chosen.values():
        widths[weight.bits] = widths.get(weight.bits, 0) + 1
    notes = [f"{counted(count, 'weight')} in {bits} bits" for bits, count in sorted(widths.items())]
    return module.but(graphs={**module.graphs, "main": graph}, vars=variables).noted("quantise", ", ".join(notes))


@dataclass(frozen=True)
class _ChosenWeight:
    """A variable that is rounded: to so many bits, by groups along the rows of it or of its transpose."""

    var: Var
    bits: int
    group: int
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.var.type.dims
        return (columns, rows) if self.turned else (rows, columns)

    def variables(self) -> list[Var]:
        """Return the variables in its place."""
        if self.bits == 16:
            return [self._made("bf16", "bf16", TensorType("bf16", self.var.type.dims))]
        rows, columns = self.shape
        tail = f"{self.bits}.{self.group}{'.turned' if self.turned else ''}"
        codes = TensorType("i8", (rows, columns)) if self.bits == 8 else TensorType("u8", (rows, columns // 2))
        scales = TensorType("f16", (rows, columns // self.group))
        return [
            self._made(f"q{self.bits}", f"codes{tail}", codes),
            self._made(f"s{self.bits}", f"scales{tail}", scales),
        ]

    def _made(self, suffix: str, form: str, type: TensorType) -> Var:
        return replace(self.var, name=f"{self.var.name}.{suffix}", type=type, source=self.var.name, form=form)


class _Rewriting:
    """The rewriting of one graph."""

    def __init__(self, module: Module, graph: Graph, changed: set[str], options: QuantiseOptions) -> None:
        self.module, self.graph, self.options = module, graph, options
        self.changed = changed
        self.keep = [re.compile(pattern) for pattern in options.keep]
        self.readers: dict[Value, list[Op]] = {}
        for op in graph.ops:
            for value in op.ins:
                self.readers.setdefault(value, []).append(op)
        self.computed = {v for op in graph.ops if op.kind not in ("read", "const") for v in op.outs}
        self.made: dict[str, Var] = {}

    def choose(self) -> dict[str, _ChosenWeight]:
        """Return the weights to round, by the names of their variables."""
        reads: dict[str, list[Value]] = {}
        for op in self.graph.ops:
            if op.kind == "read":
                reads.setdefault(op.var, []).append(op.outs[0])
        weights = {name: self._chosen(self.module.vars[name], values) for name, values in reads.items()}
        return {name: weight for name, weight in weights.items() if weight is not None}

    def _chosen(self, var: Var, values: Sequence[Value]) -> _ChosenWeight | None:
        """Return how a variable is rounded, or None if it stays as it is."""
        users = [(op, value) for value in values for op in self.readers.get(value, ())]
        turns = {_turn(op, value) for op, value in users}
        is_weight = var.role == PARAM and var.type.dtype == "f32" and var.type.rank == 2 and var.init == "file"
        if not is_weight or var.type.size < _LEAST or var.name in self.changed or len(turns) != 1 or "" in turns:
            return None
        if not set(values).isdisjoint(self.graph.results) or any(p.search(var.name) for p in self.keep):
            return None
        turned = turns == {"turned"}
        if self.options.bits == 16:
            return _ChosenWeight(var, 16, 0, turned)
        columns = var.type.dims[0 if turned else 1]
        group = next((g for g in reversed(GROUPS) if g <= self.options.group and columns % g == 0), 0)
        if not group:
            return None
        careful = any(op.kind == "gather" or self._is_head(op) for op, _ in users)
        return _ChosenWeight(var, 8 if careful else self.options.bits, group, turned)

    def _is_head(self, op: Op) -> bool:
        """Return whether the result of a product becomes an output, but for layouts, and numbers added or
        multiplied."""
        stack, seen = [op.outs[0]], set[Value]()
        while stack:
            value = stack.pop()
            if value in self.graph.results:
                return True
            if value in seen:
                continue
            seen.add(value)
            for user in self.readers.get(value, ()):
                goes_on = OPS[user.kind].family == "layout" or user.kind in ("add", "mul", "cast")
                if goes_on and all(v is value or v not in self.computed for v in user.ins):
                    stack += user.outs
        return False

    def run(self, chosen: Mapping[str, _ChosenWeight]) -> Graph:
        """Return the graph with the chosen weights rounded."""
        namer = Namer.of(self.graph)
        ops: list[Op] = []
        replaced: dict[Value, tuple[_ChosenWeight, list[Value]]] = {}
        for op in self.graph.ops:
            weight = chosen.get(op.var) if op.kind == "read" else None
            if weight is None:
                ops.append(self._rewritten(op, replaced))
                continue
            values = []
            for var in weight.variables():
                self.made[var.name] = var
                values.append(Value(namer.fresh(var.name), var.type))
                ops.append(Op("read", (), (values[-1],), {**op.attrs, "var": var.name}, op.loc))
            if weight.bits == 16:
                ops.append(Op("cast", (values[0],), op.outs, {"dtype": "f32"}, op.loc))
            else:
                replaced[op.outs[0]] = (weight, values)
        return replace(self.graph, ops=tuple(ops))

    def _rewritten(self, op: Op, replaced: Mapping[Value, tuple[_ChosenWeight, list[Value]]]) -> Op:
        place = {"matmul": 1, "gather": 0}.get(op.kind)
        if place is None or op.ins[place] not in replaced:
            return op
        weight, values = replaced[op.ins[place]]
        attrs: dict[str, Attr] = {"bits": weight.bits, "group": weight.group}
        attrs |= {name: value for name, value in op.attrs.items() if name in ANNOTATIONS}
        kind = "matmul_q" if op.kind == "matmul" else "gather_q"
        if kind == "matmul_q":
            attrs["act"] = self.options.act
        product = make(kind, (op.ins[1 - place], *values), [op.outs[0].name], op.loc, **attrs)
        assert product.outs == op.outs, f"{op.kind} became another type"
        return product


def _turn(op: Op, value: Value) -> str:
    """Return how an operation reads a weight, `straight` or `turned`, so that rows are added up or looked up; an empty
    string for an operation that does neither."""
    attrs = complete_attrs(op)
    if op.kind == "matmul" and op.ins[1] == value and op.ins[0] != value and not attrs["ta"]:
        return "straight" if attrs["tb"] else "turned"
    if op.kind == "gather" and op.ins[0] == value and attrs["axis"] == 0:
        return "straight"
    return ""
