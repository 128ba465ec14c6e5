"""The fastest layouts on a mesh: what `--shard auto` does.

In: a model, a cluster and settings with a mesh. Out: the plan with the layouts that take least by simulation. Tried are
no layouts at all, each preset that the model and the mesh have, and the layouts of the integer programme (search.py)
over the costs of the model (costs.py). All passes plan each of them, and the simulator says its seconds. So the plan is
never slower than one without layouts, or than one of a preset, by the planner's own account.

Each solution of the programme is tried a second time, with what is in no repeated block left open. The programme
assumes that a gradient lies as its value. In fact a split embedding may give its layout to the gradients of all layers.

Where devices have a limit of memory, the integer programme is solved without it, and for that much and less. On meshes
of more axes than two it splits over those two that have most devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import REPLICAS, Graph, Module, Op, Value
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import GraphCost, shown_seconds
from penstock.passes.sharding.given import parse_mesh
from penstock.passes.sharding.presets import PRESETS
from penstock.passes.sharding.written import AUTO, NONE, PRESET, layouts_of
from penstock.passes.simulator.exchanges import collective_seconds
from penstock.passes.simulator.machine import machine_of
from penstock.planning.model import Model
from penstock.planning.options import AUTO as BY_PRICE
from penstock.planning.options import PlanOptions
from penstock.planning.pipeline import PreparedModel, plan_model, prepare
from penstock.planning.plan import Plan
from penstock.planning.watching import SILENT, Feedback
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

from .costs import LayoutModel, LayoutPrices
from .search import best_options

# Parts of the memory that the integer programme is solved for, beside no limit: passes count more than it does.
_ROOMS = (1.0, 0.85, 0.7, 0.5)
# The axes that the integer programme splits over, at most: layouts over more have too many ways between them.
_MOST_AXES = 2
_DEFAULTS = PlanOptions(shard=(AUTO,))
CHOSEN = "layouts of the programme"
IN_BLOCKS = " in repeated blocks alone"


def asks_for_layouts(options: PlanOptions) -> bool:
    """Return whether the layouts of tensors are to be chosen."""
    return AUTO in layouts_of(options.shard)


def plan_with_layouts(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
) -> Plan:
    """Plan a model with the layouts that take least by simulation."""
    sizes = _axes(options)
    head = PreparedModel(prepare(model, cluster, replace(options, shard=(NONE,)), training), ())
    trials = _Trials(model, cluster, training, options, feedback, sizes, head)
    trials.run()
    name, plan = trials.best()
    if feedback.watcher is not None:
        plan = plan_model(model, cluster, training, replace(options, shard=trials.texts[name]), feedback)
    return replace(plan, module=plan.module.noted("placement", trials.note(name)))


def _axes(options: PlanOptions) -> dict[str, int]:
    """Return the axes that tensors can be split over, with their sizes."""
    if options.offload == BY_PRICE:
        raise UsageError("--offload auto and --shard auto both choose by price", hint="give one of the two")
    if not options.mesh:
        raise UsageError("--shard auto chooses layouts on a mesh, and there is none", hint="such as --mesh tp=2")
    if ";" in options.mesh:
        raise UsageError(f"--shard auto takes one mesh for all stages, not {options.mesh!r}")
    sizes = {axis: size for axis, size in parse_mesh(options.mesh).items() if axis != REPLICAS and size > 1}
    if not sizes:
        what = f"--shard auto needs an axis beside {REPLICAS} over more than one device, the mesh is {options.mesh}"
        raise UsageError(what, hint="such as --mesh tp=2")
    return sizes


@dataclass
class _Trials:
    """The plans of a model with several layouts. `texts` are the layouts by name, `plans` those that came about, and
    `refused` the reasons of others."""

    model: Model
    cluster: Cluster
    training: Training | None
    options: PlanOptions
    feedback: Feedback
    sizes: dict[str, int]
    head: PreparedModel
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)

    def run(self) -> None:
        """Plan with no layouts, with presets, and with those that the integer programme finds."""
        self._try(NONE, (NONE,))
        for preset in PRESETS:
            self._try(PRESET + preset, (PRESET + preset,))
        for name, texts in self._searched():
            self._try(name, texts or (NONE,))

    def best(self) -> tuple[str, Plan]:
        """Return the fastest plan with its name, the first of several."""
        if not self.plans:
            raise self._nothing_fits()
        name = min(self.plans, key=lambda name: self.plans[name].predicted.step)
        return name, self.plans[name]

    def _nothing_fits(self) -> DoesNotFit:
        """Return the error of no layouts, which says that others were tried."""
        error = self.refused[NONE]
        assert isinstance(error, DoesNotFit)
        what = f"{error.what}\n  --shard auto tried other layouts, too{self._left_out()}"
        return DoesNotFit(what, where=error.where, hint=error.hint, excess=error.excess, needs=error.needs)

    def _left_out(self) -> str:
        """Say which layouts do not fit, and why those of the programme are refused otherwise."""
        short = [name for name, error in self.refused.items() if isinstance(error, DoesNotFit)]
        odd = {name: str(error).splitlines()[0] for name, error in self.refused.items() if name.startswith(CHOSEN)}
        return (f"; into memory do not fit: {', '.join(short)}" if short else "") + "".join(
            f"; {name} are refused: {why}" for name, why in odd.items() if name not in short
        )

    def note(self, chosen: str) -> str:
        """Say what was chosen, and what the others take."""
        steps = {name: shown_seconds(plan.predicted.step) for name, plan in self.plans.items()}
        others = [f"{name} {step}" for name, step in steps.items() if name != chosen]
        return (
            f"layouts chosen by simulation: {chosen}, {steps[chosen]} per batch"
            + (f"; {', '.join(others)}" if others else "")
            + self._left_out()
        )

    def _try(self, name: str, texts: tuple[str, ...]) -> None:
        self.texts[name] = texts
        try:
            self.plans[name] = self._made(name, texts, self.cluster)
        except DoesNotFit as error:
            self.refused[name] = error
        except (UsageError, VerifyError) as error:
            # Not every model has every preset; a plan without layouts is refused for what is asked beside them.
            if name == NONE:
                raise
            self.refused[name] = error

    def _made(self, name: str, texts: tuple[str, ...], cluster: Cluster) -> Plan:
        options, shown = replace(self.options, shard=texts), self.feedback.of_trial(f"--shard auto: {name}")
        return plan_model(self.model, cluster, self.training, options, shown, self.head)

    def _searched(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield layouts that the integer programme finds, with names: without a limit of memory, and within parts of
        it. Each comes a second time with what is in no repeated block left open."""
        whole = self.plans.get(NONE) or self._made(NONE, (NONE,), _unlimited(self.cluster))
        progress = self.feedback.of_trial(f"--shard auto: {CHOSEN}").progress
        if progress is not None:
            progress(0, 1, "costs of layouts")
        model = LayoutModel(self.head.module, _largest(self.sizes), _prices(whole.module, self.training))
        room, solved, tried = _room(whole.module, self.cluster), set[tuple[int, ...]](), set[tuple[str, ...]]()
        costs = model.costs()
        for limit in (inf, *(part * room for part in _ROOMS if room < inf)):
            options = best_options(replace(costs, room=limit), progress=progress).options
            if options is None or options in solved:
                continue
            name = CHOSEN if not solved else f"{CHOSEN} for less memory, {len(solved)}"
            solved.add(options)
            full, blocks = model.texts(options), model.texts(options, open_outside=True)
            for each, texts in ((name, full), (name + IN_BLOCKS, blocks)):
                if texts not in tried and (texts or each == name):
                    tried.add(texts)
                    yield each, texts


