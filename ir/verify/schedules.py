"""Checkers of the facts scheduled, versioned and freed. In: a module with a schedule. They judge the expanded programs of all ranks from
first principles, not by the pass that made them.

A schedule is a period without a fixed length, so each check runs on concrete programs, runs of 1 to 4 batches from batch 0 and from
batch 2: what a batch meets is at most the tail of its neighbours, so longer runs repeat what these show. The shortest run with a problem
is reported, with rank, step and action, and the steps around. Per rank and kind of problem only the first one is listed. Messages
between ranks are checked in ir/verify/messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ir.action_kinds import ACTION_KINDS, BACKWARD, DROP, FORWARD, SUM, UPDATE, adder
from penstock.ir.graph import Module, Value, stepped_vars, summed_vars, touched_vars, touching_ops, written_vars
from penstock.ir.grid import Event, Rules, play, value_rules
from penstock.ir.memory.predict import Memory, measure_memory
from penstock.ir.schedule import (
    BATCH_ORDER,
    COMPUTE,
    MESSAGES,
    PER_BATCH,
    PHASES,
    READERS,
    SENDS,
    SUM_USERS,
    TAKERS,
    VERSIONED,
    Action,
    Schedule,
)
from penstock.support.words import counted, exact_bytes, shown_bytes

from .problems import Problem, op_window, step_window
from .ranks import check_dealing, check_homes

RUNS = tuple((first, batches) for first in (0, 2) for batches in (1, 2, 3, 4))
# Schedules with more actions than this per batch are checked on these runs only: beginning and end in one, and all phases apart.
MANY_ACTIONS, FEW_RUNS = 5000, ((0, 1), (0, 3), (2, 2))


@dataclass(frozen=True, slots=True)
class ConcreteRun:
    """The concrete programs of one run."""

    schedule: Schedule
    first: int
    batches: int
    programs: Mapping[int, list[Action]]

    @property
    def microbatches(self) -> range:
        m = self.schedule.microbatches
        return range(self.first * m, (self.first + self.batches) * m)

    def place(self, rank: int, step: int) -> str:
        return f"rank {rank} step {step} ({self.programs[rank][step]})"

    def problem(self, rank: int, step: int, what: str, hint: str = "") -> Problem:
        return Problem(f"{self._name()}, {self.place(rank, step)}", what, step_window(self.programs[rank], step), hint)

    def missing(self, rank: int, what: str, hint: str = "") -> Problem:
        return Problem(f"{self._name()}, rank {rank}", what, "", hint)

    def _name(self) -> str:
        return f"schedule {self.schedule.name}, run of {counted(self.batches, 'batch')} from batch {self.first}"


class FirstOfEach:
    """Problems of one rank in one run, of each category the first alone: what follows from it says no more."""

    def __init__(self, run: ConcreteRun, rank: int) -> None:
        self._run, self._rank = run, rank
        self.reported: set[str] = set()

    def __call__(self, category: str, step: int, what: str, hint: str = "") -> Iterator[Problem]:
        if category not in self.reported:
            self.reported.add(category)
            yield self._run.problem(self._rank, step, what, hint)


def over_runs(module: Module, checker: Callable[[Module, ConcreteRun], Iterable[Problem]]) -> Iterator[Problem]:
    """Problems of the shortest run that has any."""
    schedule = module.schedule
    if schedule is None:
        yield Problem("schedule", "there is none")
        return
    many = sum(1 for _ in schedule.actions()) > MANY_ACTIONS
    for first, batches in FEW_RUNS if many else RUNS:
        programs = schedule.kept.get((first, batches))
        if programs is None:
            programs = schedule.kept[first, batches] = schedule.expand_all(batches, first)
        found = list(checker(module, ConcreteRun(schedule, first, batches, programs)))
        if found:
            yield from found
            return


def sources(module: Module) -> dict[tuple[int, int, str], list[Value]]:
    """What each stage's graphs take from other stages' graphs, by (source, destination, phase), in the source's order."""
    found: dict[tuple[int, int, str], list[Value]] = {}
    fed = {v.name for v in module.inputs}
    for phase in PHASES:
        graphs = {s.index: g for s in module.stages if (g := module.stage_graph(s.index, phase))}
        for dst in (s.index for s in module.stages):
            savers = (module.stage_graph(dst, kind) for kind in ACTION_KINDS[phase].saved_by)
            kept = {v.name for saver in savers if saver for v in saver.saved}
            wanted = (
                {v.name for kind in TAKERS[phase] if (g := module.stage_graph(dst, kind)) for v in g.ins} - fed - kept
            )
            for src, maker in graphs.items():
                values = [v for v in maker.outs if v.name in wanted]
                if src != dst and values:
                    found[src, dst, phase] = values
    return found


