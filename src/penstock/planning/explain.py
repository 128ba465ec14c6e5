"""The reasons of a plan, for people.

In: a plan, and the search behind it if the planner chose it. Out: lines. First comes a table of ranks with their
seconds, their share of the bottleneck and their memory by purpose. Then come the step that the simulator predicts for
the program, what limits it, and how far it is from the bound. The last lines say why devices were left out, and what
would change the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.graph import PARAM, Module
from penstock.ir.ladder.ladder import filling
from penstock.ir.ops import OPS
from penstock.ir.schedule_names import DELAYED
from penstock.passes.costs.prices import by_simulation, shown_seconds
from penstock.passes.memory.lifetimes import memory_table
from penstock.passes.planner.mixed import helping
from penstock.passes.sharding.given import mesh_text
from penstock.passes.simulator.forecast import binding
from penstock.runtime.generation.turn import TOKENS
from penstock.support.terminal import table
from penstock.support.words import counted, shown_bytes

from .choice import AS_LONG, RUN, WORTH_OF_TEAMS, Objective, Search, compare, first_reason, passed_over
from .facts import ASSUMED, changes_facts, predicted_facts, rates_facts
from .plan import Plan
from .predict import Predicted, predict, predict_here


def plan_lines(plan: Plan, searched: bool = False) -> Iterator[str]:
    """Describe a plan and its prediction on this machine; if it was `searched` for, add the reasons of the search."""
    module, predicted = plan.module, predict_here(plan.module, plan.predicted)
    yield from _ranks(module, predicted)
    yield from _sizes(plan)
    yield from _mesh(module)
    if plan.search is None or any(way.taken and way.size > 1 for way in plan.search.ways):
        yield from _left_over(module)
    for note in module.notes:
        if note.origin in ("placement", "partition", "update-on", "schedule", "recompute"):
            yield f"{note.origin}: {note.text}"
    if plan.prices is not None:
        yield from plan.prices.lines()
    yield from _pace(predicted)
    yield from _rates(module)
    if searched and plan.search is not None:
        yield from argument(plan.search)


def as_json(plan: Plan) -> str:
    """Return the plan with its prediction on this machine, and what would change it."""
    facts = plan.as_dict() | {"predicted": predicted_facts(predict_here(plan.module, plan.predicted))}
    facts["rates"] = rates_facts(plan.module)
    if plan.search is not None:
        facts["planner"] |= changes_facts(plan.search)
    return json.dumps(facts, indent=2, sort_keys=True)


def _sizes(plan: Plan) -> Iterator[str]:
    """Describe the rungs of a plan with bounded dimensions. The table above is of the largest."""
    for bound in plan.module.bounds if plan.ladder is not None else ():
        assert plan.ladder is not None
        if f"turn.{TOKENS}" in {value.name for value in plan.module.data_inputs}:
            listed = ", ".join(map(str, plan.ladder.sizes_along(bound.name)))
            yield f"tokens of a turn: {listed} (a turn takes the first of these that holds its tokens)"
            continue
        how = "rows are cut into these sizes" if bound.rows else "filled up to the next of these sizes, and masked"
        if len(plan.ladder) > 1 and not bound.rows and len(plan.module.bounds) == 1:
            worst = filling({rung.sizes[bound.name]: predict(rung.held).step for rung in plan.ladder})
            least = min(plan.ladder.sizes_along(bound.name))
            how += f"; from {least} on padding is predicted to take {worst - 1:.0%} more time at most"
        yield f"{bound.name} up to {bound.size}: {', '.join(map(str, plan.ladder.sizes_along(bound.name)))} ({how})"


def _pace(predicted: Predicted) -> Iterator[str]:
    step, samples = predicted.step, predicted.forecast.samples
    yield (
        f"predicted: {shown_seconds(step)} per batch of {counted(samples, 'sample')}, {samples / step:.1f} samples/s, "
        f"{1 - _busy(predicted):.0%} of the ranks' time idle"
    )
    if predicted.measured:
        yield (
            f"the {'time' if predicted.measured == 1 else 'times'} of {counted(predicted.measured, 'stage graph')} "
            "come from runs on this machine"
        )
    if predicted.correction is not None:
        runs = predicted.correction.runs
        yield (
            f"estimates of this machine are corrected by {predicted.correction.factor:.2f}, from "
            f"{counted(runs, 'graded run')}"
        )
    yield f"limited by: {binding(predicted.forecast)}"


def _rates(module: Module) -> Iterator[str]:
    """Say of the devices of a plan which figures were measured, given and assumed. Devices with the same sources share
    a line."""
    groups: dict[str, list[str]] = {}
    for name, sources in rates_facts(module)["devices"].items():
        if name in module.rank_devices():
            groups.setdefault("; ".join(_told(*item) for item in sources.items()), []).append(name)
    for figures, names in groups.items():
        assumed = figures.startswith(f"{ASSUMED}: ")
        yield f"rates of {', '.join(names)}: {'assumed, none of them measured or given' if assumed else figures}"


def _told(source: str, names: list[str]) -> str:
    """Name figures with their source, and the families of work among them together."""
    shares = [name.removeprefix("share of ") for name in names if name.startswith("share of ")]
    plain = [name for name in names if not name.startswith("share of ")]
    families = [f"shares of {', '.join(shares)}"] if shares else []
    return f"{source}: {', '.join([*plain, *families])}"


def _ranks(module: Module, predicted: Predicted) -> Iterator[str]:
    memory, schedule = memory_table(module), module.schedule
    assert schedule is not None
    columns = list(next(iter(memory.values())))
    shares = [share for s in module.stages for share in schedule.shares(s.index)]
    rows = [
        [
            " ".join(map(str, stages)),
            device,
            shares[rank],
            shown_seconds(predicted.busy[rank]),
            f"{predicted.busy[rank] / predicted.pace:.0%}" if predicted.pace else "-",
            *(shown_bytes(memory[rank][c]) for c in columns),
        ]
        for rank, (stages, device) in enumerate(zip(module.rank_packs(), module.rank_devices(), strict=True))
    ]
    yield (
        f"{module.name}: schedule {schedule.name}, {counted(schedule.microbatches, 'microbatch')} per batch, "
        "predicted time per batch and peak memory"
    )
    yield table(["stage", "device", "microbatches", "time", "of slowest", *columns], rows)


def _mesh(module: Module) -> Iterator[str]:
    """Describe how tensors lie on the meshes of stages; nothing where they are not split."""
    if not module.is_local:
        return
    axes = dict.fromkeys(f"{axis}={size}" for mesh in module.meshes for axis, size in mesh.axes)
    variables = list(module.vars.values())
    split = sum(not var.type.is_plain for var in variables)
    fed = sum(not value.type.is_plain for value in module.data_inputs)
    inputs = f" and {fed} of {counted(len(module.data_inputs), 'input')}" if fed else ""
    held, whole = 0, 0
    for stage in module.stages:
        types = [var.type for var in variables if var.role == PARAM and var.stage == stage.index]
        here = sum(module.local_type(t, stage.index).nbytes for t in types)
        if here >= held:
            held, whole = here, sum(t.nbytes for t in types)
    yield (
        f"mesh {', '.join(axes)}: {split} of {counted(len(variables), 'variable')}{inputs} split, "
        f"at most {shown_bytes(held)} of {shown_bytes(whole)} of parameters per device, "
        f"{counted(_collectives(module), 'collective')} per microbatch"
    )


def _left_over(module: Module) -> Iterator[str]:
    """Name the devices that no mesh takes, in one line; nothing where there are no meshes."""
    known, used = module.cluster.devices if module.cluster is not None else (), module.rank_devices()
    left = [device.name for device in known if device.name not in used]
    if module.meshes and left:
        stages = counted(len(module.stages), "stage")
        takes = f"{mesh_text(module)} for {stages} takes {len(used)} of {counted(len(known), 'device')}"
        yield f"idle: {', '.join(left)}; {takes}"


def _collectives(module: Module) -> int:
    """Count the collectives in the graphs that run once per microbatch, those of all stages together."""
    kinds = [row.name for row in ACTION_KINDS.values() if row.computes and row.per == "microbatch"]
    graphs = (module.stage_graph(stage.index, kind) for stage in module.stages for kind in kinds)
    return sum(OPS[op.kind].family == "collective" for graph in graphs if graph is not None for op in graph.ops)


def _busy(predicted: Predicted) -> float:
    total = sum(u.busy + u.waiting + u.idle for u in predicted.forecast.simulated.ranks)
    return sum(u.busy for u in predicted.forecast.simulated.ranks) / total if total else 1.0


def argument(search: Search) -> Iterator[str]:
    """Yield the planner's reasons, a line each."""
    chosen, profile, result = search.chosen, search.profile, search.result
    if search.objective is not None:
        yield from _served(search.objective)
        yield from _beside_others(search)
        return
    plan = chosen.plan
    alone = "" if search.taken is None else f"with one stage on a device, under {plan.schedule}, "
    grain = (
        ""
        if len(profile.starts) == profile.operations
        else f" (of {profile.operations} operations, the longest {profile.largest:.1%} of the work)"
    )
    yield (
        f"planner: {counted(search.plan.size, 'sample')} per microbatch, "
        f"{counted(search.plan.count, 'microbatch')}; chosen over "
        f"{counted(len(profile.starts), 'layer')}{grain}"
    )
    if profile.left_out:
        sizes = " or ".join(map(str, profile.left_out))
        yield f"planner: not tried: microbatches of {sizes} samples, with which the model has other operations"
    yield (
        f"planner: {alone}{shown_seconds(chosen.step)} per batch by its formulas, limited by {chosen.judged.binding}; "
        f"{_bound(search)}"
    )
    if (simulated := search.refined.get(plan.schedule)) is not None and simulated.outcome.plan == plan:
        yield (
            f"planner: {alone}the fastest of {counted(simulated.tried, 'plan')} simulated: "
            f"{shown_seconds(simulated.step)} per batch"
        )
    yield from _ways(search)
    if search.with_moves:
        yield (
            "planner: these figures leave out what moves to other memory, and updates on other devices; the predicted "
            "time of the plan counts them"
        )
    yield from _packs(search)
    if search.more_memory > 1:
        yield (
            f"planner: its estimates of memory are up to {search.more_memory - 1:.0%} more than the devices have; by "
            "the exact count of the passes the plan fits"
        )
    for schedule, reason in search.refused.items():
        if schedule not in result.outcomes:
            continue
        what = f"the fastest plan of {schedule}" if schedule == plan.schedule else schedule
        yield (
            f"planner: {what} would take {shown_seconds(result.outcomes[schedule].step)}, but it was refused: "
            f"{first_reason(reason)}"
        )
    if search.plan.schedule in DELAYED:
        yield (
            f"planner: under {search.plan.schedule} gradients are one update late, which is not what plain training "
            "computes; --schedule 1f1b is"
        )
    yield from _beside_others(search)


