"""The search for a plan of batches of a size, where something may be elsewhere: `--batch` with `--offload` or
`--update-on`.

In: a search for a plan in so many times the memory of the devices, and what carries a plan out with moves. Out: the
fastest plan that fits. The formulas of the planner know nothing of moves, so plans for more memory than there is are
searched, too. Each is carried out on the devices as they are. They know nothing of updates elsewhere, either, which
some schedules hide and others wait for: then the best plan of every schedule is carried out, also of those with several
stages on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Protocol

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule_names import PACKED, TRAINING, WRAPPED
from penstock.passes.memory.offload import FEWEST_STAGES, MOVE_WEIGHTS
from penstock.passes.planner.packed import MOST_STAGES
from penstock.passes.planner.plan import PipelinePlan
from penstock.passes.planner.profile import Profile
from penstock.passes.schedules.schedule import PACK_SCHEDULES
from penstock.planning.choice import Search
from penstock.planning.options import SearchOptions
from penstock.planning.plan import Plan
from penstock.support.errors import DoesNotFit, UsageError, VerifyError

_Refusal = DoesNotFit | UsageError | VerifyError
# Multiples of the memory of devices that plans are searched for.
MULTIPLES = (1.0, 1.5, 2.0, 4.0)


def with_memory(cluster: Cluster, part: float) -> Cluster:
    """Return the cluster with so many times the memory of its devices."""
    devices = [
        replace(
            d,
            spaces=tuple(
                (name, int(nbytes * part)) if not i else (name, nbytes) for i, (name, nbytes) in enumerate(d.spaces)
            ),
        )
        for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


class Searching(Protocol):
    """A search for plans, by what it finds and what the passes make of that."""

    def plan(self) -> Plan: ...

    def carried_out(self, plan: PipelinePlan, profile: Profile) -> Plan: ...


def schedules_to_search(options: SearchOptions) -> Sequence[str]:
    """Return the schedules of those asked for that may be the fastest. Weights move where a device has three stages or
    more. Where they stay, the schedules that move them the least are no faster than the same with more turns."""
    if options.offload in MOVE_WEIGHTS:
        few = {kind for kind, row in PACK_SCHEDULES.items() if max(row.each) < FEWEST_STAGES}
        left_out = {*TRAINING, *few}
    else:
        alike = [PACK_SCHEDULES[kind] for kind in options.schedules if kind in {*PACKED} - {*WRAPPED}]
        delays = {row.delay for row in alike if not row.folded}
        left_out = {kind for kind in WRAPPED if PACK_SCHEDULES[kind].delay in delays}
    return tuple(kind for kind in options.schedules if kind not in left_out) or options.schedules


def fastest_elsewhere(
    cluster: Cluster, options: SearchOptions, searching: Callable[[Cluster, SearchOptions, int], Searching]
) -> Plan:
    """Return the fastest plan in which something is elsewhere. `searching` gives the search with the fewest stages on
    a device that has several. Where weights move, less is on a device that has more of them."""
    errors = list[_Refusal]()
    numbers = range(FEWEST_STAGES, MOST_STAGES + 1) if options.offload in MOVE_WEIGHTS else (1,)
    for fewest in numbers:
        try:
            return _with_fewest(cluster, options, searching, fewest)
        except DoesNotFit as error:
            errors.append(error)
    raise _nearest(errors)


def _with_fewest(
    cluster: Cluster,
    options: SearchOptions,
    searching: Callable[[Cluster, SearchOptions, int], Searching],
    fewest: int,
) -> Plan:
    moves = options.offload != "none"

    def searched(scaled: Cluster) -> Plan:
        plain = replace(options, offload="none", spill="", explained=options.explained and not moves)
        return searching(scaled, plain, fewest).plan()

    def carried_out(outline: Search) -> Plan:
        return searching(cluster, options, fewest).carried_out(outline.plan, outline.profile)

    every = bool(options.update_on) or fewest > 1
    return fastest_of_memories(cluster, searched, carried_out, moves=moves, every=every, schedules=options.schedules)


def fastest_of_memories(
    cluster: Cluster,
    searched: Callable[[Cluster], Plan],
    carried_out: Callable[[Search], Plan],
    *,
    moves: bool = True,
    every: bool = False,
    schedules: Collection[str] = (*TRAINING, *PACKED),
) -> Plan:
    """Return the fastest of the plans that are searched, and fit as they are carried out; where something `moves`, they
    are searched for more and more memory. Those of a search that have one of the `schedules` are taken by their speed,
    the first that fits, or `every` one."""
    best: Plan | None = None
    errors, known, done = list[_Refusal](), set[object](), set[object]()
    limited = any(device.memory for device in cluster.devices)
    for part in MULTIPLES if limited and moves else MULTIPLES[:1]:
        try:
            plan = searched(with_memory(cluster, part))
        except (DoesNotFit, UsageError, VerifyError) as error:
            errors.append(error)
            continue
        assert plan.search is not None
        # The reasons against plans of this search, as they are carried out.
        reasons = dict[str, str]()
        for search in _by_speed(plan.search, every, schedules):
            if search.plan in known:
                # What was refused is refused again, and what was carried out is no faster in another search.
                if search.plan in done and not every:
                    break
                continue
            known.add(search.plan)
            try:
                plan = carried_out(search)
            except (DoesNotFit, UsageError, VerifyError) as error:
                errors.append(error)
                reasons.setdefault(search.plan.schedule, str(error))
                continue
            done.add(search.plan)
            if best is None or plan.predicted.step < best.predicted.step:
                best = replace(plan, search=replace(_compared(search, part, every), refused=dict(reasons)))
            if not every:
                break
    if best is None:
        raise _nearest(errors)
    return best


def _compared(search: Search, part: float, every: bool) -> Search:
    apart = search.with_moves or part > 1 or every
    return replace(search, more_memory=part * search.more_memory, with_moves=apart)


def _by_speed(search: Search, every: bool, schedules: Collection[str]) -> Iterator[Search]:
    """Yield the search with what it chose, then with the best plan of each other schedule, the fastest first. Where
    `every` one is tried, those with several stages on a device follow."""
    yield search
    refined = {kind: near.outcome for kind, near in search.refined.items() if isfinite(near.step)}
    others = {kind: refined.get(kind, outcome) for kind, outcome in search.result.outcomes.items()}
    steps = {kind: search.refined[kind].step if kind in refined else one.step for kind, one in others.items()}
    for kind in sorted(others, key=steps.__getitem__):
        if others[kind].plan != search.plan and kind in schedules:
            yield replace(search, chosen=others[kind], taken=None, little=())
    for packed in sorted(search.packs.values(), key=lambda packed: packed.step) if every else ():
        if packed.plan != search.plan:
            yield replace(search, taken=packed)


def _nearest(errors: Sequence[_Refusal]) -> _Refusal:
    """Return the error of the plan that is nearest to fitting; where none says what it needs, the last one."""
    short = [error for error in errors if isinstance(error, DoesNotFit) and error.needs]
    return min(short, key=lambda error: max(error.needs.values())) if short else errors[-1]