def layout_model(model: Model, cluster: Cluster, training: Training | None, options: PlanOptions) -> LayoutModel:
    """Return a model as choices of layouts, priced on a mesh of the cluster."""
    options = replace(options, shard=(NONE,))
    head = PreparedModel(prepare(model, cluster, options, training), ())
    whole = plan_model(model, _unlimited(cluster), training, options, SILENT, head)
    return LayoutModel(head.module, _largest(_axes(options)), _prices(whole.module, training))


def _largest(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes that have most devices, in the order of the mesh."""
    kept = sorted(sizes, key=lambda axis: -sizes[axis])[:_MOST_AXES]
    return {axis: sizes[axis] for axis in sizes if axis in kept}


def _unlimited(cluster: Cluster) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, spaces=()) for d in cluster.devices))


def _prices(whole: Module, training: Training | None) -> LayoutPrices:
    """Return prices on the slowest device, and of collectives on the slowest team, of a program without layouts."""
    assert whole.cluster is not None
    devices = whole.rank_devices()
    slowest = min((whole.cluster.device(name) for name in devices), key=lambda device: device.flops)
    route = machine_of(whole.cluster, dict(enumerate(devices))).route

    @cache
    def collective(kind: str, t: TensorType, over: tuple[str, ...]) -> float:
        op = Op(kind, (Value("part", t),), (), {"over": over[0] if len(over) == 1 else over})
        return max(collective_seconds(whole, stage.index, op, route) for stage in whole.stages)

    def operations(graph: Graph) -> Sequence[float]:
        return GraphCost.of(graph).op_seconds(slowest)

    return LayoutPrices(operations, collective, 1 if training is None else training.microbatches)


def _room(whole: Module, cluster: Cluster) -> float:
    """Return the bytes of a device of each stage together; infinity where a device has no limit."""
    limits = [cluster.device(name).memory for name in whole.rank_devices()]
    return min(limit or inf for limit in limits) * len(whole.stages)