def _served(objective: Objective) -> Iterator[str]:
    """Yield what a plan for inference takes by the formulas, and what that for the other objective would."""
    plan, other = objective.plans[objective.name], objective.plans[objective.other]
    what = (
        f"{shown_seconds(plan.latency)} for one microbatch from input to output, {shown_seconds(plan.pace)} for each "
        f"in a run of {RUN}"
    )
    least = shown_seconds(plan.bound if objective.name == "latency" else plan.bound / RUN)
    sure = "no other plan is better" if plan.proven else f"no plan takes less than {least}"
    yield f"planner: for {objective.name}, by its formulas: {what}; {sure}"
    yield (
        f"planner: for {objective.other} it would be {counted(len(other.devices), 'stage')} on "
        f"{', '.join(other.devices)}: {shown_seconds(other.latency)} from input to output "
        f"({compare(other.latency, plan.latency)}), {shown_seconds(other.pace)} for each in a run "
        f"({compare(other.pace, plan.pace)})"
    )


def _beside_others(search: Search) -> Iterator[str]:
    """Yield what other plans and other devices would take, as far as the search was for the devices that there are."""
    result, chosen = search.result, search.chosen
    if search.with_moves:
        if search.left_out:
            yield f"planner: not used: {', '.join(search.left_out)}"
        return
    if not result.stopped:
        yield from (f"planner: {name} helps: {reason}" for name, reason in helping(result.planner, chosen))
    yield from (f"planner: left out: {line}" for line in search.little)
    if search.plan.devices == result.best.plan.devices:
        yield from (f"planner: left out: {name}, because {reason}" for name, reason in result.left_out.items())
    elif others := [name for name in search.left_out if not any(line.startswith(f"{name} ") for line in search.little)]:
        yield f"planner: not used: {', '.join(others)}"
    usual = search.usual
    if (same := compare(usual, chosen.step)) != AS_LONG:
        yield (
            f"planner: by its formulas another plan of {chosen.plan.schedule} is {same}, {shown_seconds(usual)}, "
            f"{passed_over(search)}"
        )
    yield from _changes(search, usual)


