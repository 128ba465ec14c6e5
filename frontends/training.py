"""How a model is trained: loss, optimiser, microbatches; and the pass over a fresh module that attaches the loss.

`attach_loss` takes the module as a reader left it, one graph `main`, and gives a module whose only output is a scalar loss:
    cross_entropy   mean over all rows of -log softmax(first output)[label]; new input `labels` i64, the output's shape without the last
    mse             mean of (first output - labels)^2; new input `labels` of the output's type
    output:NAME     a scalar that the model computes itself
Every loss is a mean over a microbatch. The model's other outputs are not computed in training.

A training file is TOML; an unknown key, a missing one or a wrong value is an error, and all of them are reported at once:

    loss = "cross_entropy"
    microbatches = 4
    precision = "bf16"
    [optimizer]
    kind = "adamw"
    lr = 3e-4
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from penstock.ir.errors import UsageError
from penstock.ir.graph import PARAM, Attr, Graph, Module, Namer, Op, Value, substitute
from penstock.ir.liveness import live_ops
from penstock.ir.ops import make
from penstock.ir.renames import accepted, shown
from penstock.ir.types import FLOATS, TensorType

LABELS = "labels"
LOSSES = ("cross_entropy", "mse", "output:NAME")
TRAINING_PRECISIONS = ("f32", "bf16")

# ---------------------------------------------------------------------------------------- settings


# Allowed values by the name of a setting; all optimisers mean the same by the same name.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("0 or more", lambda x: x >= 0),
    "weight_decay": ("0 or more", lambda x: x >= 0),
    "eps": ("above 0", lambda x: x > 0),
    "beta": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "beta1": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "beta2": ("at least 0 and below 1", lambda x: 0 <= x < 1),
}


@dataclass(frozen=True)
class _Settings:
    """What all optimisers share: settings are the dataclass fields, `kind` is the name on the command line."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        wrong = []
        for name, value in asdict(self).items():
            said, holds = _RANGES.get(name, ("", lambda x: True))
            if not (isfinite(value) and holds(value)):
                wrong.append(f"{name} must be {said}, got {value!r}")
        if wrong:
            raise UsageError("; ".join(wrong), where=f"optimizer {self.kind}")

    def pass_options(self) -> dict[str, Attr]:
        """Options of the pass `optimizer`."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class SGD(_Settings):
    """w - lr * (g + weight_decay * w)"""

    kind: ClassVar[str] = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Momentum(_Settings):
    """m = beta * m + g + weight_decay * w; w - lr * m, or with nesterov w - lr * (g + beta * m)"""

    kind: ClassVar[str] = "momentum"
    lr: float = 0.01
    beta: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW(_Settings):
    """Adam with decoupled weight decay"""

    kind: ClassVar[str] = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


Optimizer = SGD | Momentum | AdamW
OPTIMIZERS: dict[str, type[SGD] | type[Momentum] | type[AdamW]] = {c.kind: c for c in (SGD, Momentum, AdamW)}


def optimizer_of(kind: str, **settings: float) -> Optimizer:
    """The optimiser of that name; settings that are not given have their defaults."""
    problems: list[str] = []
    found = _load_optimizer({"kind": kind, **settings}, problems)
    if found is None:
        raise UsageError("; ".join(problems))
    return found


@dataclass(frozen=True)
class Training:
    """`loss` is cross_entropy, mse or output:NAME; `microbatches` is how many make one step of the optimiser; `precision` is what activations
    and products are computed in, f32 or bf16, with weights kept in f32; `seed` is that of dropout."""

    loss: str
    optimizer: Optimizer = SGD()
    microbatches: int = 1
    precision: str = "f32"
    seed: int = 0

    def __post_init__(self) -> None:
        named = self.loss.startswith("output:") and len(self.loss) > len("output:")
        wrong = []
        if self.loss not in ("cross_entropy", "mse") and not named:
            wrong.append(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.microbatches < 1:
            wrong.append(f"microbatches must be 1 or more, got {self.microbatches}")
        if not 0 <= self.seed < 2**32:
            wrong.append(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        if self.precision not in TRAINING_PRECISIONS:
            scaling = " (f16 would need loss scaling, which does not exist yet)" if self.precision == "f16" else ""
            wrong.append(f"precision must be one of {', '.join(TRAINING_PRECISIONS)}, got {self.precision!r}{scaling}")
        if wrong:
            raise UsageError("; ".join(wrong), where="training")


# ---------------------------------------------------------------------------------------- files


def load_training(path: str | Path, loss: str | None = None) -> Training:
    """The settings in a TOML file; a loss given here stands in for the one of the file, which may then have none."""
    where = str(path)
    try:
        with Path(path).open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=where) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not a TOML file: {error}", where=where) from error
    problems: list[str] = []
    chosen = _pick(table, {"loss": str, "microbatches": int, "precision": str, "seed": int, "optimizer": dict}, "", problems)
    if loss is not None:
        chosen["loss"] = loss
    if "loss" not in chosen and "loss" not in table:
        problems.append("loss is missing")
    optimizer = _load_optimizer(chosen.pop("optimizer"), problems) if "optimizer" in chosen else SGD()
    made = None
    try:
        made = Training(**{"loss": "mse", **chosen}, optimizer=optimizer or SGD())
    except UsageError as error:
        problems += error.what.split("; ")
    if problems or made is None:
        raise UsageError("the training file has errors:\n" + "\n".join(f"  {p}" for p in problems), where=where)
    return made


def _load_optimizer(table: Mapping[str, Any], problems: list[str]) -> Optimizer | None:
    """The optimiser a table describes; None with an entry in `problems` for everything that is wrong."""
    kind = table.get("kind")
    if kind not in OPTIMIZERS:
        problems.append(f"optimizer.kind must be one of {', '.join(OPTIMIZERS)}, got {kind!r}")
        return None
    maker = OPTIMIZERS[kind]
    kinds = {f.name: type(f.default) for f in fields(maker)}
    before = len(problems)
    chosen = _pick({k: v for k, v in table.items() if k != "kind"}, kinds, "optimizer.", problems)
    try:
        made = maker(**chosen)
    except UsageError as error:
        problems += [f"optimizer.{what}" for what in error.what.split("; ")]
        return None
    return made if len(problems) == before else None


def _pick(table: Mapping[str, Any], kinds: Mapping[str, type], prefix: str, problems: list[str]) -> dict[str, Any]:
    """The entries of `table` that have the right type; everything else becomes a problem."""
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        kind = kinds.get(key)
        if kind is None:
            problems.append(f"{prefix}{key} is not known, there are {', '.join(prefix + k for k in kinds)}")
        elif kind is float and type(value) in (int, float):
            chosen[key] = float(value)
        elif type(value) is kind:
            chosen[key] = value
        else:
            problems.append(f"{prefix}{key} must be {words[kind]}, got {value!r}")
    return chosen


# ---------------------------------------------------------------------------------------- the loss


def attach_loss(module: Module, training: Training, renamed: Mapping[str, str] | None = None) -> Module:
    """`renamed` gives the model's names of outputs that are spelled otherwise. The module with a scalar loss as its only output, and `labels` among its inputs where the loss needs them."""
    main = module.graphs["main"]
    if training.loss.startswith("output:"):
        loss, inputs, ops = _own_loss(main, training.loss.removeprefix("output:"), renamed or {}), main.ins, list(main.ops)
    else:
        main, labels, op = _added_loss(main, training.loss)
        loss, inputs, ops = op.outs[0], (*main.ins, labels), [*main.ops, op]
    live = [op.with_attrs(seed=training.seed) if op.kind == "random_key" else op for op in live_ops(ops, (loss,))]
    read = {op.var for op in live if op.kind in ("read", "write")}
    graph = Graph("main", inputs, (loss,), tuple(live))
    variables = {name: var for name, var in module.vars.items() if name in read}
    halves = [f"@{name}" for name, var in variables.items() if var.role == PARAM and var.type.dtype == "f16"]
    if halves:
        raise UsageError(
            f"parameters in f16 cannot be trained, there is no loss scaling: {', '.join(halves)}",
            where="training",
            hint="keep them in f32; precision bf16 computes in 16 bits",
        )
    notes = []
    others = [name for name in module.outputs if name != loss.name]
    if others:
        notes.append(f"the loss is {loss.name}; not handed out in training: {', '.join(others)}")
    if len(variables) < len(module.vars):
        notes.append("the loss does not depend on " + ", ".join(f"@{name}" for name in module.vars if name not in read))
    return module.but(inputs=inputs, outputs=(loss.name,), vars=variables, graphs={**module.graphs, "main": graph}).noted(
        "training", *notes
    )


