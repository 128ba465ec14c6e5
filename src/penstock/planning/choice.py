"""The choice of the planner: the search that led to a plan, the changes that would lead to another, and what every
device contributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.passes.planner.argue import PlanChange, Result, counterfactuals
from penstock.passes.planner.packed import Packed
from penstock.passes.planner.plan import PipelinePlan
from penstock.passes.planner.planner import Outcome
from penstock.passes.planner.profile import Profile
from penstock.passes.planner.refine import Refined
from penstock.passes.planner.sparing import LITTLE

# Steps whose ratio differs from one by less are the same.
_SAME = 5e-4
# How such a step compares.
AS_LONG = "the same"


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of a device to a plan, by the formulas.

    `with_it` and `without_it` are the steps of the best plans with and without the device, where there are such plans.
    `gain` is the step without it over the step with it, less one. `effect` is one of

        needed     without it nothing fits            hurts      with it a batch takes longer
        helps      a batch takes less time with it    unfit      no plan with it fits
        little     it changes less than LITTLE        unknown    no such plan was found, or none was searched
    """

    device: str
    used: bool
    effect: str
    with_it: float | None = None
    without_it: float | None = None
    reason: str = ""

    @property
    def gain(self) -> float | None:
        return None if self.with_it is None or self.without_it is None else self.without_it / self.with_it - 1


