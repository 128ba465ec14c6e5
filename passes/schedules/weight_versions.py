"""Choose the version of the weights that every computation uses: the pass `weight-versions`. In: a scheduled module.
Out: versions on F, B and U, `versions` on trained parameters, `version=mb` on their reads in forward and backward
graphs; and `versions` on gradients where a stage begins to sum those of the next batch before the update.

Take a schedule with delay n and m microbatches per batch. Microbatch k uses version max(k // m - n, 0) in its forward
and its backward, on every stage. Update t makes version t + 1. So W(t+1) = W(t) - lr * g(W(t - n)), and n + 1 versions
are alive; version v lives in slot v mod (n + 1). Update graphs go on reading the latest version: optimiser state needs
one copy only.

The order of computations may not allow that. A forward may come before the update that makes its version (2bw with m <
d - 1). An update may overwrite what a backward still needs. The checker, which this pass runs at its end, refuses both.
Parameters that no update writes never change and are left alone; so is a schedule without updates. Known limit: a
schedule is written as for batch 1, so a delay above 1 has no text form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.ir.action_kinds import UPDATE
from penstock.ir.graph import Graph, Module, rewrite, stepped_vars
from penstock.ir.schedule import ADDERS, READERS, Action
from penstock.ir.verify.verifier import check
from penstock.support.errors import UsageError

from .schedule import PACK_SCHEDULES, SCHEDULES, delay_of


@dataclass(frozen=True, slots=True)
class WeightVersionsOptions:
    """Options of `weight-versions`. `delay` and `versions` come from the schedule when not given; `checked=false` hands
    out an illegal module for experiments."""

    delay: int | None = None
    versions: int | None = None
    checked: bool = True


def weight_versions(module: Module, options: WeightVersionsOptions = WeightVersionsOptions()) -> Module:
    """Set the version of the weights that every computation uses, and the number of versions that each
    parameter keeps."""
    schedule = module.schedule
    if schedule is None:
        raise UsageError("the module has no schedule", where="weight-versions", hint="run the schedule pass first")
    if not any(a.kind == UPDATE for a in schedule.actions()):
        return module
    if options.delay is None and schedule.name not in (*SCHEDULES, *PACK_SCHEDULES):
        raise UsageError(
            f"schedule {schedule.name!r} is not known, so its delay must be given",
            where="weight-versions",
            hint="delay=0 or 1",
        )
    delay = delay_of(schedule.name) if options.delay is None else options.delay
    if not 0 <= delay <= 1:
        raise UsageError(f"delay must be 0 or 1, got {delay}", where="weight-versions")
    versions = delay + 1 if options.versions is None else options.versions
    if versions < 1:
        raise UsageError(f"versions must be at least 1, got {versions}", where="weight-versions")

    def number(action: Action) -> tuple[Action, ...]:
        if action.kind == UPDATE:
            return (action._replace(version=action.mb + 1),)
        if action.kind in READERS:
            return (action._replace(version=action.mb // schedule.microbatches - delay),)
        return (action,)

    trained = stepped_vars(module)
    updates = {f"s{s.index}.U" for s in module.stages}
    versions_of = dict.fromkeys(trained, versions) | _gradient_buffers(module)
    result = module.but(
        schedule=schedule.rewrite(number),
        vars={
            name: replace(var, versions=versions_of[name]) if name in versions_of else var
            for name, var in module.vars.items()
        },
        graphs={name: graph if name in updates else _pin(graph, trained) for name, graph in module.graphs.items()},
    )
    if options.checked:
        check(result, ("versioned",))
    return result


def _gradient_buffers(module: Module) -> dict[str, int]:
    """Return the gradients that need two buffers: between the first addition of a batch and the update of the batch
    before."""
    assert module.schedule is not None
    buffers: dict[str, int] = {}
    for program in module.schedule.ranks.values():
        summed: dict[int, set[str]] = {}
        for action in reversed(program.batch):
            graph = module.stage_graph(action.stage, action.kind)
            if graph is None:
                continue
            if action.once and action.mb == 0:
                summed.setdefault(action.stage, set()).update(op.var for op in graph.ops if op.kind == "take")
            elif action.kind in ADDERS:
                buffers |= {
                    op.var: 2 for op in graph.ops if op.kind == "accum" and op.var in summed.get(action.stage, ())
                }
    return buffers


def _pin(graph: Graph, trained: set[str]) -> Graph:
    """Set the version of reads of trained parameters to that of the microbatch."""
    return rewrite(graph, lambda op: [op.with_attrs(version="mb")] if op.kind == "read" and op.var in trained else None)