def _ways(search: Search) -> Iterator[str]:
    """Yield what plans take whose tensors are split over teams, a line for each size, beside the plan that was taken.
    Of a mesh that was given there is nothing to say."""
    if len(search.ways) < 2:
        return
    chosen_way = next(way for way in search.ways if way.taken)
    assert chosen_way.step is not None
    for way in search.ways:
        named = f", {way.layouts}" if way.layouts else ""
        what = "no tensor parallelism" if way.size == 1 else f"{way.size} ways of tensor parallelism{named}"
        if way.step is None:
            yield f"planner: {what}: {'no plan' if way.tried else 'not tried'}: {way.reason}"
            continue
        how = by_simulation(way.step) if way.simulated else f"{shown_seconds(way.step)} by the formulas"
        # Teams that are hardly faster are not taken.
        hardly = "" if way.taken or way.step >= chosen_way.step else f", which is less than {WORTH_OF_TEAMS:.0%}"
        yield f"planner: {what}: {how}" + (
            "; chosen" if way.taken else f", {compare(way.step, chosen_way.step)}{hardly}; not chosen"
        )


def _packs(search: Search) -> Iterator[str]:
    """Yield what plans with several stages on a device would take, a line for each schedule, and their price."""
    names = [device.name for device in search.result.fleet.devices]
    refined = search.refined.get(search.chosen.plan.schedule)
    for kind, packed in sorted(search.packs.items(), key=lambda item: item[1].step):
        line = f"planner: {packed.plan.packs} stages on each device, {kind}: {by_simulation(packed.step)}"
        if refined is not None and refined.outcome.plan == search.chosen.plan:
            line += f", {compare(packed.step, refined.step)}"
        before, after = search.chosen.judged.memory, packed.memory
        device = max(after, key=lambda i: after[i].activations)
        if device in before:
            held = f"{shown_bytes(after[device].activations)} in place of {shown_bytes(before[device].activations)}"
            line += f"; activations on {names[device]}: {held}"
        if kind in search.refused:
            line += f"; it was refused: {first_reason(search.refused[kind])}"
        yield line