def taking(module: Module, stage: int, phase: str, values: Iterable[Value]) -> list[str]:
    """The kinds of a stage's graphs that take some of the values that a phase hands out, in the order in which they run."""
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
    if not any(a.kind in SENDS for a in schedule.actions()):
        feeds: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for (src, dst, phase), values in sources(module).items():
            for kind in taking(module, dst, phase, values):
                feeds.setdefault((kind, dst), []).append((phase, src))
        rules = value_rules(feeds, schedule)
        yield from over_runs(module, lambda _, run: check_progress(run, rules))


def _check_order(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    kinds = {s.index: {k for k in COMPUTE if module.stage_graph(s.index, k)} for s in module.stages}
    moving = {
        s.index: min(names)
        for s in module.stages
        if (graph := module.stage_graph(s.index, FORWARD)) and (names := written_vars(graph))
    }
    summing = {
        stage for stage, ranks in run.schedule.members().items() if len(ranks) > 1 and summed_vars(module, stage)
    }
    for rank, actions in run.programs.items():
        yield from _Order(run, rank, kinds, summing).check(actions)
        yield from _check_forward_order(run, rank, actions, moving)


def _check_forward_order(
    run: ConcreteRun, rank: int, actions: list[Action], moving: Mapping[int, str]
) -> Iterator[Problem]:
    """Forwards that change a variable run in the order of microbatches, so that its values depend on no
    schedule. `moving` has one of each stage."""
    last: dict[int, int] = {}
    for step, a in enumerate(actions):
        if a.kind == FORWARD and a.stage in moving:
            if a.mb < last.get(a.stage, a.mb):
                what = f"comes after microbatch {last[a.stage]}; @{moving[a.stage]}, which every forward changes, needs them in order"
                yield run.problem(rank, step, what)
                return
            last[a.stage] = a.mb


class _Order:
    """Each microbatch of this rank once forward, then once backward, then its weight gradients where they are apart; what is done
    once per batch after exactly the gradients of its microbatches of the batch, in order. `kinds` are the graphs of each stage,
    `summing` the stages whose ranks sum up their gradients: AR comes first."""

    def __init__(self, run: ConcreteRun, rank: int, kinds: Mapping[int, set[str]], summing: set[int]) -> None:
        self._run, self._rank, self._kinds, self._summing = run, rank, kinds, summing
        self._m, self._problem = run.schedule.microbatches, FirstOfEach(run, rank)
        self._share = sorted({a.mb % self._m for a in run.schedule.ranks[rank].batch if a.kind == FORWARD})
        self._adders = {stage: adder(found) for stage, found in kinds.items()}
        self._done: dict[tuple[str, int, int], int] = {}
        self._added: dict[tuple[int, int], list[int]] = {}

    def check(self, actions: list[Action]) -> Iterator[Problem]:
        for step, a in enumerate(actions):
            check = ORDERED[a.kind]
            if check is None:
                continue
            if a.kind == SUM and a.stage not in self._summing:
                what = f"stage {a.stage} has no gradients that several ranks add to"
                yield from self._problem("graph", step, what)
                continue
            if a.kind in COMPUTE and a.kind not in self._kinds[a.stage]:
                yield from self._problem("graph", step, f"there is no graph @s{a.stage}.{a.kind}")
                continue
            earlier = self._done.setdefault((a.kind, a.stage, a.mb), step)
            if earlier != step:
                yield from self._problem("twice", step, f"was already done at step {earlier}")
            yield from check(self, step, a)
        for stage in sorted({a.stage for a in actions}):
            yield from self._lost(stage)

    def once(self, step: int, a: Action) -> Iterator[Problem]:
        """Once per batch."""
        expected, found = [a.mb * self._m + k for k in self._share], self._added.get((a.stage, a.mb), [])
        if BACKWARD in self._kinds[a.stage] and sorted(found) != expected:
            what = f"uses the gradients of microbatches {_spans(found)}, expected {_spans(expected)}"
            yield from self._problem("update", step, what)
        for kind in BATCH_ORDER[: BATCH_ORDER.index(a.kind)]:
            there = a.stage in self._summing if kind == SUM else kind in self._kinds[a.stage]
            if there and (kind, a.stage, a.mb) not in self._done:
                what = f"comes before {a.stage}{kind}{a.mb}, whose results it may use"
                yield from self._problem("update", step, what)

    def each(self, step: int, a: Action) -> Iterator[Problem]:
        """Once per microbatch."""
        if a.mb % self._m not in self._share:
            yield from self._problem("share", step, f"runs forward on another rank of stage {a.stage}")
            return
        earlier = ACTION_KINDS[a.kind].after
        if earlier and (earlier, a.stage, a.mb) not in self._done:
            what = f"microbatch {a.mb} has not run {ACTION_KINDS[earlier].words} on stage {a.stage} yet"
            yield from self._problem("before", step, what)
        if a.kind == self._adders[a.stage]:
            self._added.setdefault((a.stage, a.mb // self._m), []).append(a.mb)

    def _lost(self, stage: int) -> Iterator[Problem]:
        run, alone = self._run, len(self._run.schedule.members()[stage]) == 1
        for kind in sorted(self._kinds[stage] | ({SUM} if stage in self._summing else set())):
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


# The check of every kind; messages and drops have checks of their own.
ORDERED: dict[str, Callable[[_Order, int, Action], Iterator[Problem]] | None] = {
    **dict.fromkeys(READERS, _Order.each),
    **dict.fromkeys((SUM, *SUM_USERS), _Order.once),
    **dict.fromkeys((*MESSAGES, DROP), None),
}


def _spans(numbers: list[int]) -> str:
    """0..3, 5"""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}..{b}" if a != b else str(a) for a, b in parts) or "none"


def check_progress(run: ConcreteRun, rules: Rules) -> Iterator[Problem]:
    """Sends are buffered, receives wait: when some rank never ends, say who waits for whom."""
    played = play(run.programs, rules, lambda a: 0.0)
    if not played.stuck:
        return
    import networkx

    givers: dict[Event, tuple[int, int]] = {}
    for rank, actions in run.programs.items():
        for step, action in enumerate(actions):
            for event in (*rules.gives(rank, action), *rules.meets(rank, action)):
                givers.setdefault(event, (rank, step))
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
            parts.append(f"{run.place(rank, at[rank])} waits for {run.place(other, step)}")
        excerpts = "\n".join(step_window(run.programs[rank], at[rank]) for rank in ranks[1:])
        problem = run.problem(ranks[0], at[ranks[0]], "deadlock: " + ", ".join(parts))
        yield Problem(problem.where, problem.what, problem.excerpt + (f"\n{excerpts}" if excerpts else ""))
    for rank, event in played.stuck.items():
        if event not in givers:
            yield run.problem(rank, at[rank], "deadlock: waits for something that no rank ever does")


# ------------------------------------------------------------------------------------------------ versioned


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
    """Forward and backward read what updates change in the microbatch's version, updates the latest."""
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
    """Gradients of a stage: the kind of graph that adds to them, those that are added to, with how many buffers each has, and
    those that each kind of graph takes. The first of those with as many buffers that the same graphs take stands for all of
    them: what happens to one happens to all."""

    adder: str
    added: Mapping[str, int]
    taken: Mapping[str, set[str]]


def _sums(module: Module, stage: int) -> _Sums:
    graphs = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))}
    added = {name: module.vars[name].versions for name in summed_vars(module, stage)}
    taken = {kind: touched_vars(graph, "take") for kind, graph in graphs.items()}
    first: dict[tuple[int, frozenset[str]], str] = {}
    for name, buffers in added.items():
        first.setdefault((buffers, frozenset(kind for kind, names in taken.items() if name in names)), name)
    shown = {name: added[name] for name in first.values()}
    return _Sums(adder(graphs), shown, {kind: names & shown.keys() for kind, names in taken.items()})


