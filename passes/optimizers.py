"""The update graph: what happens to the parameters once per batch.

In: a differentiated module. Out: graph U, and state variables beside each parameter that has a gradient:

    sgd        w - lr * (g + weight_decay * w)
    momentum   m = beta * m + g + weight_decay * w;  w - lr * m         state @w.momentum; `nesterov` as in PyTorch
    adamw      decoupled decay, bias correction by 1 - beta^t           state @w.adam_m, @w.adam_v, and @step (the batch number t, from 1)

Every parameter decays alike, as in PyTorch. g is what @w.grad holds, the gradient of the mean loss of the batch; `take` leaves it zero.
State is read and written here alone, so one copy of it is enough under every schedule. The bias corrections are scalars in float64,
computed once for all parameters of a rank, and rounded to the element type of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.errors import UsageError
from ..ir.graph import PARAM, STATE, Attr, Graph, Module, Namer, Op, Value, Var
from ..ir.ops import OPS, make
from ..ir.types import TensorType

STEP = "step"


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """`kind` is sgd, momentum or adamw; `beta` and `nesterov` belong to momentum, `beta1`, `beta2` and `eps` to adamw."""

    kind: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0
    beta: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


# Names of the state tensors of a parameter, and the options that become attributes of the update operation.
STATES: dict[str, tuple[str, ...]] = {"sgd": (), "momentum": ("momentum",), "adamw": ("adam_m", "adam_v")}
ATTRS: dict[str, tuple[str, ...]] = {
    "sgd": ("weight_decay",),
    "momentum": ("beta", "weight_decay", "nesterov"),
    "adamw": ("beta1", "beta2", "eps", "weight_decay"),
}


def optimizer(module: Module, options: OptimizerOptions) -> Module:
    """Add the update graph U and the optimiser's state."""
    _check(options)
    if "U" in module.graphs:
        raise UsageError("the module has an update graph already", where=f"@{module.name}")
    params = [v for v in module.vars.values() if v.role == PARAM and f"{v.name}.grad" in module.vars]
    builder = _Update(module, options)
    for var in params:
        builder.update(var)
    return module.but(vars={**module.vars, **builder.vars}).with_graph(Graph("U", (), (), builder.finish()))


def _check(options: OptimizerOptions) -> None:
    problems = []
    if options.kind not in STATES:
        problems.append(f"unknown optimizer {options.kind!r}, expected one of {', '.join(STATES)}")
    problems += [
        f"{name} must be in [0, 1), got {value}"
        for name, value in (("beta", options.beta), ("beta1", options.beta1), ("beta2", options.beta2))
        if not 0 <= value < 1
    ]
    problems += [
        f"{name} must not be negative, got {value}"
        for name, value in (("lr", options.lr), ("weight_decay", options.weight_decay), ("eps", options.eps))
        if not value >= 0
    ]
    if problems:
        raise UsageError("; ".join(problems), where="optimizer")


class _Update:
    def __init__(self, module: Module, options: OptimizerOptions) -> None:
        self.options, self.namer = options, Namer.of(*module.graphs.values())
        self.taken = set(module.vars)
        self.vars: dict[str, Var] = {}
        self.ops: list[Op] = []
        self.scalars: dict[tuple[str, str], Value] = {}
        self.tail: list[Op] = []

    def update(self, param: Var) -> None:
        """The operations of one parameter: read, take, step, write."""
        kind, attrs = self.options.kind, OPS[self.options.kind].attrs
        weight = self._read("read", param.name, f"{param.name}.latest", param.type)
        grad = self._read("take", f"{param.name}.grad", f"{param.name}.total", param.type)
        names = [f"{param.name}.{state}" for state in STATES[kind]]
        states = []
        for name in names:
            self._add_var(Var(name, param.type, STATE, param.stage, init="zeros"))
            states.append(self._read("read", name, name, param.type))
        scalars = [self._scalar(s, param.type.dtype) for s in (("c1", "c2", "lr") if kind == "adamw" else ("lr",))]
        given: dict[str, Attr] = {name: getattr(self.options, name) for name in ATTRS[kind]}
        changed = {k: v for k, v in given.items() if v != attrs[k]}
        outs = self._emit(kind, weight, grad, *states, *scalars, bases=[f"{n}.next" for n in (param.name, *names)], **changed)
        for name, value in zip((param.name, *names), outs, strict=True):
            self.ops.append(Op("write", (value,), (), {"var": name}))

    def finish(self) -> tuple[Op, ...]:
        return (*self.ops, *self.tail)

    def _add_var(self, var: Var) -> None:
        if var.name in self.taken:
            raise UsageError(f"the optimizer needs the name @{var.name}, which the model uses already", hint="rename it in the model")
        self.taken.add(var.name)
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

    def _scalar(self, name: str, dtype: str) -> Value:
        """lr, c1 or c2 in an element type, made once."""
        if (name, dtype) not in self.scalars:
            made: dict[str, Callable[[], Value]] = {
                "lr": lambda: self._one("const", base="lr", value=self.options.lr, dtype=dtype),
                "c1": lambda: self._one("cast", self._correction("c1", self.options.beta1), base="c1", dtype=dtype),
                "c2": lambda: self._one("cast", self._correction("c2", self.options.beta2), base="c2", dtype=dtype),
            }
            self.scalars[name, dtype] = made[name]()
        return self.scalars[name, dtype]

    def _correction(self, name: str, beta: float) -> Value:
        """1 - beta^t in float64."""
        if (name, "wide") not in self.scalars:
            time = self._time()
            power = self._one("pow", self._one("const", base=f"{name}.beta", value=beta, dtype="f64"), time, base=f"{name}.power")
            one = self._one("const", base=f"{name}.one", value=1.0, dtype="f64")
            self.scalars[name, "wide"] = self._one("sub", one, power, base=f"{name}.wide")
        return self.scalars[name, "wide"]

    def _time(self) -> Value:
        """The batch number from 1, as float64; @step is advanced at the end of the update."""
        if ("t", "f64") not in self.scalars:
            self._add_var(Var(STEP, TensorType("i64", ()), STATE, init="zeros"))
            step = self._read("read", STEP, STEP, TensorType("i64", ()))
            one = self._one("const", base="step.one", value=1, dtype="i64")
            after = self._one("add", step, one, base="step.next")
            self.tail.append(Op("write", (after,), (), {"var": STEP}))
            self.scalars["t", "f64"] = self._one("cast", after, base="step.time", dtype="f64")
        return self.scalars["t", "f64"]
