"""The optimisers, their settings, and which parameter gets which: groups of parameters by name.

In: the optimiser of a training run, its groups, a parameter. Out: an `OptimizerChoice`, the optimiser of that
parameter and what the learning rate is multiplied by for it. Defaults are those of torch.optim, for lion and muon those
of the publications.

    sgd momentum adam adamw adagrad lion     for every parameter
    muon                                     for matrices; all other parameters get its adamw, with a rate and a decay
                                             of their own

A group is a pattern with settings, `PATTERN{weight_decay=0.0,lr=0.1}`; of several that match a name anywhere the first
one counts. What an optimiser does with a gradient stands in passes/training/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar, NamedTuple

from penstock.ir.attrs import Attr
from penstock.ir.graph import Var
from penstock.support.errors import UsageError

from .settings import changed, make, make_kind, parse_call, print_call

# Allowed values by the name of a setting; all optimisers mean the same by the same name.
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("lr", "adamw_lr", "weight_decay", "adamw_weight_decay"), ("0 or more", lambda x: x >= 0)),
    "eps": ("above 0", lambda x: x > 0),
    **dict.fromkeys(("beta", "beta1", "beta2"), ("at least 0 and below 1", lambda x: 0 <= x < 1)),
}


def _range_problems(settings: Mapping[str, object]) -> list[str]:
    wrong = []
    for name, value in settings.items():
        range_words, holds = _RANGES.get(name, ("", lambda x: True))
        if isinstance(value, int | float) and not (isfinite(value) and holds(value)):
            wrong.append(f"{name} must be {range_words}, got {value!r}")
    return wrong


class _Settings:
    """The base of all optimisers: settings are the dataclass fields, `kind` is the name on the command line."""

    kind: ClassVar[str]
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        wrong = _range_problems(vars(self)) + self.problems()
        if wrong:
            raise UsageError("; ".join(wrong), where=f"optimizer {self.kind}")

    def problems(self) -> list[str]:
        """List what is wrong beyond the ranges."""
        return []

    def __str__(self) -> str:
        return print_call(self.kind, changed(self))

    def pass_options(self) -> dict[str, Attr]:
        """Return the options of the pass `optimizer`."""
        return {"kind": self.kind, **changed(self)}


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
class _Moments(_Settings):
    """The base of the two forms of Adam."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class Adam(_Moments):
    """Adam; the weight decay is added to the gradient"""

    kind: ClassVar[str] = "adam"
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW(_Moments):
    """Adam with decoupled weight decay"""

    kind: ClassVar[str] = "adamw"
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Adagrad(_Settings):
    """s = s + g^2; w - lr * g / (sqrt(s) + eps); the weight decay is added to the gradient"""

    kind: ClassVar[str] = "adagrad"
    lr: float = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Lion(_Settings):
    """w - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w); m = beta2 * m + (1 - beta2) * g"""

    kind: ClassVar[str] = "lion"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0


ADJUST = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(_Settings):
    """Momentum made orthogonal by five steps of Newton and Schulz, with decoupled weight decay, for matrices; adamw for
    the rest.

    `adjust` as in torch.optim.Muon: `original` multiplies the rate by sqrt(max(1, rows / columns)), `match_rms_adamw`
    by 0.2 sqrt(max(rows, columns)), so that one rate fits both. `adamw_lr`, `beta1`, `beta2`, `eps` and
    `adamw_weight_decay` are those of the adamw."""

    kind: ClassVar[str] = "muon"
    lr: float = 0.02
    beta: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    adjust: str = "original"
    adamw_lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10
    adamw_weight_decay: float = 0.0

    def problems(self) -> list[str]:
        wrong = [f"adjust must be one of {', '.join(ADJUST)}, got {self.adjust!r}"] if self.adjust not in ADJUST else []
        return wrong + (["lr must be above 0, because the rate of adamw is a multiple of it"] if self.lr == 0 else [])

    def rest(self) -> AdamW:
        """Return the optimiser of all parameters that are no matrices."""
        return AdamW(self.adamw_lr, self.beta1, self.beta2, self.eps, self.adamw_weight_decay)


Optimizer = SGD | Momentum | Adam | AdamW | Adagrad | Lion | Muon
OPTIMIZERS: dict[str, type[Optimizer]] = {c.kind: c for c in (SGD, Momentum, Adam, AdamW, Adagrad, Lion, Muon)}