def _check_versions(
    module: Module, run: ConcreteRun, stepped: Mapping[int, list[str]], sums: Mapping[int, _Sums]
) -> Iterator[Problem]:
    """`stepped` are the variables with versions that the update of each stage writes."""
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
    """The sum of a batch's gradients is taken before its buffer gets gradients of a later batch."""
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
        elif a.kind in BATCH_ORDER:
            # AR works in the buffer, and leaves the sum there.
            for name in sums[a.stage].taken.get(a.kind, ()):
                waiting.pop((a.stage, name, a.mb % sums[a.stage].added[name]), None)


def _check_rank_versions(
    run: ConcreteRun,
    rank: int,
    actions: list[Action],
    slots: Mapping[int, tuple[int, str]],
    microbatch: dict[int, tuple[int, int, int]],
) -> Iterator[Problem]:
    """`slots` says how many versions the stage keeps, and of which parameter; `microbatch` collects versions over all ranks, each with the
    rank and the step that has it first."""
    last_use: dict[tuple[int, int], int] = {}
    makers: dict[tuple[int, int | None], int] = {}
    for step, a in enumerate(actions):
        if a.kind == UPDATE:
            makers[a.stage, a.version] = step
        elif a.version is not None:
            last_use[a.stage, a.version] = step
    latest, problem = dict.fromkeys(slots, run.first), FirstOfEach(run, rank)

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
            latest[a.stage] = a.version
            old = a.version - count
            reader = last_use.get((a.stage, old), step)
            if reader > step:
                what = f"makes version {a.version} of @{name} in the slot of version {old}, which {run.place(rank, reader)} still reads"
                what += f"; {count} version{'s are' if count > 1 else ' is'} kept"
                yield from problem("overwritten", step, what, _legal(run.schedule, f"keep {count + 1} versions"))
        elif a.version > latest[a.stage]:
            made = makers.get((a.stage, a.version))
            when = f"made only later by {run.place(rank, made)}" if made is not None else "never made"
            what = f"reads version {a.version} of @{name}, which is {when}; the newest then is {latest[a.stage]}"
            yield from problem("unmade", step, what + _live(run.schedule, rank), _legal(run.schedule))
        elif a.version <= latest[a.stage] - count and "overwritten" not in problem.reported:
            what = (
                f"reads version {a.version} of @{name}, which version {a.version + count} has overwritten; {count} kept"
            )
            yield from problem("gone", step, what, _legal(run.schedule, f"keep {count + 1} versions"))


