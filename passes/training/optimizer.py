"""The update graph: the computation on parameters once per batch.

In: a differentiated module. Out: graph U, and state variables beside each parameter that has a gradient:

    sgd        w - lr * (g + weight_decay * w)
    momentum   m = beta * m + g + weight_decay * w;  w - lr * m               @w.momentum; `nesterov` as in PyTorch
    adam       adamw whose decay is added to the gradient                     @w.adam_m, @w.adam_v
    adamw      decoupled decay, bias correction by 1 - beta^n                 @w.adam_m, @w.adam_v
    adagrad    s = s + g^2;  w - lr * g / (sqrt(s) + eps)                     @w.adagrad; decay added to the gradient
    lion       sgd whose gradient is sign(beta1 * m + (1 - beta1) * g)        @w.lion
    muon       sgd whose gradient is orthogonal(m), for matrices              @w.muon; adamw for all that is no matrix

g is the content of @w.grad, the gradient of the mean loss of the batch; `take` leaves it zero. Where the loss is
scaled, it is divided by @loss.scale.sum here, which changes no bit if the number of microbatches is a power of two.
State is read and written here alone, so one copy of it is enough under every schedule. Two counters: @step is the
number of batches, which the learning rate follows; @updates the number n of updates, which bias corrections follow. The
rate is data, read from @lr and @lr.curve (ir/training/rates.py), and so is the factor on it for some parameters,
@lr.factor. Scalars are computed in float64, once for all parameters of a rank, and rounded to the element type of the
parameter. Every gradient comes through `_gradient`, every new value goes through `_write`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from penstock.ir.attrs import Attr
from penstock.ir.graph import PARAM, SETTING, STATE, Graph, Module, Namer, Op, Value, Var
from penstock.ir.ops import OPS, make
from penstock.ir.training.optimizers import (
    Adagrad,
    Adam,
    AdamW,
    Group,
    Lion,
    Momentum,
    Muon,
    Optimizer,
    choose,
    load_optimizer,
    parse_groups,
    sort_into,
)
from penstock.ir.training.rates import COLUMNS, CURVE, LR, ROWS, Rate, parse_rate
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError

from .autodiff import SCALE_SUM

T = TypeVar("T")
R = TypeVar("R")

_SCALAR = TensorType("f64", ())
STEP, UPDATES = "step", "updates"
# The quintic of Newton and Schulz in the publication of Muon: it drives singular values into about 0.7 to 1.2, quickly.
_QUINTIC, _ROUNDS, _LEAST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """Options of `optimizer`. `kind` is one of ir/training/optimizers.py; settings that are None have the defaults of
    the kind, and those it does not have must be None. `rate` is a schedule of ir/training/rates.py, `groups` are groups
    of parameters, as text."""

    kind: str = "sgd"
    lr: float | None = None
    weight_decay: float | None = None
    beta: float | None = None
    nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    adjust: str | None = None
    adamw_lr: float | None = None
    adamw_weight_decay: float | None = None
    rate: str = "constant"
    groups: tuple[str, ...] = ()


def optimizer(module: Module, options: OptimizerOptions) -> Module:
    """Add the update graph U and the optimiser's state."""
    base, rate, groups = _settings(options)
    if "U" in module.graphs:
        raise UsageError("the module has an update graph already", where=f"@{module.name}")
    names = [v.name for v in module.vars.values() if v.role == PARAM]
    group_of = sort_into(groups, names)
    builder = _Update(module, base.lr, rate)
    for var in module.vars.values():
        if var.role == PARAM and f"{var.name}.grad" in module.vars:
            chosen = choose(base, group_of.get(var.name), var)
            builder.update(var, chosen.optimizer, chosen.factor)
    return module.but(vars={**module.vars, **builder.vars}).with_graph(Graph("U", (), (), builder.finish()))


def _settings(options: OptimizerOptions) -> tuple[Optimizer, Rate, tuple[Group, ...]]:
    """Read the options; one UsageError lists all problems."""
    problems: list[str] = []

    def read(reader: Callable[[T], R], setting: T) -> R | None:
        try:
            return reader(setting)
        except UsageError as error:
            problems.append(error.what)
            return None

    settings = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("rate", "groups")}
    base = load_optimizer({name: value for name, value in settings.items() if value is not None}, "", problems)
    rate, groups = read(parse_rate, options.rate), read(parse_groups, options.groups)
    problems += [
        f"group {g.name!r}: it is too late to freeze, gradients are computed already" for g in groups or () if g.frozen
    ]
    if problems or base is None or rate is None or groups is None:
        raise UsageError("; ".join(problems), where="optimizer")
    return base, rate, groups


