"""Guard the update by the norm of the whole gradient of a batch: the pass `guard`. In: F, B and U of the whole model.
Out: graph N, and U guarded.

    N   for every gradient the sum of its squares, added to @gradients.squares, whose sum over all stages U takes
    U   returns the norm of the whole gradient; with `clip`, gradients are scaled down so that the norm is at most that,
        as by torch.nn.utils.clip_grad_norm_; where the norm is not finite, nothing changes but the number of batches

All stages decide by the same number, the sum of all parts in one order. So all of them apply or skip an update, and
scale by the same factor. The squares of one parameter are added up in the element type of its gradient, the sums of the
parameters in float64. In float32 the squares of a parameter may add up to more than 3.4e38 (one element above 1.8e19,
or many smaller ones). The norm then counts as infinite.

With a loss scale (`autodiff{loss_scale=...}`; for f16, whose small gradients would vanish) N adds up the squares of
gradients times the scale. U divides their sum, so the norm is that of the true gradient. The scale is halved by every
update that is skipped, and doubled after `grow_every` updates in a row that are not. It has versions, like a parameter,
because each backward must use one value from beginning to end.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.attrs import Attr
from penstock.ir.graph import GRAD, NORM, STATE, Graph, Module, Namer, Op, Value, Var, substitute
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError

from .autodiff import LOSS_SCALE, SCALE_SUM
from .optimizer import STEP

SQUARES, GOOD = "gradients.squares", "loss.scale.good"
# The number that torch.nn.utils.clip_grad_norm_ adds to the norm it divides by.
_CLIP_EPS = 1e-6
_SCALAR = TensorType("f64", ())
# Beyond these limits a scale does harm: the loss itself would overflow, or gradients would be scaled down.
_LEAST_SCALE, _LARGEST_SCALE = 1.0, 2.0**24


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Options of `guard`. `clip` is the largest norm of the gradient, 0 for any; `grow_every` updates in a row that are
    not skipped double the loss scale."""

    clip: float = 0.0
    grow_every: int = 2000


def guard(module: Module, options: GuardOptions) -> Module:
    """Clip the gradient of the whole model, leave out updates by gradients that are not finite, and adapt the loss
    scale."""
    problems = [] if options.clip >= 0 else [f"clip must not be negative, got {options.clip}"]
    problems += [] if options.grow_every >= 1 else [f"grow_every must be at least 1, got {options.grow_every}"]
    update = module.graphs.get("U")
    if update is None:
        problems.append("there is no update graph U, run the pass optimizer first")
    problems += [f"the name @{name} is taken by the model" for name in (SQUARES, GOOD) if name in module.vars]
    if any(v.name == NORM for graph in module.graphs.values() for op in graph.ops for v in op.outs):
        problems.append(f"the name %{NORM} is taken by the model")
    if problems or update is None:
        raise UsageError("; ".join(problems), where="guard")
    squares = Var(SQUARES, _SCALAR, GRAD, init="zeros")
    builder = _Guard(module, options, update)
    graphs = {**module.graphs, "N": _norm(module, update)}
    graphs["U"] = builder.run()
    return module.but(graphs=graphs, vars={**module.vars, SQUARES: squares, **builder.vars})


def _norm(module: Module, update: Graph) -> Graph:
    namer = Namer.of(*module.graphs.values())
    ops: list[Op] = []

    def emit(kind: str, *ins: Value, base: str, **attrs: Attr) -> Value:
        ops.append(make(kind, ins, [namer.fresh(base)], **attrs))
        return ops[-1].outs[0]

    for take in (op for op in update.ops if op.kind == "take" and op.var != SCALE_SUM):
        grad = Value(namer.fresh(f"{take.var}.sum"), take.outs[0].type)
        ops.append(Op("read", (), (grad,), {"var": take.var}))
        total = emit("mul", grad, grad, base=f"{take.var}.square")
        if grad.type.rank:
            total = emit("sum", total, base=f"{take.var}.squares", axes=tuple(range(grad.type.rank)))
        if total.type.dtype != "f64":
            total = emit("cast", total, base=f"{take.var}.squares", dtype="f64")
        ops.append(Op("accum", (total,), (), {"var": SQUARES}))
    return Graph("N", (), (), tuple(ops))


