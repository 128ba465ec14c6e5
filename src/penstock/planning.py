"""Let the planner choose: how many stages, on which devices, with which shares of how large microbatches, under which schedule.

In: a way to load the model at any size of a microbatch, a cluster, training settings, samples per batch. Out: a Plan as `ps.plan` makes it,
with the `Search` that led to it: what every schedule could do at best, and why one was not taken.

The planner works on a chain of layers with formulas (passes/planner); what is best by these, and what is near it, is simulated
(refining.py), and the fastest then goes through all passes, which check order, versions and memory exactly. A choice that they refuse is
not lost in silence: the next best schedule is taken, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock import api
from penstock.grading import best_prices
from penstock.ir.cluster.cluster import Cluster
from penstock.passes.planner.argue import PlanChange, Result, counterfactuals, plan_chain
from penstock.passes.planner.chain import Chain
from penstock.passes.planner.fleet import Fleet, fleet_of
from penstock.passes.planner.plan import PipelinePlan as Chosen
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Outcome, Planner
from penstock.passes.planner.profile import Profile, profile_chain
from penstock.passes.planner.sparing import without_little_help
from penstock.passes.schedules.schedule import SYNCHRONOUS
from penstock.refining import Refined, refine
from penstock.support.errors import DoesNotFit, PenstockError, UsageError, VerifyError
from penstock.support.words import itemised

if TYPE_CHECKING:
    from penstock.frontends.training import Training

# Sizes of microbatches that are tried if none are given: each is one more import of the model.
MOST_SIZES = 5

# Where stages turn out too large, plans are tried for less memory on their devices, by what they lack and a little more: so many times, begun with
# as much memory as there is, and with more, as what is estimated may be too much elsewhere.
CORRECTIONS = 6
_MARGIN = 1.005
_BEGUN_WITH = (1.0, 1.1)
# Parts of the memory that a plan is tried again for, where what was planned for all of it does not fit after all.
LESS_MEMORY = (0.95, 0.85, 0.7)
# And how many times the memory, where nothing fits by estimates: what the passes count exactly may be less.
MORE_MEMORY = (1.05, 1.1, 1.2)

# The model at so many samples per microbatch; None for the size that it has.
Load = Callable[[int | None], api.Model]
# A schedule, a plan of it, and devices that it does without although they would help a little.
_Try = tuple[str, Outcome, list[str]]


@dataclass(frozen=True)
class Search:
    """What led to a plan. `result` has the best plan of every schedule, `chosen` is the one that was carried out; `refused` are those that
    the passes refused, with the reason; `little` says of devices that they help too little to be used. `refined` is what the simulator said
    of the best plans near the planner's, by schedule; `more_memory` how many times the memory of the devices the formulas were given.
    `in_bf16` makes the profile of the model in bfloat16, where the plan is in float32."""

    profile: Profile
    result: Result
    chosen: Outcome
    refused: Mapping[str, str]
    little: Sequence[str] = ()
    refined: Mapping[str, Refined] = field(default_factory=dict)
    in_bf16: Callable[[], Profile] | None = None
    more_memory: float = 1.0

    @cached_property
    def what_if(self) -> list[PlanChange]:
        """Plans with one thing changed in what was asked for, or in the devices of the plan that was
        chosen, all the best by the formulas."""
        others = {}
        if self.in_bf16 is not None and (chain := self.in_bf16().chain).sizes == self.profile.chain.sizes:
            others["in bfloat16"] = chain
        kinds = {kind: found for kind, found in self.result.outcomes.items() if kind != self.chosen.plan.schedule}
        return counterfactuals(replace(self.result, outcomes={self.chosen.plan.schedule: self.chosen} | kinds), others)

    @property
    def left_out(self) -> list[str]:
        """Devices that the plan does not use."""
        return [device.name for i, device in enumerate(self.result.fleet.devices) if i not in self.chosen.plan.devices]


def sizes_of(batch: int, fixed: int | None) -> tuple[int, ...]:
    """Samples per microbatch to try: the size that the model has, or divisors of the batch, evenly among its powers of two and the like."""
    if fixed is not None:
        if batch % fixed:
            raise UsageError(
                f"a batch of {batch} samples cannot be made of microbatches of {fixed}, the size that the model is read with",
                hint=f"give a --batch that {fixed} divides, or another size by --dim; where the first dimension of the model is symbolic "
                "and no --dim binds it, the planner chooses",
            )
        return (fixed,)
    divisors = [b for b in range(1, batch + 1) if batch % b == 0]
    if len(divisors) <= MOST_SIZES:
        return tuple(divisors)
    step = (len(divisors) - 1) / (MOST_SIZES - 1)
    return tuple(sorted({divisors[round(i * step)] for i in range(MOST_SIZES)}))


def other_sizes(batch: int) -> tuple[int, ...]:
    """Divisors of the batch that are not among those that are tried first: the small ones, where none of these fits into memory."""
    first = sizes_of(batch, None)
    return tuple([b for b in range(1, batch + 1) if batch % b == 0 and b not in first][:MOST_SIZES])


def plan_best(
    load: Load,
    cluster: Cluster,
    training: Training,
    *,
    batch: int,
    sizes: Sequence[int | None] = (None,),
    schedules: Sequence[str] = SYNCHRONOUS,
    recompute: str = "auto",
    replicas: int = 0,
    precision: str | None = None,
    explained: bool = True,
    progress: api.ProgressHook | None = None,
    **options: Any,
) -> api.Plan:
    """The best plan for batches of so many samples: what `--batch` asks for. `load` gives the model with so many samples per microbatch,
    for each of the `sizes` to choose from, or as it is for None. The fastest of `schedules` is taken, by default of those that compute
    what plain training does; `replicas` is the most devices of a stage, 0 for any number; `recompute` is auto, none or all;
    where nothing fits, the error says what would, unless it need not be `explained`, which takes longer than
    finding that out; further options are those of `penstock.plan`."""
    library = {"cuda_libraries": options.get("cuda_libraries", "torch")}
    alone = replace(training, microbatches=1)
    models = _load_models(load, sizes, batch)

    def profile_in(precision: str | None, sizes: Sequence[int], progress: api.ProgressHook | None = None) -> Profile:
        modules = {
            size: api.before_partition(
                models[size],
                cluster,
                alone,
                precision=precision,
                progress=progress and _for_size(progress, size),
                **library,
            )
            for size in sizes
        }
        return profile_chain(
            modules,
            max(cluster.devices, key=lambda device: device.flops),
            best_prices(),
            wire=options.get("wire", "f32"),
            shared=cluster.is_shared,
        )

    profile = profile_in(precision, sorted(models), progress)
    wanted = PlanRequest(batch, tuple(schedules), recompute, profile.chain.sizes, replicas=replicas)
    refused: dict[str, Exception] = {}
    too_large: dict[Chosen, DoesNotFit] = {}
    tried: set[Chosen] = set()

    def carried_out(
        result: Result, tries: Iterable[_Try], refined: Mapping[str, Refined], more_memory: float = 1.0
    ) -> api.Plan | None:
        """The first that the passes accept."""
        for schedule, outcome, little in tries:
            if outcome.plan in tried:
                continue
            tried.add(outcome.plan)
            try:
                made = _carried_out(
                    models[outcome.plan.size],
                    cluster,
                    training,
                    outcome,
                    profile,
                    recompute,
                    precision,
                    progress,
                    options,
                )
            except (VerifyError, DoesNotFit) as error:
                refused.setdefault(schedule, error)
                if isinstance(error, DoesNotFit) and error.excess:
                    too_large[outcome.plan] = error
                continue
            told = {kind: str(error) for kind, error in refused.items()}
            whole = (
                (lambda: profile_in("bf16", profile.chain.sizes))
                if (precision or training.precision) == "f32"
                else None
            )
            return replace(made, search=Search(profile, result, outcome, told, little, refined, whole, more_memory))
        return None

    try:
        result = plan_chain(
            profile.chain, cluster, wanted, explained=explained, progress=progress and _of_planner(progress)
        )
    except DoesNotFit:
        for result, part in _with_more_memory(profile.chain, cluster, wanted):
            if (plan := carried_out(result, [(result.best.plan.schedule, result.best, [])], {}, part)) is not None:
                return plan
        raise
    spared = {
        kind: without_little_help(profile.chain, result.fleet, wanted, outcome)
        for kind, outcome in result.outcomes.items()
    }
    refined = {}
    for kind, (outcome, little) in spared.items():
        # What was just left out for helping too little does not come back.
        usable = outcome.plan.devices if little else range(len(result.fleet))
        if (near := refine(result.planner, cluster, outcome, usable)) is not None:
            refined[kind] = near
    if (plan := carried_out(result, _tries(profile, result, spared, refined, too_large), refined)) is not None:
        return plan
    raise _all_refused(refused)


def _of_planner(progress: api.ProgressHook) -> api.ProgressHook:
    """Progress of the search, which is a part of planning like passes; its cases never count as all of it."""
    return lambda done, total, what: progress(min(done, total - 1), total, f"planner: {what}")


def _load_models(load: Load, sizes: Sequence[int | None], batch: int) -> dict[int, api.Model]:
    """The model at each of the sizes, by samples per microbatch; UsageError where a batch cannot be made of such microbatches."""
    from penstock.ir.batch_shares import microbatch_size

    models: dict[int, api.Model] = {}
    for size in sizes:
        model = load(size)
        found = microbatch_size(model.module)
        if size is not None and found != size:
            raise UsageError(
                f"with microbatches of {size} the model's inputs are of {found} samples",
                hint="which dimension is the batch?",
            )
        if batch % found:
            sizes_of(batch, found)
        models[found] = model
    return models


def _all_refused(refused: Mapping[str, Exception]) -> PenstockError:
    """The error where the passes take no plan, with the reason for each schedule."""
    reasons = itemised(f"{kind}: {first_reason(str(error))}" for kind, error in refused.items())
    what = f"what the planner chose was refused by the passes:{reasons}"
    if any(isinstance(error, VerifyError) for error in refused.values()):
        return UsageError(what, hint="--replicas 1, or a plan by hand (--stages, --split-at), may do")
    return DoesNotFit(what, hint="more devices, or smaller microbatches or batches, need less")


def _for_size(progress: api.ProgressHook, size: int) -> api.ProgressHook:
    """Progress of the passes that a size is profiled with. They are a part of planning, which ends with all passes
    over the plan, so their end is not told."""

    def tell(done: int, total: int, what: str) -> None:
        if done < total:
            progress(done, total, f"{what} (microbatches of {size})")

    return tell


def _with_more_memory(chain: Chain, cluster: Cluster, wanted: PlanRequest) -> Iterator[tuple[Result, float]]:
    """Of every schedule the best plan in the least of more memory in which there is one, the fastest first;
    and how many times the memory that is."""
    fleet, found = fleet_of(cluster), list[tuple[Result, float]]()
    for schedule in wanted.schedules:
        for part in MORE_MEMORY:
            planner = Planner(chain, fleet.with_memory(part), wanted)
            if (outcome := planner.best(schedule)) is not None:
                found.append((Result(chain, planner.fleet, wanted, {schedule: outcome}, {}, planner), part))
                break
    return iter(sorted(found, key=lambda row: row[0].best.step))


def _corrected(fleet: Fleet, plan: Chosen, error: DoesNotFit) -> Fleet:
    """A fleet with less memory on the devices of the stages that need more than they have, so that the formulas give them less."""
    parts = {
        device: 1 / (error.excess[number] * _MARGIN)
        for number in error.excess
        for device in plan.stages[number].devices
    }
    devices = enumerate(fleet.devices)
    return fleet.but(
        [replace(d, spaces=tuple((name, int(size * parts.get(i, 1))) for name, size in d.spaces)) for i, d in devices]
    )


def _tries(
    profile: Profile,
    result: Result,
    spared: Mapping[str, tuple[Outcome, list[str]]],
    refined: Mapping[str, Refined],
    too_large: Mapping[Chosen, DoesNotFit],
) -> Iterator[_Try]:
    """Plans to be carried out, until the passes accept one: of every schedule the best by simulation, where there is one, that of the
    formulas, those for somewhat less memory than there is, since what the planner counts are estimates, and such without replicas, whose
    rules are simpler. The fastest schedule comes first. Then, by schedule, plans with less memory for devices whose stages were found
    `too_large` in those before."""
    limited = any(device.memory for device in result.fleet.devices)
    every = len(refined) == len(spared)
    for schedule in sorted(spared, key=lambda kind: refined[kind].step if every else spared[kind][0].step):
        outcome, little = spared[schedule]
        if schedule in refined and refined[schedule].outcome.plan != outcome.plan:
            yield schedule, refined[schedule].outcome, little
        yield schedule, outcome, little
        least = LESS_MEMORY if limited else ()
        shared = len(outcome.plan.stages) < len(outcome.plan.devices)
        alone = replace(result.wanted, replicas=1)
        for wanted, part in [
            *((result.wanted, part) for part in least),
            *((alone, part) for part in (1.0, *least) if shared),
        ]:
            less = result.fleet.with_memory(part)
            found = Planner(profile.chain, less, wanted).best(schedule)
            if found is not None:
                # A device that hardly helps stays where its memory is wanted.
                yield schedule, *without_little_help(profile.chain, less, wanted, found)
    for schedule, part in ((schedule, part) for part in _BEGUN_WITH for schedule in result.outcomes):
        fleet = result.fleet.with_memory(part)
        for _ in range(CORRECTIONS):
            found = Planner(profile.chain, fleet, result.wanted).best(schedule)
            if found is None:
                break
            yield schedule, found, []
            if found.plan not in too_large:
                break
            fleet = _corrected(fleet, found.plan, too_large[found.plan])


def first_reason(error: str) -> str:
    """The first thing that an error says, which may be a list."""
    first, *rest = error.splitlines()
    return f"{first} {rest[0].strip(' -')}" if first.endswith(":") and rest else first


def _carried_out(
    model: api.Model,
    cluster: Cluster,
    training: Training,
    outcome: Outcome,
    profile: Profile,
    recompute: str,
    precision: str | None,
    progress: api.ProgressHook | None,
    options: Mapping[str, Any],
) -> api.Plan:
    """The chosen plan through all passes."""
    plan = outcome.plan
    names = [device.name for device in cluster.devices]
    return api.plan(
        model,
        cluster,
        replace(training, microbatches=plan.count),
        schedule=plan.schedule,
        split_at=[profile.starts[stage.first] for stage in plan.stages[1:]],
        devices=[[names[i] for i in stage.devices] for stage in plan.stages],
        shares=[stage.shares for stage in plan.stages],
        recompute=recompute,
        precision=precision,
        hints=False,
        progress=progress,
        **options,
    )
