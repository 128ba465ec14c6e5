"""Training settings (loss, optimiser, microbatches), and the pass over a freshly read module that attaches the loss.

`attach_loss` takes the module as a reader left it, one graph `main`, and returns a module with a scalar loss as its
only output:

    cross_entropy   mean over all rows of -log softmax(first output)[label]; new input `labels` i64, the output's shape
                    without the last
    mse             mean of (first output - labels)^2; new input `labels` of the output's type
    output:NAME     a scalar that the model computes itself

Every loss is a mean over a microbatch. The model's other outputs are not computed in training.

A training file is TOML. Unknown keys, missing keys and wrong values are errors, and one message reports them all:

    loss = "cross_entropy"
    microbatches = 4
    precision = "bf16"
    clip = 1.0
    [optimizer]
    kind = "muon"
    lr = 0.02
    [rate]
    kind = "cosine"
    steps = 1000
    warmup = 100
    [[group]]
    name = "embed"
    kind = "adamw"

Optimisers, schedules of the learning rate and groups of parameters with their settings are defined in
ir/training/optimizers.py and ir/training/rates.py.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.ir.attrs import Attr
from penstock.ir.graph import BUFFER, PARAM, Graph, Module, Namer, Op, Value, Var, substitute
from penstock.ir.liveness import live_ops
from penstock.ir.names import accepted, shown
from penstock.ir.ops import make
from penstock.ir.schedule import MOST_MICROBATCHES
from penstock.ir.training.optimizers import SGD, Group, Optimizer, load_group, load_optimizer, sort_into
from penstock.ir.training.rates import Constant, Rate, rate_of
from penstock.ir.training.settings import pick
from penstock.ir.types import FLOATS, TensorType
from penstock.support.errors import UsageError

LABELS = "labels"
LOSSES = ("cross_entropy", "mse", "output:NAME")
PRECISIONS = ("f32", "bf16", "f16")
_PLAIN, _STEADY = SGD(), Constant()

# ---------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Training:
    """The settings of a training.

    loss             cross_entropy, mse or output:NAME
    microbatches     the number of microbatches in one step of the optimiser
    precision        f32, bf16 or f16, in which activations and products are computed; weights are kept in f32
    seed             the seed of dropout
    rate             the schedule of the optimiser's learning rate
    groups           settings for some parameters: the first group whose pattern is found in a parameter's name counts
    clip             the largest norm of the gradient of all parameters, 0 for any
    skip_nonfinite   skip updates by a gradient that is not finite, as also happens with `clip` and in f16
    """

    loss: str
    optimizer: Optimizer = _PLAIN
    microbatches: int = 1
    precision: str = "f32"
    seed: int = 0
    rate: Rate = _STEADY
    groups: tuple[Group, ...] = ()
    clip: float = 0.0
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        named = self.loss.startswith("output:") and len(self.loss) > len("output:")
        wrong = []
        if self.loss not in ("cross_entropy", "mse") and not named:
            wrong.append(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if not 1 <= self.microbatches <= MOST_MICROBATCHES:
            wrong.append(f"microbatches must be 1 to {MOST_MICROBATCHES}, got {self.microbatches}")
        if not 0 <= self.seed < 2**32:
            wrong.append(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        if self.precision not in PRECISIONS:
            wrong.append(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not isinstance(self.optimizer, Optimizer):
            wrong.append(f"optimizer must be an optimiser such as ps.AdamW(lr=1e-3), got {self.optimizer!r}")
        if not isinstance(self.rate, Rate):
            wrong.append(f"rate must be a schedule such as ps.Cosine(steps=1000), got {self.rate!r}")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, Group) for group in self.groups):
            wrong.append(f"groups must be a tuple of ps.Group(...), got {self.groups!r}")
        if not 0 <= self.clip < math.inf:
            wrong.append(f"clip must be 0 or more, got {self.clip}")
        if wrong:
            raise UsageError("; ".join(wrong), where="training")

    def pass_options(self) -> dict[str, Attr]:
        """Return the options of the pass `optimizer`. Frozen parameters have become buffers before it runs."""
        options: dict[str, Attr] = self.optimizer.pass_options()
        if self.rate != _STEADY:
            options["rate"] = str(self.rate)
        groups = tuple(str(group) for group in self.groups if not group.frozen)
        return {**options, "groups": groups} if groups else options

    def guard_options(self) -> dict[str, Attr] | None:
        """Return the options of the pass `guard`, or None if the gradient need not be checked."""
        if self.clip:
            return {"clip": self.clip}
        return {} if self.skip_nonfinite else None


# ---------------------------------------------------------------------------------------- files


def load_training(path: str | Path, loss: str | None = None) -> Training:
    """Read the settings in a TOML file.

    A `loss` passed here replaces the file's, which may then be missing.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=where) from error
    except (ValueError, RecursionError) as error:  # ValueError: also of numbers with thousands of digits
        raise UsageError(f"not a TOML file: {error}", where=where) from error
    problems: list[str] = []
    kinds = {
        "loss": "str",
        "microbatches": "int",
        "precision": "str",
        "seed": "int",
        "clip": "float",
        "skip_nonfinite": "bool",
        "optimizer": "dict",
        "rate": "dict",
        "group": "list",
    }
    chosen = pick(table, kinds, "", problems)
    if loss is not None:
        chosen["loss"] = loss
    if "loss" not in chosen and "loss" not in table:
        problems.append("loss is missing")
    optimizer = load_optimizer(chosen.pop("optimizer"), "optimizer.", problems) if "optimizer" in chosen else _PLAIN
    rate = rate_of(chosen.pop("rate"), "rate.", problems) if "rate" in chosen else _STEADY
    groups = _load_groups(chosen.pop("group", []), problems)
    training = None
    try:
        training = Training(
            **{"loss": "mse", **chosen}, optimizer=optimizer or _PLAIN, rate=rate or _STEADY, groups=groups
        )
    except UsageError as error:
        problems += error.what.split("; ")
    if problems or training is None:
        raise UsageError("the training file has errors:\n" + "\n".join(f"  {p}" for p in problems), where=where)
    return training


