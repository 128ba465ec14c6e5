"""Values of the role `setting`: data that a compiled module reads, such as the learning rate. Every run may have its
own; nothing is compiled anew.

In: the module, the settings of a checkpoint, the wishes of the user. Out: elements by variable, for all ranks the same.
The wishes of the user count first, then the checkpoint, then the module. A checkpoint counts for the rate and its curve
alone. Factors of groups are numbered in the order in which the module uses them, so a name says nothing about another
module's groups. Fields and keys in files call them tables, by their older name.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from penstock.ir.graph import SETTING, Module
from penstock.ir.training.rates import CURVE, LR, Rate, curve_at, parse_rate
from penstock.support.errors import UsageError

Settings = Mapping[str, tuple[float, ...]]


def settings_of(module: Module) -> dict[str, tuple[float, ...]]:
    """Return the settings as the module was compiled with them."""
    return {name: var.init for name, var in module.vars.items() if var.role == SETTING and isinstance(var.init, tuple)}


def settings_for_run(
    module: Module, saved: Settings | None, lr: float | None, rate: Rate | str | None
) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Return the settings of a run, and what to warn of. `saved` are those of the checkpoint it goes on from."""
    compiled = settings_of(module)
    wished: dict[str, tuple[float, ...]] = {}
    problems = []
    if lr is not None and not (isfinite(lr) and lr >= 0):
        problems.append(f"the learning rate must be 0 or more, got {lr}")
    elif lr is not None:
        wished[LR] = (lr,)
    if rate is not None:
        try:
            wished[CURVE] = (parse_rate(rate) if isinstance(rate, str) else rate).table()
        except UsageError as error:
            problems.append(f"{error.where}: {error.what}")
    if (lr is not None or rate is not None) and LR not in compiled:
        problems.append(f"module {module.name} does not train, it has no learning rate")
    if problems:
        raise UsageError("; ".join(problems))
    from_checkpoint = {
        name: elements
        for name in (LR, CURVE)
        if name in compiled and len(elements := (saved or {}).get(name, ())) == len(compiled[name])
    }
    changed = [
        f"@{name}" for name, values in from_checkpoint.items() if values != compiled[name] and name not in wished
    ]
    warnings = []
    if changed:
        warnings.append(
            f"{' and '.join(changed)} go on as in the checkpoint, not as compiled; --lr and --lr-schedule replace them"
        )
    return {**compiled, **from_checkpoint, **wished}, warnings


def learning_rate(tables: Settings, step: int) -> float | None:
    """Return the learning rate of a step, from 0; None for a module that does not train."""
    return tables[LR][0] * curve_at(tables[CURVE], step) if LR in tables else None
