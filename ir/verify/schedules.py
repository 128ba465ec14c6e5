"""The checkers of the facts scheduled and freed.

In: a module with a schedule. They judge the expanded programs of all ranks from
first principles, not by the pass that made them.

The runs that they look at are those of ir/verify/runs.py. Versions are checked in ir/verify/versions.py, messages
between ranks in ir/verify/messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from penstock.ir.action_kinds import ACTION_KINDS, AGAIN, BACKWARD, DROP, FORWARD, LET_GO, SUM, UPDATE, adder
from penstock.ir.cluster.cluster import TAKEN
from penstock.ir.collective_calls import first_meeting, meeting_ranks
from penstock.ir.graph import Module, Value, summed_vars, written_vars
from penstock.ir.grid import Event, Rules, gatherings, play, value_rules
from penstock.ir.memory.predict import Memory, measure_memory
from penstock.ir.memory.update_parts import update_parts
from penstock.ir.schedule import (
    BATCH_ORDER,
    COMPUTE,
    COPIES,
    MESSAGES,
    PER_BATCH,
    PHASES,
    READERS,
    SENDS,
    SUM_USERS,
    TAKERS,
    Action,
)
from penstock.support.errors import VerifyError
from penstock.support.words import exact_bytes, shown_bytes

from .items import check_items, check_spaces
from .problems import Problem, step_window
from .ranks import check_dealing, check_homes
from .runs import ConcreteRun, FirstOfEach, over_runs


def sources(module: Module) -> dict[tuple[int, int, str], list[Value]]:
    """List what each stage's graphs take from other stages' graphs, by (source, destination, phase), in the source's
    order."""
    edges: dict[tuple[int, int, str], list[Value]] = {}
    for phase in PHASES:
        graphs = {s.index: g for s in module.stages if (g := module.stage_graph(s.index, phase))}
        for dst in (s.index for s in module.stages):
            savers = (module.stage_graph(dst, kind) for kind in ACTION_KINDS[phase].saved_by)
            fed = module.given_names(dst)
            kept = {v.name for saver in savers if saver for v in saver.saved}
            wanted = (
                {v.name for kind in TAKERS[phase] if (g := module.stage_graph(dst, kind)) for v in g.ins} - fed - kept
            )
            for src, maker in graphs.items():
                values = [v for v in maker.outs if v.name in wanted]
                if src != dst and values:
                    edges[src, dst, phase] = values
    return edges


def taking(module: Module, stage: int, phase: str, values: Iterable[Value]) -> list[str]:
    """Return the kinds of a stage's graphs that take results of a phase, in the order in which they run."""
    names = {v.name for v in values}
    return [
        kind
        for kind in TAKERS[phase]
        if (g := module.stage_graph(stage, kind)) and not names.isdisjoint(v.name for v in g.ins)
    ]


# ------------------------------------------------------------------------------------------------ scheduled


def check_scheduled(module: Module) -> Iterator[Problem]:
    schedule = module.schedule
    if schedule is None:
        yield Problem("schedule", "there is none")
        return
    if schedule.microbatches < 1:
        yield Problem(
            f"schedule {schedule.name}", f"{schedule.microbatches} microbatches per batch, expected at least 1"
        )
        return
    misplaced = list(check_homes(module, schedule))
    yield from misplaced
    if misplaced:
        return
    yield from check_dealing(module, schedule)
    yield from over_runs(module, _check_order)
    yield from check_items(module)
    if not any(a.kind in SENDS for a in schedule.actions()):
        feeds: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for (src, dst, phase), values in sources(module).items():
            for kind in taking(module, dst, phase, values):
                feeds.setdefault((kind, dst), []).append((phase, src))
        rules = value_rules(feeds, schedule)
        yield from over_runs(module, lambda _, run: check_progress(module, run, rules))