# The microbatches of a run that stands for throughput.
RUN = 512


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """A plan for inference by the formulas: the devices of each stage, joined by `+`. Beside them stand the seconds of
    one microbatch from input to output, and those of each in a run of RUN. No plan takes less than `bound` seconds by
    the objective that it is for: for one microbatch, or for the run."""

    devices: tuple[str, ...]
    latency: float
    pace: float
    bound: float
    proven: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a plan for inference, `latency` or `throughput`, and the plans for both."""

    name: str
    plans: Mapping[str, ServedPlan]

    @property
    def other(self) -> str:
        return next(name for name in self.plans if name != self.name)


# The part of the time by which plans over teams have to be faster to be taken: teams wait for each other in each layer.
WORTH_OF_TEAMS = 0.05


@dataclass(frozen=True, slots=True)
class TeamWay:
    """The best plan whose tensors are split over teams of `size` devices, or over none where that is 1. `step` are its
    seconds per batch: by simulation, or else the plan was so much slower by the formulas that it was not carried out.
    Where there is no plan, or none was `tried`, `reason` says why."""

    size: int
    layouts: str = ""
    step: float | None = None
    simulated: bool = True
    reason: str = ""
    taken: bool = False
    tried: bool = True


@dataclass(frozen=True)
class Search:
    """The search that led to a plan.

    `result` has the best plan of every schedule, `chosen` is the one that was carried out. `refused` are those that the
    passes refused, with the reason. `little` says of devices that they help too little to be used. `refined` is what
    the simulator said of the best plans near the planner's, by schedule. `more_memory` is how many times the memory of
    the devices the formulas were given; `with_moves` says that passes move what is too much for these, or updates to
    other devices. Then no other plan of the search can be compared with the one that was carried out. `in_bf16` makes
    the profile of the model in bfloat16, where the plan is in float32. `packs` are the best plans with several stages
    on a device that were found, by schedule. Where one of them was carried out, it is `taken`, and `chosen` is the best
    plan without. A plan for inference has an `objective`. `ways` are those of splitting tensors, where any were tried;
    on teams of devices all else is about teams.
    """

    profile: Profile
    result: Result
    chosen: Outcome
    refused: Mapping[str, str]
    little: Sequence[str] = ()
    refined: Mapping[str, Refined] = field(default_factory=dict)
    in_bf16: Callable[[], Profile] | None = None
    more_memory: float = 1.0
    with_moves: bool = False
    packs: Mapping[str, Packed] = field(default_factory=dict)
    taken: Packed | None = None
    objective: Objective | None = None
    ways: Sequence[TeamWay] = ()

    @property
    def plan(self) -> PipelinePlan:
        """The plan that was carried out."""
        return self.chosen.plan if self.taken is None else self.taken.plan

    @cached_property
    def what_if(self) -> list[PlanChange]:
        """Plans with one change in the request, or in the devices of the plan that was chosen, all the best by the
        formulas; none after an interrupt, nor where passes move what is too much."""
        if self.result.stopped or self.with_moves:
            return []
        try:
            return self._changes()
        except KeyboardInterrupt:
            self.result.planner.stopped = True
            return []

    def _changes(self) -> list[PlanChange]:
        others = {}
        if self.in_bf16 is not None and (chain := self.in_bf16().chain).sizes == self.profile.chain.sizes:
            others["in bfloat16"] = chain
        kinds = {kind: outcome for kind, outcome in self.result.outcomes.items() if kind != self.chosen.plan.schedule}
        return counterfactuals(replace(self.result, outcomes={self.chosen.plan.schedule: self.chosen} | kinds), others)

    @property
    def usual(self) -> float:
        """The step of the best plan of the schedule by the formulas, which changes are compared with."""
        return self.result.outcomes[self.chosen.plan.schedule].step

    @cached_property
    def contributions(self) -> list[Contribution]:
        """The contribution of each device of the cluster; nothing after an interrupt."""
        without = {name: change for change in self.what_if for name in change.devices}
        if self.result.stopped:
            return []
        idle = {*self.left_out}
        names = [device.name for device in self.result.fleet.devices]
        if self.with_moves:
            return [Contribution(name, name not in idle, "unknown") for name in names]
        return [self._of_idle(name) if name in idle else self._of_used(name, without.get(name)) for name in names]

    def _of_used(self, name: str, change: PlanChange | None) -> Contribution:
        if change is None or (change.step is None and not change.sure):
            return Contribution(name, True, "unknown")
        if change.step is None:
            return Contribution(name, True, "needed", self.usual)
        effect = _effect(change.step / self.usual - 1)
        if change.bound and _effect(change.bound / self.usual - 1) != effect:
            return Contribution(name, True, "unknown")
        return Contribution(name, True, effect, self.usual, change.step)

    def _of_idle(self, name: str) -> Contribution:
        if little := next((line for line in self.little if line.startswith(f"{name} ")), ""):
            return Contribution(name, False, "little", reason=little.removeprefix(f"{name} "))
        if name not in self.result.left_out:
            return Contribution(name, False, "unknown")
        step, reason = self.result.with_idle.get(name), self.result.left_out[name]
        if step is None:
            return Contribution(name, False, "unfit" if self.result.planner.sees_all else "unknown", reason=reason)
        best = self.result.best.step
        return Contribution(name, False, _effect(best / step - 1), step, best, reason)

    @property
    def left_out(self) -> list[str]:
        """Devices that the plan does not use."""
        return [device.name for i, device in enumerate(self.result.fleet.devices) if i not in self.plan.devices]


def _effect(gain: float) -> str:
    return "hurts" if gain <= -_SAME else "helps" if gain >= LITTLE else "little"


def first_reason(error: str) -> str:
    """Return the first line of an error; where that begins a list, with the first item."""
    first, *more = error.splitlines()
    return f"{first} {more[0].strip(' -')}" if first.endswith(":") and more else first


def compare(other: float, chosen: float) -> str:
    """Describe how much slower or faster another step is than the chosen one."""
    ratio = other / chosen
    if abs(ratio - 1) < _SAME:
        return AS_LONG
    return f"{ratio - 1:.1%} slower" if ratio > 1 else f"{1 - ratio:.1%} faster"


def passed_over(search: Search) -> str:
    """Explain why the best plan by the formulas was not taken."""
    simulated = search.refined.get(search.chosen.plan.schedule)
    if simulated is not None and simulated.outcome.plan == search.chosen.plan:
        return "but not when it is simulated"
    return "but with devices that hardly help" if search.little else "but it was refused"
