"""The places between modules where stages may start, and the rule that says which modules are opened for that.

Karakus et al. (Amazon SageMaker Model Parallelism, 2021) share devices out along the tree. Breadth first, the children
of a visit that has several devices make as many segments, so that the costliest costs least. The segments get devices
by D'Hondt's rule, and one with several devices and children is divided again. The cost is alpha parts of the memory and
the others of the seconds of the model. Visits with several devices are open: stages may start at their children.

That takes devices to be equal and messages to be free, and may leave a device without work. So here it only says what
is open at first, and the search of cuts.py chooses among the starts. Where that takes more than 5 % longer than
cuts at any operation, what the slowest stage computes is opened, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.support.errors import UsageError
from penstock.support.words import counted

from .chain import moving_spans, names_to_split_at, readers
from .cuts import CutSearch, by_operation
from .judging import Judge, refined
from .modules import ModuleVisit, ranges, tree_of_chain

# The part of memory in the cost of a module; that of seconds is the other.
ALPHA = 0.5
# How much longer than with cuts at any operation a microbatch may take before more modules are opened.
WORTH = 0.05


# ---------------------------------------------------------------------------------------- the published rule


def least_segments(costs: Sequence[float], count: int) -> list[int]:
    """Return the first items of `count` segments of a sequence, none of them empty, of which the costliest costs the
    least."""
    before = np.concatenate([[0.0], np.cumsum(costs)])
    best = [before[1:].copy()]
    choice: list[list[int]] = [[0] * len(costs)]
    for k in range(1, count):
        value, start = np.full(len(costs), np.inf), [0] * len(costs)
        for j in range(k, len(costs)):
            either = np.maximum(best[-1][k - 1 : j], before[j + 1] - before[k : j + 1])
            at = int(np.argmin(either))
            value[j], start[j] = either[at], k + at
        best.append(value)
        choice.append(start)
    starts, last = list[int](), len(costs) - 1
    for k in reversed(range(count)):
        starts.append(choice[k][last])
        last = starts[-1] - 1
    return starts[::-1]


def d_hondt(costs: Sequence[float], devices: int) -> list[int]:
    """Return the number of devices of each item: one after the other goes to the largest cost over devices and one
    more."""
    counts = [0] * len(costs)
    for _ in range(devices):
        counts[max(range(len(costs)), key=lambda i: costs[i] / (counts[i] + 1))] += 1
    return counts


def devices_along(tree: ModuleVisit, count: int) -> dict[ModuleVisit, range]:
    """Return the devices of every visit, numbered from the first visit on. A visit without a device of its own has the
    first one of its parent."""
    devices = {tree: range(count)}
    queue = [tree]
    for visit in queue:
        devices |= _shared_out(devices[visit], visit.children)
        queue += visit.children
    return devices


def _shared_out(devices: range, visits: Sequence[ModuleVisit]) -> dict[ModuleVisit, range]:
    if len(devices) == 1 or len(visits) < 2:
        return dict.fromkeys(visits, devices)
    starts = least_segments([visit.cost for visit in visits], min(len(devices), len(visits)))
    segments = [visits[a:b] for a, b in ranges(starts, len(visits))]
    shared: dict[ModuleVisit, range] = {}
    at = devices.start
    for segment, n in zip(
        segments, d_hondt([sum(v.cost for v in part) for part in segments], len(devices)), strict=True
    ):
        shared |= _shared_out(range(at, at + n), segment) if n else dict.fromkeys(segment, devices[:1])
        at += n
    return shared


# ---------------------------------------------------------------------------------------- places for stages


def module_starts(
    search: CutSearch, memory: Mapping[str, float], judge: Judge | None = None, weight: int = 1
) -> tuple[str, ...]:
    """Return the operations between modules at which stages may start, by name. `memory` has the bytes of parameters.
    With a `judge`, of which a call counts so much `weight`, simulations say how long cuts take."""
    chain, tree = search.costs.chain, _tree_for(search, memory)
    names = names_to_split_at(chain)
    inside = {i for first, last in moving_spans(chain).values() for i in range(first + 1, last + 1)}
    most = [visit for visit in _open_visits(tree, {*_all_visits(tree)}) if visit.first not in inside]
    if search.count > 1 and len(most) < search.count:
        raise _too_few(tree, len(most), search)

    def cut(starts: Sequence[str]) -> tuple[list[int], float]:
        limited = replace(search, only_at=starts)
        cuts = limited.best_at_all()
        if not cuts:
            return [], np.inf
        stages = refined(limited, by_operation(cuts, len(chain)), judge, weight)
        return stages, search.step(stages) if judge is None else judge(stages)

    limit = (1 + WORTH) * cut(search.only_at)[1]
    opened = {visit for visit, devices in devices_along(tree, search.count).items() if len(devices) > 1}
    while True:
        visits = _open_visits(tree, opened)
        starts = tuple(names[visit.first] for visit in visits[1:])
        closed = [visit for visit in visits if visit.children]
        if not closed or search.count == 1:
            return starts
        stages, value = cut(starts) if starts else ([], np.inf)
        if stages and value <= limit:
            return starts
        slowest = search.slowest(stages) if stages else -1
        # Without cuts all modules are opened by one level, else those of the slowest stage.
        opened |= {v for v in closed if not stages or stages[v.first] == slowest} or {*closed}


def _too_few(tree: ModuleVisit, places: int, search: CutSearch) -> UsageError:
    if not tree.children:
        return UsageError(
            "the names of the model's operations show no modules, so stages cannot be cut between them",
            hint="leave out --split-by module, or name nodes by their modules, as in h.0.fc/MatMul",
        )
    kept = [name for name, (first, last) in moving_spans(search.costs.chain).items() if first < last]
    apart = f", of which none parts what reads and writes {', '.join('@' + name for name in kept)}" if kept else ""
    wanted = f"{counted(search.count, 'stage')} need {counted(search.count, 'module')} one after the other"
    return UsageError(
        f"{wanted}, the model has {places}{apart}",
        hint="ask for fewer stages, or leave out --split-by module",
    )


def _tree_for(search: CutSearch, memory: Mapping[str, float]) -> ModuleVisit:
    """Return the tree of a chain with costs: seconds of a mean device, and memory."""
    costs, chain = search.costs, search.costs.chain
    seconds = np.mean([np.diff(before) for before in costs.before], axis=0)
    held = np.zeros(len(chain))
    for name, positions in readers(chain, costs.params).items():
        held[positions[0]] += memory.get(name, 0.0)
    parts = [array / array.sum() for array in (held, seconds) if array.sum() > 0]
    weights = (ALPHA, 1 - ALPHA) if len(parts) == 2 else (1.0,)
    cost = sum((weight * part for weight, part in zip(weights, parts, strict=False)), np.zeros(len(chain)))
    return tree_of_chain(chain, costs.params, cost.tolist())


def _all_visits(tree: ModuleVisit) -> Iterator[ModuleVisit]:
    yield tree
    for child in tree.children:
        yield from _all_visits(child)


def _open_visits(visit: ModuleVisit, opened: set[ModuleVisit]) -> list[ModuleVisit]:
    """Return the visits that cover the chain if some of them are opened."""
    if visit not in opened or not visit.children:
        return [visit]
    return [inner for child in visit.children for inner in _open_visits(child, opened)]