class _Guard:
    """The rewriting of the update graph U: gradients pass through the clipping factor, new values through the choice
    whether to apply them."""

    def __init__(self, module: Module, options: GuardOptions, update: Graph) -> None:
        self.module, self.options, self.update = module, options, update
        self.namer = Namer.of(*module.graphs.values())
        self.ops: list[Op] = []
        self.vars: dict[str, Var] = {}
        self.constants: dict[tuple[float, str], Value] = {}
        self.factors: dict[str, Value] = {}

    def run(self) -> Graph:
        scaled, factors = self._state("take", SQUARES, _SCALAR), self._factors()
        squares = scaled if factors is None else self._unscaled(scaled, factors)
        norm = self._emit("sqrt", squares, base=NORM)
        self.finite = self._emit("less", squares, self._number(float("inf"), "f64"), base="gradient.finite")
        self.wide = self._factor(norm)
        table: dict[Value, Value] = {}
        held = {op.var: op.outs[0] for op in self.update.ops if op.kind == "read"}
        for op in self.update.ops:
            if factors is not None and op.outs == (factors,):
                continue
            op = op.with_ins(substitute(op.ins, table))
            if op.kind == "write" and op.var != STEP:
                old = held.get(op.var) or self._state("read", op.var, op.ins[0].type)
                op = Op(
                    "write",
                    (self._emit("where", self.finite, op.ins[0], old, base=f"{op.var}.kept"),),
                    (),
                    op.attrs,
                    op.loc,
                )
            self.ops.append(op)
            if op.kind == "take" and self.wide is not None:
                (total,) = op.outs
                table[total] = self._emit("mul", total, self._factor_in(total.type.dtype), base=f"{total.name}.clipped")
        if LOSS_SCALE in self.module.vars:
            self._adapt()
        return Graph(self.update.name, self.update.ins, (*self.update.outs, norm), tuple(self.ops), self.update.saved)

    def _factors(self) -> Value | None:
        """Take the sum of the factors on the loss, ahead of the rest of the update; None without a loss scale."""
        take = next((op for op in self.update.ops if op.kind == "take" and op.var == SCALE_SUM), None)
        if take is None:
            return None
        self.ops.append(take)
        return take.outs[0]

    def _unscaled(self, squares: Value, factors: Value) -> Value:
        """Divide the sum of squares by the square of the factor on gradients."""
        wide = self._emit("cast", factors, base=f"{SCALE_SUM}.wide", dtype="f64")
        root = self._emit("div", squares, wide, base=f"{SQUARES}.unscaled")
        return self._emit("div", root, wide, base=f"{SQUARES}.unscaled")

    def _factor(self, norm: Value) -> Value | None:
        """Emit the factor on gradients, at most 1."""
        if not self.options.clip:
            return None
        divisor = self._emit("add", norm, self._number(_CLIP_EPS, "f64"), base="gradient.divisor")
        ratio = self._emit("div", self._number(self.options.clip, "f64"), divisor, base="gradient.ratio")
        return self._emit("minimum", ratio, self._number(1.0, "f64"), base="gradient.factor")

    def _factor_in(self, dtype: str) -> Value:
        assert self.wide is not None
        if dtype not in self.factors:
            self.factors[dtype] = (
                self.wide if dtype == "f64" else self._emit("cast", self.wide, base="gradient.factor", dtype=dtype)
            )
        return self.factors[dtype]

    def _adapt(self) -> None:
        """Halve the scale where this update is skipped; double the scale after enough updates in a row that are not."""
        kind = self.module.vars[LOSS_SCALE].type
        self.vars[GOOD] = Var(GOOD, TensorType("i64", ()), STATE, init="zeros")
        scale, good = self._state("read", LOSS_SCALE, kind), self._state("read", GOOD, TensorType("i64", ()))
        more = self._emit("add", good, self._number(1, "i64"), base=f"{GOOD}.more")
        enough = self._emit("less_equal", self._number(self.options.grow_every, "i64"), more, base=f"{GOOD}.enough")
        grown = self._emit(
            "minimum", self._scaled(scale, 2.0), self._number(_LARGEST_SCALE, kind.dtype), base=f"{LOSS_SCALE}.grown"
        )
        shrunk = self._emit(
            "maximum", self._scaled(scale, 0.5), self._number(_LEAST_SCALE, kind.dtype), base=f"{LOSS_SCALE}.shrunk"
        )
        calm = self._emit("where", enough, grown, scale, base=f"{LOSS_SCALE}.calm")
        after = self._emit("where", self.finite, calm, shrunk, base=f"{LOSS_SCALE}.next")
        none = self._number(0, "i64")
        counted = self._emit("where", enough, none, more, base=f"{GOOD}.calm")
        count = self._emit("where", self.finite, counted, none, base=f"{GOOD}.next")
        self.ops += [Op("write", (after,), (), {"var": LOSS_SCALE}), Op("write", (count,), (), {"var": GOOD})]

    def _scaled(self, scale: Value, by: float) -> Value:
        return self._emit("mul", scale, self._number(by, scale.type.dtype), base=f"{scale.name}.by")

    def _number(self, value: float, dtype: str) -> Value:
        if (value, dtype) not in self.constants:
            self.constants[value, dtype] = self._emit("const", base="number", value=value, dtype=dtype)
        return self.constants[value, dtype]

    def _state(self, kind: str, var: str, type: TensorType) -> Value:
        value = Value(self.namer.fresh(var if kind == "take" else f"{var}.latest"), type)
        self.ops.append(Op(kind, (), (value,), {"var": var}))
        return value

    def _emit(self, kind: str, *ins: Value, base: str, **attrs: Attr) -> Value:
        self.ops.append(make(kind, ins, [self.namer.fresh(base)], **attrs))
        return self.ops[-1].outs[0]
