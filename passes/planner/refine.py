"""The last step of planning: the planner's plans, and others near them, judged by the simulator instead of formulas.

In: a chain of layers, a cluster, and the best plan of each schedule by the formulas of passes/planner/cost.py. These
are some percent off where stages are unequal. Out: for each schedule the plan with the shortest time when
passes/simulator/simulate.py runs its program against the same costs, and that time. The search tries all usable devices
in every order, one for each stage, with the best cuts and shares by the formulas for that order. It does the same with
several devices on a stage, in every way that the formulas find nearly as fast as the fastest way. Under schedules that
drain they are furthest off there, where links are slow. From the fastest of these plans on it moves cuts by some
layers, and microbatches between replicas.

With more devices the search starts with the fastest ones in a row, and changes the devices of one or two stages at a
time: a device is left out, added or exchanged for another, those of a stage become two stages, stages change places or
become one.

Limits: small plans only (`MOST_ACTIONS`, `MOST_SIMULATED` in all; every order of up to `MOST_ORDERED` devices, changes
with up to `MOST_CHANGED`); microbatches are as large as in a plan that the formulas found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, permutations, product

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE, WEIGHTS
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule import MESSAGES, Action, Schedule
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs, build_schedule
from penstock.passes.simulator.cores import TURN
from penstock.passes.simulator.forecast import BATCHES, LOCAL, seat_of
from penstock.passes.simulator.machine import machine_of
from penstock.passes.simulator.simulate import simulate, step_seconds
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import UsageError, VerifyError
from penstock.support.hardware import usable_cores

from .chain import Table
from .cost import judge
from .fleet import Fleet
from .plan import Judged, PipelinePlan
from .planner import Outcome, Planner

MOST_ACTIONS, MOST_ORDERED, MOST_CHANGED = 4000, 4, 6
# The most times as slow as the best that layouts may be by the formulas. The numbers of such layouts, of ways to put
# several devices on a stage, and of sizes of microbatches that orders are tried with.
_WITHIN, _MOST_LAYOUTS, _MOST_GROUPED, _SIZES = 1.5, 12, 40, 2
# The numbers of starts, and of changes of devices, whose cuts are moved, and the numbers of layers they move by.
STARTS, _CHANGES, _MOVES = 6, 3, (1, 2, 4, 8)
# The limits of all simulations together: microbatches on ranks, and turns on cores where devices share some. The part
# of them that starts may take: the others are for what is changed from there.
MOST_SIMULATED, _FOR_STARTS = 8000, 0.6
# The programs that are kept: plans whose cuts alone differ have the same one.
_PROGRAMS = 256
# The devices of each stage, in order.
Devices = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Refined:
    """A plan with its seconds per batch by simulation; `tried` is how many were simulated."""

    outcome: Outcome
    step: float
    tried: int


def refine(planner: Planner, cluster: Cluster, outcome: Outcome, devices: Sequence[int]) -> Refined | None:
    """Return the best plan near one that the planner found, on some of these devices of the fleet. It is None where it
    is too large to be simulated many times."""
    plan = outcome.plan
    if plan.count * len(plan.devices) > MOST_ACTIONS or len(plan.stages) > len(planner.fleet):
        return None
    usable = devices if len(devices) <= MOST_ORDERED else ()
    judge_of = SimulatedSteps(planner, cluster, most=_FOR_STARTS * MOST_SIMULATED, devices=usable)
    starts = judge_of.fastest(dict.fromkeys((plan, *_others(planner, plan, devices))), STARTS)
    judge_of.most = MOST_SIMULATED
    best = best_near(starts or [plan], judge_of)
    if MOST_ORDERED < len(devices) <= MOST_CHANGED:
        best = _changed(best, planner, judge_of, devices)
    judged = judge(planner.table(best.size), planner.fleet, best, planner.wanted.base)
    refined = replace(outcome, plan=best, judged=judged, bound=min(outcome.bound, judged.step))
    return Refined(refined, judge_of.step(best), len(judge_of.known))


def _others(planner: Planner, plan: PipelinePlan, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    """Yield the best plans by the formulas of every layout and size of microbatches, and those of every order of the
    devices on stages. With many devices these are rows of the fastest."""
    if len(devices) > MOST_ORDERED:
        if len(devices) <= MOST_CHANGED:
            yield from _rows(planner, plan, devices)
        return
    plans = [other.plan for other in planner.candidates(plan.schedule, _WITHIN) if {*other.plan.devices} <= {*devices}]
    plans = [other for other in plans if other.count * len(other.devices) <= MOST_ACTIONS][:_MOST_LAYOUTS]
    yield from plans
    sizes = dict.fromkeys(
        other.size for other in (plan, *(other for other in plans if len(other.stages) == len(other.devices)))
    )
    for size in [*sizes][:_SIZES]:
        yield from _orders(planner, plan.schedule, size, devices)
        yield from _grouped(planner, plan.schedule, size, devices)


def _orders(planner: Planner, schedule: str, size: int, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    seen = set()
    for order in (order for count in range(1, len(devices) + 1) for order in permutations(devices, count)):
        names = tuple(planner.fleet.exchangeable[i] for i in order)
        if names not in seen:
            seen.add(names)
            plan = planner.in_order(schedule, size, order)
            if plan is not None:
                yield plan


def _rows(planner: Planner, plan: PipelinePlan, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    """Yield plans with some of the fastest devices in a row, from the fastest to the slowest, and the other way
    round."""
    speeds = planner.speeds(plan.size)
    ordered = sorted(devices, key=lambda i: -speeds[i])
    for count in range(1, len(ordered) + 1):
        for order in dict.fromkeys((tuple(ordered[:count]), tuple(ordered[:count][::-1]))):
            if (row := planner.in_order(plan.schedule, plan.size, order)) is not None:
                yield row


def _grouped(planner: Planner, schedule: str, size: int, devices: Sequence[int]) -> list[PipelinePlan]:
    """Return the fastest plans by the formulas with several devices on a stage, one for each way."""
    outcomes, seen, fastest = list[Outcome](), set[tuple[object, ...]](), float("inf")
    # Where memory has limits, each way may have to compute again in parts, which is tried without a limit of time.
    within = float("inf") if any(planner.fleet.devices[i].memory is not None for i in devices) else _WITHIN
    for groups in _groups(devices, planner.wanted.replicas or len(devices)):
        names = _names(planner, groups)
        if len(groups) == sum(map(len, groups)) or names in seen:
            continue
        seen.add(names)
        outcome = _best_on(planner, schedule, size, groups, fastest * within)
        if outcome is not None:
            outcomes.append(outcome)
            fastest = min(fastest, outcome.step)
    near = sorted((one for one in outcomes if one.step <= fastest * _WITHIN), key=lambda one: one.step)
    return [one.plan for one in near[:_MOST_GROUPED]]


def _groups(devices: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to put some of the devices on stages in order, at most so many on each."""
    yield ()
    for count in range(1, min(most, len(devices)) + 1):
        for group in combinations(devices, count):
            free = [device for device in devices if device not in group]
            yield from ((group, *others) for others in _groups(free, most))


