"""Tables: data that a compiled module reads, such as the learning rate. Every run may have its own elements; nothing is
compiled anew.

In: the module, the tables of a checkpoint, the wishes of the user. Out: elements by variable, for all ranks the same.
The wishes of the user count first, then the checkpoint, then the module. A checkpoint counts for the rate and its curve
alone. Factors of groups are numbered in the order in which the module uses them, so a name says nothing about another
module's groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from penstock.ir.graph import TABLE, Module
from penstock.ir.training.rates import CURVE, LR, Rate, curve_at, parse_rate
from penstock.support.errors import UsageError

Tables = Mapping[str, tuple[float, ...]]


def tables_of(module: Module) -> dict[str, tuple[float, ...]]:
    """Return the tables as the module was compiled with them."""
    return {name: var.init for name, var in module.vars.items() if var.role == TABLE and isinstance(var.init, tuple)}


def tables_for_run(
    module: Module, saved: Tables | None, lr: float | None, rate: Rate | str | None
) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Return the tables of a run, and what to warn of. `saved` are those of the checkpoint it goes on from."""
    compiled = tables_of(module)
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
    kept = {
        name: elements
        for name in (LR, CURVE)
        if name in compiled and len(elements := (saved or {}).get(name, ())) == len(compiled[name])
    }
    changed = [f"@{name}" for name, values in kept.items() if values != compiled[name] and name not in wished]
    warnings = []
    if changed:
        warnings.append(
            f"{' and '.join(changed)} go on as in the checkpoint, not as compiled; --lr and --lr-schedule replace them"
        )
    return {**compiled, **kept, **wished}, warnings


def learning_rate(tables: Tables, step: int) -> float | None:
    """Return the learning rate of a step, from 0; None for a module that does not train."""
    return tables[LR][0] * curve_at(tables[CURVE], step) if LR in tables else None
