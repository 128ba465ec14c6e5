"""The search for a plan: stages, their devices and shares, the size of microbatches, and the schedule.

In: a way to load the model at any size of a microbatch, a cluster, training settings, samples per batch. Out: a Plan,
with the `Search` that led to it: what every schedule could do at best, and why one was not taken.

The planner works on a chain of layers with formulas (passes/planner). The plan that is best by these, and those near
it, are simulated (passes/planner/refine.py), and so are plans with several stages on each of their devices
(passes/planner/packed.py). The fastest then goes through all passes, which check order, versions and memory exactly.
Where they refuse a choice, the next best is tried (tries.py), and the reason is reported.

Devices that only update weights (`update_on`) are none of the search's: its formulas count no updates on the others.
So the best plan of each schedule is carried out, and the simulation of all says which is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from penstock.calibration.corrections import best_prices
from penstock.frontends.training import Training
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.schedule_names import PACKED, SYNCHRONOUS, TRAINING
from penstock.passes.costs.prices import shown_seconds
from penstock.passes.planner.argue import Result, plan_chain
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.packed import Packed, pack
from penstock.passes.planner.plan import PipelinePlan as Chosen
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Outcome
from penstock.passes.planner.profile import Profile, profile_chain
from penstock.passes.planner.refine import MOST_CHANGED, MOST_ORDERED, Refined, refine
from penstock.passes.planner.sparing import LITTLE, without_little_help
from penstock.support.errors import DoesNotFit, PenstockError, UsageError, VerifyError
from penstock.support.words import flag_for, itemised

from .choice import Search, first_reason
from .model import Load, Model, ModelFile
from .offloading.batches import fastest_elsewhere, schedules_to_search
from .offloading.choose import plan_within_memory
from .options import AUTO, PlanOptions, SearchOptions
from .pipeline import before_partition, check_updates_elsewhere, plan_model, updaters, with_devices
from .plan import Plan
from .teams.choose import check_teams, fastest_of_teams
from .teams.shares import share_of
from .teams.teams import Teams
from .tries import Try, other_sizes, sizes_of, tries, with_more_memory
from .watching import SILENT, Feedback, ProgressHook


def search(
    load: Load, cluster: Cluster, training: Training, options: SearchOptions, feedback: Feedback = SILENT
) -> Plan:
    """Find the best plan for batches of so many samples. `load` gives the model with so many samples per microbatch,
    for each of the sizes to choose from, or as it is for None."""
    settings = PlanOptions(update_on=options.update_on, offload=options.offload, zero=options.zero)
    check_updates_elsewhere(cluster, settings, trains=True)
    check_teams(options)
    models = _load_models(load, options)
    options = replace(options, schedules=schedules_to_search(options))
    if options.offload == "none" and not options.update_on:
        single = _Searching(cluster, training, options, feedback, models)
        return fastest_of_teams(single, cluster, options, max(models), feedback)

    def searching(somewhere: Cluster, settings: SearchOptions, fewest: int) -> _Searching:
        return _Searching(somewhere, training, settings, feedback, models, fewest=fewest)

    return fastest_elsewhere(cluster, options, searching)


def search_file(
    source: ModelFile, cluster: Cluster, training: Training, options: SearchOptions, feedback: Feedback = SILENT
) -> Plan:
    """Find the best plan of a model in a file.

    Where its dimensions leave the size of a microbatch open, some sizes are tried, and where none of these fits,
    others. Where they do not, and nothing fits, the error says which smaller size would.
    """
    load = source.loader(feedback)
    if source.open is None:
        try:
            return search(load, cluster, training, options, feedback)
        except DoesNotFit as error:
            if smaller := _smaller_size(source, cluster, training, options):
                error.hint = f"{smaller}, smaller microbatches, for which there is a plan; or {error.hint}"
            raise
    try:
        return search(load, cluster, training, replace(options, sizes=sizes_of(options.batch, None)), feedback)
    except DoesNotFit:
        others = other_sizes(options.batch)
        if others:
            tried = ", ".join(map(str, others))
            feedback.say(f"no plan fits with the sizes of microbatches that were tried first; trying {tried}")
            with suppress(DoesNotFit):
                return search(load, cluster, training, replace(options, sizes=others, explained=False), feedback)
        raise


def _smaller_size(source: ModelFile, cluster: Cluster, training: Training, options: SearchOptions) -> str:
    """Return the option for smaller microbatches that there is a plan for, where an option gave their size; else
    nothing."""
    for name, bound in source.dims.items():
        free = source.without(name)
        sizes = [size for size in sizes_of(bound, None) if size < bound] if isinstance(bound, int) else []
        if not sizes or free.open != name:
            continue
        try:
            plan = search(free.load, cluster, training, replace(options, sizes=sizes, explained=False))
        except PenstockError:
            # A size without a plan is not proposed; the error of the first search is the one that is reported.
            return ""
        assert plan.search is not None
        return flag_for("--dim", name, plan.search.plan.size)
    return ""


_INTERRUPTED = "interrupted: going on with the best plan so far"
# The part of the time by which several stages on a device have to be faster to be taken: they need more memory, more
# messages, and code for more graphs.
WORTH = 0.02


@dataclass
class _Searching:
    """A search under way: the models by samples per microbatch, the plans that were tried, and the answers of the
    passes: the plans that were `refused`. `teams` are those that tensors are split over. Devices with several stages
    have `fewest` of them or more."""

    cluster: Cluster
    training: Training
    options: SearchOptions
    feedback: Feedback
    models: Mapping[int, Model]
    refused: dict[Chosen, Exception] = field(default_factory=dict)
    too_large: dict[Chosen, DoesNotFit] = field(default_factory=dict)
    tried: set[Chosen] = field(default_factory=set)
    teams: Teams | None = None
    fewest: int = 1
    wholes: dict[tuple[str | None, int], Module] = field(default_factory=dict)

    def over(self, teams: Teams, trial: bool) -> _Searching:
        """Return a search over teams of devices, which shares what was prepared. Passes of a trial are not watched."""
        feedback = self.feedback.of_trial(f"{teams.mesh()}: {teams.named}") if trial else self.feedback
        return replace(self, feedback=feedback, refused={}, too_large={}, tried=set(), teams=teams)

    def without_end(self) -> _Searching:
        """Return the same search, whose progress does not tell its end."""
        return replace(self, feedback=self.feedback.told(_before_end))

    def shown(self, plan: Plan) -> Plan:
        """Return a plan, made once more where passes are watched."""
        if self.feedback.watcher is None:
            return plan
        assert plan.search is not None
        return replace(self.carried_out(plan.search.plan, plan.search.profile), search=plan.search)

    @cached_property
    def computing(self) -> Cluster:
        """The devices that run stages, or a device for each team of these."""
        if self.teams is not None:
            return self.teams.cluster
        updating = updaters(self.options.update_on)
        return with_devices(self.cluster, [d.name for d in self.cluster.devices if d.name not in updating])

    @property
    def _simulated(self) -> Cluster:
        """The same for simulations, where a team takes the cores of all its devices."""
        return self.computing if self.teams is None else self.teams.seated

    @cached_property
    def _alone(self) -> tuple[str, ...]:
        """The schedules with one stage on each device."""
        options = self.options
        if strange := [kind for kind in options.schedules if kind not in (*TRAINING, *PACKED)]:
            expected = ", ".join((*TRAINING, *PACKED))
            raise UsageError(f"{', '.join(strange)}: no schedule of a training, expected some of {expected}")
        return tuple(kind for kind in options.schedules if kind not in PACKED)

    @cached_property
    def _profiled(self) -> Profile:
        return self._profile(self.options.precision, sorted(self.models), self.feedback)

    @cached_property
    def _wanted(self) -> PlanRequest:
        """The request to the formulas. Plans with a device for every stage give the orders of devices for packs."""
        options = self.options
        return PlanRequest(
            options.batch,
            self._alone or SYNCHRONOUS,
            options.recompute,
            self._profiled.chain.sizes,
            replicas=options.replicas,
            zero=options.zero,
        )

    @cached_property
    def result(self) -> Result:
        """The best plans of all schedules by the formulas."""
        fleet, progress = fleet_of(self.computing), self.feedback.told(_of_planner).progress
        chain, explained = self._profiled.chain, self.options.explained and self.teams is None
        return plan_chain(chain, fleet, self._wanted, explained=explained, progress=progress)

    def sizes_left_out(self) -> Sequence[int]:
        """Return the sizes of microbatches with which the model has other operations, and no plans are searched."""
        return self._profiled.left_out

    def plan(self) -> Plan:
        """Return the first of the best plans that the passes accept."""
        options, alone, profile, wanted = self.options, self._alone, self._profiled, self._wanted
        try:
            result = self.result
        except DoesNotFit as error:
            if not alone:
                what = f"there is no plan of {' or '.join(options.schedules)}: with one stage on a device nothing fits"
                raise DoesNotFit(what, where="planner", hint=error.hint) from error
            for result, part in with_more_memory(profile.chain, fleet_of(self.computing), wanted):
                best = Search(profile, result, result.best, {}, more_memory=part)
                if (plan := self._first(best, [(result.best.plan.schedule, result.best, [])])) is not None:
                    return plan
            raise
        spared, refined = self._improved(profile, result, wanted)
        steps = {kind: _judged_step(outcome, refined.get(kind)) for kind, (outcome, _) in spared.items()}
        fastest = min(steps, key=steps.__getitem__)
        worth = steps[fastest] * (1 - WORTH) if alone else math.inf
        # Of plans that differ by updates elsewhere the formulas know nothing: the best packs may be of use yet.
        packs = {} if result.stopped else self._packs(result, refined, math.inf if options.update_on else worth)
        if result.stopped and not alone:
            # What was asked for has not been searched yet.
            raise KeyboardInterrupt
        chosen = refined[fastest].outcome if fastest in refined else spared[fastest][0]
        outline = Search(profile, result, chosen, {}, little=spared[fastest][1], refined=refined, packs=packs)
        packed = self._packed(outline, worth)
        plain = self._first(outline, tries(result, spared, refined, self.too_large)) if alone else None
        if packed is not None and (plain is None or packed.predicted.step < plain.predicted.step * (1 - WORTH)):
            return self.shown(packed) if alone else packed
        if plain is not None:
            return plain if packed is None else _rather(plain, packed)
        if not self.refused:
            raise DoesNotFit(
                f"there is no plan of {' or '.join(options.schedules)}",
                where="planner",
                hint="several stages on a device need two devices, and microbatches that can be dealt to them; "
                "--schedule 1f1b has plans"
                if self.fewest == 1
                else "weights move where the model can be cut into three stages for each device",
            )
        raise _all_refused(self.refused)

    def _packs(self, result: Result, refined: Mapping[str, Refined], worth: float) -> dict[str, Packed]:
        """Return the best plans with several stages on a device, on the devices of other plans, in their order. They
        are of use where they take less than `worth` seconds."""
        kinds = [kind for kind in self.options.schedules if kind in PACKED]
        if not kinds:
            return {}
        plans = [one.outcome.plan for one in refined.values()]
        # Several stages on one device are of use where their weights move.
        orders = [plan.devices for plan in plans if len(plan.devices) > 1 or self.fewest > 1]
        orders += [order[::-1] for order in orders if len(order) <= MOST_ORDERED]
        if plans and MOST_ORDERED < len(result.fleet) <= MOST_CHANGED:
            # More of them may help packs than help one stage on each.
            speeds = result.planner.speeds(plans[0].size)
            ordered = tuple(sorted(range(len(speeds)), key=lambda i: -speeds[i]))
            orders += [ordered, ordered[::-1]]
        if len(kinds) == len(self.options.schedules):
            # Nothing else was asked for: where microbatches cannot be dealt to all devices, fewer are tried.
            several = [order for order in orders if len(order) > 1]
            longest = max(several, key=len, default=tuple(range(len(result.fleet))))
            orders += [longest[:count] for count in range(len(longest), 0 if self.fewest > 1 else 1, -1)]
        try:
            return pack(result.planner, self._simulated, kinds, list(dict.fromkeys(orders)), self.fewest, worth)
        except KeyboardInterrupt:
            result.planner.stopped = True
            self.feedback.say(_INTERRUPTED)
            return {}

    def _packed(self, search: Search, worth: float) -> Plan | None:
        """Return the fastest plan with packs that takes less than `worth` seconds and that the passes accept."""
        for packed in sorted(search.packs.values(), key=lambda one: one.step):
            if packed.step < worth:
                try:
                    plan = self.carried_out(packed.plan, search.profile)
                except (VerifyError, DoesNotFit) as error:
                    self.refused.setdefault(packed.plan, error)
                else:
                    reasons = self._against(search.packs)
                    return replace(plan, search=self._answered(search, search.chosen, taken=packed, refused=reasons))
        return None

    def _answered(self, search: Search, chosen: Outcome, **changes: Any) -> Search:
        """Return the search with its end: the plan that was chosen, and why others were refused."""
        is_f32 = (self.options.precision or self.training.precision) == "f32"
        in_bf16 = (lambda: self._profile("bf16", search.profile.chain.sizes)) if is_f32 else None
        return replace(search, chosen=chosen, in_bf16=in_bf16, **changes)

    def _improved(
        self, profile: Profile, result: Result, wanted: PlanRequest
    ) -> tuple[dict[str, tuple[Outcome, list[str]]], dict[str, Refined]]:
        """Return the plan of every schedule without devices that help little, and the best near it by simulation. After
        an interrupt the other plans stay as they are."""
        spared: dict[str, tuple[Outcome, list[str]]] = {kind: (best, []) for kind, best in result.outcomes.items()}
        refined: dict[str, Refined] = {}
        try:
            if not result.stopped:
                for kind, outcome in result.outcomes.items():
                    spared[kind] = without_little_help(result.planner, outcome)
                for kind, near in self._refined(result, spared):
                    refined[kind] = near
        except KeyboardInterrupt:
            result.planner.stopped = True
        if result.stopped:
            self.feedback.say(_INTERRUPTED)
        return spared, refined

    def _refined(self, result: Result, spared: dict[str, tuple[Outcome, list[str]]]) -> Iterator[tuple[str, Refined]]:
        """Yield the best plan of every schedule by simulation, where it is small enough for that."""
        for kind, (outcome, little) in list(spared.items()):
            if result.stopped:
                return
            everything = range(len(result.fleet))
            near = refine(result.planner, self._simulated, outcome, outcome.plan.devices if little else everything)
            if little and near is not None and len(everything) <= MOST_CHANGED:
                # A device that was left out as it helps too little comes back if it does help by simulation.
                more = refine(result.planner, self._simulated, outcome, everything)
                if more is not None and more.step < near.step * (1 - LITTLE):
                    near, spared[kind] = more, (outcome, [])
            if near is not None:
                yield kind, near

    def _profile(self, precision: str | None, sizes: Sequence[int], feedback: Feedback = SILENT) -> Profile:
        modules = {size: self._whole(precision, size, feedback) for size in sizes}
        exchanged = {}
        if self.teams is not None:
            shares = {size: share_of(module, self.teams) for size, module in modules.items()}
            modules = {size: share for size, (share, _) in shares.items()}
            exchanged = {size: seconds for size, (_, seconds) in shares.items()}
        fastest = max(self.computing.devices, key=lambda device: device.flops)
        return profile_chain(
            modules,
            fastest,
            best_prices(),
            wire=self.options.wire,
            shared=self.cluster.is_shared,
            updates_elsewhere=bool(self.options.update_on),
            exchanged=exchanged,
        )

    def whole(self, size: int) -> Module:
        """Return the whole model with so many samples per microbatch, as `shard` sees it."""
        return self._whole(self.options.precision, size, self.feedback)

    def _whole(self, precision: str | None, size: int, feedback: Feedback) -> Module:
        if (precision, size) not in self.wholes:
            planned = PlanOptions(precision=precision, cuda_libraries=self.options.cuda_libraries)
            alone, shown = replace(self.training, microbatches=1), feedback.told(partial(_for_size, size=size))
            self.wholes[precision, size] = before_partition(self.models[size], self.cluster, alone, planned, shown)
        return self.wholes[precision, size]

    def _first(self, search: Search, tries: Iterable[Try]) -> Plan | None:
        """Return the first plan that the passes accept, with the search that led to it. Of each schedule it has the
        reason against the first plan of this search that was refused, now or in a search before."""
        reasons = self._against(search.packs)
        for schedule, outcome, little in tries:
            if outcome.plan in self.tried:
                if (known := self.refused.get(outcome.plan)) is not None:
                    reasons.setdefault(schedule, str(known))
                continue
            self.tried.add(outcome.plan)
            try:
                plan = self.carried_out(outcome.plan, search.profile)
            except (VerifyError, DoesNotFit) as error:
                self.refused[outcome.plan] = error
                reasons.setdefault(schedule, str(error))
                if isinstance(error, DoesNotFit) and error.excess:
                    self.too_large[outcome.plan] = error
                continue
            return replace(plan, search=self._answered(search, outcome, little=little, refused=reasons))
        return None

    def _against(self, packs: Mapping[str, Packed]) -> dict[str, str]:
        """Return the reasons against plans with several stages on a device, by schedule."""
        return {kind: str(self.refused[one.plan]) for kind, one in packs.items() if one.plan in self.refused}

    def carried_out(self, plan: Chosen, profile: Profile) -> Plan:
        """Run all passes over the chosen plan."""
        options, names = self.options, [device.name for device in self.computing.devices]
        placed = plan.stages[: len(plan.devices)] if plan.packs > 1 else plan.stages
        teams, members = self.teams, {} if self.teams is None else self.teams.members
        planned = PlanOptions(
            schedule=plan.schedule,
            split_at=[profile.starts[stage.first] for stage in plan.stages[1:]],
            devices=[[d for i in stage.devices for d in members.get(names[i], (names[i],))] for stage in placed],
            shares=() if plan.packs > 1 else [stage.shares for stage in plan.stages],
            packs=plan.packs,
            recompute=options.recompute,
            precision=options.precision,
            cuda_libraries=options.cuda_libraries,
            wire=options.wire,
            hints=False,
            mesh="" if teams is None else teams.mesh_of(plan),
            shard=() if teams is None else teams.layouts,
            zero=plan.zero,
            offload=options.offload,
            spill=options.spill,
            update_on=options.update_on,
        )
        training = replace(self.training, microbatches=plan.count)
        make = plan_within_memory if options.offload == AUTO else plan_model
        done = make(self.models[plan.size], self.cluster, training, planned, self.feedback)
        notes = [
            f"the layouts of configuration {name!r} of the model are not followed: the planner chooses layouts"
            for name in self.models[plan.size].imported.hints.configurations
        ]
        return replace(done, module=done.module.noted("placement", *notes)) if notes else done


def _of_planner(progress: ProgressHook) -> ProgressHook:
    """Show the progress of the search, which is a part of planning like passes; its cases never count as all of it."""
    return lambda done, total, what: progress(min(done, total - 1), total, f"planner: {what}")


def _before_end(progress: ProgressHook) -> ProgressHook:
    """Show progress but not its end, where something follows."""
    return lambda done, total, what: progress(done, total, what) if done < total else None


def _for_size(progress: ProgressHook, size: int) -> ProgressHook:
    """Show the progress of the passes that a size is profiled with. They are a part of planning, which ends with all
    passes over the plan, so their end is not shown."""

    def tell(done: int, total: int, what: str) -> None:
        if done < total:
            progress(done, total, f"{what} (microbatches of {size})")

    return tell


def _load_models(load: Load, options: SearchOptions) -> dict[int, Model]:
    """Load the model at each of the sizes, by samples per microbatch; UsageError where a batch cannot be made of such
    microbatches."""
    models: dict[int, Model] = {}
    for size in options.sizes:
        model = load(size)
        samples = microbatch_size(model.module)
        if size is not None and samples != size:
            raise UsageError(
                f"with microbatches of {size} the model's inputs are of {samples} samples",
                hint="which dimension is the batch?",
            )
        if options.batch % samples:
            sizes_of(options.batch, samples)
        models[samples] = model
    return models


def _rather(plan: Plan, packed: Plan) -> Plan:
    """Return the plan with one stage on each device, and say of the one with packs that it is not faster after all."""
    assert plan.search is not None
    assert packed.module.schedule is not None
    packs, alone = (shown_seconds(each.predicted.step) for each in (packed, plan))
    reason = f"with all passes it takes {packs} per batch, and one stage on each device {alone}"
    refused = {**plan.search.refused, packed.module.schedule.name: reason}
    return replace(plan, search=replace(plan.search, refused=refused))


def _judged_step(outcome: Outcome, refined: Refined | None) -> float:
    """Return the seconds per batch of the best plan of a schedule: by simulation, where it was simulated and fits."""
    return refined.step if refined is not None and math.isfinite(refined.step) else outcome.step


def _all_refused(refused: Mapping[Chosen, Exception]) -> PenstockError:
    """Return the error where the passes take no plan, with the first reason for each schedule."""
    first = {plan.schedule: error for plan, error in reversed([*refused.items()])}
    kinds = dict.fromkeys(plan.schedule for plan in refused)
    reasons = itemised(f"{kind}: {first_reason(str(first[kind]))}" for kind in kinds)
    what = f"what the planner chose was refused by the passes:{reasons}"
    if any(isinstance(error, VerifyError) for error in refused.values()):
        return UsageError(what, hint="--replicas 1, or a plan by hand (--stages, --split-at), may do")
    return DoesNotFit(what, hint="more devices, or smaller microbatches or batches, need less")