def _names(planner: Planner, groups: Devices) -> tuple[object, ...]:
    """Return the same for groups of devices that are interchangeable."""
    return tuple(tuple(sorted(planner.fleet.exchangeable[i] for i in group)) for group in groups)


def _best_on(
    planner: Planner, schedule: str, size: int, groups: Devices, below: float = float("inf")
) -> Outcome | None:
    """Return the best plan by the formulas whose stages are these groups of devices, all of them."""
    used = frozenset(i for group in groups for i in group)
    return planner.in_groups(schedule, size, groups, used.__eq__, below)


def _changed(start: PipelinePlan, planner: Planner, judge_of: SimulatedSteps, devices: Sequence[int]) -> PipelinePlan:
    """Return the best plan that changes of the devices of stages lead to, one at a time."""
    best, most = start, planner.wanted.replicas or len(devices)
    seen = {_names(planner, [stage.devices for stage in start.stages])}
    while not judge_of.is_spent:
        changed = list[PipelinePlan]()
        for groups in _changes([stage.devices for stage in best.stages], devices):
            names = _names(planner, groups)
            if not groups or max(map(len, groups)) > most or names in seen:
                continue
            seen.add(names)
            outcome = _best_on(planner, best.schedule, best.size, groups)
            changed += [] if outcome is None else [outcome.plan]
        starts = judge_of.fastest(changed, _CHANGES)
        near = best_near(starts, judge_of) if starts else best
        if judge_of.step(near) >= judge_of.step(best):
            break
        best = near
    return best