def _lead(schedule: Schedule, rank: int) -> tuple[int, int]:
    """How many forwards this rank runs ahead of its backwards, none if it has none, and the delay in batches that its versions follow."""
    ahead, delay = -1, 0
    program = schedule.ranks[rank]
    for a in (*program.start, *program.batch):
        if a.kind == BACKWARD:
            break
        if a.kind == FORWARD:
            ahead += 1
            if a.version is not None:
                delay = a.mb // schedule.microbatches - a.version
    else:
        ahead = 0
    return ahead, delay


def _live(schedule: Schedule, rank: int) -> str:
    ahead, delay = _lead(schedule, rank)
    if not delay:
        return ""
    m = schedule.microbatches
    needed = -(-ahead // m) + 1
    return (
        f" ({ahead} forwards run ahead, a delay of {delay} at {counted(m, 'microbatch')} allows {delay * m}; this would need {needed} "
        "live versions)"
    )


def _legal(schedule: Schedule, other: str = "") -> str:
    """What would make the schedule legal: w forwards ahead are legal under delay n iff w <= n * microbatches."""
    leads = [_lead(schedule, rank) for rank in schedule.ranks]
    most, delay = max(ahead for ahead, _ in leads), max(delay for _, delay in leads)
    ways = [f"microbatches >= {-(-most // delay)}"] if delay and most > delay * schedule.microbatches else []
    ways += [other] if other else []
    ways += ["schedule 1f1b"] if delay or any(program.start for program in schedule.ranks.values()) else []
    return " or ".join(ways)


# ------------------------------------------------------------------------------------------------ freed


def check_freed(module: Module) -> Iterator[Problem]:
    found = list(over_runs(module, _check_drops))
    yield from found
    if not found:
        yield from _check_budget(module)


def _check_drops(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    """Whatever a microbatch left on a stage is dropped exactly once, and never used afterwards."""
    for rank, actions in run.programs.items():
        dropped: dict[tuple[int, int], int] = {}
        held: dict[tuple[int, int], int] = {}
        for step, a in enumerate(actions):
            if a.kind in PER_BATCH:
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
    """All that lives on a device fits into its memory at the worst moment."""
    if module.cluster is None:
        return
    devices = module.rank_devices()
    used: dict[str, list[tuple[int, Memory]]] = {}
    for rank, memory in measure_memory(module).items():
        used.setdefault(devices[rank], []).append((rank, memory))
    for name, rows in used.items():
        limit, total = module.cluster.device(name).memory, sum(row.peak for _, row in rows)
        if limit is not None and total > limit:
            parts = " + ".join(f"rank {rank} {shown_bytes(row.peak)}" for rank, row in rows)
            listed = f" ({parts})" if len(rows) > 1 else ""
            what = f"needs {exact_bytes(total)} at the worst moment{listed}, it has {exact_bytes(limit)}"
            for rank, row in rows:
                what += f"\n  rank {rank}: " + ", ".join(
                    f"{purpose} {shown_bytes(n)}" for purpose, n in row.at_peak().items() if n
                )
            yield Problem(
                f"device {name}",
                what,
                hint="more stages, fewer microbatches in flight or smaller microbatches need less",
                memory=True,
            )
