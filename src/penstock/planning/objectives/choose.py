"""The choice of stages and devices for inference: `--objective latency` or `throughput`.

In: a model without a loss, a cluster, the objective. Out: a Plan with the `Search` that led to it. The planner is that
of trainings, with the schedule forward: of one microbatch for latency, which is then the sum of stages and messages
from input to output; of a run of many, one behind the other, for throughput. For latency stages have one device each.
For throughput they may have several, which take turns with microbatches. A batch of the program then has so many
microbatches that its shares are about those of the run.

Both objectives are searched, so that a plan says what the other one would take. Where the passes refuse a plan for
exact memory, plans for somewhat less memory follow, as in a training.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.calibration.corrections import best_prices
from penstock.frontends.training import Training
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule_names import INFERENCE
from penstock.passes.planner.argue import Result, plan_chain
from penstock.passes.planner.cost import judge
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.plan import PipelinePlan, PlanRequest, StagePlan
from penstock.passes.planner.planner import Outcome
from penstock.passes.planner.profile import Profile, profile_chain
from penstock.passes.schedules.dealing import fair_shares
from penstock.planning.choice import RUN, Objective, Search, ServedPlan
from penstock.planning.lengths.family import plan_family
from penstock.planning.model import Model
from penstock.planning.options import PlanOptions
from penstock.planning.pipeline import before_partition
from penstock.planning.plan import Plan
from penstock.planning.tries import tries
from penstock.planning.watching import SILENT, Feedback
from penstock.support.errors import DoesNotFit, UsageError, VerifyError
from penstock.support.settings import flags_of, problems_of, settings_of
from penstock.support.words import itemised

_DEFAULTS = PlanOptions()
_CHOSEN = (
    *("stages", "packs", "split_at", "split_by", "pin", "replicas", "devices", "shares", "mesh", "shard", "zero"),
    *("offload", "spill", "update_on"),
)
# The microbatches of each objective, and the most devices of a stage, where 0 is any number.
_COUNTS = {"latency": (1, 1), "throughput": (RUN, 0)}
# The most microbatches of a batch that are dealt to devices, and the part by which the slowest may take longer so than
# in the run.
_MOST_DEALT, _AS_GOOD = 32, 0.05


def plan_for_objective(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
) -> Plan:
    """Plan a model; with an objective the planner chooses stages and devices."""
    if problems := problems_of(options):
        raise UsageError("cannot plan with these settings:" + itemised(problems))
    if not options.objective:
        return plan_family(model, cluster, training, options, feedback)
    _check(training, options)
    plain = replace(options, objective="")
    module = before_partition(model, cluster, None, plain, feedback)
    fastest = max(cluster.devices, key=lambda device: device.flops)
    size = microbatch_size(module)
    profile = profile_chain({size: module}, fastest, best_prices(), wire=options.wire, shared=cluster.is_shared)
    results = {name: _searched(profile, cluster, size, *counts) for name, counts in _COUNTS.items()}
    result, refused = results[options.objective], dict[str, Exception]()
    too_large: dict[PipelinePlan, DoesNotFit] = {}
    for _, outcome, _ in tries(result, {INFERENCE: (result.best, [])}, {}, too_large):
        try:
            plan = _carried_out(outcome.plan, profile, model, cluster, plain, feedback)
        except (VerifyError, DoesNotFit) as error:
            refused.setdefault(INFERENCE, error)
            if isinstance(error, DoesNotFit) and error.excess:
                too_large[outcome.plan] = error
            continue
        served = {name: _served(other, other.best) for name, other in results.items()}
        objective = Objective(options.objective, served | {options.objective: _served(result, outcome)})
        reasons = {kind: str(error) for kind, error in refused.items()}
        return replace(plan, search=Search(profile, result, outcome, reasons, objective=objective))
    raise next(iter(refused.values()))


def _check(training: Training | None, options: PlanOptions) -> None:
    """Refuse trainings, and settings that the planner chooses."""
    if training is not None:
        raise UsageError(
            f"--objective {options.objective} is for inference",
            hint="leave out the loss; trainings are planned with --batch",
        )
    described = settings_of(PlanOptions)
    flags = [
        flags_of(name, described[name])[0] if name in described else name
        for name in _CHOSEN
        if getattr(options, name) not in (getattr(_DEFAULTS, name), [])
    ]
    if flags:
        raise UsageError(
            f"{', '.join(flags)} with --objective {options.objective}: the planner chooses stages and their devices",
            hint="leave out one or the other",
        )


def _searched(profile: Profile, cluster: Cluster, size: int, count: int, replicas: int) -> Result:
    """Return the best plan of a run of so many microbatches, with at most so many devices of a stage; with one where
    devices do not run the same code."""
    codes = {(device.kind, device.target) for device in cluster.devices}
    wanted = PlanRequest(size * count, (INFERENCE,), "none", (size,), replicas=replicas if len(codes) == 1 else 1)
    return plan_chain(profile.chain, replace(fleet_of(cluster), trains=False), wanted)


def _carried_out(
    plan: PipelinePlan, profile: Profile, model: Model, cluster: Cluster, options: PlanOptions, feedback: Feedback
) -> Plan:
    """Run all passes over a chosen plan."""
    batch = max(options.microbatches, _dealt(plan))
    planned = replace(
        options,
        stages=len(plan.stages),
        split_at=[profile.starts[stage.first] for stage in plan.stages[1:]],
        devices=[[cluster.devices[i].name for i in stage.devices] for stage in plan.stages],
        shares=[fair_shares(stage.shares, batch) for stage in plan.stages] if batch > 1 else (),
        microbatches=batch,
        hints=False,
    )
    return plan_family(model, cluster, None, planned, feedback)


def _dealt(plan: PipelinePlan) -> int:
    """Return the fewest microbatches that can be dealt to the devices of each stage about as those of the run are."""

    def longer(batch: int) -> float:
        """Return how many times as long as in the run the slowest device takes."""
        return max(
            share / batch / (of_run / plan.count)
            for stage in plan.stages
            for share, of_run in zip(fair_shares(stage.shares, batch), stage.shares, strict=True)
        )

    least = max(len(stage.devices) for stage in plan.stages)
    counts = range(least, max(least, _MOST_DEALT) + 1)
    return next((n for n in counts if longer(n) <= 1 + _AS_GOOD), min(counts, key=longer))


def _served(result: Result, outcome: Outcome) -> ServedPlan:
    """Return what a plan takes by the formulas: one microbatch alone, on the slowest device of each stage, and each of
    many."""
    table, fleet, base = result.planner.table(outcome.plan.size), result.fleet, result.wanted.base
    plan = outcome.plan

    def slowest(stage: StagePlan) -> int:
        columns = {i: table.times(fleet.devices[i])[0] for i in stage.devices}
        return max(columns, key=lambda i: float(columns[i][stage.last] - columns[i][stage.first]))

    single = tuple(replace(stage, devices=(slowest(stage),), shares=(1,)) for stage in plan.stages)
    shares = tuple(replace(stage, shares=fair_shares(stage.shares, RUN)) for stage in plan.stages)
    alone, run = (
        judge(table, fleet, replace(plan, count=count, stages=stages), base).step
        for count, stages in ((1, single), (RUN, shares))
    )
    names = tuple("+".join(fleet.devices[i].name for i in stage.devices) for stage in plan.stages)
    return ServedPlan(names, alone, run / RUN, outcome.bound, outcome.proven(result.wanted.tolerance))
