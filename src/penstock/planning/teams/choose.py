"""The choice of how many devices each work on a tensor: tensor parallelism as a factor of `--batch`.

In: searches for a plan, over single devices and over teams of them. Out: the fastest plan, with what the others take.

Without a mesh, plans over single devices are searched first. Teams of all sizes that divide the devices alike on a host
are tried where they can pay: where the devices would do the work in less time if none ever waited. Layouts are ranked
by their seconds on the smallest teams; each size takes the first that it and the model bear. Teams whose best plan is
slower by the formulas are not carried out. All others go through the search as single devices do, and all passes. The
simulation of what comes out decides: teams are taken where they are faster by WORTH_OF_TEAMS, or where nothing else
fits.

With a mesh its axes are those of all teams, and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Protocol

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import REPLICAS, Module
from penstock.ir.schedule_names import PACKED
from penstock.passes.planner.argue import Result
from penstock.passes.sharding.given import parse_mesh
from penstock.passes.sharding.written import AUTO, NONE, is_widths, layouts_of
from penstock.planning.choice import WORTH_OF_TEAMS, Search, TeamWay, first_reason
from penstock.planning.options import SearchOptions
from penstock.planning.plan import Plan
from penstock.planning.watching import Feedback
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

from .shares import rank_layouts, share_of
from .teams import AXIS, Teams, sizes_of_teams

# The most times as slow as the best plan of single devices that the best of teams may be by the formulas to be carried
# out.
_WITHIN = 1.1


class OpenSearch(Protocol):
    """A search for a plan, over single devices or over teams."""

    @property
    def result(self) -> Result:
        """The best plans by the formulas."""

    def sizes_left_out(self) -> Sequence[int]:
        """Return the sizes of microbatches with which the model has other operations, and no plans are searched."""

    def whole(self, size: int) -> Module:
        """Return the whole model with so many samples per microbatch, as `shard` sees it."""

    def plan(self) -> Plan:
        """Return the fastest plan that the passes accept."""

    def over(self, teams: Teams, trial: bool) -> OpenSearch:
        """Return the same search over teams. Where passes are watched, those of a trial are not."""

    def without_end(self) -> OpenSearch:
        """Return the same search, whose progress does not tell its end."""

    def shown(self, plan: Plan) -> Plan:
        """Return a plan, made once more where passes are watched."""


def fastest_of_teams(
    single: OpenSearch, cluster: Cluster, options: SearchOptions, size: int, feedback: Feedback
) -> Plan:
    """Return the fastest plan over single devices and over teams. Layouts are ranked with microbatches of so many
    samples."""
    layouts = layouts_of(options.shard)
    if layouts == (NONE,) and not options.mesh:
        return single.plan()
    trials = _Trials(single, cluster, options, size, layouts, feedback)
    if options.mesh:
        return trials.on_mesh(parse_mesh(options.mesh))
    trials.single = single.without_end()
    plan = trials.run()
    if feedback.progress is not None:
        feedback.progress(1, 1, "done")
    return plan


def check_teams(options: SearchOptions) -> None:
    """Refuse meshes and layouts that the planner has no plans for; one error names all of it."""
    problems, layouts = [], layouts_of(options.shard)
    if ";" in options.mesh:
        problems.append(f"--mesh {options.mesh}: with --batch all stages have the same axes")
    elif options.mesh and REPLICAS in parse_mesh(options.mesh):
        problems.append(f"--mesh {options.mesh}: the planner chooses replicas, so leave out {REPLICAS}")
    if any(map(is_widths, layouts)):
        problems.append("--shard widths: with --batch all layers lie over the same devices")
    moved = [f"--offload {options.offload}"] if options.offload != "none" else []
    moved += [f"--update-on {options.update_on}"] if options.update_on else []
    if moved and (options.mesh or layouts not in ((), (NONE,))):
        flag = "--mesh" if options.mesh else "--shard"
        problems.append(f"{flag} with {' and '.join(moved)}: with --batch it is one or the other")
    if problems:
        raise UsageError("; ".join(problems), hint="leave --batch out, and give --dim, --microbatches and --devices")


@dataclass
class _Trials:
    """The plans over single devices and over teams of one model, by the size of teams. `given` are layouts."""

    single: OpenSearch
    cluster: Cluster
    options: SearchOptions
    size: int
    given: tuple[str, ...]
    feedback: Feedback
    ways: list[TeamWay] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    teams: dict[int, Teams] = field(default_factory=dict)

    def on_mesh(self, axes: Mapping[str, int]) -> Plan:
        """Return the best plan over teams with these axes."""
        teams = Teams(self.cluster, dict(axes))
        if not teams.members:
            raise UsageError(f"the mesh {teams.mesh()} needs {teams.size} devices that are alike on one host")
        errors = []
        for each, search in self._searches(self._ranked(teams), trial=False):
            try:
                plan = search.plan()
            except (DoesNotFit, UsageError, VerifyError) as error:
                errors.append(error)
                continue
            return _with(plan, teams.size, [TeamWay(teams.size, each.named, plan.predicted.step)])
        raise errors[0] if errors else UsageError(f"the model has no layouts on the mesh {teams.mesh()}")

    def run(self) -> Plan:
        """Return the fastest plan, with what the others take."""
        self._check_given()
        refusal = None
        try:
            plan = self.single.plan()
        except DoesNotFit as error:
            refusal = error
            self.ways.append(TeamWay(1, reason=first_reason(error.what)))
        else:
            assert plan.search is not None
            if plan.search.result.stopped:
                return plan
            self.plans[1] = plan
            self.ways.append(TeamWay(1, step=plan.predicted.step))
        stopped = False
        try:
            stopped = self._try_teams()
        except KeyboardInterrupt:
            if not self.plans:
                raise
            stopped = True
            self.feedback.say("interrupted: going on with the best plan so far")
        if not self.plans:
            assert refusal is not None
            raise refusal
        chosen = self._best()
        plan = self.plans[chosen]
        if stopped:
            assert plan.search is not None
            plan.search.result.planner.stopped = True
        if chosen > 1:
            plan = self.single.over(self.teams[chosen], trial=False).shown(plan)
        # Where no team can be made, there is nothing to say of them.
        return _with(plan, chosen, self.ways) if len(self.ways) > 1 else plan

    def _check_given(self) -> None:
        """Refuse layouts that teams of no size can have."""
        if self.given in ((), (AUTO,), (NONE,)):
            return
        errors, sizes = list[UsageError](), sizes_of_teams(self.cluster)
        if not sizes:
            raise UsageError(
                f"--shard {', '.join(self.given)} needs devices that are alike on one host; there are none"
            )
        for size in sizes:
            try:
                share_of(self.single.whole(self.size), Teams(self.cluster, {AXIS: size}, self.given))
            except UsageError as error:
                errors.append(error)
            else:
                return
        raise errors[0]

    def _best(self) -> int:
        """Return the size of the teams to take: the fastest, but single devices where teams are hardly faster."""
        fastest = min(self.plans, key=lambda size: self.plans[size].predicted.step)
        if 1 not in self.plans:
            return fastest
        least = self.plans[1].predicted.step * (1 - WORTH_OF_TEAMS)
        return fastest if self.plans[fastest].predicted.step <= least else 1

    def _try_teams(self) -> bool:
        """Try teams of all sizes, where they can pay. Return whether an interrupt ended the search for one."""
        sizes, alone = sizes_of_teams(self.cluster), self.plans.get(1)
        if not sizes:
            return False
        if alone is not None and (share := _work_share(alone)) > 1 - WORTH_OF_TEAMS:
            reason = f"devices wait for {1 - share:.1%} of the time alone"
            self.ways += [TeamWay(size, reason=reason, tried=False) for size in sizes]
            return False
        ranked = self._ranked(Teams(self.cluster, {AXIS: sizes[0]}))
        for size in sizes:
            self.ways.append(self._tried([replace(teams, axes={AXIS: size}) for teams in ranked], size))
            plan = self.plans.get(size)
            if plan is not None and plan.search is not None and plan.search.result.stopped:
                return True
        return False

    def _ranked(self, teams: Teams) -> list[Teams]:
        """Return the teams with the layouts to try on them, in order."""
        if self.given and self.given != (AUTO,):
            layouts = () if self.given == (NONE,) else self.given
            return [replace(teams, layouts=layouts, named=", ".join(self.given))]
        return rank_layouts(
            self.single.whole(self.size),
            teams,
            self.options.batch // self.size,
            self.feedback.of_trial("teams").progress,
        )

    def _searches(self, ranked: Sequence[Teams], trial: bool) -> Iterator[tuple[Teams, OpenSearch]]:
        """Yield the searches over teams with each of these layouts. Layouts are ranked for one size of microbatches.
        Those that leave out others are compared by the formulas with the first that do not."""
        steps = list[tuple[float, int, Teams, OpenSearch]]()
        for at, teams in enumerate(ranked):
            search, step, complete = self.single.over(teams, trial), inf, False
            try:
                complete = not search.sizes_left_out()
                step = search.result.best.step if steps or not complete else 0.0
            except (DoesNotFit, UsageError, VerifyError):
                # What is wrong is said where the plan is asked for.
                pass
            steps.append((step, at, teams, search))
            if complete:
                break
        yield from ((teams, search) for _, _, teams, search in sorted(steps, key=lambda row: row[:2]))
        yield from ((teams, self.single.over(teams, trial)) for teams in ranked[len(steps) :])

    def _tried(self, ranked: list[Teams], size: int) -> TeamWay:
        """Return what the best plan over teams of a size takes, or why there is none."""
        alone, reasons = self.plans.get(1), list[str]()
        for teams, search in self._searches(ranked, trial=True):
            try:
                if alone is not None and (slower := self._slower(search, alone)) > _WITHIN:
                    return TeamWay(size, teams.named, slower * alone.predicted.step, simulated=False)
                plan = search.plan()
            except (DoesNotFit, UsageError, VerifyError) as error:
                reasons.append(first_reason(str(error)))
                continue
            self.plans[size], self.teams[size] = plan, teams
            return TeamWay(size, teams.named, plan.predicted.step)
        return TeamWay(size, reason=reasons[0] if reasons else "the model has no layouts for them")

    def _slower(self, search: OpenSearch, alone: Plan) -> float:
        """Return how many times as slow as the plan over single devices the best over teams is by the formulas; 0 where
        they do not know."""
        assert alone.search is not None
        if {*PACKED}.issuperset(self.options.schedules):
            # Formulas know of no packs.
            return 0.0
        try:
            return search.result.best.step / alone.search.result.best.step
        except DoesNotFit:
            # The exact count of the passes may be less.
            return 0.0


def _with(plan: Plan, taken: int, ways: list[TeamWay]) -> Plan:
    """Return a plan whose search knows the ways that were tried."""
    assert plan.search is not None
    marked = tuple(replace(way, taken=way.size == taken) for way in ways)
    return replace(plan, search=replace(plan.search, ways=marked))


def _work_share(plan: Plan) -> float:
    """Return the part of the time of a plan in which its devices would do the work of a batch, if none ever waited."""
    search = plan.search
    assert search is not None
    planner, wanted = search.result.planner, search.result.wanted
    step = _step_of(search)
    if not isfinite(step) or not step:
        return 0.0
    works = []
    for b in wanted.microbatch_sizes():
        columns = [planner.table(b).times(device) for device in planner.fleet.devices]
        rate = sum(1 / max(float(forward[-1] + backward[-1]), 1e-300) for forward, backward, *_ in columns)
        works.append(wanted.batch / b / rate)
    return min(works) / step


def _step_of(search: Search) -> float:
    if search.taken is not None:
        return search.taken.step
    refined = search.refined.get(search.chosen.plan.schedule)
    simulated = refined is not None and refined.outcome.plan == search.chosen.plan
    return refined.step if refined is not None and simulated else search.chosen.step