def _changes(groups: Sequence[tuple[int, ...]], devices: Sequence[int]) -> Iterator[Devices]:
    """Yield the groups with a device less, one more or another, with one in two parts, with two that change places, and
    with two neighbours as one."""
    idle = [device for device in devices if not any(device in group for group in groups)]
    for s, group in enumerate(groups):
        before, behind = (*groups[:s],), (*groups[s + 1 :],)
        for i in group:
            others = tuple(other for other in group if other != i)
            yield (*before, *([others] if others else []), *behind)
            yield from ((*before, tuple(sorted((*others, one))), *behind) for one in idle)
        for count in range(1, len(group)):
            for part in combinations(group, count):
                yield (*before, part, tuple(other for other in group if other not in part), *behind)
        yield from ((*before, tuple(sorted((*group, other))), *behind) for other in idle)
        yield from ((*before, (other,), group, *behind) for other in idle)
        for t in range(s + 1, len(groups)):
            yield (*before, groups[t], *groups[s + 1 : t], group, *groups[t + 1 :])
        if behind:
            yield (*before, tuple(sorted((*group, *behind[0]))), *behind[1:])
    yield from ((*groups, (other,)) for other in idle)


def best_near(starts: Sequence[PipelinePlan], judge_of: SimulatedSteps) -> PipelinePlan:
    """Return the best plan that moving cuts and microbatches leads to, from any of some plans."""
    return min((_moved(start, judge_of) for start in starts), key=judge_of.step)


def _moved(start: PipelinePlan, judge_of: SimulatedSteps) -> PipelinePlan:
    """Return the best plan that moving one cut, or one microbatch between replicas, at a time leads to."""
    best = start
    while True:
        table = judge_of.table(best)
        near = chain(_neighbours(best, table), _with_other_stages(best, table, judge_of.devices))
        faster = judge_of.fastest(near, 1, judge_of.step(best))
        if not faster:
            return best
        best = faster[0]


def _neighbours(plan: PipelinePlan, table: Table) -> Iterator[PipelinePlan]:
    for s, stage in enumerate(plan.stages[1:]):
        before = plan.stages[s]
        for move in (*_MOVES, *(-n for n in _MOVES)):
            cut = stage.first + move
            if before.first < cut < stage.last and table.cut[cut]:
                changed = (replace(before, last=cut), replace(stage, first=cut))
                yield replace(plan, stages=(*plan.stages[:s], *changed, *plan.stages[s + 2 :]))
    for s, stage in enumerate(plan.stages):
        for source, target in permutations(range(len(stage.devices)), 2):
            if stage.shares[source] > 1:
                shares = [n - (i == source) + (i == target) for i, n in enumerate(stage.shares)]
                yield replace(
                    plan, stages=(*plan.stages[:s], replace(stage, shares=tuple(shares)), *plan.stages[s + 1 :])
                )


