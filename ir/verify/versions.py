"""The checker of the fact versioned: forward and backward see one version, which exists and is not overwritten.

In: a module with a schedule. The checker judges the expanded programs of all ranks (ir/verify/runs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import lcm
from typing import NamedTuple

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE, adder
from penstock.ir.graph import Module, stepped_vars, summed_vars, touched_vars, touching_ops, written_vars
from penstock.ir.schedule import BATCH_ORDER, COMPUTE, READERS, VERSIONED, Action, Schedule
from penstock.support.words import counted

from .problems import Problem, op_window
from .runs import ConcreteRun, FirstOfEach, over_runs


def check_versioned(module: Module) -> Iterator[Problem]:
    stepped = stepped_vars(module)
    written = {
        s.index: [n for n in sorted(written_vars(g)) if n in stepped]
        for s in module.stages
        if (g := module.stage_graph(s.index, UPDATE))
    }
    sums = {s.index: _sums(module, s.index) for s in module.stages}
    yield from _check_pins(module, stepped)
    yield from over_runs(module, lambda module, run: _check_versions(module, run, written, sums))


def _check_pins(module: Module, trained: set[str]) -> Iterator[Problem]:
    """Check that forward and backward read variables that updates change in the microbatch's version, and updates in
    the latest."""
    for stage in module.stages:
        for kind in VERSIONED:
            graph = module.stage_graph(stage.index, kind)
            expected = "latest" if kind == UPDATE else "mb"
            for i, op in touching_ops(graph):
                version = op.attrs.get("version", "latest")
                if op.kind == "read" and op.var in trained and version != expected:
                    assert graph is not None
                    what = f"reads @{op.var} in version {version}, expected version={expected}"
                    yield Problem(f"@{graph.name} op {i}", what, op_window(graph, i))


class _Sums(NamedTuple):
    """The gradients of a stage. `adder` is the kind of graph that adds to them. `added` has the number of buffers of
    each, `taken_by` the gradients that each kind of graph takes. Gradients that the same graphs take from the same
    number of buffers are treated alike: the first stands for all.
    """

    adder: str
    added: Mapping[str, int]
    taken_by: Mapping[str, set[str]]


def _sums(module: Module, stage: int) -> _Sums:
    graphs = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))}
    added = {name: module.vars[name].versions for name in summed_vars(module, stage)}
    takes = {kind: touched_vars(graph, "take") for kind, graph in graphs.items()}
    first: dict[tuple[int, frozenset[str]], str] = {}
    for name, buffers in added.items():
        first.setdefault((buffers, frozenset(kind for kind, names in takes.items() if name in names)), name)
    shown = {name: added[name] for name in first.values()}
    return _Sums(adder(graphs), shown, {kind: names & shown.keys() for kind, names in takes.items()})


def _check_versions(
    module: Module, run: ConcreteRun, stepped: Mapping[int, list[str]], sums: Mapping[int, _Sums]
) -> Iterator[Problem]:
    """Check the versions that computations read. `stepped` are the variables with versions that the update of each
    stage writes."""
    if not any(a.kind == UPDATE for actions in run.programs.values() for a in actions):
        return  # nothing ever changes
    microbatch: dict[int, tuple[int, int, int]] = {}
    for rank, actions in run.programs.items():
        yield from _check_gradients(run, rank, actions, sums)
        slots: dict[int, tuple[int, str]] = {}
        for stage in {a.stage for a in actions}:
            written = [module.vars[name] for name in stepped.get(stage, ())]
            if written:
                fewest = min(written, key=lambda var: var.versions)
                slots[stage] = (fewest.versions, fewest.name)
        yield from _check_rank_versions(run, rank, actions, slots, microbatch)


def _check_gradients(
    run: ConcreteRun, rank: int, actions: list[Action], sums: Mapping[int, _Sums]
) -> Iterator[Problem]:
    """Check that the sum of a batch's gradients is taken before its buffer gets gradients of a later batch."""
    waiting: dict[tuple[int, str, int], int] = {}
    for step, a in enumerate(actions):
        if a.kind == sums[a.stage].adder:
            batch = a.batch(run.schedule.microbatches)
            for name, buffers in sums[a.stage].added.items():
                other = waiting.setdefault((a.stage, name, batch % buffers), batch)
                if other != batch:
                    kept = f"{buffers} buffer{'s are' if buffers > 1 else ' is'} kept"
                    yield run.problem(
                        rank,
                        step,
                        f"adds to @{name} before the sum of batch {other} was taken from that buffer; {kept}",
                    )
                    return
        elif a.kind in BATCH_ORDER and not a.item:
            # AR works in the buffer, and leaves the sum there.
            for name in sums[a.stage].taken_by.get(a.kind, ()):
                waiting.pop((a.stage, name, a.mb % sums[a.stage].added[name]), None)