def _check_order(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    kinds = {s.index: {k for k in COMPUTE if module.stage_graph(s.index, k)} for s in module.stages}
    moving = {
        s.index: min(names)
        for s in module.stages
        if (graph := module.stage_graph(s.index, FORWARD)) and (names := written_vars(graph))
    }
    summing = {stage for stage, teams in run.schedule.teams().items() if len(teams) > 1 and summed_vars(module, stage)}
    saving = {stage for stage in kinds if _saves_what_is_done_again(module, stage)}
    parts = {stage: _part_items(module, stage) for stage in kinds}
    for rank, actions in run.programs.items():
        yield from _Order(run, rank, kinds, summing, saving, parts).check(actions)
        yield from _check_forward_order(run, rank, actions, moving)


def _part_items(module: Module, stage: int) -> set[str]:
    """Return the items of the parts that an update runs before its last."""
    try:
        return {item for item in update_parts(module, stage) if item}
    except VerifyError:  # the checker of items says so
        return set()


def _saves_what_is_done_again(module: Module, stage: int) -> bool:
    forward, again = module.stage_graph(stage, FORWARD), module.stage_graph(stage, AGAIN)
    return forward is not None and again is not None and not set(again.saved).isdisjoint(forward.saved)


def _check_forward_order(
    run: ConcreteRun, rank: int, actions: list[Action], moving: Mapping[int, str]
) -> Iterator[Problem]:
    """Check that forwards that change a variable run in the order of microbatches, so that its values depend on no
    schedule. `moving` has one of each stage."""
    last: dict[int, int] = {}
    for step, a in enumerate(actions):
        if a.kind == FORWARD and a.stage in moving:
            if a.mb < last.get(a.stage, a.mb):
                what = (
                    f"comes after microbatch {last[a.stage]}; @{moving[a.stage]}, which every forward changes, needs "
                    "them in order"
                )
                yield run.problem(rank, step, what)
                return
            last[a.stage] = a.mb


class _Order:
    """The checker of the order on one rank. Each microbatch runs once forward, then once backward, then its weight
    gradients where they are apart. What is done once per batch follows exactly the gradients of the rank's
    microbatches, in order. `kinds` are the graphs of each stage, `summing` the stages whose ranks sum up their
    gradients: AR comes first. On stages that are `saving` the forward saves all that is computed again: a microbatch
    keeps that, or lets go of it first. An update in `parts`, by stage, runs each once before its last."""

    def __init__(
        self,
        run: ConcreteRun,
        rank: int,
        kinds: Mapping[int, set[str]],
        summing: set[int],
        saving: set[int],
        parts: Mapping[int, set[str]],
    ) -> None:
        self._parts = parts
        self._run, self._rank, self._kinds, self._summing, self._saving = run, rank, kinds, summing, saving
        self._m, self._problem = run.schedule.microbatches, FirstOfEach(run, rank)
        self._share = sorted({a.mb % self._m for a in run.schedule.ranks[rank].batch if a.kind == FORWARD})
        self._adders = {stage: adder(present) for stage, present in kinds.items()}
        self._done: dict[tuple[str, int, int], int] = {}
        self._added: dict[tuple[int, int], list[int]] = {}

    def check(self, actions: list[Action]) -> Iterator[Problem]:
        for step, a in enumerate(actions):
            check = ORDERED[a.kind]
            if check is None or (a.item and a.kind not in COMPUTE):
                continue
            if a.kind == SUM and a.stage not in self._summing:
                what = f"stage {a.stage} has no gradients that several ranks add to"
                yield from self._problem("graph", step, what)
                continue
            if a.kind in COMPUTE and a.kind not in self._kinds[a.stage]:
                yield from self._problem("graph", step, f"there is no graph @s{a.stage}.{a.kind}")
                continue
            if a.item and a.item not in self._parts[a.stage]:
                yield from self._problem("graph", step, f"the update of stage {a.stage} has no part {a.item}")
                continue
            earlier = self._done.setdefault((a.computation, a.stage, a.mb), step)
            if earlier != step:
                yield from self._problem("twice", step, f"was already done at step {earlier}")
            yield from check(self, step, a)
        for stage in sorted({a.stage for a in actions}):
            yield from self._lost(stage)

    def once(self, step: int, a: Action) -> Iterator[Problem]:
        """Check an action that runs once per batch."""
        expected, added = [a.mb * self._m + k for k in self._share], self._added.get((a.stage, a.mb), [])
        if BACKWARD in self._kinds[a.stage] and sorted(added) != expected:
            what = f"uses the gradients of microbatches {_spans(added)}, expected {_spans(expected)}"
            yield from self._problem("update", step, what)
        for kind in BATCH_ORDER[: BATCH_ORDER.index(a.kind)]:
            applies = a.stage in self._summing if kind == SUM else kind in self._kinds[a.stage]
            if applies and (kind, a.stage, a.mb) not in self._done:
                what = f"comes before {a.stage}{kind}{a.mb}, whose results it may use"
                yield from self._problem("update", step, what)
        if a.item and (a.kind, a.stage, a.mb) in self._done:
            yield from self._problem("part", step, f"comes after {a.stage}{a.kind}{a.mb}, which ends the update")
        for item in sorted(self._parts[a.stage]) if a.kind == UPDATE and not a.item else ():
            if (f"{a.kind}.{item}", a.stage, a.mb) not in self._done:
                what = f"ends the update before its part {a.stage}{a.kind}{a.mb}:{item}"
                yield from self._problem("part", step, what)

    def each(self, step: int, a: Action) -> Iterator[Problem]:
        """Check an action of a microbatch."""
        if a.mb % self._m not in self._share:
            yield from self._problem("share", step, f"runs forward on another rank of stage {a.stage}")
            return
        earlier = ACTION_KINDS[a.kind].after
        if earlier and (earlier, a.stage, a.mb) not in self._done:
            what = f"microbatch {a.mb} has not run {ACTION_KINDS[earlier].words} on stage {a.stage} yet"
            yield from self._problem("before", step, what)
        if a.kind == self._adders[a.stage]:
            self._added.setdefault((a.stage, a.mb // self._m), []).append(a.mb)

    def let_go(self, step: int, a: Action) -> Iterator[Problem]:
        """Check that a microbatch lets go of what it holds, and what is computed again."""
        if a.stage not in self._saving:
            what = f"@s{a.stage}.{FORWARD} saves nothing that is computed again"
            yield from self._problem("nothing", step, what)
        elif (FORWARD, a.stage, a.mb) not in self._done:
            yield from self._problem("before", step, f"comes before {a.stage}{FORWARD}{a.mb}, which saves it")
        elif (BACKWARD, a.stage, a.mb) in self._done:
            yield from self._problem("late", step, f"comes after {a.stage}{BACKWARD}{a.mb}, which takes it")
        elif (AGAIN, a.stage, a.mb) in self._done:
            what = f"comes after {a.stage}{AGAIN}{a.mb}, which computes it again"
            yield from self._problem("late", step, what)

    def again(self, step: int, a: Action) -> Iterator[Problem]:
        """Check that what is computed again is needed: it is not there, and its backward is still ahead."""
        yield from self.each(step, a)
        if (BACKWARD, a.stage, a.mb) in self._done:
            what = f"comes after {a.stage}{BACKWARD}{a.mb}, which takes what it computes"
            yield from self._problem("late", step, what)
        elif a.stage in self._saving and (LET_GO, a.stage, a.mb) not in self._done:
            what = f"computes again what microbatch {a.mb} still holds (no {a.stage}{LET_GO}{a.mb} before)"
            yield from self._problem("held", step, what)

    def backward(self, step: int, a: Action) -> Iterator[Problem]:
        """Check a backward: what its microbatch did not keep has been computed again."""
        yield from self.each(step, a)
        gone = AGAIN in self._kinds[a.stage] and (a.stage not in self._saving or (LET_GO, a.stage, a.mb) in self._done)
        if gone and (AGAIN, a.stage, a.mb) not in self._done:
            what = f"takes what microbatch {a.mb} did not keep and has not computed again ({a.stage}{AGAIN}{a.mb})"
            yield from self._problem("again", step, what)

    def _lost(self, stage: int) -> Iterator[Problem]:
        run, alone = self._run, len(self._run.schedule.teams()[stage]) == 1
        # What is computed again is missed by the backward that takes it.
        for kind in sorted((self._kinds[stage] - {AGAIN}) | ({SUM} if stage in self._summing else set())):
            numbers = range(run.first, run.first + run.batches) if kind in PER_BATCH else run.microbatches
            lost = [
                n
                for n in numbers
                if (kind, stage, n) not in self._done and (alone or kind in PER_BATCH or n % self._m in self._share)
            ]
            if lost:
                unit = ACTION_KINDS[kind].per
                what = "sums up the gradients" if kind == SUM else f"runs @s{stage}.{kind}"
                yield run.missing(self._rank, f"never {what} for {unit} {_spans(lost)}")


# The check of every kind; messages, moves of items and drops have checks of their own.
ORDERED: dict[str, Callable[[_Order, int, Action], Iterator[Problem]] | None] = {
    **dict.fromkeys(READERS, _Order.each),
    AGAIN: _Order.again,
    BACKWARD: _Order.backward,
    LET_GO: _Order.let_go,
    **dict.fromkeys((SUM, *SUM_USERS), _Order.once),
    **dict.fromkeys((*MESSAGES, *COPIES, DROP), None),
}


def _spans(numbers: list[int]) -> str:
    """Format numbers as ranges: 0..3, 5."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}..{b}" if a != b else str(a) for a, b in parts) or "none"


def check_progress(module: Module, run: ConcreteRun, rules: Rules) -> Iterator[Problem]:
    """Check that every rank ends, where sends are buffered and receives wait, as do computations whose collectives
    bring several ranks together. A problem says which rank waits for which, and in which collective."""
    rules = replace(rules, gathers=gatherings(run.programs, meeting_ranks(module)))
    played = play(run.programs, rules, lambda a: 0.0)
    if not played.stuck:
        return
    import networkx

    givers: dict[Event, tuple[int, int]] = {}
    for rank, actions in run.programs.items():
        for step, action in enumerate(actions):
            for event in (*rules.gives(rank, action), *rules.meets(rank, action)):
                givers.setdefault(event, (rank, step))
            if (gathering := rules.gathers.get((rank, action))) is not None:
                givers.setdefault((gathering.event, rank), (rank, step))
    waits = networkx.DiGraph()
    for rank, event in played.stuck.items():
        if event in givers:
            waits.add_edge(rank, givers[event][0])
    at = {rank: len(played.ranks[rank]) for rank in played.stuck}
    cycles = list(networkx.strongly_connected_components(waits))
    cycles = [c for c in cycles if len(c) > 1 or waits.has_edge(*(tuple(c) * 2))]
    for group in cycles:
        ranks = [edge[0] for edge in networkx.find_cycle(waits.subgraph(group))]
        parts = []
        for rank in ranks:
            other, step = givers[played.stuck[rank]]
            action = run.programs[rank][at[rank]]
            call = first_meeting(module, action.stage, action.kind) if (rank, action) in rules.gathers else None
            where = f", {call}," if call is not None else ""
            parts.append(f"{run.place(rank, at[rank])}{where} waits for {run.place(other, step)}")
        excerpts = "\n".join(step_window(run.programs[rank], at[rank]) for rank in ranks[1:])
        problem = run.problem(ranks[0], at[ranks[0]], "deadlock: " + ", ".join(parts))
        yield Problem(problem.where, problem.what, problem.excerpt + (f"\n{excerpts}" if excerpts else ""))
    for rank, event in played.stuck.items():
        if event not in givers:
            yield run.problem(rank, at[rank], "deadlock: waits for something that no rank ever does")


# ------------------------------------------------------------------------------------------------ freed


def check_freed(module: Module) -> Iterator[Problem]:
    problems = list(over_runs(module, _check_drops))
    yield from problems
    if not problems:
        yield from _check_budget(module)
        yield from check_spaces(module)


def _check_drops(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    """Check that the values of a microbatch on a stage are dropped exactly once, and never used afterwards."""
    for rank, actions in run.programs.items():
        dropped: dict[tuple[int, int], int] = {}
        held: dict[tuple[int, int], int] = {}
        for step, a in enumerate(actions):
            if a.once:
                continue
            key = (a.stage, a.mb)
            if key in dropped:
                again = "drops it a second time" if a.kind == DROP else "needs it"
                yield run.problem(rank, step, f"microbatch {a.mb} was dropped at step {dropped[key]}, and this {again}")
                break
            if a.kind == DROP:
                if key not in held:
                    yield run.problem(rank, step, f"stage {a.stage} holds nothing of microbatch {a.mb}")
                    break
                dropped[key] = step
            else:
                held[key] = step
        else:
            for key, step in held.items():
                if key not in dropped:
                    yield run.problem(
                        rank, step, f"microbatch {key[1]} is never dropped on stage {key[0]} (no {key[0]}D{key[1]})"
                    )
                    break


def _check_budget(module: Module) -> Iterator[Problem]:
    """Check that all that lives on a device fits into its memory at the worst moment."""
    if module.cluster is None:
        return
    devices = module.rank_devices()
    used: dict[str, list[tuple[int, Memory]]] = {}
    for rank, memory in measure_memory(module).items():
        used.setdefault(devices[rank], []).append((rank, memory))
    for name, rows in used.items():
        device = module.cluster.device(name)
        # Each rank is a process, with libraries of its own.
        limit, total = device.memory, sum(row.peak + device.taken for _, row in rows)
        if limit is not None and total > limit:
            parts = " + ".join(f"rank {rank} {shown_bytes(row.peak + device.taken)}" for rank, row in rows)
            listed = f" ({parts})" if len(rows) > 1 else ""
            what = f"needs {exact_bytes(total)} at the worst moment{listed}, it has {exact_bytes(limit)}"
            for rank, row in rows:
                held = row.at_peak() | {TAKEN: device.taken}
                what += f"\n  rank {rank}: " + ", ".join(
                    f"{purpose} {shown_bytes(n)}" for purpose, n in held.items() if n
                )
            yield Problem(
                f"device {name}",
                what,
                hint="more stages, fewer microbatches in flight or smaller microbatches need less",
                memory=True,
                needs=((name, total),),
            )