def _load_groups(tables: list[object], problems: list[str]) -> tuple[Group, ...]:
    groups = []
    for i, table in enumerate(tables):
        if isinstance(table, dict):
            groups.append(load_group(table, f"group[{i}].", problems))
        else:
            problems.append(f"group[{i}] must be a table, got {table!r}")
    return tuple(group for group in groups if group is not None)


# ---------------------------------------------------------------------------------------- the loss


def attach_loss(module: Module, training: Training, renamed: Mapping[str, str] | None = None) -> Module:
    """Return the module with a scalar loss as its only output.

    `labels` is among its inputs where the loss needs them. `renamed` maps the IR names of outputs to the model's, where
    they differ.
    """
    main = module.graphs["main"]
    if training.loss.startswith("output:"):
        loss, inputs, ops = (
            _own_loss(main, training.loss.removeprefix("output:"), renamed or {}),
            main.ins,
            list(main.ops),
        )
    else:
        main, labels, op = _added_loss(main, training.loss)
        loss, inputs, ops = op.outs[0], (*main.ins, labels), [*main.ops, op]
    live = [op.with_attrs(seed=training.seed) if op.kind == "random_key" else op for op in live_ops(ops, (loss,))]
    read = {op.var for op in live if op.kind in ("read", "write")}
    graph = Graph("main", inputs, (loss,), tuple(live))
    variables = _frozen({name: var for name, var in module.vars.items() if name in read}, training.groups)
    halves = [f"@{name}" for name, var in variables.items() if var.role == PARAM and var.type.dtype == "f16"]
    if halves:
        raise UsageError(
            f"parameters in f16 cannot be trained, updates would be lost in their rounding: {', '.join(halves)}",
            where="training",
            hint="keep them in f32; precision f16 or bf16 computes in 16 bits",
        )
    notes = []
    others = [name for name in module.outputs if name != loss.name]
    if others:
        notes.append(f"the loss is {loss.name}; not handed out in training: {', '.join(others)}")
    if len(variables) < len(module.vars):
        notes.append("the loss does not depend on " + ", ".join(f"@{name}" for name in module.vars if name not in read))
    return module.but(
        inputs=inputs, outputs=(loss.name,), vars=variables, graphs={**module.graphs, "main": graph}
    ).noted("training", *notes)


def _frozen(variables: Mapping[str, Var], groups: tuple[Group, ...]) -> dict[str, Var]:
    """Turn the parameters of frozen groups into buffers. A group without parameters is an error."""
    group_of = sort_into(groups, [name for name, var in variables.items() if var.role == PARAM])
    frozen = {name for name, group in group_of.items() if group.frozen}
    return {name: replace(var, role=BUFFER) if name in frozen else var for name, var in variables.items()}


def _own_loss(main: Graph, name: str, renamed: Mapping[str, str]) -> Value:
    values = {v.name: v for v in main.outs}
    outs = {name: values[ours] for name, ours in accepted(values, renamed).items()}
    where = f"loss output:{name}"
    if name not in outs:
        listed = ", ".join(f"%{name} : {values[ours].type}" for ours, name in shown(values, renamed).items())
        raise UsageError(f"the model has no output of that name, it has {listed}", where=where)
    if outs[name].type.shape != () or outs[name].type.dtype not in FLOATS:
        raise UsageError(
            f"must be a floating-point scalar, but is {outs[name].type}",
            where=where,
            hint="reduce it to its mean in the model",
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
                "needs one score per class in the last of two or more dimensions, "
                f"the model's first output is {first!r}",
                where=where,
            )
        wanted = TensorType("i64", first.type.shape[:-1])
    else:
        wanted = first.type
    clashes = [v for v in (*main.ins, *main.outs) if v.name == LABELS]
    if clashes:
        raise UsageError(
            f"adds an input {LABELS}, but the model has {clashes[0]!r} itself",
            where=where,
            hint="if the model computes its loss, use output:NAME; otherwise rename the tensor",
        )
    namer = Namer.of(main)
    if namer.fresh(LABELS) != LABELS:  # rename the model's inner tensor
        main = _rename(main, LABELS, namer.fresh(LABELS))
    labels = Value(LABELS, wanted)
    names = ("loss", "loss.lse") if kind == "cross_entropy" else ("loss",)
    return main, labels, make(kind, (first, labels), [namer.fresh(n) for n in names], where)


def _rename(graph: Graph, old: str, new: str) -> Graph:
    table = {v: Value(new, v.type) for op in graph.ops for v in op.outs if v.name == old}
    ops = tuple(op.renamed(table) for op in graph.ops)
    return Graph(graph.name, graph.ins, substitute(graph.outs, table), ops, graph.saved)