def _check_rank_versions(
    run: ConcreteRun,
    rank: int,
    actions: list[Action],
    slots: Mapping[int, tuple[int, str]],
    microbatch: dict[int, tuple[int, int, int]],
) -> Iterator[Problem]:
    """Check the versions that a rank reads. `slots` are the number of versions that the stage keeps, and the parameter.
    `microbatch` collects versions over all ranks, each with the first rank and step that have it."""
    last_use: dict[tuple[int, int], int] = {}
    makers: dict[tuple[int, int | None], int] = {}
    for step, a in enumerate(actions):
        if a.kind == UPDATE:
            makers[a.stage, a.version] = step
        elif a.kind in READERS and a.version is not None:
            last_use[a.stage, a.version] = step
    latest, problem = dict.fromkeys(slots, run.first), FirstOfEach(run, rank)
    # Parts of an update overwrite variables before it ends.
    begun = dict(latest)

    for step, a in enumerate(actions):
        if a.kind not in VERSIONED:
            continue
        if a.version is None:
            yield from problem("none", step, "has no version, expected @<version>")
            continue
        if a.kind != UPDATE:
            version, *first = microbatch.setdefault(a.mb, (a.version, rank, step))
            if version != a.version:
                what = f"reads version {a.version}, but microbatch {a.mb} has version {version} in {run.place(*first)}"
                yield from problem("mixed", step, what)
        if a.stage not in slots:
            continue
        count, name = slots[a.stage]
        if a.kind == UPDATE:
            if a.version != latest[a.stage] + 1:
                yield from problem("update", step, f"makes version {a.version}, expected {latest[a.stage] + 1}")
            begun[a.stage] = a.version
            if not a.item:
                latest[a.stage] = a.version
            old = a.version - count
            reader = last_use.get((a.stage, old), step)
            if reader > step:
                what = (
                    f"makes version {a.version} of @{name} in the slot of version {old}, which "
                    f"{run.place(rank, reader)} still reads"
                )
                what += f"; {count} version{'s are' if count > 1 else ' is'} kept"
                yield from problem("overwritten", step, what, _legal(run.schedule, f"keep {count + 1} versions"))
        elif a.version > latest[a.stage]:
            maker = makers.get((a.stage, a.version))
            when = f"made only later by {run.place(rank, maker)}" if maker is not None else "never made"
            what = f"reads version {a.version} of @{name}, which is {when}; the newest then is {latest[a.stage]}"
            yield from problem("unmade", step, what + _live(run.schedule, rank), _legal(run.schedule))
        elif a.version <= begun[a.stage] - count and "overwritten" not in problem.reported:
            what = (
                f"reads version {a.version} of @{name}, which version {a.version + count} has overwritten; {count} kept"
            )
            yield from problem("gone", step, what, _legal(run.schedule, f"keep {count + 1} versions"))


def _lead(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Return how many forwards of a stage this rank has run ahead at the last backward of a batch, and the delay of its
    versions in batches. Of several stages the most counts.
    """
    program, delay, ahead = schedule.ranks[rank], 0, dict[int, int]()
    done = Counter[int]()
    for a in (*program.start, *program.batch):
        if a.kind == FORWARD:
            done[a.stage] += 1
            if a.version is not None:
                delay = a.mb // schedule.microbatches - a.version
        elif a.kind == BACKWARD:
            done[a.stage] -= 1
            ahead[a.stage] = done[a.stage]
    return max(ahead.values(), default=0), delay


def _live(schedule: Schedule, rank: int) -> str:
    ahead, delay = _lead(schedule, rank)
    if not delay:
        return ""
    m = schedule.microbatches
    needed = -(-ahead // m) + 1
    return (
        f" ({ahead} forwards run ahead, a delay of {delay} at {counted(m, 'microbatch')} allows "
        f"{delay * m}; this would need {needed} "
        "live versions)"
    )


def _legal(schedule: Schedule, other: str = "") -> str:
    """Describe what would make the schedule legal: w forwards ahead are legal under delay n iff w <= n times the
    microbatches of a batch that the rank runs."""
    delay = max(_lead(schedule, rank)[1] for rank in schedule.ranks)
    ways = _larger_batches(schedule, delay) if delay else []
    ways += [other] if other else []
    drained = "schedule interleaved" if _packs(schedule) else "schedule 1f1b"
    ways += [drained] if delay or any(program.start for program in schedule.ranks.values()) else []
    return " or ".join(ways)


def _packs(schedule: Schedule) -> set[frozenset[int]]:
    """Return the stages of ranks that run several."""
    stages = {frozenset(a.stage for a in program.batch) for program in schedule.ranks.values()}
    return {together for together in stages if len(together) > 1}


def _larger_batches(schedule: Schedule, delay: int) -> list[str]:
    """Say which batches have microbatches enough, where more of them help.

    Ranks that share the microbatches of a stage run as far ahead as before where their parts of a batch stay the same.
    Parts that differ by one become equal, and may then run ahead a little further. Packs deal their microbatches in
    groups of as many as there are packs.
    """
    m, packs = schedule.microbatches, _packs(schedule)
    shares: dict[int, list[int]] = {}
    most, times = m, 1
    for stage, teams in schedule.teams().items():
        for team in teams:
            count = len({a.mb for a in schedule.ranks[team[0]].batch if (a.kind, a.stage) == (FORWARD, stage)})
            if not count:
                continue  # ranks that update weights of others alone
            shares.setdefault(stage, []).append(count)
            ahead = max(_lead(schedule, rank)[0] for rank in team)
            most, times = max(most, -(-ahead * m // (count * delay))), max(times, -(-ahead // (count * delay)))
    if most == m:
        return []
    parts = list(shares.values())
    shared = max(map(len, parts)) > 1
    if not shared and not packs:
        return [f"microbatches >= {most}"]
    apart = max(max(of_stage) - min(of_stage) for of_stage in parts)
    if apart > 1 and not packs:
        return [f"{times * m} microbatches, {times} times as many for each rank"]
    unit = lcm(*map(len, parts)) * max(1, len(packs))
    size = -(-most // unit) * unit + (unit if apart else 0)
    return [f"{size} microbatches" + (", as many for each rank of a stage" if shared else "")]