def load_optimizer(given: Mapping[str, object], prefix: str, problems: list[str]) -> Optimizer | None:
    """Return the optimiser that a table with `kind` describes. Where it is wrong, add entries to `problems` and return
    None."""
    return make_kind(OPTIMIZERS, given, prefix, problems)


def optimizer_of(text: str, **settings: float) -> Optimizer:
    """Return the optimiser of that name. Settings may follow the name, `momentum{nesterov=true}`; others have their
    defaults."""
    problems: list[str] = []
    optimizer = None
    try:
        kind, written = parse_call(text)
        optimizer = load_optimizer({**written, **settings, "kind": kind}, "optimizer.", problems)
    except ValueError as error:
        problems.append(str(error))
    if optimizer is None:
        raise UsageError("; ".join(problems))
    return optimizer


# ---------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class Group:
    """Parameters whose name has a match of the regular expression `name`, and what is different for them: the kind of
    their optimiser, a factor `lr` of the learning rate, the weight decay. Of a frozen parameter no gradient is
    computed."""

    name: str
    kind: str | None = None
    lr: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        wrong = _range_problems(vars(self))
        if not self.name:
            wrong.append("an empty pattern would match every parameter")
        try:
            re.compile(self.name)
        except (re.error, RecursionError, OverflowError) as error:
            wrong.append(f"bad pattern {self.name!r}: {error}")
        if self.kind is not None and self.kind not in OPTIMIZERS:
            wrong.append(f"kind must be one of {', '.join(OPTIMIZERS)}, got {self.kind!r}")
        settings = self.settings()
        if not settings:
            wrong.append("nothing is different in it, expected kind, lr, weight_decay or frozen")
        if self.frozen and len(settings) > 1:
            wrong.append("frozen stands alone: nothing else matters of a parameter that is not trained")
        if wrong:
            raise UsageError("; ".join(wrong), where=f"group {self.name!r}")

    def settings(self) -> dict[str, Attr]:
        """Return the settings that are different in it."""
        return {name: value for name, value in changed(self).items() if name != "name"}

    def __str__(self) -> str:
        return print_call(self.name, self.settings())


def load_group(given: Mapping[str, object], prefix: str, problems: list[str]) -> Group | None:
    """Return the group that a table describes. Where it is wrong, add entries to `problems` and return None."""
    return make(Group, given, prefix, problems)


def parse_groups(texts: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups that print as `texts`. One UsageError lists all that is wrong with any of them."""
    problems: list[str] = []
    groups = []
    for text in texts:
        try:
            name, settings = parse_call(text)
            groups.append(load_group({"name": name, **settings}, f"group {name!r}: ", problems))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems), hint="e.g. 'embed{kind=adamw,weight_decay=0}'")
    return tuple(group for group in groups if group is not None)


def sort_into(groups: Sequence[Group], names: Sequence[str]) -> dict[str, Group]:
    """Return the group of each name that has one. A group that no name is left for is an error."""
    group_of = {
        name: group
        for name in names
        if (group := next((g for g in groups if re.search(g.name, name)), None)) is not None
    }
    empty = [g for g in groups if all(g is not other for other in group_of.values())]
    if empty:
        idle = [
            f"{g.name!r} matches no parameter"
            + (" that the groups before it leave" if any(re.search(g.name, n) for n in names) else "")
            for g in empty
        ]
        raise UsageError("; ".join(idle), where="groups", hint=f"there are {', '.join(names)}"[:400])
    return group_of


class OptimizerChoice(NamedTuple):
    """The optimiser of one parameter, and what the learning rate is multiplied by for it."""

    optimizer: Optimizer
    factor: float


def choose(base: Optimizer, group: Group | None, var: Var) -> OptimizerChoice:
    """Return the optimiser of a parameter; `group` is the one it is in."""
    kind = group.kind if group is not None and group.kind is not None else base.kind
    # A group with a kind of its own has that kind's settings, and the rate of the run; the adamw beside a muon is that
    # muon's.
    optimizer, factor = base if kind == base.kind else OPTIMIZERS[kind](), 1.0
    muon = optimizer if isinstance(optimizer, Muon) else base
    if isinstance(muon, Muon) and (kind == "adamw" or (kind == "muon" and var.type.rank != 2)):
        optimizer, factor = muon.rest(), muon.adamw_lr / muon.lr
    if group is None:
        return OptimizerChoice(optimizer, factor)
    if group.weight_decay is not None:
        optimizer = replace(optimizer, weight_decay=group.weight_decay)
    return OptimizerChoice(optimizer, factor * group.lr)