class _Update:
    """The update graph while it is built, and the variables that it needs."""

    def __init__(self, module: Module, lr: float, rate: Rate) -> None:
        self.namer = Namer.of(*module.graphs.values())
        self.var_names = set(module.vars)
        self.vars: dict[str, Var] = {}
        self.ops: list[Op] = []
        self.shared_values: dict[tuple[object, ...], Value] = {}
        self.tail: list[Op] = []
        self.lr, self.rate, self.tables = lr, rate, Namer()
        self.is_scaled = SCALE_SUM in module.vars

    def update(self, param: Var, optimizer: Optimizer, factor: float) -> None:
        """Emit the operations of one parameter: read, take, step, write."""
        weight = self._read("read", param.name, f"{param.name}.latest", param.type)
        grad = self._gradient(param)
        match optimizer:
            case Momentum():
                self._momentum(param, weight, grad, optimizer, factor)
            case Adam() | AdamW():
                self._adam(param, weight, grad, optimizer, factor)
            case Adagrad():
                self._adagrad(param, weight, grad, optimizer, factor)
            case Lion():
                self._lion(param, weight, grad, optimizer, factor)
            case Muon():
                self._muon(param, weight, grad, optimizer, factor)
            case _:
                self._sgd(param, weight, grad, optimizer.weight_decay, factor)

    def finish(self) -> tuple[Op, ...]:
        return (*self.ops, *self.tail)

    # ------------------------------------------------------------------------------------ one method per kind

    def _sgd(self, param: Var, weight: Value, grad: Value, decay: float, factor: float) -> None:
        attrs = {"weight_decay": decay} if decay else {}
        self._write(
            param.name,
            self._one("sgd", weight, grad, self._rate(factor, param.type.dtype), base=f"{param.name}.next", **attrs),
        )

    def _momentum(self, param: Var, weight: Value, grad: Value, o: Momentum, factor: float) -> None:
        state = self._state(param, "momentum")
        ins = (weight, grad, state, self._rate(factor, param.type.dtype))
        self._step(param, "momentum", ins, ("momentum",), beta=o.beta, weight_decay=o.weight_decay, nesterov=o.nesterov)

    def _adam(self, param: Var, weight: Value, grad: Value, o: Adam | AdamW, factor: float) -> None:
        coupled = isinstance(o, Adam)
        if coupled:
            grad = self._decayed(param, weight, grad, o.weight_decay)
        states = [self._state(param, name) for name in ("adam_m", "adam_v")]
        dtype = param.type.dtype
        scalars = (
            self._correction(o.beta1, "c1", dtype),
            self._correction(o.beta2, "c2", dtype),
            self._rate(factor, dtype),
        )
        attrs = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "weight_decay": 0.0 if coupled else o.weight_decay}
        self._step(param, "adamw", (weight, grad, *states, *scalars), ("adam_m", "adam_v"), **attrs)

    def _adagrad(self, param: Var, weight: Value, grad: Value, o: Adagrad, factor: float) -> None:
        grad = self._decayed(param, weight, grad, o.weight_decay)
        state, name = self._state(param, "adagrad"), param.name
        after = self._one(
            "add", self._one("mul", grad, grad, base=f"{name}.square"), state, base=f"{name}.adagrad.next"
        )
        root = self._one(
            "add",
            self._one("sqrt", after, base=f"{name}.root"),
            self._number(o.eps, param.type.dtype),
            base=f"{name}.divisor",
        )
        self._sgd(param, weight, self._one("div", grad, root, base=f"{name}.scaled"), 0.0, factor)
        self._write(f"{name}.adagrad", after)

    def _lion(self, param: Var, weight: Value, grad: Value, o: Lion, factor: float) -> None:
        state, name = self._state(param, "lion"), param.name
        mixed = self._mixed(grad, state, o.beta1, f"{name}.mixed")
        self._sgd(param, weight, self._one("sign", mixed, base=f"{name}.sign"), o.weight_decay, factor)
        self._write(f"{name}.lion", self._mixed(grad, state, o.beta2, f"{name}.lion.next"))

    def _muon(self, param: Var, weight: Value, grad: Value, o: Muon, factor: float) -> None:
        state, name = self._state(param, "muon"), param.name
        after = self._mixed(grad, state, o.beta, f"{name}.muon.next")
        self._write(f"{name}.muon", after)
        ahead = self._mixed(grad, after, o.beta, f"{name}.ahead") if o.nesterov else after
        rows, columns = param.type.dims
        scale = math.sqrt(max(1, rows / columns)) if o.adjust == "original" else 0.2 * math.sqrt(max(rows, columns))
        turned = self._orthogonal(ahead, name)
        scaled = (
            self._one("mul", turned, self._number(scale, param.type.dtype), base=f"{name}.scaled")
            if scale != 1
            else turned
        )
        self._sgd(param, weight, scaled, o.weight_decay, factor)

    def _orthogonal(self, x: Value, name: str) -> Value:
        """Emit an approximation of u v^T, where u s v^T are the singular values and vectors of a matrix. Products are
        on its shorter side."""
        dtype = x.type.dtype
        rows, columns = x.type.dims
        a, b, c = _QUINTIC
        square = self._one("sum", self._one("mul", x, x, base=f"{name}.square"), base=f"{name}.squares", axes=(0, 1))
        norm = self._one(
            "maximum",
            self._one("sqrt", square, base=f"{name}.norm"),
            self._number(_LEAST_NORM, dtype),
            base=f"{name}.divisor",
        )
        x = self._one("div", x, norm, base=f"{name}.unit")
        for _ in range(_ROUNDS):
            # a x + (b g + c g^2) x with g = x x^T, each sum behind a product, where it costs nothing.
            flags = {"ta": True} if rows > columns else {"tb": True}
            g = self._one("matmul", x, x, base=f"{name}.gram", **flags)
            g2 = self._one(
                "mul",
                self._one("matmul", g, g, base=f"{name}.gram2"),
                self._number(c / b, dtype),
                base=f"{name}.quartic",
            )
            p = self._one(
                "mul", self._one("add", g2, g, base=f"{name}.even"), self._number(b / a, dtype), base=f"{name}.even"
            )
            px = self._one("matmul", *((x, p) if rows > columns else (p, x)), base=f"{name}.odd")
            x = self._one(
                "mul", self._one("add", px, x, base=f"{name}.odd"), self._number(a, dtype), base=f"{name}.orthogonal"
            )
        return x

    # ------------------------------------------------------------------------------------ parts of them

    def _gradient(self, param: Var) -> Value:
        """Emit the read of the gradient of the batch."""
        total = self._read("take", f"{param.name}.grad", f"{param.name}.total", param.type)
        if not self.is_scaled:
            return total
        dtype = param.type.dtype
        inverse = self._once(("inverse", dtype), lambda: self._inverse(dtype))
        return self._one("mul", total, inverse, base=f"{param.name}.unscaled")

    def _inverse(self, dtype: str) -> Value:
        """Return one over the sum of the factors on the loss of a batch, in an element type."""
        scalar = TensorType("f32", ())
        total = self._once(("factors",), lambda: self._read("take", SCALE_SUM, SCALE_SUM, scalar))
        wide = total if dtype == "f32" else self._one("cast", total, base=SCALE_SUM, dtype=dtype)
        return self._one("div", self._number(1.0, dtype), wide, base=f"{SCALE_SUM}.inverse")

    def _write(self, var: str, value: Value) -> None:
        """Emit the write of a parameter or of its state."""
        self.ops.append(Op("write", (value,), (), {"var": var}))

    def _state(self, param: Var, kind: str) -> Value:
        name = f"{param.name}.{kind}"
        self._add_var(Var(name, param.type, STATE, param.stage, init="zeros"))
        return self._read("read", name, name, param.type)

    def _step(self, param: Var, kind: str, ins: Sequence[Value], states: Sequence[str], **attrs: Attr) -> None:
        """Emit one row of the op table that makes the weight and its states. Attributes with the row's defaults are
        left out."""
        names = [param.name, *(f"{param.name}.{state}" for state in states)]
        changed = {k: v for k, v in attrs.items() if v != OPS[kind].attrs[k]}
        for name, value in zip(
            names, self._emit(kind, *ins, bases=[f"{n}.next" for n in names], **changed), strict=True
        ):
            self._write(name, value)

    def _decayed(self, param: Var, weight: Value, grad: Value, decay: float) -> Value:
        if not decay:
            return grad
        term = self._one("mul", weight, self._number(decay, param.type.dtype), base=f"{param.name}.decay")
        return self._one("add", term, grad, base=f"{param.name}.decayed")

    def _mixed(self, new: Value, old: Value, share: float, base: str) -> Value:
        """Emit share * old + (1 - share) * new, starting from the term with the larger share, which loses least."""
        much, little, part = (old, new, 1 - share) if share >= 0.5 else (new, old, share)
        step = self._one("sub", little, much, base=f"{base}.step")
        step = self._one("mul", step, self._number(part, new.type.dtype), base=f"{base}.part")
        return self._one("add", step, much, base=base)

    def _add_var(self, var: Var) -> None:
        if var.name in self.var_names:
            raise UsageError(
                f"the optimizer needs the name @{var.name}, which the model uses already", hint="rename it in the model"
            )
        self.var_names.add(var.name)
        self.vars[var.name] = var

    def _read(self, kind: str, var: str, base: str, type: TensorType) -> Value:
        value = Value(self.namer.fresh(base), type)
        self.ops.append(Op(kind, (), (value,), {"var": var}))
        return value

    def _emit(self, kind: str, *ins: Value, bases: Sequence[str], **attrs: Attr) -> tuple[Value, ...]:
        op = make(kind, ins, [self.namer.fresh(base) for base in bases], **attrs)
        self.ops.append(op)
        return op.outs

    def _one(self, kind: str, *ins: Value, base: str, **attrs: Attr) -> Value:
        return self._emit(kind, *ins, bases=[base], **attrs)[0]

    # ------------------------------------------------------------------------------------ scalars, each made once

    def _once(self, key: tuple[object, ...], maker: Callable[[], Value]) -> Value:
        if key not in self.shared_values:
            self.shared_values[key] = maker()
        return self.shared_values[key]

    def _number(self, value: float, dtype: str) -> Value:
        return self._once(("number", value, dtype), lambda: self._one("const", base="number", value=value, dtype=dtype))

    def _rate(self, factor: float, dtype: str) -> Value:
        """Return the learning rate of this batch, times a factor, in an element type."""
        wide = self._once(("rate",), self._read_rate)
        if factor != 1:
            wide = self._once(
                ("rate", factor),
                lambda: self._one("mul", wide, self._table(f"{LR}.factor", _SCALAR, (factor,)), base="lr.times"),
            )
        return self._once(("rate", factor, dtype), lambda: self._one("cast", wide, base="lr", dtype=dtype))

    def _read_rate(self) -> Value:
        lr = self._table(LR, _SCALAR, (self.lr,))
        curve = self._table(CURVE, TensorType("f64", (ROWS, COLUMNS)), self.rate.table())
        step, _ = self._counted(STEP)
        time = self._one("cast", step, base="step.time", dtype="f64")
        return self._one("mul", lr, self._one("ramp", curve, time, base="lr.part"), base="lr.wide")

    def _table(self, base: str, type: TensorType, elements: tuple[float, ...]) -> Value:
        """Make a table of that name; the second factor and those after it are numbered."""
        name = self.tables.fresh(base)
        self._add_var(Var(name, type, SETTING, init=elements))
        return self._read("read", name, f"{name}.table", type)

    def _correction(self, beta: float, name: str, dtype: str) -> Value:
        """Return 1 - beta^n."""

        def wide() -> Value:
            power = self._one(
                "pow", self._number(beta, "f64"), self._once(("updates",), self._updates), base=f"{name}.power"
            )
            return self._one("sub", self._number(1.0, "f64"), power, base=f"{name}.wide")

        return self._once(
            ("correction", beta, dtype),
            lambda: self._one("cast", self._once(("correction", beta), wide), base=name, dtype=dtype),
        )

    def _updates(self) -> Value:
        """Return the number of this update, from 1, as float64."""
        return self._one("cast", self._counted(UPDATES)[1], base="updates.time", dtype="f64")

    def _counted(self, name: str) -> tuple[Value, Value]:
        """Return a counter before and after this update; it is written at the end."""
        self._add_var(Var(name, TensorType("i64", ()), STATE, init="zeros"))
        before = self._read("read", name, name, TensorType("i64", ()))
        after = self._one(
            "add", before, self._one("const", base=f"{name}.one", value=1, dtype="i64"), base=f"{name}.next"
        )
        self.tail.append(Op("write", (after,), (), {"var": name}))
        return before, after
