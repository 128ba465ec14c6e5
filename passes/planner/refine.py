"""The last step of planning: the planner's plans, and others near them, judged by the simulator instead of formulas.

In: a chain of layers, a cluster, and the best plan of each schedule by the formulas of passes/planner/cost.py. These
are some percent off where stages are unequal. Out: for each schedule the plan with the shortest time when
passes/simulator/simulate.py runs its program against the same costs, and that time. The search tries all usable devices
in every order, one for each stage, with the best cuts by the formulas for that order. Of layouts with replicas it tries
the best by the formulas. From the fastest of these on it moves cuts by some layers.

Limits: small plans only (`MOST_ACTIONS`, `_ENOUGH` in all; orders and layouts of up to `_MOST_ORDERED` devices);
microbatches are as large as in a plan that the formulas found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE, WEIGHTS
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule import MESSAGES, Action, Schedule
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs, build_schedule
from penstock.passes.simulator.cores import TURN
from penstock.passes.simulator.forecast import BATCHES, LOCAL, seat_of
from penstock.passes.simulator.machine import machine_of
from penstock.passes.simulator.simulate import simulate
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import UsageError, VerifyError
from penstock.support.hardware import usable_cores

from .chain import Table
from .cost import judge
from .fleet import Fleet
from .plan import Judged, PipelinePlan
from .planner import Outcome, Planner

MOST_ACTIONS, _MOST_ORDERED = 4000, 4
# The most times as slow as the best that layouts may be by the formulas, and the number of such layouts. The number of
# sizes of microbatches that orders are tried with.
_WITHIN, _MOST_LAYOUTS, _SIZES = 1.5, 12, 2
# The number of starts whose cuts are moved, and the numbers of layers they move by.
_STARTS, _MOVES = 2, (1, 2, 4, 8)
# The limits of all simulations together: microbatches on ranks, and turns on cores where devices share some.
_ENOUGH = 8000


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
    judge_of = SimulatedSteps(planner, cluster)
    starts = sorted(dict.fromkeys((plan, *_others(planner, plan, devices))), key=judge_of.step)
    best = best_near(starts, judge_of)
    judged = judge(planner.table(best.size), planner.fleet, best, planner.wanted.base)
    refined = replace(outcome, plan=best, judged=judged, bound=min(outcome.bound, judged.step))
    return Refined(refined, judge_of.step(best), len(judge_of.known))


def _others(planner: Planner, plan: PipelinePlan, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    """Yield the best plans by the formulas of every layout and size of microbatches, and with one device for every
    stage, in every order."""
    if len(devices) > _MOST_ORDERED:
        return
    plans = [other.plan for other in planner.candidates(plan.schedule, _WITHIN) if {*other.plan.devices} <= {*devices}]
    plans = [other for other in plans if other.count * len(other.devices) <= MOST_ACTIONS][:_MOST_LAYOUTS]
    yield from plans
    sizes = dict.fromkeys(
        other.size for other in (plan, *(other for other in plans if len(other.stages) == len(other.devices)))
    )
    for size in [*sizes][:_SIZES]:
        yield from _orders(planner, plan.schedule, size, devices)


def _orders(planner: Planner, schedule: str, size: int, devices: Sequence[int]) -> Iterator[PipelinePlan]:
    seen = set()
    for order in (order for count in range(1, len(devices) + 1) for order in permutations(devices, count)):
        names = tuple((planner.kinds[i], planner.fleet.devices[i].host) for i in order)
        if names not in seen:
            seen.add(names)
            plan = planner.in_order(schedule, size, order)
            if plan is not None:
                yield plan


def best_near(starts: Sequence[PipelinePlan], judge_of: SimulatedSteps) -> PipelinePlan:
    """Return the best plan that moving cuts leads to from the first of some plans, which come in order."""
    return min((_moved(start, judge_of) for start in starts[:_STARTS]), key=judge_of.step)


def _moved(start: PipelinePlan, judge_of: SimulatedSteps) -> PipelinePlan:
    """Return the best plan that moving one cut at a time leads to."""
    best = start
    while True:
        moved = min(_neighbours(best, judge_of.table(best)), key=judge_of.step, default=best)
        if judge_of.step(moved) >= judge_of.step(best):
            return best
        best = moved


def _neighbours(plan: PipelinePlan, table: Table) -> Iterator[PipelinePlan]:
    for s, stage in enumerate(plan.stages[1:]):
        before = plan.stages[s]
        for move in (*_MOVES, *(-n for n in _MOVES)):
            cut = stage.first + move
            if before.first < cut < stage.last and table.cut[cut]:
                changed = (replace(before, last=cut), replace(stage, first=cut))
                yield replace(plan, stages=(*plan.stages[:s], *changed, *plan.stages[s + 2 :]))


# The reasons that forbid a plan, and its seconds per batch by formulas.
Checked = Callable[[Table, Fleet, PipelinePlan, int], Judged]


class SimulatedSteps:
    """The times of plans by the simulator, each of them once; infinity of those that are illegal, do not fit,
    or came when enough had been simulated, of which `most` is the limit."""

    def __init__(self, planner: Planner, cluster: Cluster, checked: Checked = judge, *, most: float = _ENOUGH) -> None:
        self.planner, self.cluster, self._checked, self._most = planner, cluster, checked, most
        self.known: dict[PipelinePlan, float] = {}
        self._spent = 0
        local_cpus = [device for device in cluster.devices if device.kind == "cpu" and device.host == LOCAL]
        self._takes_turns = sum(device.threads for device in local_cpus) > usable_cores()

    def table(self, plan: PipelinePlan) -> Table:
        return self.planner.table(plan.size)

    def step(self, plan: PipelinePlan) -> float:
        if plan not in self.known:
            if self._spent > self._most:
                return float("inf")
            judged = self._checked(self.table(plan), self.planner.fleet, plan, self.planner.wanted.base)
            ranks = max(len(plan.devices), len(plan.stages))
            self._spent += plan.count * ranks + (int(judged.step / TURN) if self._takes_turns else 0)
            fits = not judged.against
            self.known[plan] = self._simulated(plan) if fits else float("inf")
        return self.known[plan]

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
            back = backward + (recompute if stage.recompute else 0.0) - (weight if parted else 0.0)
            duration = {FORWARD: forward, BACKWARD: back, WEIGHTS: weight, UPDATE: update}.get(action.kind)
            return 0.0 if duration is None else duration + device.call_overhead

        def nbytes(phase: str, source: int, target: int) -> float:
            return float((table.out if phase == FORWARD else table.back)[plan.stages[max(source, target)].first])

        def reduced(stage: int) -> float:
            return float(table.grads[plan.stages[stage].last] - table.grads[plan.stages[stage].first])

        return simulate(
            program, BATCHES, seconds, nbytes, machine_of(self.cluster, names, seats), reduced=reduced
        ).step_seconds


def _program(plan: PipelinePlan) -> Schedule | None:
    """Return the program of the ranks of a plan with its messages; None where the schedule is none for it."""
    try:
        if plan.schedule in PACK_SCHEDULES:
            packs = PACK_SCHEDULES[plan.schedule].packs(len(plan.devices), plan.packs)
            return wire_chain(build_packs(plan.schedule, packs, plan.count))
        plain = build_schedule(plan.schedule, len(plan.stages), plan.count, [stage.shares for stage in plan.stages])
    except (UsageError, VerifyError):
        return None
    delay = SCHEDULES[plan.schedule].delay
    late = sum_late(plain, delay)
    return wire_chain(late) if _reads_what_is_made(late, delay) else None


def _reads_what_is_made(schedule: Schedule, delay: int) -> bool:
    """Return whether no rank begins a microbatch before the update that makes its weights, which the passes would
    refuse."""
    for actions in schedule.expand_all(3).values():
        latest = -1
        for action in actions:
            if action.kind == UPDATE:
                latest = action.mb
            elif action.kind == FORWARD and action.batch(schedule.microbatches) - delay - 1 > latest:
                return False
    return True
