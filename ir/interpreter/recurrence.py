"""The meaning of training, in NumPy: the recurrence on the unsplit graphs F, B and U.

`run_recurrence` trains with nothing but the update rule W(t+1) = W(t) - upd(grad f(W(t - delay))), clamped at version
0.

In: arrays by name (weights by variable, batches by input, first axis = samples of the whole batch, cut into
microbatches in order). Out: an `InterpretedRun`: outputs per microbatch, the log of versions, live buffers, final
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from penstock.ir.action_kinds import BACKWARD, FORWARD
from penstock.ir.graph import GRAD, MICROBATCH, Graph, Module, Op, Var, rewrite, stepped_vars
from penstock.support.errors import UsageError
from penstock.support.words import counted

from .graphs import Noise, run_graph
from .ops import F64, Array
from .store import Arrays, VersionStore, initial_arrays

# Called with each operation that was done: the name of its graph, the microbatch (of an update, the batch), the
# operation and its results.
Watch = Callable[[str, int, Op, tuple[Array, ...]], None]


@dataclass
class InterpretedRun:
    """The results of a run. `log` has (stage, microbatch, phase, version) for each F, B and W; stage -1 is the unsplit
    module.

    `buffers` is the largest number of buffers of a parameter that were alive at once. `variables` are the last
    versions, `previous` the versions before them that are alive: with both, a later run goes on where this one ended.
    `handed_out` are the results of updates by batch.
    """

    loss: str
    outputs: dict[int, dict[str, Array]] = field(default_factory=dict)
    log: list[tuple[int, int, str, int | None]] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    handed_out: dict[int, dict[str, Array]] = field(default_factory=dict)
    variables: dict[str, Array] = field(default_factory=dict)
    previous: dict[str, Array] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """The first module output of every microbatch, in order."""
        return [float(self.outputs[mb][self.loss]) for mb in sorted(self.outputs)]


def microbatches_of(module: Module, batch: Arrays, number: int = 0) -> list[dict[str, Array]]:
    """Cut batch `number` into microbatches along the samples of every input, in order."""
    problems, counts, arrays = [], {}, {}
    for value in module.data_inputs:
        if value.name not in batch:
            problems.append(f"input {value.name} is missing")
            continue
        array, shape, axis = np.asarray(batch[value.name]), value.type.dims, module.batch.get(value.name) or 0
        others = (*shape[:axis], *shape[axis + 1 :])
        if (
            array.ndim != len(shape)
            or not shape
            or (*array.shape[:axis], *array.shape[axis + 1 :]) != others
            or not shape[axis]
            or array.shape[axis] % shape[axis]
        ):
            problems.append(f"input {value.name} has shape {list(array.shape)}, one microbatch of it is {value.type}")
            continue
        counts[value.name] = array.shape[axis] // shape[axis]
        arrays[value.name] = np.split(array, max(counts[value.name], 1), axis)
    if len(set(counts.values())) > 1:
        problems.append(
            "inputs have different numbers of microbatches: " + ", ".join(f"{n} {c}" for n, c in counts.items())
        )
    if problems or not counts:
        raise UsageError("; ".join(problems) or "the module has no inputs", where=module.name)
    count = next(iter(counts.values()))
    parts = [{name: pieces[i] for name, pieces in arrays.items()} for i in range(count)]
    if module.bounds:
        # Nothing is padded.
        parts = [{**part, **{bound.input: np.array(bound.size) for bound in module.bounds}} for part in parts]
    if module.draws:
        parts = [{**part, MICROBATCH: np.array(number * count + i)} for i, part in enumerate(parts)]
    return parts


def run_recurrence(
    module: Module,
    weights: Arrays,
    batches: Sequence[Arrays],
    delay: int = 0,
    precision: str = F64,
    watch: Watch | None = None,
    noise: Noise | None = None,
) -> InterpretedRun:
    """Train the unsplit module by the recurrence, batch by batch; without a B graph only the forward runs.

    The gradient of batch t is taken at version max(t - delay, 0) and applied to version t.
    """
    forward = module.graphs.get("F") or module.graphs.get("main")
    if forward is None:
        raise UsageError(
            f"the graphs are {', '.join(module.graphs)}; the recurrence needs F (and B and U), before `split`",
            where=module.name,
        )
    backward, norm, update = (module.graphs.get(kind) for kind in "BNU")
    forward, backward = _reading_own_version(forward), backward and _reading_own_version(backward)
    stepped = stepped_vars(module)
    held = {
        name: Var(var.name, var.type, var.role, versions=delay + 1 if name in stepped else 1)
        for name, var in module.vars.items()
    }
    store = VersionStore(held, stepped, initial_arrays(module, weights, list(module.vars), precision))
    run = InterpretedRun(module.outputs[0])
    for t, batch in enumerate(batches):
        version = max(t - delay, 0)
        parts = microbatches_of(module, batch, t)
        _check_seed(module, backward, len(parts))
        for k, mb in enumerate(parts):
            run.log.append((-1, t * len(parts) + k, FORWARD, version))
            seen = watching(watch, forward, t * len(parts) + k)
            results = by_name(forward, run_graph(forward, mb, store.at(version), precision, seen, noise))
            run.outputs[t * len(parts) + k] = {name: results[name] for name in module.outputs}
            if backward is not None:
                run.log.append((-1, t * len(parts) + k, BACKWARD, version))
                seen = watching(watch, backward, t * len(parts) + k)
                run_graph(backward, {**mb, **results}, store.at(version), precision, seen, noise)
        for graph in (norm, update):
            if graph is not None:
                results_of = run_graph(graph, [], store.at(made=t + 1), precision, watching(watch, graph, t), noise)
                run.handed_out.setdefault(t, {}).update(by_name(graph, results_of))
    run.buffers = {name: store.buffers(name) for name in stepped}
    collect(run, module, store)
    return run


def watching(watch: Watch | None, graph: Graph, number: int) -> Callable[[Op, tuple[Array, ...]], None] | None:
    return None if watch is None else partial(watch, graph.name, number)


class FinalVariables(Protocol):
    """Variables at the end of a run, such as those of a store."""

    slots: dict[str, list[Array | None]]
    newest: dict[str, int]

    def latest(self, var: str) -> Array: ...
    def before_latest(self, var: str) -> Array | None: ...


def collect(run: InterpretedRun, module: Module, store: FinalVariables) -> None:
    for name in store.slots:
        if module.vars[name].role != GRAD:
            run.variables.setdefault(name, store.latest(name))
        before = store.before_latest(name) if name in store.newest else None
        if before is not None:
            run.previous.setdefault(name, before)


def _reading_own_version(graph: Graph) -> Graph:
    """Set reads of forward and backward to the version of the microbatch, which they mean before `weight-versions`
    writes it."""
    return rewrite(graph, lambda op: [op.with_attrs(version="mb")] if op.kind == "read" else None)


def _check_seed(module: Module, backward: Graph | None, parts: int) -> None:
    """Check that batches are cut as the module was differentiated: its seed gradient is 1 / microbatches."""
    planned = module.schedule.microbatches if module.schedule is not None else None
    if backward is not None and planned is not None and planned != parts:
        raise UsageError(f"a batch has {counted(parts, 'microbatch')}, the schedule has {planned}", where=module.name)


def by_name(graph: Graph, results: Sequence[Array]) -> dict[str, Array]:
    return {v.name: x for v, x in zip(graph.results, results, strict=True)}