def _with_other_stages(plan: PipelinePlan, table: Table, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    """Yield the plan with a stage less, whose layers a neighbour takes, and with a small one more on a device that has
    none; all other cuts stay."""
    stages = plan.stages
    for s, stage in enumerate(stages if devices and len(stages) > 1 else ()):
        before, behind = stages[:s], stages[s + 1 :]
        if before:
            yield replace(plan, stages=(*before[:-1], replace(before[-1], last=stage.last), *behind))
        if behind:
            yield replace(plan, stages=(*before, replace(behind[0], first=stage.first), *behind[1:]))
    for device, s, move in product({*devices} - {*plan.devices}, range(len(stages)), _MOVES):
        before, stage, behind = stages[:s], stages[s], stages[s + 1 :]
        for cut, in_front in ((stage.first + move, True), (stage.last - move, False)):
            if stage.first < cut < stage.last and table.cut[cut]:
                halves = [replace(stage, last=cut), replace(stage, first=cut)]
                new = 0 if in_front else 1
                halves[new] = replace(halves[new], devices=(device,), shares=(plan.count,))
                yield replace(plan, stages=(*before, *halves, *behind))


# The reasons that forbid a plan, and its seconds per batch by formulas.
Checked = Callable[[Table, Fleet, PipelinePlan, int], Judged]


class SimulatedSteps:
    """The times of plans by the simulator, each of them once; infinity of those that are illegal, do not fit,
    or came when enough had been simulated, of which `most` is the limit. Stages may come and go on `devices`."""

    def __init__(
        self,
        planner: Planner,
        cluster: Cluster,
        checked: Checked = judge,
        *,
        most: float = MOST_SIMULATED,
        devices: Sequence[int] = (),
        patience: float = math.inf,
    ) -> None:
        self.planner, self.cluster, self._checked, self.most = planner, cluster, checked, most
        self.devices, self._patience = devices, patience
        self.known: dict[PipelinePlan, float] = {}
        self._admitted: dict[PipelinePlan, bool] = {}
        self.spent = 0
        local_cpus = [device for device in cluster.devices if device.kind == "cpu" and device.host == LOCAL]
        self._takes_turns = sum(device.threads * device.quota for device in local_cpus) > usable_cores()

    @property
    def is_spent(self) -> bool:
        """True when enough was simulated."""
        return self.spent > self.most

    def table(self, plan: PipelinePlan) -> Table:
        return self.planner.table(plan.size)

    def step(self, plan: PipelinePlan) -> float:
        if plan not in self.known:
            if not self._admits(plan):
                return float("inf")
            self.known[plan] = self._simulated(plan)
        return self.known[plan]

    def fastest(self, plans: Iterable[PipelinePlan], most: int, below: float = float("inf")) -> list[PipelinePlan]:
        """Return at most so many plans that take less than some seconds, the fastest first. Those that cannot be among
        them are not simulated. With `patience` it ends where so many in a row, those with the least work first, are
        none the faster. Then plans count that are simulated, else all that are asked for."""
        lazy = self._patience < math.inf
        listed = [(self._least(plan), place, plan) for place, plan in enumerate(plans) if lazy or self._admits(plan)]
        near, last, patience = list[tuple[float, int, PipelinePlan]](), 0, self._patience
        for number, (least, place, plan) in enumerate(sorted(listed, key=lambda row: row[:2])):
            if least >= (below if len(near) < most else near[-1][0]) or (near and number - last > patience):
                break
            if (step := self.step(plan)) < below:
                last = number if not near or step < near[0][0] else last
                near = sorted([*near, (step, place, plan)], key=lambda row: row[:2])[:most]
        return [plan for _, _, plan in near]

    def _admits(self, plan: PipelinePlan) -> bool:
        """Return whether a plan is legal and fits, and came before enough had been simulated."""
        if plan not in self._admitted:
            if self.is_spent:
                return False
            judged = self._checked(self.table(plan), self.planner.fleet, plan, self.planner.wanted.base)
            ranks = max(len(plan.devices), len(plan.stages))
            self.spent += plan.count * ranks + (int(judged.step / TURN) if self._takes_turns else 0)
            self._admitted[plan] = not judged.against
        return self._admitted[plan]

    def _least(self, plan: PipelinePlan) -> float:
        """Return seconds that a batch takes at least: the work of a device. What a device saves up within a quota is
        no longer than it waits. Under delayed schedules a run may not have come to its pace."""
        kind = PACK_SCHEDULES.get(plan.schedule) or SCHEDULES[plan.schedule]
        if kind.delay:
            return 0.0
        busy = dict.fromkeys(plan.devices, 0.0)
        for stage in plan.stages:
            for number, share in zip(stage.devices, stage.shares, strict=True):
                device = self.planner.fleet.devices[number]
                forward, backward, _, again, _ = self.table(plan).times(device)
                seconds = (2 + kind.splits) * device.call_overhead
                for sums in (forward, backward, again) if stage.recompute else (forward, backward):
                    seconds += float(sums[stage.last] - sums[stage.first])
                busy[number] += share * seconds
        return max(busy.values())

    def _simulated(self, plan: PipelinePlan) -> float:
        table, fleet = self.table(plan), self.planner.fleet
        devices = [fleet.devices[i] for i in plan.devices]
        names = {rank: device.name for rank, device in enumerate(devices)}
        seats = {rank: seat for rank, name in names.items() if (seat := seat_of(self.cluster, name)) is not None}
        program = _program(plan)
        if program is None:
            return float("inf")
        kind = PACK_SCHEDULES.get(plan.schedule) or SCHEDULES[plan.schedule]
        parted = kind.splits

        def seconds(rank: int, action: Action) -> float:
            stage, device = plan.stages[action.stage], devices[rank]
            if action.kind in MESSAGES:
                assert action.peer is not None
                return self.cluster.message_overhead(device.name, devices[action.peer].name)
            forward, backward, weight, recompute, update = (
                float(sums[stage.last] - sums[stage.first]) for sums in table.times(device)
            )
            update /= len(stage.devices) if plan.zero else 1
            back = backward + (recompute if stage.recompute else 0.0) - (weight if parted else 0.0)
            duration = {FORWARD: forward, BACKWARD: back, WEIGHTS: weight, UPDATE: update}.get(action.kind)
            return 0.0 if duration is None else duration + device.call_overhead

        def nbytes(phase: str, source: int, target: int) -> float:
            return float((table.out if phase == FORWARD else table.back)[plan.stages[max(source, target)].first])

        def reduced(stage: int) -> float:
            return float(table.grads[plan.stages[stage].last] - table.grads[plan.stages[stage].first])

        machine = machine_of(self.cluster, names, seats)
        if kind.delay:
            return simulate(program, BATCHES, seconds, nbytes, machine, reduced=reduced).step_seconds
        return step_seconds(program, BATCHES, seconds, nbytes, machine, reduced)


def _program(plan: PipelinePlan) -> Schedule | None:
    """Return the program of the ranks of a plan with its messages; None where the schedule is none for it."""
    return _program_of(plan.schedule, len(plan.devices), plan.packs, plan.count, tuple(s.shares for s in plan.stages))


@lru_cache(_PROGRAMS)
def _program_of(
    schedule: str, devices: int, packs: int, count: int, shares: tuple[tuple[int, ...], ...]
) -> Schedule | None:
    """Return the same for all plans with so many devices, whatever their cuts are."""
    try:
        if schedule in PACK_SCHEDULES:
            kind = PACK_SCHEDULES[schedule]
            built = build_packs(schedule, kind.packs(devices, packs), count)
            return wire_chain(built) if _reads_what_is_made(built, kind.delay) else None
        plain = build_schedule(schedule, len(shares), count, shares)
    except (UsageError, VerifyError):
        return None
    delay = SCHEDULES[schedule].delay
    late = sum_late(plain, delay)
    return wire_chain(late) if _reads_what_is_made(late, delay) else None


def _reads_what_is_made(schedule: Schedule, delay: int) -> bool:
    """Return whether no rank begins a microbatch before the update that makes its weights, which the passes would
    refuse."""
    for actions in schedule.expand_all(3).values():
        latest: dict[int, int] = {}
        for action in actions:
            if action.kind == UPDATE:
                latest[action.stage] = action.mb
            elif action.kind != FORWARD:
                continue
            elif action.batch(schedule.microbatches) - delay - 1 > latest.get(action.stage, -1):
                return False
    return True