def _own_loss(main: Graph, name: str, renamed: Mapping[str, str]) -> Value:
    values = {v.name: v for v in main.outs}
    outs = {name: values[ours] for name, ours in accepted(values, renamed).items()}
    where = f"loss output:{name}"
    if name not in outs:
        there = ", ".join(f"%{name} : {values[ours].type}" for ours, name in shown(values, renamed).items())
        raise UsageError(f"the model has no output of that name, it has {there}", where=where)
    if outs[name].type.shape != () or outs[name].type.dtype not in FLOATS:
        raise UsageError(
            f"must be a floating-point scalar, but is {outs[name].type}", where=where, hint="reduce it to its mean in the model"
        )
    if outs[name] in main.ins:
        raise UsageError("is an input of the model, nothing is computed", where=where)
    return outs[name]


def _added_loss(main: Graph, kind: str) -> tuple[Graph, Value, Op]:
    first, where = main.outs[0], f"loss {kind}"
    if first.type.dtype not in FLOATS:
        raise UsageError(f"needs a floating-point output, the model's first is {first!r}", where=where)
    if kind == "cross_entropy":
        if first.type.rank < 2:
            raise UsageError(
                f"needs one score per class in the last of two or more dimensions, the model's first output is {first!r}", where=where
            )
        wanted = TensorType("i64", first.type.shape[:-1])
    else:
        wanted = first.type
    taken = [v for v in (*main.ins, *main.outs) if v.name == LABELS]
    if taken:
        raise UsageError(
            f"adds an input {LABELS}, but the model has {taken[0]!r} itself",
            where=where,
            hint="if the model computes its loss, use output:NAME; otherwise rename the tensor",
        )
    namer = Namer.of(main)
    if namer.fresh(LABELS) != LABELS:  # a tensor inside the model gives way
        main = _rename(main, LABELS, namer.fresh(LABELS))
    labels = Value(LABELS, wanted)
    names = ("loss", "loss.lse") if kind == "cross_entropy" else ("loss",)
    return main, labels, make(kind, (first, labels), [namer.fresh(n) for n in names], where)


def _rename(graph: Graph, old: str, new: str) -> Graph:
    table = {v: Value(new, v.type) for op in graph.ops for v in op.outs if v.name == old}
    ops = tuple(Op(op.kind, substitute(op.ins, table), substitute(op.outs, table), op.attrs, op.loc) for op in graph.ops)
    return Graph(graph.name, graph.ins, substitute(graph.outs, table), ops, graph.saved)


__all__ = ["LABELS", "OPTIMIZERS", "SGD", "AdamW", "Momentum", "Optimizer", "Training", "attach_loss", "load_training", "optimizer_of"]
