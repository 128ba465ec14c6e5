"""Plans of models with bounded dimensions: one program for each rung of a ladder of sizes.

In: a model with bounds, and what imports it at other sizes. Out: a plan of the largest size with the programs of all.
The model is imported and simplified at every size. Two imports that differ in one size show what follows it
(passes/lengths/compare.py). The largest rung is cut into stages as any model; all others are cut at the same places.

Sizes of a ladder: where rows do not see each other, powers of two, of which any number of rows is made. Where padding
is masked, sizes from 8 on: so near to each other that padding is predicted to take 7 % more time at most. These
predictions are made at powers of two, and time grows evenly between them. Where several dimensions
have bounds, rungs multiply: there sizes grow by an eighth at most from 64 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bound, print_sizes
from penstock.ir.ladder.ladder import Ladder, Rung, grown_sizes, priced_sizes
from penstock.passes.lengths.bound import BoundOptions, cannot_bound, print_places
from penstock.passes.lengths.compare import SizeFindings, alike, by_name, compare, first_difference
from penstock.passes.lengths.settle import settle
from penstock.passes.manager import Call
from penstock.planning.facts import replica_shares
from penstock.planning.hints import stage_starts
from penstock.planning.layouts.choose import asks_for_layouts, plan_with_layouts
from penstock.planning.model import Model
from penstock.planning.offloading.choose import plan_within_memory
from penstock.planning.options import AUTO, PlanOptions
from penstock.planning.pipeline import PreparedModel, plan_model, prepare
from penstock.planning.plan import Plan
from penstock.planning.predict import predict
from penstock.planning.watching import SILENT, Feedback
from penstock.support.errors import UnsupportedModel, UsageError

_DEFAULTS = PlanOptions()
Sizes = dict[str, int]
# The smallest length of a ladder, and how many times the time of a size the rung that it is filled up to may be
# predicted to take. Less than a tenth: predictions are off by some hundredths.
_LEAST, _WORST = 8, 1.07


def plan_family(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
) -> Plan:
    """Plan a model, at all sizes of its bounded dimensions if it has some."""
    if not model.bounds:
        if asks_for_layouts(options):
            return plan_with_layouts(model, cluster, training, options, feedback)
        if options.offload == AUTO:
            return plan_within_memory(model, cluster, training, options, feedback)
        return plan_model(model, cluster, training, options, feedback)
    names = ", ".join(f"{name}{bound}" for name, bound in model.bounds.items())
    if training is not None:
        raise UsageError(f"{names}: bounds are for inference", hint="give one size to a model that is trained")
    if model.at is None:
        raise UsageError(f"{names}: the model cannot be imported at other sizes")
    return _Family(model, cluster, options, feedback).plan()


class _Family:
    """The imports of one model at several sizes."""

    def __init__(self, model: Model, cluster: Cluster, options: PlanOptions, feedback: Feedback) -> None:
        self.model, self.cluster, self.options, self.feedback = model, cluster, options, feedback
        self.bounds: Mapping[str, Bound] = model.bounds
        self.most: Sizes = {name: bound.most for name, bound in self.bounds.items()}
        # Variables that are tables of indices, other ones at every size.
        self.tables: set[str] = set()
        self.weights = model.imported.weights

    def plan(self) -> Plan:
        """Plan the largest size, and all others like it."""
        compared = {name: self._compared(self.most, name) for name in self.bounds}
        problems = {name: f.problems for name, f in compared.items() if f is not None and f.problems}
        if problems:
            errors = [cannot_bound(name, listed) for name, listed in problems.items()]
            raise UnsupportedModel("\n".join(error.what for error in errors), hint=errors[0].hint)
        self.top = self._prepared(self.most)
        self.rows = {name: f is None or f.rows for name, f in compared.items()}
        self.inputs = {name: self._places_of_inputs(name) for name in self.bounds}
        self.outputs = {
            name: {} if f is None else {value: f.dims[value] for value in self.top.outputs if value in f.dims}
            for name, f in compared.items()
        }
        for name in self.bounds:
            # A request is cut into rows only where every output has some of each.
            self.rows[name] &= len(self.outputs[name]) == len(self.top.outputs) and not self.top.draws
        # Graphs of sizes that were compared, with what the comparisons say.
        self.known = [(self.top.graphs["main"], {name: f or SizeFindings() for name, f in compared.items()})]
        largest = self._planned(self.most, self.options)
        same = _imposed(largest, self.options)
        rungs = {tuple(self.most.values()): Rung(dict(self.most), largest.module)}

        def rung(sizes: Sizes) -> Rung[Module]:
            key = tuple(sizes.values())
            if key not in rungs:
                rungs[key] = Rung(sizes, self._planned(sizes, same).module)
            return rungs[key]

        wanted = list(self._sizes(lambda sizes: predict(rung(sizes).held).step))
        for number, sizes in enumerate(wanted, 1):
            if self.feedback.progress is not None:
                self.feedback.progress(number, len(wanted), f"sizes {print_sizes(sizes)}")
            rung(sizes)
        return replace(largest, ladder=Ladder([rung(sizes) for sizes in wanted]))

    def _sizes(self, seconds: Callable[[Sizes], float]) -> Iterator[Sizes]:
        """Yield the sizes of all rungs. `seconds` predicts the time of one."""
        of_each: list[Sequence[int]] = []
        for name, bound in self.bounds.items():
            if bound.sizes or self.rows[name] or len(self.bounds) > 1 or bound.most <= _LEAST:
                of_each.append(bound.sizes or default_sizes(bound.most, self.rows[name]))
                continue
            powers = [n for n in grown_sizes(bound.most, lambda n: max(2 * n, _LEAST)) if n >= _LEAST]
            of_each.append(priced_sizes(_LEAST, bound.most, {n: seconds({name: n}) for n in powers}, _WORST))
        for sizes in product(*of_each):
            yield dict(zip(self.bounds, sizes, strict=True))

    # ------------------------------------------------------------------------------------ imports

    def _import(self, sizes: Mapping[str, int]) -> Model:
        assert self.model.at is not None
        return self.model if sizes == self.most else self.model.at(sizes)

    def _prepared(self, sizes: Mapping[str, int], model: Model | None = None) -> Module:
        """Return the model at some sizes, ready for `bound`."""
        model = model or self._import(sizes)
        module = prepare(model, self.cluster, self.options)
        known = {name: model.imported.weights[name] for name in self.tables if name in module.vars}
        return settle(module, known)

    def _compared(self, sizes: Sizes, name: str) -> SizeFindings | None:
        """Compare the model at some sizes with one that is a little smaller, or larger; None where the bound is 1."""
        size = sizes[name]
        if size == 1:
            return None
        models = {size: self._import(sizes)}
        difference = ""

        def at(n: int) -> Model:
            if n not in models:
                models[n] = self._import({**sizes, name: n})
            return models[n]

        for base in (size, *(n for n in (size - 1, size - 2) if n > 1)):
            for other in _near(base, self.most[name]):
                self.tables |= _differing(at(base), at(other))
                module, smaller = (self._prepared({**sizes, name: n}, at(n)) for n in (base, other))
                graph, places = module.graphs["main"], _places(module, smaller)
                if not alike(graph, smaller.graphs["main"]):
                    difference = difference or f" {other}: {first_difference(graph, smaller.graphs['main'])}"
                    continue
                findings = compare(graph, smaller.graphs["main"], name, (base, other), places)
                if base == size or findings.problems:
                    return findings
                # A special size, such as that of a whole table: its values follow it as those of its neighbours do.
                return by_name(self._prepared(sizes, at(size)).graphs["main"], findings, name, size, places)
        problem = f"the model has other operations at {name} {size} than at sizes beside it, such as{difference}"
        return SizeFindings(problems=[problem])

    def _places_of_inputs(self, name: str) -> dict[str, tuple[int, ...]]:
        if self.most[name] == 1:
            return {}
        other = self._import({**self.most, name: self.most[name] - 1}).module
        return _places(self.top, other)

    # ------------------------------------------------------------------------------------ programs

    def _planned(self, sizes: Sizes, options: PlanOptions) -> Plan:
        """Plan the model at the sizes of one rung."""
        model = self._import(sizes)
        module = self._prepared(sizes, model)
        self._check_variables(module, model, sizes)
        graph = module.graphs["main"]
        same = next((findings for other, findings in self.known if alike(graph, other)), None)
        learnt: dict[str, SizeFindings] = {}
        calls = []
        for name, size in sizes.items():
            learnt[name] = SizeFindings() if same is None else same[name]
            if same is None and not self.rows[name]:
                beside = self._compared(sizes, name)
                if beside is not None and beside.problems:
                    raise cannot_bound(name, beside.problems)
                learnt[name] = beside or SizeFindings()
            settings = BoundOptions(
                name,
                size,
                print_places(self.inputs[name]),
                print_places(self.outputs[name]),
                print_places(learnt[name].grown),
                self.rows[name],
                learnt[name].ends,
            )
            calls.append(Call("bound", settings))
        if same is None and min(sizes.values()) > 1:
            self.known.append((graph, learnt))
        feedback = self.feedback if sizes == self.most else SILENT
        return plan_model(model, self.cluster, None, options, feedback, PreparedModel(module, tuple(calls)))

    def _check_variables(self, module: Module, model: Model, sizes: Mapping[str, int]) -> None:
        """Refuse variables whose elements depend on a size: all rungs have the same."""
        ours, theirs = self.weights, model.imported.weights
        problems = [
            f"variable @{name} has other elements at {print_sizes(sizes)} than at {print_sizes(self.most)}"
            for name in module.vars
            if name in theirs and not (name in ours and _equal(ours[name], theirs[name]))
        ]
        if problems:
            raise cannot_bound(", ".join(self.bounds), problems)


def _differing(a: Model, b: Model) -> set[str]:
    """Return the variables of both whose elements are others."""
    ours, theirs = a.imported.weights, b.imported.weights
    return {name for name in ours.keys() & theirs.keys() if not _equal(ours[name], theirs[name])}


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a is b or (a.size and a.ctypes.data == b.ctypes.data and a.strides == b.strides):
        return True
    return bool(np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8)))


def _near(size: int, most: int) -> list[int]:
    """Return sizes to compare one with: any may happen to be special."""
    return [n for n in (size - 1, size + 1, size - 2, size - 3, size + 2, size // 2) if 2 <= n <= most or n == 1]


def _places(module: Module, other: Module) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of inputs in which two imports differ."""
    places = {}
    for value, beside in zip(module.data_inputs, other.data_inputs, strict=True):
        dims = tuple(i for i, (a, b) in enumerate(zip(value.type.dims, beside.type.dims, strict=True)) if a != b)
        if dims:
            places[value.name] = dims
    return places


def _imposed(plan: Plan, options: PlanOptions) -> PlanOptions:
    """Return the options that cut another size of the model as this one was cut."""
    starts = stage_starts(plan.reference, plan.module)
    stages = [stage.index for stage in plan.module.stages]
    return replace(
        options,
        stages=0,
        replicas=1,
        hints=False,
        split_at=tuple(str(start) for start in starts[1:]),
        split_by="operation",
        pin=(),
        devices=tuple(plan.module.devices_of(stage) for stage in stages),
        shares=tuple(tuple(replica_shares(plan.module, stage)) for stage in stages),
    )


def default_sizes(most: int, rows: bool) -> Sequence[int]:
    """Return the sizes of a ladder up to a bound."""
    return grown_sizes(most, lambda n: max(2 * n, 1)) if rows else grown_sizes(most, _next_length)


def _next_length(n: int) -> int:
    """Return the size behind another one, for lengths: multiples of 8 up to 64, then steps of an eighth at most."""
    return n + max(8, 1 << max(0, (n // 8).bit_length() - 1)) if n >= 64 else n + 8