def _changes(search: Search, usual: float) -> Iterator[str]:
    """Yield the steps with one setting changed, a line each, against the `usual` one."""
    if search.result.stopped:
        yield "planner: stopped by an interrupt: this is the best plan until then, and others were not compared with it"
        return
    # Formulas are compared with formulas: what was chosen by simulation may be slower by them. They know of no packs.
    alone = "" if search.taken is None else f"{search.chosen.plan.schedule} with one stage on a device"
    against = f"{shown_seconds(usual)} of {alone}" if alone else shown_seconds(usual)
    yield f"planner: with one thing changed in what was given, by its formulas, against {against}:"
    for change in search.what_if:
        if change.name.removeprefix("schedule ") in search.refused:
            continue
        if change.step is None:
            effect = "nothing fits" if change.sure else "no plan was found"
        else:
            effect = f"{shown_seconds(change.step)} ({_compared(change.step, usual, alone)})"
            if change.bound:
                least = f"{shown_seconds(change.bound)} ({_compared(change.bound, usual, alone)})"
                effect += f" at most, and no less than {least} under {search.result.best.plan.schedule}"
        simulated = search.refined.get(change.name.removeprefix("schedule "))
        if simulated is not None and change.step is not None and change.step < usual:
            effect += f", but {by_simulation(simulated.step)}"
        yield f"what if: {change.name}: {effect}"


def _compared(step: float, usual: float, alone: str) -> str:
    """Compare a step with the usual one. Beside packs that were taken it says which plan has that: `alone`."""
    effect = compare(step, usual)
    return f"{effect} {'as' if effect == AS_LONG else 'than'} {alone}" if alone else effect


def _bound(search: Search) -> str:
    chosen = search.chosen
    best = search.result.outcomes.get(chosen.plan.schedule, chosen)
    if best.step < chosen.step:
        above = chosen.step / best.bound - 1 if best.bound else 0.0
        return "not the fastest by these" + (f", at most {above:.1%} above the best of all" if best.bound else "")
    if chosen.proven(search.result.wanted.tolerance):
        said = f"by these no plan of {chosen.plan.schedule} for what was given is faster"
        return said if search.result.planner.orders_alike else f"{said}, with replicas in the order of the cluster"
    above = chosen.step / chosen.bound - 1 if chosen.bound else float("inf")
    least = f"no plan takes less than {shown_seconds(chosen.bound)}, so it is at most {above:.1%} above the best"
    return least + (
        ""
        if chosen.layout.complete
        else f"; of a fleet of this size not every choice was tried, {chosen.layout.name} were best"
    )
