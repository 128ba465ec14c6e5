"""The comparison of the program of a smaller size with the model at its largest size.

In: the model before it was cut into stages, the program of one size, weights. Out: the first value of the program that
is off, if a result, a cache or what tokens are picked by is. A request of the smaller size is drawn, and filled up for
the model: with rows that belong to no sequence of a turn, or with numbers beyond the size that the model is told. What
caches hold before is drawn, too. The interpreter runs both in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.ir.graph import CACHE, Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, Array
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.passes.partition.chain import forward_graph
from penstock.runtime.data.samples import SyntheticSamples
from penstock.runtime.data.turns import SyntheticTurns

from .bisect.values import Seen, Spot
from .roundings import relative_error
from .tolerance import asked, in_float64

Arrays = Mapping[str, Array]


def drawn_request(reference: Module, module: Module, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the inputs of a request of at most a smaller size, and the same request filled up for the model."""
    samples = SyntheticSamples(reference, seed)
    large = {value.name: np.asarray(samples.microbatch(0, value.name)) for value in reference.data_inputs}
    small = {value.name: _cut(large[value.name], value.type.dims) for value in module.data_inputs}
    few, many = SyntheticTurns(module), SyntheticTurns(reference)
    if few.exist:
        turn = few.drawn(np.random.default_rng(seed))
        small |= _known(turn.arrays(few.sequences, few.each), small)
        large |= _known(replace(turn, rung=many.rows).arrays(many.sequences, many.each), large)
    return small, large | {bound.input: np.array(bound.size) for bound in module.bounds}


def first_off(
    reference: Module, module: Module, weights: Arrays, seed: int, tolerance: float | None = None
) -> Spot | None:
    """Return the first value of a smaller size's program that is off; None where its results and caches are right."""
    assert module.schedule is not None
    small, large = drawn_request(reference, module, seed)
    expected, seen, graph = Seen(), Seen(), forward_graph(reference)
    caches = [name for name, var in module.vars.items() if var.role == CACHE]
    generator = np.random.default_rng(seed)
    weights = {**weights, **{name: generator.normal(size=module.vars[name].type.dims) for name in caches}}
    store = DictStore(initial_arrays(reference, weights, list(reference.vars), F64))
    results = run_graph(graph, large, store, F64, partial(expected.watch, graph.name, 0))
    # Every microbatch is the same request.
    count = module.schedule.microbatches
    batch = {name: np.concatenate([array] * count, module.batch.get(name) or 0) for name, array in small.items()}
    run = run_schedule(module, weights, [batch], watch=seen.watch)
    right = {f"%{value.name}": array for value, array in zip(graph.results, results, strict=True)}
    computed = {f"%{name}": array for name, array in run.outputs[0].items()}
    theirs, ours = expected.first(), seen.first()
    for name in {op.ins[0].name for op in graph.ops if op.kind == "pick"} & ours.keys():
        right[f"%{name}"], computed[f"%{name}"] = theirs[name], ours[name]
    right |= {f"@{name}": store.arrays[name] for name in caches}
    computed |= {f"@{name}": run.variables[name] for name in caches}
    allowed = asked(tolerance) if tolerance is not None else in_float64(module.graphs.values(), 1)
    errors = {name: relative_error(array, _cut(right[name], array.shape)) for name, array in computed.items()}
    wrong = next((name for name, error in errors.items() if not error <= allowed.error), None)
    if wrong is None:
        return None
    for key, array in seen.values.items():
        other = theirs.get(key[2])
        if key[1] or other is None or other.ndim != array.ndim or any(np.less(other.shape, array.shape)):
            continue
        error = relative_error(array, _cut(other, array.shape))
        if not error <= allowed.error:
            return replace(seen.spot(key, error, allowed), unit="")
    return Spot(graph.name, None, wrong, "", errors[wrong], allowed)


def _cut(array: Array, dims: tuple[int, ...]) -> Array:
    return array[tuple(slice(0, size) for size in dims)]


def _known(arrays: Arrays, names: Arrays) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if name in names}
